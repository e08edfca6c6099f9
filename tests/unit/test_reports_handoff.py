"""Handoffs by way: their latency and bytes by hand, beside what is published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_module

from harness.plugins import build
from harness.record import Record
from harness.result import find_runs
from reports.handoff import Handoff
from tests.unit.rundir import make_run
from tests.unit.test_cli import relaybench
from tests.unit.test_metrics import record


@pytest.fixture(scope="module")
def report() -> Handoff:
    with initialize_config_module("conf", version_base="1.3"):
        made: Handoff = build(compose("run", ["report=[handoff]"]), "report.handoff")
    return made


def handed(turn: int, way: str, lasted_s: float, token_bytes: float, **values: Any) -> Record:
    """Ten tokens of a relay, handed over this way."""
    served: dict[str, Any] = {
        "relay_tokens": 10,
        "handoff": way,
        "handoff_bytes": 10 * token_bytes,
        "handoff_start_s": turn + 1.0,
        "handoff_s": turn + 1.0 + lasted_s,
    }
    return record(turn, **served | values)


def test_a_line_a_run_and_way_with_figures_by_hand(tmp_path: Path) -> None:
    lasted_s = np.arange(1, 101) / 1000
    rows = [handed(turn, "one-shot", each, 15.0) for turn, each in enumerate(lasted_s)]
    rows += [handed(turn, "catch-up", 0.5, 15.0) for turn in (100, 101)]
    ids = make_run(tmp_path / "pdd", rows)
    kv = make_run(tmp_path / "rival", [handed(0, "kv", 0.25, 40e3), record(1)])
    (figure,) = Handoff({}).render([ids, kv], tmp_path)
    one, two, three = figure.numbers.to_pylist()
    assert [(row["source"], row["handoff"], row["handoffs"]) for row in (one, two, three)] == [
        ("pdd", "one-shot", 100), ("pdd", "catch-up", 2), ("rival", "kv", 1),
    ]  # fmt: skip
    assert one["handoff_mean_s"] == pytest.approx(0.0505)
    assert [one[f"handoff_{each}_s"] for each in ("p50", "p90", "p99", "max")] == pytest.approx(
        [0.050, 0.090, 0.099, 0.100]
    )
    assert one["handoff_std_s"] == pytest.approx(lasted_s.std())
    assert (one["tokens_mean"], one["bytes_per_token"]) == (10, 15)
    assert (three["bytes_per_token"], three["handoff_std_s"]) == (40e3, 0)
    assert "pdd, catch-up: mean 500 ms, max 500 ms, std 0 s, 10.0 tokens" in figure.caption
    assert "Published" not in figure.caption
    assert figure.path.read_bytes().startswith(b"\x89PNG")


def test_the_published_rows_stand_below_and_are_called_so(report: Handoff, tmp_path: Path) -> None:
    run = make_run(tmp_path / "pdd", [handed(0, "kv", 0.25, 40e3)])
    (figure,) = report.render([run], tmp_path)
    _, ids, kv = figure.numbers.to_pylist()
    assert (ids["source"], ids["handoff"], ids["handoffs"]) == ("published", "ids", None)
    assert (ids["bytes_per_token"], ids["handoff_mean_s"], ids["handoff_max_s"]) == (
        15, 0.305, 0.3214,
    )  # fmt: skip
    assert (kv["bytes_per_token"], kv["handoff_std_s"], kv["handoff_p50_s"]) == (46490, None, None)
    assert "Published, not from these runs: ids: 100 tokens, mean 305 ms" in figure.caption
    assert "plus 24.5 ms of copies" in figure.caption


def test_what_failed_or_did_not_end_is_not_counted(report: Handoff, tmp_path: Path) -> None:
    rows = [
        handed(0, "catch-up", 0.1, 15.0),
        handed(1, "catch-up", 0.1, 15.0, handoff_s=None, handoff_bytes=None),
        handed(2, "catch-up", 9.0, 15.0, status="failed", error="BadStatus: 500"),
        handed(3, "catch-up", 0.3, 15.0, handoff_bytes=None),
    ]
    (figure,) = report.render([make_run(tmp_path / "pdd", rows)], tmp_path)
    row = figure.numbers.to_pylist()[0]
    assert (row["handoffs"], row["bytes_per_token"]) == (2, 15)
    assert row["handoff_max_s"] == pytest.approx(0.3)
    assert "1 answered before the handoff ended" in figure.caption


@pytest.mark.parametrize("lasted_s", [0.0, 0.001, 100.0])
def test_one_handoff_of_any_length_is_drawn(
    report: Handoff, tmp_path: Path, lasted_s: float
) -> None:
    run = make_run(tmp_path / "pdd", [handed(0, "kv", lasted_s, 0.0)])
    for each in (report, Handoff({})):
        (figure,) = each.render([run], tmp_path)
        assert figure.numbers.to_pylist()[0]["handoff_max_s"] == pytest.approx(lasted_s)


def test_runs_without_a_handoff_are_named_and_alone_draw_nothing(
    report: Handoff, tmp_path: Path
) -> None:
    without = make_run(tmp_path / "cross_dc", [record(0)])
    none = make_run(tmp_path / "none", [])
    bad = make_run(
        tmp_path / "pdd", [handed(0, "kv", 0.1, 1.0)], validity={"valid": False, "reasons": []}
    )
    assert report.render([without, none], tmp_path) == []
    (figure,) = report.render([without, bad, none], tmp_path)
    assert figure.caption.endswith(
        " Left out, without a relay that handed over: cross_dc, none. Not valid: pdd."
    )


def test_of_simulated_runs_ids_are_fewer_bytes_than_kv(report: Handoff, tmp_path: Path) -> None:
    done = relaybench(
        "run", "-m", "trace.sessions=8", "backend=pdd", "backend.pdd.link.bandwidth_bps=2e9",
        "backend.pdd.handoff.way=one-shot,kv", "report=[handoff]", "out=here", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    runs = [find_runs(tmp_path / "here" / job)[0] for job in ("0", "1")]
    (figure,) = report.render(runs, tmp_path)
    again = figure.path.read_bytes()
    assert report.render(runs, tmp_path)[0].path.read_bytes() == again
    ids, kv = figure.numbers.to_pylist()[:2]
    assert (ids["handoff"], kv["handoff"]) == ("one-shot", "kv")
    assert ids["bytes_per_token"] == pytest.approx(15)
    assert kv["bytes_per_token"] > 1000
