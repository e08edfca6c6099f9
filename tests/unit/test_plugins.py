"""Building what a configuration names, and a backend from outside the project."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from harness.errors import ConfigError, InstallError
from harness.manifest import without_secrets
from harness.pacing import Closed
from harness.plugins import build
from harness.result import Run

PROJECT = Path(__file__).parents[2]


def built(**config: Any) -> Any:
    return build(OmegaConf.create({"pacing": config}), "pacing")


def test_a_target_is_built_with_its_settings() -> None:
    pacing = built(_target_="harness.pacing.Closed", sessions=3)
    assert isinstance(pacing, Closed)
    assert pacing.sessions == 3


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"_target_": "harness.pacing.Nonesuch"}, "pacing: .*Nonesuch"),
        ({"_target_": "nonesuch.Thing"}, "pacing: .*nonesuch"),
        ({"_target_": "harness.pacing.Closed", "sesions": 3}, "pacing: .*sesions"),
        ({"_target_": "harness.pacing.Closed", "sessions": 0}, "pacing.sessions is 0"),
        (
            {"_target_": "harness.pacing.Closed", "sessions": "???"},
            "pacing.sessions has no value: add pacing.sessions=",
        ),
        ({"_target_": "harness.pacing.Closed", "sessions": "${nowhere}"}, "nowhere"),
    ],
)
def test_what_cannot_be_built_is_a_setting_to_mend(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        built(**config)


def test_two_owners_of_a_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of our import names exist on the index; one install overwrites the other."""
    owners = {"traces": ["relaybench", "traces"]}
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: owners)
    with pytest.raises(InstallError, match=r"own 'traces': relaybench, traces"):
        built(_target_="traces.nonesuch.read")


OUTSIDE = """
echo:
  loop: {_target_: harness.clock.WallLoop}
  _target_: tests.unit.echo.Echo
  first_s: 0.002
  gap_s: 0.0
"""
QUICK = [
    "backend=echo", "trace.sessions=4", "trace.session_rate_per_s=1000",
    "trace.shape.delay_limit_s=0.001", "trace.shape.turns_mean=3", "out=here",
    "trace.shape.answer_tokens={median: 5, sigma: 0, rare_share: 0}",
]  # fmt: skip


def run_outside(
    tmp_path: Path, *overrides: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "conf" / "backend").mkdir(parents=True)
    (tmp_path / "conf" / "backend" / "echo.yaml").write_text(OUTSIDE)
    return subprocess.run(
        [sys.executable, "-m", "harness", "run", "--config-dir", "conf", *QUICK, *overrides],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(PROJECT)} | environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_backend_from_outside_is_one_class_and_one_yaml(tmp_path: Path) -> None:
    """On the wall clock, where the client's own lag is real."""
    done = run_outside(tmp_path)
    assert done.returncode == 0, done.stderr
    run = Run.open(tmp_path / "here" / "echo")
    assert run.manifest["clock"] == "wall"
    assert run.manifest["validity"]["valid"]
    summary = run.summary().to_pylist()[0]
    assert summary["ok"] == run.manifest["trace"]["turns"]
    assert 0 <= summary["send_lag_p99_s"] < 1
    assert summary["ttft_p50_s"] >= 0.002


def test_a_request_that_fails_makes_the_run_invalid(tmp_path: Path) -> None:
    done = run_outside(tmp_path, "timeout_s=0.0001")
    assert done.returncode == 1
    assert "NOT VALID" in done.stdout
    run = Run.open(tmp_path / "here" / "echo")
    assert run.manifest["counts"]["failed"] == 4
    assert run.records().num_rows == run.manifest["trace"]["turns"]
    assert (tmp_path / "here" / "report.html").exists()


def test_a_backend_that_cannot_be_used_is_code_3(tmp_path: Path) -> None:
    done = run_outside(tmp_path, "backend.echo._target_=tests.unit.echo.Unusable")
    assert done.returncode == 3
    assert "relaybench: nobody listens" in done.stderr
    assert "Traceback" not in done.stderr
    run = Run.open(tmp_path / "here" / "echo")
    assert run.manifest["partial"] is True
    assert run.manifest["validity"]["reasons"][0] == "ended by ConnectFailed: nobody listens"


def test_real_input_on_a_virtual_clock_is_code_3(tmp_path: Path) -> None:
    done = run_outside(
        tmp_path, "backend.echo._target_=tests.unit.echo.Dialling",
        "backend.echo.loop._target_=harness.clock.VirtualTimeLoop",
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "virtual clock cannot wait for" in done.stderr


def test_secrets_are_written_nowhere(tmp_path: Path) -> None:
    """Neither one from the environment, which the backend is given, nor one in the clear."""
    done = run_outside(
        tmp_path, "backend.echo._target_=tests.unit.echo.Keyed",
        "+auth={api_key: '${oc.env:OUR_KEY}'}", "+backend.echo.auth=${auth}",
        "+other={api_key: sk-LITERAL}",
        OUR_KEY="sk-TOPSECRET",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = [path for path in (tmp_path / "here").rglob("*") if path.is_file()]
    assert len(written) > 5
    for path in written:
        data = path.read_bytes()
        assert b"sk-TOPSECRET" not in data, path
        assert b"sk-LITERAL" not in data, path
    assert "${oc.env:OUR_KEY}" in (tmp_path / "here" / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "struck"),
    [
        ("api_key: sk-1", "api_key: (struck"),
        ("a.b.api_key=sk-1", "a.b.api_key=(struck"),
        ("{key: sk-1, sessions: 3}", "{key: (struck out: give secrets by the environment), sess"),
        ('"password": "p w"', '"password": (struck'),
        ("Authorization=Bearer", "Authorization=(struck"),
        ("per_token: 4444", "per_token: 4444"),
        ("nominal_token_s: 0.017", "nominal_token_s: 0.017"),
        ("api_key: ${oc.env:KEY}", "api_key: ${oc.env:KEY}"),
        ("api_key: null", "api_key: null"),
    ],
)
def test_what_looks_like_a_secret_is_struck_out(text: str, struck: str) -> None:
    assert without_secrets(text).startswith(struck)
    assert "sk-1" not in without_secrets(text)
