"""Traces made smaller or calmer keep their rules and say what was done to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.errors import ConfigError
from harness.trace import Trace
from traces import transform

MakeTrace = Callable[..., Trace]


def test_long_delays_are_capped_and_counted(make_trace: MakeTrace) -> None:
    trace = transform.cap_delays(make_trace(), 1.5)
    assert [trace.turn(row).delay_s for row in range(4)] == [None, None, 1.0, 1.5]
    assert trace.header.changes == {"delay_capped_at_1.5_s": 1}
    assert transform.cap_delays(make_trace(), 9).header.changes == {}


def test_the_first_sessions_keep_their_gates(make_trace: MakeTrace) -> None:
    whole = make_trace(
        session=[0, 1, 2, 0, 2],
        turn_index=[0, 0, 0, 1, 1],
        parents=[[], [], [], [0], [2]],
        recorded_s=[0.0, 1.0, 2.0, 3.0, 4.0],
        arrival_s=[0.0, 1.0, 2.0, None, None],
        delay_s=[None, None, None, 0.5, 0.7],
        input_tokens=[64] * 5,
        output_tokens=[1] * 5,
        run_starts=[[0], [1], [2], [0], [2]],
        run_lengths=[[1]] * 5,
        agent=["main"] * 5,
    )
    fewer = transform.first_sessions(whole, 1)
    assert (len(fewer), fewer.sessions) == (2, 1)
    assert fewer.turn(1).parents == (0,)
    assert fewer.turn(1).delay_s == 0.5
    assert fewer.header.changes == {"turns_of_later_sessions_left_out": 3}


def test_the_first_sessions_are_those_that_begin_first(make_trace: MakeTrace) -> None:
    trace = make_trace(session=[1, 0, 1, 1])
    fewer = transform.first_sessions(trace, 1)
    assert (len(fewer), fewer.sessions) == (3, 1)
    assert fewer.column("recorded_s").tolist() == [0.0, 2.0, 5.0]


def test_impossible_transforms_are_refused(make_trace: MakeTrace) -> None:
    with pytest.raises(ConfigError, match=r"max_s is -1: give a number, 0 or more"):
        transform.cap_delays(make_trace(), -1)
    with pytest.raises(ConfigError, match=r"sessions is 0: give a whole number, 1 or more"):
        transform.first_sessions(make_trace(), 0)


def test_a_shrunk_trace_keeps_its_hit_rates(make_trace: MakeTrace) -> None:
    trace = make_trace()
    small = transform.shrink(trace, 2)
    assert small.header.block_tokens == 2
    assert small.input_tokens.tolist() == [4, 4, 8, 10]
    assert small.output_tokens.tolist() == [1, 1, 1, 1]
    assert small.ideal_hit_rates.tolist() == trace.ideal_hit_rates.tolist()
    assert small.header.changes == {"tokens_times_2_over_64": 4}


def test_a_last_partial_block_stays_one(make_trace: MakeTrace) -> None:
    floor = make_trace(input_tokens=[130, 128, 319, 320], run_lengths=[[2], [2], [4], [5]])
    assert transform.shrink(floor, 2).input_tokens.tolist() == [4, 4, 9, 10]
    header = replace(floor.header, partial_block="ceil")
    ceil = make_trace(header, input_tokens=[70, 128, 250, 257], run_lengths=[[2], [2], [4], [5]])
    assert transform.shrink(ceil, 2).input_tokens.tolist() == [3, 4, 8, 9]


def test_turns_beyond_the_context_go_and_so_do_those_that_wait_for_them(
    make_trace: MakeTrace,
) -> None:
    trace = make_trace(input_tokens=[128, 500, 300, 130], run_lengths=[[2], [7], [4], [2]])
    cut = transform.within_context(trace, 256)
    assert cut.input_tokens.tolist() == [128]
    assert cut.sessions == 1
    assert cut.header.changes == {"turns_beyond_256_tokens_left_out": 3}
    both = transform.within_context(trace, 503)
    assert both.table.equals(trace.table)


def test_a_context_that_nothing_fits_is_refused(make_trace: MakeTrace) -> None:
    with pytest.raises(ConfigError, match="no turn fits, the smallest prompt has 128 tokens"):
        transform.within_context(make_trace(), 100)
    with pytest.raises(ConfigError, match="give 64 or less"):
        transform.shrink(make_trace(), 128)


def three_sessions(make_trace: MakeTrace) -> Trace:
    """Sessions that start at 0, 10 and 20 s; the first and the last have two turns."""
    return make_trace(
        session=[0, 1, 2, 0, 2],
        turn_index=[0, 0, 0, 1, 1],
        parents=[[], [], [], [0], [2]],
        recorded_s=[0.0, 10.0, 20.0, 21.0, 22.0],
        arrival_s=[0.0, 10.0, 20.0, None, None],
        delay_s=[None, None, None, 0.5, 0.7],
        input_tokens=[64] * 5,
        output_tokens=[1] * 5,
        run_starts=[[0], [1], [2], [0], [2]],
        run_lengths=[[1]] * 5,
        agent=["planner", "coder", "planner", "coder", "tester"],
    )


def test_sessions_that_start_in_a_time(make_trace: MakeTrace) -> None:
    later = transform.between(three_sessions(make_trace), 10, 20.5)
    assert later.session.tolist() == [0, 1, 1]
    assert later.turn(2).parents == (1,)
    assert later.header.changes == {"turns_of_other_sessions_left_out": 2}
    with pytest.raises(ConfigError, match="50 to 60 s: no session is left of 3"):
        transform.between(three_sessions(make_trace), 50, 60)
    with pytest.raises(ConfigError, match="until_s is 5"):
        transform.between(three_sessions(make_trace), 5, 5)


def test_a_sample_is_of_whole_sessions_and_of_its_seed(make_trace: MakeTrace) -> None:
    trace = three_sessions(make_trace)
    whole = transform.sample_sessions(trace, 1.0, 3)
    assert whole.table.equals(trace.table)
    assert whole.header.changes == {}
    sizes = set()
    for seed in range(12):
        try:
            some = transform.sample_sessions(trace, 0.5, seed)
        except ConfigError as error:
            assert "no session is left" in str(error)  # noqa: PT017 - others must not fail
            continue
        again = transform.sample_sessions(trace, 0.5, seed)
        assert some.table.equals(again.table)
        assert set(some.session.tolist()) == set(range(some.sessions))
        sizes.add(some.sessions)
    assert sizes >= {1, 2}


def test_an_anonymous_trace_tells_no_names_and_replays_alike(make_trace: MakeTrace) -> None:
    trace = three_sessions(make_trace)
    nobody = transform.anonymise(trace)
    assert nobody.table.column("agent").to_pylist() == [
        "agent 0", "agent 1", "agent 0", "agent 1", "agent 2",
    ]  # fmt: skip
    assert nobody.header.sources == ()
    assert nobody.header.parameters == {}
    assert nobody.table.drop_columns("agent").equals(trace.table.drop_columns("agent"))
