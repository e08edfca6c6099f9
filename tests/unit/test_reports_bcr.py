"""Goodput over cost: identities by hand, the published arithmetic, and what must be refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.errors import ConfigError
from harness.record import Record
from harness.report import Figure
from harness.result import Run
from reports.bcr import Bcr
from tests.unit.rundir import make_run, prices, trace
from tests.unit.test_metrics import record

CARDS = {"in_dc": {"P": 40, "D": 48}, "pdd": {"P": 40, "RLD": 3, "MD": 32}}
PUT_IN = "published goodput put in, not measured"


def requests(
    per_s: float = 1.0, count: int = 120, sessions: int = 40, ttft_s: float = 1.0, **values: Any
) -> list[Record]:
    """`count` evenly over time, in sessions of 1 to 5 turns, each answered in `2 * ttft_s`."""
    lengths = np.random.default_rng(1).integers(1, 6, sessions)
    session = np.resize(np.repeat(np.arange(sessions), lengths), count)
    return [
        record(
            turn,
            **{
                "session": int(session[turn]),
                "scheduled_s": turn / per_s,
                "sent_s": turn / per_s,
                "first_token_s": turn / per_s + ttft_s,
                "last_token_s": turn / per_s + 2 * ttft_s,
            }
            | values,
        )
        for turn in range(count)
    ]


def run(path: Path, rows: list[Record], load: float = 1.0, **values: Any) -> Run:
    """A run of the backend that `path` is named after, at a Poisson rate of `load`."""
    name = path.name
    backend = {"name": name, "topology": name, "cards": CARDS.get(name, {}), "details": {}}
    pacing = {"_target_": "harness.pacing.Poisson", "requests_per_s": load}
    given: dict[str, Any] = {"backend": backend, "pacing": pacing} | values
    return make_run(path, rows, **given)


def drawn(runs: list[Run], out: Path, **options: Any) -> list[Figure]:
    given: dict[str, Any] = {"md_over_p": [1.2, 1.3], "published_goodput": 1.278} | options
    return Bcr(**given).render(runs, out)


def rows(figure: Figure) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = figure.numbers.to_pylist()
    return found


def test_twice_the_goodput_at_the_same_cost_is_a_bcr_of_two(tmp_path: Path) -> None:
    backend = {"name": "x", "topology": "x", "cards": {"P": 4}, "details": {}}
    slow = run(tmp_path / "a", requests(1.0, ttft_s=1.0), backend=backend | {"name": "slow"})
    fast = run(tmp_path / "b", requests(2.0, ttft_s=0.5), backend=backend | {"name": "fast"})
    (figure,) = drawn([slow, fast], tmp_path)
    base, other = rows(figure)
    assert (base["system"], base["bcr"], base["cost_change_share"]) == ("slow", 1.0, 0.0)
    assert base["bcr_low"] is None
    assert other["bcr"] == other["goodput_ratio"] == pytest.approx(2)
    assert other["bcr_low"] < 2 < other["bcr_high"]
    assert figure.path.read_bytes().startswith(b"\x89PNG")
    assert figure.path.with_suffix(".pdf").exists()


def test_costs_are_those_worked_out_by_hand(tmp_path: Path) -> None:
    """120 requests of 11 tokens in 121 s, 12 of them past the promise, on 88 cards."""
    late = [
        each._replace(first_token_s=each.scheduled_s + 31, last_token_s=121.0)
        if each.turn % 10 == 0 and each.turn < 90 and each.scheduled_s is not None
        else each
        for each in requests()
    ]
    slo = {"ttft_s": 30.0, "tpot_s": None, "e2e_s": None, "share": 0.9}
    (figure,) = drawn([run(tmp_path / "in_dc", late, slo=slo)], tmp_path)
    (row,) = rows(figure)
    spent = 88 * 121 / 3600
    assert row["slo_share"] == pytest.approx(111 / 120)
    assert row["goodput_requests_per_s"] == pytest.approx(111 / 121)
    assert row["cost_per_hour"] == 88
    assert row["cost_per_million_output_tokens"] == pytest.approx(spent / (120 * 11) * 1e6)
    within = row["cost_per_million_output_tokens_within_slo"]
    assert within == pytest.approx(spent / (111 * 11) * 1e6)
    assert row["cost_per_request_within_slo"] == pytest.approx(spent / 111)
    assert row["requests_within_slo_per_cost"] == pytest.approx(111 / spent)
    good = row["goodput_sessions_per_s"]
    assert row["cost_per_session_within_slo"] == pytest.approx(88 / 3600 / good)
    assert row["goodput_requests_per_s_low"] < 111 / 121 < row["goodput_requests_per_s_high"]


def test_one_system_has_costs_and_no_ratios(tmp_path: Path) -> None:
    (figure,) = drawn([run(tmp_path / "pdd", requests())], tmp_path)
    assert "bcr" not in figure.numbers.column_names
    assert "BCR" not in figure.caption
    assert figure.title == "Goodput and cost"


def test_published_prices_and_goodput_give_the_published_figures(tmp_path: Path) -> None:
    runs = [run(tmp_path / name, requests()) for name in ("in_dc", "pdd")]
    figure, priced = drawn(runs, tmp_path)
    assert rows(figure)[1]["cost_change_share"] == pytest.approx(-0.071, abs=5e-4)
    assert rows(figure)[1]["bcr"] == pytest.approx(1 / 0.929, abs=1e-3)
    found = {(row["md_over_p"], row["goodput"]): row for row in rows(priced)}
    assert found[1.2, PUT_IN]["cost_change_share"] == pytest.approx(-0.071, abs=5e-4)
    assert found[1.2, PUT_IN]["bcr"] == pytest.approx(1.376, abs=5e-4)
    assert found[1.3, PUT_IN]["cost_change_share"] == pytest.approx(-0.035, abs=5e-4)
    assert found[1.3, PUT_IN]["bcr_low"] is None
    assert found[1.2, "measured"]["goodput_ratio"] == 1
    assert found[1.2, "measured"]["bcr"] == rows(figure)[1]["bcr"]
    assert PUT_IN in priced.caption


def test_the_published_goodput_is_put_in_only_where_it_was_published_and_wanted(
    tmp_path: Path,
) -> None:
    runs = [run(tmp_path / name, requests()) for name in ("pdd", "in_dc")]
    for given, published in ((runs, 1.278), (runs[::-1], None)):
        _, priced = drawn(given, tmp_path, published_goodput=published)
        assert {row["goodput"] for row in rows(priced)} == {"measured"}
        assert PUT_IN not in priced.caption


def test_the_best_run_that_keeps_the_promise_counts_and_not_the_fastest(tmp_path: Path) -> None:
    sweep = [
        run(tmp_path / f"{load}" / "in_dc", requests(load, ttft_s=ttft_s), load)
        for load, ttft_s in ((1.0, 1.0), (4.0, 2.0), (10.0, 31.0))
    ]
    (figure,) = drawn(sweep, tmp_path)
    (row,) = rows(figure)
    assert row["goodput_requests_per_s"] == pytest.approx(120 / (119 / 4 + 4))
    assert (row["valid_runs"], row["limit_reached"], row["next_load_ratio"]) == (3, True, 2.5)
    assert "2.5 times as heavy" in figure.caption


def test_a_limit_not_reached_is_said_on_both_sides_of_the_ratio(tmp_path: Path) -> None:
    for base, other, said in (
        ((1.0,), (1.0,), "either side"),
        ((1.0,), (1.0, 3.0), "at most"),
        ((1.0, 3.0), (1.0,), "at least"),
        ((1.0, 3.0), (1.0, 3.0), "the value"),
    ):
        folder = tmp_path / said
        folder.mkdir()
        runs = [
            run(folder / f"{name}{load}" / name, requests(load, ttft_s=load**4), load)
            for name, loads in (("in_dc", base), ("pdd", other))
            for load in loads
        ]
        figure = drawn(runs, folder)[0]
        assert rows(figure)[1]["bcr_is"] == said
        assert ("lower bound" in figure.caption) == (said != "the value")


def test_the_load_is_that_of_the_sessions_where_traces_differ(tmp_path: Path) -> None:
    recorded = {"_target_": "harness.pacing.Recorded"}
    sweep = [
        run(
            tmp_path / f"{per_s}" / "in_dc",
            requests(per_s, ttft_s=ttft_s),
            pacing=recorded,
            trace=trace(digest=f"{per_s}"),
        )
        for per_s, ttft_s in ((1.0, 1.0), (2.0, 31.0))
    ]
    (row,) = rows(drawn(sweep, tmp_path)[0])
    assert row["next_load_ratio"] == pytest.approx(2)


def test_a_promise_broken_is_said_and_is_not_a_goodput_of_zero(tmp_path: Path) -> None:
    broken = run(tmp_path / "pdd", requests(ttft_s=40.0))
    kept = run(tmp_path / "in_dc", requests())
    figure, priced = drawn([kept, broken], tmp_path)
    row = rows(figure)[1]
    assert row["goodput_requests_per_s"] is row["bcr"] is row["bcr_is"] is row["run"] is None
    assert row["cost_per_hour"] == pytest.approx(81.74)
    assert "pdd: of 1 run none keeps the promise" in figure.caption
    found = {row["goodput"]: row["bcr"] for row in rows(priced) if row["md_over_p"] == 1.2}
    assert found["measured"] is None
    assert found[PUT_IN] == pytest.approx(1.376, abs=5e-4)
    figure, _ = drawn([broken, kept], tmp_path)
    assert "Without a goodput of the base there is no BCR" in figure.caption
    assert rows(figure)[1]["bcr"] is None


def test_a_run_without_a_successful_request_keeps_no_promise(tmp_path: Path) -> None:
    lost = requests(status="failed", first_token_s=None, last_token_s=None, error="x")
    (figure,) = drawn([run(tmp_path / "in_dc", lost)], tmp_path)
    assert rows(figure)[0]["goodput_requests_per_s"] is None
    assert "none keeps the promise" in figure.caption


def test_partial_runs_and_those_that_are_not_valid_do_not_count(tmp_path: Path) -> None:
    good = run(tmp_path / "a" / "in_dc", requests())
    bad = [
        run(tmp_path / "b" / "in_dc", requests(9.0), 9.0, partial=True),
        run(tmp_path / "c" / "in_dc", requests(8.0), 8.0, validity={"valid": False, "reasons": []}),
    ]
    (figure,) = drawn([good, *bad], tmp_path)
    (row,) = rows(figure)
    assert (row["valid_runs"], row["limit_reached"]) == (1, False)
    assert "of 1 run (2 partial or not valid left out)" in figure.caption
    (figure,) = drawn(bad, tmp_path)
    assert rows(figure)[0]["goodput_requests_per_s"] is None


def test_one_request_and_one_session_have_no_interval(tmp_path: Path) -> None:
    for name, some in (("a", requests(count=1)), ("b", requests(sessions=1))):
        (figure,) = drawn([run(tmp_path / name / "in_dc", some)], tmp_path)
        (row,) = rows(figure)
        assert row["sessions"] == 1
        assert row["goodput_requests_per_s_low"] is None
        assert math.isfinite(row["goodput_requests_per_s"])
        assert "too narrow: in_dc 1. No line:" in figure.caption


def test_systems_whose_cards_are_not_known_are_left_out_by_name(tmp_path: Path) -> None:
    known, unknown = (run(tmp_path / name, requests()) for name in ("in_dc", "vllm"))
    (figure,) = drawn([unknown, known], tmp_path)
    assert [row["system"] for row in rows(figure)] == ["in_dc"]
    assert figure.caption.endswith("Left out, as their cards are not known: vllm.")
    assert drawn([unknown], tmp_path) == []


def test_nothing_sent_draws_nothing(tmp_path: Path) -> None:
    assert drawn([run(tmp_path / "in_dc", [])], tmp_path) == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prices": prices(currency="EUR")}, "currencies: A-card; EUR"),
        ({"prices": prices(name="other")}, "sheets of prices: a sheet of 2026-02-28; other of"),
        ({"prices": prices(cards={"P": 2.0})}, "prices under one name"),
        (
            {"slo": {"ttft_s": 5.0, "tpot_s": None, "e2e_s": None, "share": 0.99}},
            r"promises \(slo\): TTFT within 30 s .*; TTFT within 5 s",
        ),
    ],
)
def test_runs_of_different_prices_or_promises_are_refused(
    tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    runs = [run(tmp_path / "in_dc", requests()), run(tmp_path / "pdd", requests(), **values)]
    with pytest.raises(ConfigError, match=words):
        drawn(runs, tmp_path)


def test_a_cost_of_nothing_and_a_factor_of_nothing_are_refused(tmp_path: Path) -> None:
    free = run(tmp_path / "in_dc", requests(), prices=prices(cards={"P": 0, "D": 0}))
    with pytest.raises(ConfigError, match="in_dc costs nothing"):
        drawn([free], tmp_path)
    with pytest.raises(ConfigError, match=r"bcr\.md_over_p is 0"):
        Bcr([0], None)
    with pytest.raises(ConfigError, match=r"bcr\.published_goodput is -1"):
        Bcr([1.2], -1)


def test_runs_of_different_traces_are_compared_with_a_warning(tmp_path: Path) -> None:
    runs = [run(tmp_path / name, requests(), trace=trace(digest=name)) for name in ("in_dc", "pdd")]
    assert (
        "BEWARE: the runs that count replayed different traces" in drawn(runs, tmp_path)[0].caption
    )


def test_the_same_runs_give_the_same_bytes_and_intervals(tmp_path: Path) -> None:
    runs = [run(tmp_path / name, requests()) for name in ("in_dc", "pdd")]
    first = [(each.path.read_bytes(), rows(each)) for each in drawn(runs, tmp_path)]
    assert [(each.path.read_bytes(), rows(each)) for each in drawn(runs, tmp_path)] == first
