"""Prompts and answers of other lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.errors import ConfigError
from harness.trace import Trace
from traces import lengths

MakeTrace = Callable[..., Trace]


def test_a_cut_prompt_keeps_its_front_and_whole_blocks(make_trace: MakeTrace) -> None:
    cut = lengths.cap_lengths(make_trace(), 200, 2)
    assert cut.input_tokens.tolist() == [128, 128, 200, 200]
    assert cut.output_tokens.tolist() == [2, 2, 2, 2]
    assert [cut.runs(row) for row in range(4)] == [[(0, 2)], [(10, 2)], [(0, 3)], [(0, 3)]]
    assert cut.header.changes == {"input_capped_at_200": 2, "output_capped_at_2": 4}


def test_a_cut_block_still_counts_where_partial_blocks_do(make_trace: MakeTrace) -> None:
    header = replace(make_trace().header, partial_block="ceil")
    cut = lengths.cap_lengths(make_trace(header), 200)
    assert [cut.runs(row) for row in range(4)] == [[(0, 2)], [(10, 2)], [(0, 4)], [(0, 4)]]
    assert cut.header.changes == {"input_capped_at_200": 2}
    assert cut.output_tokens.tolist() == [3, 3, 3, 3]


def test_runs_beyond_the_cut_are_left_out(make_trace: MakeTrace) -> None:
    trace = make_trace(
        run_starts=[[0], [10], [0, 20], [0, 20, 30]], run_lengths=[[2], [2], [2, 2], [2, 1, 2]]
    )
    runs = [(0, 2), (20, 1)]
    assert lengths.cap_lengths(trace, 255).runs(2) == runs
    assert lengths.cap_lengths(trace, 192).runs(3) == runs
    assert lengths.cap_lengths(trace, 191).runs(3) == runs[:1]
    assert lengths.cap_lengths(trace, 63).runs(3) == []


def test_caps_that_nothing_exceeds_change_nothing(make_trace: MakeTrace) -> None:
    same = lengths.cap_lengths(make_trace(), 320, 3)
    assert same.table.equals(make_trace().table)
    assert same.header == make_trace().header
    with pytest.raises(ConfigError, match="give input_tokens, output_tokens or both"):
        lengths.cap_lengths(make_trace())
    with pytest.raises(ConfigError, match="input_tokens is 0: give a whole number, 1"):
        lengths.cap_lengths(make_trace(), 0)


def test_halved_prompts_share_half_as_much(make_trace: MakeTrace) -> None:
    """Chains from block 0 (to 3 blocks of it) and, after it, from block 20 (5 blocks)."""
    trace = make_trace(
        input_tokens=[192, 128, 512, 400],
        run_starts=[[0], [10], [0, 20], [0, 20]],
        run_lengths=[[3], [2], [3, 5], [3, 2]],
    )
    assert trace.ideal_hit_tokens.tolist() == [0, 0, 192, 320]
    half = lengths.scale_lengths(trace, input=0.5, output=0.1)
    assert half.input_tokens.tolist() == [96, 64, 256, 200]
    assert half.output_tokens.tolist() == [1, 1, 1, 1]
    # Blocks 0-2 of a prompt are 1 block now, blocks 3-7 the 3 after it, blocks 3-4 but 1.
    assert [half.runs(row) for row in range(4)] == [
        [(0, 1)],
        [(1, 1)],
        [(0, 1), (2, 3)],
        [(0, 1), (2, 1)],
    ]
    assert half.ideal_hit_tokens.tolist() == [0, 0, 64, 128]
    assert half.header.changes == {"input_scaled_by_0.5": 4, "output_scaled_by_0.1": 4}


def test_runs_that_vanish_leave_those_behind_them(make_trace: MakeTrace) -> None:
    """A prompt's first block is a chain of its own: a third of it is no block."""
    trace = make_trace(
        input_tokens=[64, 128, 256, 256],
        run_starts=[[0], [10], [0, 20], [0, 20]],
        run_lengths=[[1], [2], [1, 3], [1, 2]],
    )
    third = lengths.scale_lengths(trace, input=0.34)
    assert third.input_tokens.tolist() == [22, 44, 87, 87]
    assert [third.runs(row) for row in range(4)] == [[], [], [(0, 1)], [(0, 1)]]


def test_doubled_blocks_follow_each_other_where_the_old_did(make_trace: MakeTrace) -> None:
    double = lengths.scale_lengths(make_trace(), input=2)
    assert double.input_tokens.tolist() == [256, 256, 512, 640]
    assert [double.runs(row) for row in range(4)] == [[(0, 4)], [(10, 4)], [(0, 8)], [(0, 10)]]
    assert double.ideal_hit_tokens.tolist() == [0, 0, 256, 512]


def test_a_decimal_factor_is_taken_as_it_is_written(make_trace: MakeTrace) -> None:
    """0.29 * 100 is 28.999999999999996 in binary."""
    trace = make_trace(input_tokens=[6400, 128, 256, 320], run_lengths=[[100], [2], [4], [5]],
                       run_starts=[[0], [100], [0], [0]])  # fmt: skip
    assert lengths.scale_lengths(trace, input=0.29).runs(0) == [(0, 29)]


def test_scaled_prompts_go_on_from_the_end_of_a_chain_in_another(make_trace: MakeTrace) -> None:
    """Half of 2 and of 3 blocks is 1: the chain behind them now follows the end of the first."""
    trace = make_trace(
        input_tokens=[192, 128, 256, 320],
        run_starts=[[0], [10], [0, 20], [0, 20]],
        run_lengths=[[3], [2], [2, 2], [2, 3]],
    )
    half = lengths.scale_lengths(make_trace(), input=0.5)
    assert [half.runs(row) for row in range(4)] == [[(0, 1)], [(2, 1)], [(0, 2)], [(0, 2)]]
    cut = lengths.scale_lengths(trace, input=0.5)
    assert [cut.runs(row) for row in (0, 2, 3)] == [[(0, 1)], [(0, 1), (2, 1)], [(0, 1), (2, 1)]]


def test_a_factor_not_given_changes_nothing_and_one_must_be(make_trace: MakeTrace) -> None:
    with pytest.raises(ConfigError, match="scale_lengths: give input, output or both"):
        lengths.scale_lengths(make_trace())
    longer = lengths.scale_lengths(make_trace(), output=2)
    assert longer.output_tokens.tolist() == [6, 6, 6, 6]
    kept = make_trace().table.drop_columns("output_tokens")
    assert longer.table.drop_columns("output_tokens").equals(kept)
    assert longer.header.changes == {"output_scaled_by_2": 4}


def test_lengths_that_no_column_holds_are_refused(make_trace: MakeTrace) -> None:
    with pytest.raises(ConfigError, match=r"input is 1e.08: the longest would have 32,000,000,000"):
        lengths.scale_lengths(make_trace(), input=1e8)
    with pytest.raises(ConfigError, match="output is -1: give a number, above 0"):
        lengths.scale_lengths(make_trace(), output=-1)
