"""Changes beyond noise: ratios by hand, exact resampled percentiles, infinities, sweeps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.metrics import QUANTILES, nearest_rank
from harness.record import Record
from harness.report import Figure
from harness.result import Run
from reports.bootstrap import Ranked, interval, ratios, resamples, sums
from reports.compare import Compare
from tests.unit.rundir import make_run, trace
from tests.unit.test_metrics import record


def requests(
    count: int = 800, sessions: int = 40, scale: float = 1.0, seed: int = 1, lost: int = 0
) -> list[Record]:
    """Log-normal TTFT and answers of 1 s, one request a second; the last `lost` of them fail."""
    random = np.random.default_rng(seed)
    ttft_s = scale * random.lognormal(0, 0.5, count)
    failed: dict[str, Any] = {"status": "failed", "error": "x", "last_token_s": None}
    return [
        record(
            turn,
            session=turn % sessions,
            first_token_s=turn + ttft_s[turn],
            **({"last_token_s": turn + ttft_s[turn] + 1} if turn < count - lost else failed),
        )
        for turn in range(count)
    ]


def pair(path: Path, first: list[Record], second: list[Record], **values: Any) -> list[Run]:
    return [make_run(path / "a" / "pdd", first), make_run(path / "b" / "pdd", second, **values)]


def metric(figure: Figure, name: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = figure.numbers.to_pylist()
    return next(row for row in found if row["metric"].startswith(name))


def drawn(runs: list[Run], out: Path) -> Figure:
    (figure,) = Compare().render(runs, out)
    assert figure.path.read_bytes().startswith(b"\x89PNG")
    return figure


def test_paired_runs_of_exactly_twice_the_time_have_a_ratio_of_two_and_no_noise(
    tmp_path: Path,
) -> None:
    figure = drawn(pair(tmp_path, requests(), requests(scale=2.0)), tmp_path)
    for name in ("TTFT P50", "TTFT P90", "TTFT P99"):
        row = metric(figure, name)
        for key in ("ratio", "ratio_low", "ratio_high"):
            assert row[key] == pytest.approx(2)
        assert row["changed_beyond_noise"]
        assert row["value"] == pytest.approx(2 * row["base"])
    assert metric(figure, "E2E P50")["ratio_low"] < metric(figure, "E2E P50")["ratio_high"]
    assert figure.caption.startswith("Changed beyond noise: TTFT P50 (2.00 times)")


def test_the_same_run_again_has_changed_in_nothing(tmp_path: Path) -> None:
    figure = drawn(pair(tmp_path, requests(), requests()), tmp_path)
    assert figure.caption.startswith("Changed beyond noise: nothing.")
    changed = figure.numbers.column("changed_beyond_noise").to_pylist()
    assert changed == [False] * 7 + [None] * 2
    assert figure.numbers.column("ratio").to_pylist() == [1.0] * 9


def test_other_draws_of_one_kind_are_within_noise_and_a_shift_is_not(tmp_path: Path) -> None:
    other = {"trace": trace(digest="other")}
    same = drawn(pair(tmp_path / "x", requests(), requests(seed=2), **other), tmp_path)
    row = metric(same, "TTFT P50")
    assert row["ratio_low"] < 1 < row["ratio_high"]
    assert not row["changed_beyond_noise"]
    assert "BEWARE: these runs replayed different traces" in same.caption
    shifted = requests(seed=2, scale=1.5)
    slower = drawn(pair(tmp_path / "y", requests(), shifted, **other), tmp_path)
    assert metric(slower, "TTFT P50")["changed_beyond_noise"]
    assert metric(slower, "TTFT P50")["ratio_low"] < 1.5 < metric(slower, "TTFT P50")["ratio_high"]


def test_percentiles_are_those_of_the_summary(tmp_path: Path) -> None:
    runs = pair(tmp_path, requests(), requests(seed=2))
    figure = drawn(runs, tmp_path)
    first, second = (each.summary().to_pylist()[0] for each in runs)
    row = metric(figure, "E2E P90")
    assert (row["base"], row["value"]) == (first["e2e_p90_s"], second["e2e_p90_s"])
    assert row["ratio"] == second["e2e_p90_s"] / first["e2e_p90_s"]
    assert metric(figure, "goodput")["base"] == first["goodput_requests_per_s"]


def test_infinite_percentiles_have_a_ratio_only_where_one_of_the_two_is_finite(
    tmp_path: Path,
) -> None:
    whole, broken = requests(), requests(lost=200)
    worse = drawn(pair(tmp_path / "x", whole, broken), tmp_path)
    row = metric(worse, "TTFT P90")
    assert (row["value"], row["ratio"]) == (math.inf, math.inf)
    assert row["changed_beyond_noise"]
    assert "TTFT P90 (now infinite)" in worse.caption
    better = drawn(pair(tmp_path / "y", broken, whole), tmp_path)
    assert metric(better, "TTFT P90")["ratio"] == 0
    both = drawn(pair(tmp_path / "z", broken, broken), tmp_path)
    row = metric(both, "TTFT P90")
    assert row["base"] == row["value"] == math.inf
    assert row["ratio"] is row["changed_beyond_noise"] is None
    assert "Where both are infinite there is no dot" in both.caption


def test_all_failed_is_drawn(tmp_path: Path) -> None:
    lost = requests(lost=800)
    figure = drawn(pair(tmp_path, lost, lost), tmp_path)
    assert figure.caption.startswith("Too few requests or sessions")
    assert metric(figure, "throughput")["ratio"] == 1


def test_too_few_requests_or_sessions_are_not_told_from_noise(tmp_path: Path) -> None:
    few = drawn(pair(tmp_path / "x", requests(100), requests(100, scale=2.0)), tmp_path)
    assert metric(few, "TTFT P50")["changed_beyond_noise"]
    assert metric(few, "TTFT P90")["changed_beyond_noise"]
    assert metric(few, "TTFT P99")["changed_beyond_noise"] is None
    narrow = drawn(
        pair(tmp_path / "y", requests(sessions=5), requests(sessions=5, scale=2.0)), tmp_path
    )
    assert metric(narrow, "TTFT P50")["changed_beyond_noise"] is None
    one = drawn(
        pair(tmp_path / "z", requests(1, sessions=1), requests(1, sessions=1, scale=2.0)), tmp_path
    )
    assert metric(one, "TTFT P50")["ratio"] == pytest.approx(2)
    assert metric(one, "TTFT P50")["ratio_low"] is None


def test_a_single_run_or_a_run_of_nothing_draws_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "pdd", requests(10))
    empty = make_run(tmp_path / "none", [])
    assert Compare().render([run], tmp_path) == []
    assert Compare().render([empty, run], tmp_path) == []
    assert Compare().render([run, empty], tmp_path) == []


def test_a_run_of_nothing_beside_others_has_no_values(tmp_path: Path) -> None:
    runs = [*pair(tmp_path, requests(), requests()), make_run(tmp_path / "none", [])]
    found = drawn(runs, tmp_path).numbers.to_pylist()
    assert {row["value"] for row in found if row["run"] == "none"} == {None}


def sweep(path: Path, setting: str, *values: str, **more: Any) -> list[Run]:
    return [
        make_run(
            path / value / "pdd",
            requests(100, scale=at + 1.0),
            overrides=["seed=1", f"{setting}={value}", f"out=x/{at}"],
            **more,
        )
        for at, value in enumerate(values)
    ]


def test_one_number_swept_is_a_line_over_it(tmp_path: Path) -> None:
    figure = drawn(sweep(tmp_path, "pacing.requests_per_s", "8", "4", "16"), tmp_path)
    assert figure.title == "Along pacing.requests_per_s"
    found = figure.numbers.to_pylist()
    assert list(dict.fromkeys(row["pacing.requests_per_s"] for row in found)) == [4.0, 16.0]
    assert found[0]["ratio"] == pytest.approx(2)


@pytest.mark.parametrize(
    ("setting", "values"),
    [("seed2", ("a", "b")), ("seed", ("1", "2")), ("x", ("1", "inf"))],
)
def test_what_is_no_quantity_has_no_line(
    tmp_path: Path, setting: str, values: tuple[str, ...]
) -> None:
    assert drawn(sweep(tmp_path, setting, *values), tmp_path).title.startswith("Change against pdd")


def test_runs_of_several_systems_or_settings_have_no_line(tmp_path: Path) -> None:
    runs = sweep(tmp_path, "x", "1", "2")
    other = make_run(tmp_path / "in_dc", requests(100), overrides=["seed=1", "x=3"])
    assert drawn([*runs, other], tmp_path).title.startswith("Change against")
    two = make_run(tmp_path / "pdd", requests(100), overrides=["seed=1", "x=3", "y=1"])
    assert drawn([*runs, two], tmp_path).title.startswith("Change against")


def test_a_sweep_into_failure_is_drawn_to_the_top(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"{at}" / "pdd", requests(100, lost=lost), overrides=[f"x={10**at}"])
        for at, lost in enumerate((0, 5, 100))
    ]
    assert "A hollow mark at the top is infinite" in drawn(runs, tmp_path).caption
    assert "infinite" in drawn([runs[2], runs[1]], tmp_path).caption


def test_goodput_by_different_promises_is_not_compared(tmp_path: Path) -> None:
    slo = {"ttft_s": 5.0, "tpot_s": None, "e2e_s": None, "share": 0.99}
    figure = drawn(pair(tmp_path, requests(), requests(), slo=slo), tmp_path)
    assert not any(
        name.startswith("goodput") for name in figure.numbers.column("metric").to_pylist()
    )
    assert "different promises" in figure.caption


def test_runs_that_are_not_valid_are_named(tmp_path: Path) -> None:
    bad = {"validity": {"valid": False, "reasons": ["x"]}}
    figure = drawn(pair(tmp_path, requests(), requests(), **bad), tmp_path)
    assert figure.caption.endswith("Not valid: pdd (b).")


def test_the_same_runs_give_the_same_bytes_and_intervals(tmp_path: Path) -> None:
    runs = pair(tmp_path, requests(), requests(seed=2))
    first = drawn(runs, tmp_path)
    image, numbers = first.path.read_bytes(), first.numbers
    again = drawn(runs, tmp_path)
    assert again.path.read_bytes() == image
    assert again.numbers.equals(numbers)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 1.0, 2.0, 2.5, 9.0, math.inf, math.nan]), st.integers(0, 4)
        ),
        min_size=1,
        max_size=60,
    ),
    st.lists(st.integers(0, 5), min_size=5, max_size=5),
)
def test_a_resampled_percentile_is_that_of_the_values_written_out(
    rows: list[tuple[float, int]], weights: list[int]
) -> None:
    values, session = np.array([v for v, _ in rows]), np.array([s for _, s in rows])
    found = Ranked(values, session, 5, QUANTILES).percentiles(np.array(weights, float))
    written = np.repeat(values, np.array(weights)[session])
    written = written[~np.isnan(written)]
    expected = [nearest_rank(written, q) for q in QUANTILES]
    np.testing.assert_array_equal(found, expected)


def test_a_percentile_far_from_where_it_was_looked_for_is_found_all_the_same() -> None:
    values, session = np.arange(10_000.0), np.arange(10_000)
    weights = np.where(values < 100, 50.0, 0.0)
    found = Ranked(values, session, 10_000, QUANTILES).percentiles(weights)
    assert found.tolist() == [49.0, 89.0, 98.0]


def test_resamples_draw_as_many_sessions_as_there_are() -> None:
    drawn_weights = list(resamples(7, 20, "x"))
    assert {int(each.sum()) for each in drawn_weights} == {7}
    assert len({tuple(each) for each in drawn_weights}) > 10
    again = list(resamples(7, 20, "x"))
    np.testing.assert_array_equal(drawn_weights, again)


def test_sums_drawn_by_distinct_counts_spread_as_sessions_do() -> None:
    counts = np.random.default_rng(3).integers(0, 9, 500).astype(float)
    drawn_sums = sums(counts, 4000, "x")
    assert drawn_sums.mean() == pytest.approx(counts.sum(), rel=0.01)
    assert drawn_sums.std() == pytest.approx(counts.std() * math.sqrt(500), rel=0.05)


def test_ratios_of_equals_are_one_and_intervals_leave_out_what_is_not_known() -> None:
    values, bases = (
        np.array([2.0, 0, math.inf, 1, 3, math.nan]),
        np.array([1.0, 0, math.inf, 0, math.inf, 1]),
    )
    np.testing.assert_array_equal(ratios(values, bases), [2, 1, 1, math.inf, 0, math.nan])
    assert interval(np.array([math.nan, *np.arange(1.0, 201)])) == (5.0, 195.0)
    assert all(map(math.isnan, interval(np.array([math.nan]))))
