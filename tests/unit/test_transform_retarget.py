"""Traces of other hit rates."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from harness.errors import ConfigError
from harness.metrics import HIT_LABELS, hit_bin
from harness.trace import Header, Trace, build_table
from traces.retarget import retarget

MakeTrace = Callable[..., Trace]


def long_session(turns: int, sessions: int = 1, block_tokens: int = 1) -> Trace:
    """Turns of 10,000 tokens that share nothing; the sessions take turns."""
    rows = turns * sessions
    none: list[list[int]] = [[]] * rows
    columns = {
        "session": [row % sessions for row in range(rows)],
        "turn_index": [row // sessions for row in range(rows)],
        "parents": [[] if row < sessions else [row - sessions] for row in range(rows)],
        "recorded_s": np.arange(rows),
        "arrival_s": [0.0 if row < sessions else None for row in range(rows)],
        "delay_s": [None if row < sessions else 1.0 for row in range(rows)],
        "input_tokens": [10_000] * rows,
        "output_tokens": [1] * rows,
        "run_starts": none,
        "run_lengths": none,
        "agent": ["main"] * rows,
    }
    header = Header("hand", block_tokens, "floor", "file", "s", "none")
    return Trace(build_table(columns), header)


def binned(trace: Trace) -> list[int]:
    counts: list[int] = np.bincount(hit_bin(trace.ideal_hit_rates), minlength=7).tolist()
    return counts


def test_the_shares_asked_for_are_those_that_come_out() -> None:
    bins = [0.3, 0.1, 0.2, 0.1, 0.05, 0.05, 0.2]
    made = retarget(long_session(100, 10), bins, 1)
    assert binned(made) == [300, 100, 200, 100, 50, 50, 200]
    told = made.header.parameters["retarget"]
    assert told["bins"] == bins
    assert told["achieved"] == [share / 1000 for share in binned(made)]
    assert told["greatest_difference"] < 1e-12
    assert made.header.prefix_data == "generated"
    rates = np.sort(made.ideal_hit_rates)
    assert np.abs(rates[:300] - (np.arange(300) + 0.5) / 300 * 0.9).max() <= 0.9 / 300 + 1e-4


def test_the_order_of_hit_rates_stays_where_all_is_in_reach() -> None:
    """All but the first turn have 10,000 tokens before them, so ranks alone decide."""
    trace = retarget(long_session(200), [1 / 7] * 7, 2)
    again = retarget(trace, [0.5, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05], 3)
    order = np.lexsort((again.ideal_hit_rates, trace.ideal_hit_rates))  # ties are drawn
    assert (np.diff(again.ideal_hit_rates[order]) >= 0).all()


def test_the_first_of_all_can_hit_nothing() -> None:
    made = retarget(long_session(10), [0, 0, 0, 0, 0, 0, 1], 1)
    assert binned(made) == [1, 0, 0, 0, 0, 0, 9]
    assert made.header.changes == {"hits_retargeted": 10, "hit_target_out_of_reach": 1}
    assert made.header.parameters["retarget"]["greatest_difference"] == pytest.approx(0.1)


def test_a_turn_takes_the_front_of_the_turn_before_it(make_trace: MakeTrace) -> None:
    """Turns of 2, 4 and 5 blocks: all of the one before is 0.5 and 0.8 of the next."""
    made = retarget(make_trace(), [0, 0, 0, 0, 0, 0, 1], 1)
    # The other session's first turn takes both blocks of the first one: all of its prompt.
    assert [made.runs(row) for row in range(4)] == [[(0, 2)], [(0, 2)], [(0, 4)], [(0, 5)]]
    assert made.ideal_hit_tokens.tolist() == [0, 128, 128, 256]
    assert made.header.changes == {"hits_retargeted": 4, "hit_target_out_of_reach": 3}


def test_high_targets_go_to_those_that_can_reach_them() -> None:
    """Blocks of 4,000 tokens: no turn but a session's second of 8,000 tokens can hit it all."""
    trace = long_session(4, 2, 4000)
    sizes = [10_000, 8000, 8000, 8000, 10_000, 10_000, 10_000, 10_000]
    at = trace.table.schema.get_field_index("input_tokens")
    field = trace.table.schema.field(at)
    table = trace.table.set_column(at, field, [np.array(sizes, np.int32)])
    made = retarget(Trace(table, trace.header), [0.625, 0, 0, 0, 0, 0, 0.375], 4)
    assert made.ideal_hit_rates[[1, 2, 3]].tolist() == [1, 1, 1]
    assert binned(made) == [5, 0, 0, 0, 0, 0, 3]
    assert "hit_target_out_of_reach" not in made.header.changes


def test_nothing_but_blocks_and_header_changes_and_the_seed_decides() -> None:
    trace = long_session(30, 3)
    bins = [0.4, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]
    made = retarget(trace, bins, 1)
    laid = ("run_starts", "run_lengths")
    assert made.table.drop_columns(laid).equals(trace.table.drop_columns(laid))
    assert retarget(trace, bins, 1).table.equals(made.table)
    assert not retarget(trace, bins, 2).table.equals(made.table)


@pytest.mark.parametrize(
    ("bins", "words"),
    [
        ([0.5, 0.5], "give 7 shares, of 0-90%, 90-95%"),
        ("flat", "give 7 shares"),
        ([1, 0, 0, 0, 0, 0, 0.01], "sum to 1.01: make it 1"),
        ([1.5, -0.5, 0, 0, 0, 0, 0], "bins, of 0-90%, is 1.5: give a number, 0 to 1"),
        ([1, 0, 0, None, 0, 0, 0], "bins, of 97-98%, is None"),
    ],
)
def test_shares_that_are_none_are_refused(make_trace: MakeTrace, bins: object, words: str) -> None:
    assert len(HIT_LABELS) == 7
    with pytest.raises(ConfigError, match=words):
        retarget(make_trace(), bins, 1)  # type: ignore[arg-type]
