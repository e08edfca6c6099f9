"""Percentiles and counts against values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from harness import metrics
from harness.errors import ConfigError
from harness.metrics import SAMPLE_FLOOR, Slo, Window, conserve, hit_bin, nearest_rank, summarise
from harness.record import SCHEMA, Record, to_batch


def record(turn: int, **values: Any) -> Record:
    """An answered request: due at `turn` s, first token 1 s later, 11 tokens 0.1 s apart."""
    row: dict[str, Any] = dict.fromkeys(SCHEMA.names)
    row |= {
        "turn": turn,
        "session": 0,
        "turn_index": turn,
        "agent": "main",
        "input_tokens": 1000,
        "output_tokens": 11,
        "ideal_hit_tokens": 960,
        "scheduled_s": float(turn),
        "sent_s": float(turn),
        "first_token_s": turn + 1.0,
        "last_token_s": turn + 2.0,
        "shared_reads": 0,
        "worker": 0,
        "served_input_tokens": 1000,
        "served_output_tokens": 11,
        "served_hit_tokens": 900,
        "status": "ok",
    }
    return Record(**row | values)


def table(*records: Record) -> pa.Table:
    return pa.Table.from_batches([to_batch(list(records))])


def whole(records: pa.Table, window: Window | None = None) -> dict[str, Any]:
    row: dict[str, Any] = summarise(records, window or Window(), "x").to_pylist()[0]
    return row


@pytest.mark.parametrize(
    ("q", "expected"), [(0.5, 50), (0.9, 90), (0.99, 99), (1.0, 100), (0.001, 1), (0.505, 51)]
)
def test_nearest_rank_is_a_value_that_occurred(q: float, expected: float) -> None:
    values = np.arange(100, 0, -1, dtype=float)
    assert nearest_rank(values, q) == expected


def test_nearest_rank_ranks_failures_last_and_refuses_nan() -> None:
    assert nearest_rank(np.array([1.0, 2.0, np.inf, np.inf]), 0.5) == 2.0
    assert nearest_rank(np.array([1.0, 2.0, np.inf, np.inf]), 0.51) == np.inf
    assert math.isnan(nearest_rank(np.array([]), 0.5))
    with pytest.raises(ValueError, match="NaN"):
        nearest_rank(np.array([1.0, np.nan]), 0.5)
    with pytest.raises(ValueError, match="q is 0"):
        nearest_rank(np.array([1.0]), 0)


@pytest.mark.parametrize("q", SAMPLE_FLOOR)
def test_the_sample_floor_is_the_smallest_that_gives_99_percent(q: float) -> None:
    def confidence(n: int) -> float:
        return 1 - q**n - n * (1 - q) * q ** (n - 1)

    assert confidence(SAMPLE_FLOOR[q]) >= 0.99 > confidence(SAMPLE_FLOOR[q] - 1)


def test_a_bin_holds_its_lower_edge() -> None:
    rates = np.array([0.0, 0.899, 0.90, 0.95, 0.97, 0.98, 0.99, 0.995, 1.0])
    assert hit_bin(rates).tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 6]


def test_the_figures_of_answered_requests() -> None:
    row = whole(table(*(record(turn) for turn in range(10))))
    assert row["ttft_p50_s"] == row["ttft_p99_s"] == 1.0
    assert row["e2e_p50_s"] == 2.0
    assert row["tpot_p50_s"] == pytest.approx(0.1)
    assert (row["scheduled"], row["sent"], row["ok"], row["measured"]) == (10, 10, 10, 10)
    assert row["requests_per_s"] == pytest.approx(10 / 11)
    assert row["output_tokens_per_s"] == pytest.approx(110 / 11)
    assert row["ideal_hit_mean"] == pytest.approx(0.96)
    assert row["served_hit_mean"] == pytest.approx(0.90)
    assert not row["p90_supported"]


def test_a_failure_is_infinitely_slow() -> None:
    good = [record(turn) for turn in range(9)]
    row = whole(table(*good, record(9, status="failed", error="BadStatus: 500")))
    assert row["ttft_p90_s"] == 1.0
    assert row["ttft_p99_s"] == np.inf
    assert (row["ok"], row["failed"]) == (9, 1)


def test_waiting_to_be_sent_counts_from_the_schedule() -> None:
    row = whole(table(record(0, sent_s=0.75)))
    assert row["ttft_p50_s"] == 1.0
    assert row["ttft_sent_p50_s"] == 0.25
    assert row["send_lag_p99_s"] == 0.75


def test_one_token_has_no_time_per_token() -> None:
    row = whole(table(record(0, served_output_tokens=1, last_token_s=1.0)))
    assert row["tpot_p50_s"] is None


def test_the_window_leaves_out_both_ends_and_the_unsent() -> None:
    unsent = record(5, status="unsent", sent_s=None, first_token_s=None, last_token_s=None)
    records = table(*(record(turn) for turn in range(5)), unsent)
    row = whole(records, Window(warmup_s=1, cooldown_s=1))
    assert row["measured"] == 3
    assert (row["window_start_s"], row["window_end_s"]) == (1.0, 5.0)
    assert (row["sent"], row["unsent"]) == (5, 1)


def test_strata_are_bins_and_agents() -> None:
    records = table(record(0), record(1, agent="Explore", ideal_hit_tokens=0))
    rows = {row["stratum"]: row for row in summarise(records, Window(), "x").to_pylist()}
    assert rows["hit 0-90%"]["ok"] == rows["agent Explore"]["ok"] == 1
    assert rows["hit 95-97%"]["ok"] == rows["agent main"]["ok"] == 1
    assert rows["hit 99.5-100%"]["ok"] == 0
    assert rows["hit 99.5-100%"]["ttft_p50_s"] is None


def test_nothing_answered_still_has_a_summary() -> None:
    row = whole(table(record(0, status="failed", first_token_s=None, last_token_s=None)))
    assert row["ttft_p50_s"] == np.inf
    assert row["requests_per_s"] is None or row["requests_per_s"] == 0
    row = whole(SCHEMA.empty_table())
    assert row["ttft_p50_s"] is None
    assert row["measured"] == 0


@pytest.mark.parametrize(
    ("turns", "words"),
    [([0, 1], "1 of 3 turns have no record"), ([0, 1, 1, 2], "1 turns have more than one record")],
)
def test_a_lost_or_doubled_turn_breaks_the_law(turns: list[int], words: str) -> None:
    counts = conserve(table(*(record(turn) for turn in turns)), 3)
    assert counts.broken == (words,)


def test_conservation_holds_where_every_turn_has_one_record() -> None:
    counts = conserve(table(record(0), record(1, status="failed"), record(2, status="unsent")), 3)
    assert counts.broken == ()
    assert (counts.scheduled, counts.sent, counts.unsent) == (3, 2, 1)
    assert (counts.ok, counts.failed, counts.cancelled) == (1, 1, 0)
    assert metrics.conserve(table(record(5)), 3).broken[0] == "3 of 3 turns have no record"


def test_an_interrupted_run_is_measured_by_what_was_sent() -> None:
    """Sessions that were to start much later are scheduled from the beginning."""
    late = record(99, scheduled_s=1e5, status="unsent", sent_s=None, first_token_s=None)
    row = whole(table(*(record(turn) for turn in range(10)), late))
    assert row["requests_per_s"] == pytest.approx(10 / 11)


def test_a_count_that_the_server_does_not_give_is_no_zero() -> None:
    row = whole(table(record(0), record(1, served_output_tokens=None)))
    assert row["output_tokens_per_s"] is None
    assert row["input_tokens_per_s"] is not None


# ---- what was promised


def late(turn: int, wait_s: float, **values: Any) -> Record:
    """As `record`, with its first token so late."""
    times = {"first_token_s": turn + wait_s, "last_token_s": turn + wait_s + 1.0}
    return record(turn, **(times | values))


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(), [True, True, True, False]),
        (Slo(ttft_s=2.0), [True, True, False, False]),
        (Slo(e2e_s=2.0), [True, False, False, False]),
        (Slo(tpot_s=0.1), [True, True, True, False]),
        (Slo(tpot_s=0.099), [False, False, True, False]),
    ],
)
def test_a_request_is_good_within_every_limit(slo: Slo, good: list[bool]) -> None:
    """Limits are inclusive; a token alone has no TPOT; what failed is never good."""
    alone = late(2, 3.0, served_output_tokens=1)
    records = table(late(0, 1.0), late(1, 2.0), alone, late(3, 1.0, status="failed"))
    assert slo.met(records).tolist() == good


def test_goodput_is_by_request_and_by_session() -> None:
    """Of two sessions one has a slow turn: three good requests, one good session, in 6 s."""
    rows = [late(n, 5.0 if n == 3 else 1.0, session=n % 2) for n in range(4)]
    row = summarise(table(*rows), Window(), "x", Slo(ttft_s=2.0)).to_pylist()[0]
    assert row["slo_share"] == 0.75
    lasted_s = 3 + 5.0 + 1.0
    assert row["goodput_requests_per_s"] == pytest.approx(3 / lasted_s)
    assert row["goodput_sessions_per_s"] == pytest.approx(1 / lasted_s)
    assert row["requests_per_s"] == pytest.approx(4 / lasted_s)


def test_a_promise_in_words() -> None:
    assert Slo(ttft_s=30).words == "TTFT within 30 s for 99% of requests"
    assert Slo(tpot_s=0.05, e2e_s=9, share=0.5).words == (
        "TPOT within 0.05 s and E2E within 9 s for 50% of requests"
    )
    assert Slo(share=0.999).words == "an answer for 99.9% of requests"


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"ttft_s": 0}, r"slo\.ttft_s is 0"), ({"share": 1.1}, r"slo\.share is 1\.1")],
)
def test_an_impossible_promise_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Slo(**settings)


def test_a_steady_window_lies_between_the_starts_of_sessions() -> None:
    """Ten sessions start a second apart and each goes on for 100 s: those late turns are out."""
    rows = [
        record(2 * n + k, session=n, turn_index=k, scheduled_s=at_s, sent_s=at_s)
        for n in range(10)
        for k, at_s in enumerate((float(n), n + 100.0))
    ]
    records = table(*rows)
    window = Window(steady=[0.3, 0.9])
    assert window.bounds(records) == (2.0, 8.0)
    assert metrics.measured(records, window).sum() == 7
    assert Window(warmup_s=1.0, cooldown_s=2.0, steady=[0, 1]).bounds(records) == (1.0, 7.0)
    assert math.isnan(window.bounds(table(record(0, sent_s=None)))[0])


@pytest.mark.parametrize("steady", [[0.9, 0.3], [0.5], "most", [0, 2]])
def test_an_impossible_window_is_refused(steady: Any) -> None:
    with pytest.raises(ConfigError, match=r"window\.steady"):
        Window(steady=steady)


def test_in_a_steady_window_one_long_answer_stretches_nothing() -> None:
    """Ten sessions a second apart, each of one turn of 2 s; the fifth answers for 500 s."""
    rows = [
        record(n, session=n, turn_index=0, last_token_s=n + (500.0 if n == 4 else 2.0))
        for n in range(10)
    ]
    row = summarise(table(*rows), Window(steady=[0.1, 1.0]), "x", Slo(ttft_s=2)).to_pylist()[0]
    assert (row["window_start_s"], row["window_end_s"]) == (0.0, 9.0)
    # Ended by 9 s: those sent up to 7 s, but for the long one; good of those due: all ten.
    assert row["requests_per_s"] == pytest.approx(7 / 9)
    assert row["output_tokens_per_s"] == pytest.approx(7 * 11 / 9)
    assert row["goodput_requests_per_s"] == pytest.approx(10 / 9)
    whole_run = summarise(table(*rows), Window(), "x").to_pylist()[0]
    assert whole_run["requests_per_s"] == pytest.approx(10 / 504)
