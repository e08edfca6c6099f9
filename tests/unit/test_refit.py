"""Fitting step times: coefficients that are known must be found again."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_module

from adapters.simulator.costs import Fitted
from adapters.simulator.refit import Refit, sample
from harness.errors import ConfigError
from harness.plugins import build

KNOWN: dict[str, Any] = {
    "cards": 8,
    "prefill": {"t0_s": 0.0355, "a_s": 4.7e-5, "b_s": 1.1e-9},
    "decode": {"d0_s": 0.012, "d1_s": 2.0e-5, "d2_s": 1.1e-8, "d3_s": 0.0027},
}
NOT_INSTALLED = importlib.util.find_spec("aiconfigurator_core") is None


class Known:
    """Kernels that take exactly what the known coefficients say, and up to `noise` more or less."""

    def __init__(self, noise: float = 0.0) -> None:
        self.chip = Fitted(KNOWN)
        self.noise = noise
        self.random = np.random.default_rng(7)

    def prefill_s(self, new: int, cached: int) -> float:
        return self.chip.prefill_s([(new, cached)]) * self._off()

    def decode_s(self, batch: int, context: int) -> float:
        return self.chip.decode(batch, batch * context)[0] * self._off()

    def _off(self) -> float:
        return 1 + self.noise * self.random.uniform(-1, 1)


def refit(*overrides: str) -> Refit:
    given = ("refit.model=some/model", "refit.system=h200_sxm", "refit.out=mine.json")
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("refit", [*given, *overrides])
    made: Refit = build(config, "refit")
    return made


def flat(found: dict[str, Any]) -> dict[str, float]:
    return {**found["prefill"], **found["decode"]}


def test_known_coefficients_are_found_again() -> None:
    found = refit().fitted(Known())
    assert found["cards"] == 8
    assert flat(found) == pytest.approx(flat(KNOWN), rel=1e-3)
    for part in ("prefill", "decode"):
        assert found["errors"][part]["worst"] < 1e-3
        assert found["errors_held_out"][part]["worst"] < 1e-3


def test_noise_moves_them_little_and_is_told() -> None:
    found = refit().fitted(Known(noise=0.1))
    known, mine = Fitted(KNOWN), Fitted(found)
    for new, cached in ((200, 0), (4096, 60_000), (32_768, 0)):
        step = [(new, cached)]
        assert mine.prefill_s(step) == pytest.approx(known.prefill_s(step), rel=0.05)
    for batch, context in ((1, 60_000), (64, 4096), (500, 1024)):
        step_s = known.decode(batch, batch * context)[0]
        assert mine.decode(batch, batch * context)[0] == pytest.approx(step_s, rel=0.05)
    for part in ("prefill", "decode"):
        for errors in (found["errors"][part], found["errors_held_out"][part]):
            assert 0.03 < errors["mean"] < 0.07  # a tenth either way is 5% in the mean
            assert errors["mean"] < errors["worst"] < 0.2


def test_what_was_fitted_can_be_used(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(refit().fitted(Known())))
    known, mine = Fitted(KNOWN), Fitted(str(path))
    assert mine.prefill_s([(5000, 9000)]) == pytest.approx(
        known.prefill_s([(5000, 9000)]), rel=2e-3
    )
    assert mine.decode(30, 1e6)[0] == pytest.approx(known.decode(30, 1e6)[0], rel=2e-3)


def test_half_of_the_grid_is_held_out_and_what_is_too_large_is_left_out() -> None:
    samples = sample(lambda row, column: row + column / 100, [1, 2, 4], [10, 20, 30], most=80)
    assert [each.at for each in samples] == [
        (1, 10), (1, 20), (1, 30), (2, 10), (2, 20), (2, 30), (4, 10), (4, 20),
    ]  # fmt: skip
    assert [each.held_out for each in samples] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert samples[-1].seconds == 4.2


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("refit.tp=0", r"refit\.tp is 0"),
        ("refit.ep=3", r"refit\.ep is 3: give a divisor of tp, 8"),
        ("refit.new=[1,2]", r"refit\.new is \[1, 2\]: give 4 numbers or more"),
        ("refit.batch=[0,1,2,3]", r"refit\.batch is 0"),
        ("refit.cached=5", r"refit\.cached is 5"),
        ("refit.most_tokens=0", r"refit\.most_tokens is 0"),
        ("refit.system=null", r"refit\.system is None: give a name"),
        ("refit.out=mine", r"refit\.out is 'mine': name a new \.json file"),
    ],
)
def test_an_impossible_fit_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        refit(override)


def relaybench(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness", *arguments],
        cwd=cwd, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.skipif(not NOT_INSTALLED, reason="aiconfigurator is installed")
def test_without_the_package_the_message_is_how_to_get_it(tmp_path: Path) -> None:
    done = relaybench("refit", "model=a/b", "system=h200_sxm", "out=mine.json", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("is not installed: pip install 'relaybench[fit]'")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(NOT_INSTALLED, reason="needs aiconfigurator: pip install 'relaybench[fit]'")
def test_what_is_shipped_is_what_the_command_writes(tmp_path: Path) -> None:
    model = "deepseek-ai/DeepSeek-V3"
    done = relaybench(
        "refit", f"model={model}", "system=h200_sxm", "ep=8", "out=v3.json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    shipped, mine = Fitted("deepseek_v3_h200"), Fitted(str(tmp_path / "v3.json"))
    assert mine.prefill_s([(4096, 9000)]) == pytest.approx(
        shipped.prefill_s([(4096, 9000)]), rel=0.1
    )
    assert mine.decode(30, 1e6)[0] == pytest.approx(shipped.decode(30, 1e6)[0], rel=0.1)


def test_one_fit_at_a_time_into_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    done = relaybench("refit", "model=a/b", "system=h200_sxm", "out=mine.json", cwd=tmp_path)
    assert done.returncode == 2
    assert "mine.json exists, and is never overwritten" in done.stderr
    done = relaybench("refit", "-m", "model=a/b,c/d", cwd=tmp_path)
    assert "one fit at a time" in done.stderr
    done = relaybench("refit", "system=h200_sxm", "out=new.json", cwd=tmp_path)
    assert "refit.model has no value" in done.stderr
