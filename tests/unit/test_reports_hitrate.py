"""Hit-rate bins over time: counts by hand, windows of enough requests, silence said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.record import Record
from reports.hitrate import HitRate, Panel
from tests.unit.rundir import make_run, trace
from tests.unit.test_metrics import record

IDEAL_HITS = (0, 920, 960, 975, 985, 992, 998)
"""Of 1,000 input tokens: one in each bin."""


def requests(count: int, **values: int | None) -> list[Record]:
    """One a second, its ideal hit rate in each bin by turns."""
    return [
        record(turn, **{"ideal_hit_tokens": IDEAL_HITS[turn % 7]} | values) for turn in range(count)
    ]


def test_counts_are_those_of_a_count_by_hand(tmp_path: Path) -> None:
    run = make_run(tmp_path / "pdd", requests(210, served_hit_tokens=990))
    (figure,) = HitRate().render([run], tmp_path)
    rows = figure.numbers.to_pylist()
    assert [(row["measure"], row["requests"]) for row in rows] == [
        ("ideal", 105), ("ideal", 105), ("served", 105), ("served", 105),
    ]  # fmt: skip
    assert [(row["window_start_s"], row["window_end_s"]) for row in rows[:2]] == [
        (0.0, 105.0), (105.0, 209.0),
    ]  # fmt: skip
    ideal = [value for name, value in rows[0].items() if name.startswith("requests_hit_")]
    assert ideal == [15] * 7
    assert rows[2]["requests_hit_99-99.5%"] == 105
    assert figure.path.read_bytes().startswith(b"\x89PNG")


def test_only_answered_requests_were_served_and_unscheduled_ones_have_no_time(
    tmp_path: Path,
) -> None:
    rows = [
        record(0),
        record(1, status="failed"),
        record(2, status="unsent", scheduled_s=None, sent_s=None),
    ]
    (figure,) = HitRate().render([make_run(tmp_path / "x", rows)], tmp_path)
    counted = figure.numbers.to_pylist()
    assert [(row["measure"], row["requests"]) for row in counted] == [("ideal", 2), ("served", 1)]


def test_a_server_that_does_not_report_hits_is_named(tmp_path: Path) -> None:
    silent = make_run(tmp_path / "silent", requests(20, served_hit_tokens=None))
    telling = make_run(tmp_path / "telling", requests(20))
    (figure,) = HitRate().render([silent, telling], tmp_path)
    assert figure.caption.endswith("No served hits reported by: silent.")
    assert set(figure.numbers.column("run").to_pylist()) == {"silent", "telling"}


def test_runs_of_two_traces_get_a_figure_each(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / name, requests(20), trace=trace(digest=digest))
        for name, digest in (("a", "2"), ("b", "1"), ("c", "2"))
    ]
    figures = HitRate().render(runs, tmp_path)
    drawn = [list(dict.fromkeys(each.numbers.column("run").to_pylist())) for each in figures]
    assert drawn == [["b"], ["a", "c"]]
    assert len({figure.path for figure in figures}) == 2


def test_nothing_scheduled_draws_nothing(tmp_path: Path) -> None:
    assert HitRate().render([make_run(tmp_path / "none", [])], tmp_path) == []


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "pdd", requests(300))
    first = HitRate().render([run], tmp_path)[0].path.read_bytes()
    assert HitRate().render([run], tmp_path)[0].path.read_bytes() == first


@given(
    st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1)), min_size=1, max_size=400),
)
def test_windows_hold_every_request_once_and_never_a_handful(
    requests: list[tuple[float, float]],
) -> None:
    times_s, rates = np.array(requests).T
    panel = Panel.of("x", "ideal", times_s, rates)
    assert panel.counts.sum() == len(requests)
    assert panel.counts.sum(axis=1).min() >= min(100, len(requests))
    assert (np.diff(panel.edges_s) >= 0).all()
    assert (panel.edges_s[0], panel.edges_s[-1]) == (times_s.min(), times_s.max())
    assert panel.mean == pytest.approx(rates.mean())
