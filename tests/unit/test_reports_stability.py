"""A relay over time: shares, hits and medians of windows by hand, and no word beyond them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_module

from harness.plugins import build
from harness.record import Record
from harness.result import find_runs
from reports.stability import Course, Stability
from tests.unit.rundir import make_run
from tests.unit.test_cli import relaybench
from tests.unit.test_metrics import record, table


def relayed(turn: int, *, handed: bool = True, **values: Any) -> Record:
    served = {"relay_tokens": 5, "handoff_s": turn + 1.5 if handed else None}
    return record(turn, **served | values)


def failed(turn: int) -> Record:
    return record(turn, status="failed", error="x", first_token_s=None, last_token_s=None)


def requests() -> list[Record]:
    """300: a third all relayed and kept there, a third half relayed, a third not relayed at all."""
    rows = [relayed(turn, handed=False, decode_hit_tokens=0) for turn in range(100)]
    rows += [
        (relayed if turn % 2 else record)(turn, decode_hit_tokens=500) for turn in range(100, 200)
    ]
    late = {"decode_hit_tokens": 800, "served_hit_tokens": 950}
    rows += [record(turn, first_token_s=turn + 3.0, **late) for turn in range(200, 300)]
    return rows


def test_windows_hold_figures_worked_out_by_hand(tmp_path: Path) -> None:
    (figure,) = Stability().render([make_run(tmp_path / "pdd", requests())], tmp_path)
    rows = figure.numbers.to_pylist()
    assert [(row["window_start_s"], row["window_end_s"], row["requests"]) for row in rows] == [
        (0, 100, 100), (100, 200, 100), (200, 299, 100),
    ]  # fmt: skip
    assert [row["relayed_share"] for row in rows] == [1, 0.5, 0]
    assert [row["finished_at_relay_share"] for row in rows] == [1, 0, 0]
    assert [row["prefill_hit_mean"] for row in rows] == pytest.approx([0.9, 0.9, 0.95])
    assert [row["decode_hit_mean"] for row in rows] == pytest.approx([0, 0.5, 0.8])
    assert [row["ttft_p50_s"] for row in rows] == [1, 1, 3]
    assert figure.path.read_bytes().startswith(b"\x89PNG")


def test_the_caption_sets_the_first_third_against_the_last(tmp_path: Path) -> None:
    (figure,) = Stability().render([make_run(tmp_path / "pdd", requests())], tmp_path)
    assert figure.caption.endswith(
        " pdd: relayed 100.0% then 0.0%, finished there 100.0% then 0.0%, hits at prefill 90.0% "
        "then 95.0%, at the main decode 0.0% then 80.0%, TTFT P50 1.00 s then 3.00 s; in the "
        "slowest window 3.00 s."
    )


def test_records_are_taken_by_time_and_the_unsent_left_out(tmp_path: Path) -> None:
    unsent = record(400, status="unsent", sent_s=None, first_token_s=None, last_token_s=None)
    mixed = [*requests()[::-1], unsent]
    (figure,) = Stability().render([make_run(tmp_path / "pdd", mixed)], tmp_path)
    assert figure.numbers.column("relayed_share").to_pylist() == [1, 0.5, 0]


@pytest.mark.parametrize(("count", "windows"), [(1, 1), (199, 1), (200, 2), (4000, 40), (9000, 40)])
def test_windows_hold_every_request_once_and_never_a_handful(count: int, windows: int) -> None:
    course = Course.of("x", table(*(record(turn) for turn in range(count))))
    sizes = np.array([each.requests for each in course.windows])
    assert (len(sizes), sizes.sum()) == (windows, count)
    assert np.ptp(sizes) <= 1


def test_failed_requests_are_infinitely_slow_and_leave_a_gap(tmp_path: Path) -> None:
    rows = [relayed(turn) for turn in range(100)] + [failed(turn) for turn in range(100, 200)]
    (figure,) = Stability().render([make_run(tmp_path / "pdd", rows)], tmp_path)
    good, bad = figure.numbers.to_pylist()
    assert (good["ttft_p50_s"], bad["ttft_p50_s"]) == (1, math.inf)
    assert (bad["relayed_share"], bad["prefill_hit_mean"]) == (None, None)
    assert "A gap in the TTFT is infinite" in figure.caption


def test_one_request_is_drawn_and_not_compared(tmp_path: Path) -> None:
    run = make_run(tmp_path / "pdd", [relayed(0, served_hit_tokens=None)])
    (figure,) = Stability().render([run], tmp_path)
    assert figure.numbers.column("prefill_hit_mean").to_pylist() == [None]
    assert "pdd: too few requests to compare" in figure.caption


def test_runs_without_a_relay_are_named_and_alone_draw_nothing(tmp_path: Path) -> None:
    without = make_run(tmp_path / "cross_dc", [record(0)])
    none = make_run(tmp_path / "none", [])
    partial = make_run(tmp_path / "pdd", [relayed(0)], partial=True)
    assert Stability().render([without, none], tmp_path) == []
    (figure,) = Stability().render([without, partial, none], tmp_path)
    assert figure.caption.endswith(
        " Left out, without a relayed request: cross_dc, none."
        " Partial, ended before the trace did: pdd."
    )


def test_of_simulated_runs_what_is_finished_at_the_relay_leaves_no_hits(tmp_path: Path) -> None:
    done = relaybench(
        "run", "-m", "trace.sessions=8", "backend=pdd", "backend.pdd.link.bandwidth_bps=2e9",
        "backend.pdd.singular=null", "backend.pdd.overflow=wait",
        "backend.pdd.finish_locally=false,true", "report=[stability]", "out=here", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    runs = [find_runs(tmp_path / "here" / job)[0] for job in ("0", "1")]
    with initialize_config_module("conf", version_base="1.3"):
        report = build(compose("run", ["report=[stability]"]), "report.stability")
    (figure,) = report.render(runs, tmp_path)
    rows = figure.numbers.to_pylist()
    excluded, allowed = (
        [row for row in rows if row["run"].endswith(f"={each})")] for each in ("False", "True")
    )
    assert min(row["decode_hit_mean"] for row in excluded) > 0.5
    assert max(row["decode_hit_mean"] for row in allowed) < 0.1
    assert min(row["finished_at_relay_share"] for row in allowed) > 0.9
    before = figure.path.read_bytes()
    assert report.render(runs, tmp_path)[0].path.read_bytes() == before
