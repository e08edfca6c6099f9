"""Traces made smaller, calmer or finer in time keep their rules and say what was done to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.errors import ConfigError
from harness.seed import stream
from harness.trace import MAX_BLOCK, Trace
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


def test_an_anonymous_trace_has_nothing_of_the_source_s_numbers(make_trace: MakeTrace) -> None:
    """Ids near the largest, dates in s since 1970, numbers of turns as a source gave them."""
    day = 1.7e9
    nobody = transform.anonymise(
        make_trace(
            turn_index=[70, 5, 81, 95],
            recorded_s=[day, day + 0.5, day + 2, day + 5],
            arrival_s=[day + 1, day + 1.5, None, None],
            run_starts=[[MAX_BLOCK], [900], [MAX_BLOCK], [MAX_BLOCK]],
        )
    )
    assert nobody.column("turn_index").tolist() == [0, 0, 1, 2]
    assert nobody.column("recorded_s").tolist() == [0.0, 0.5, 2.0, 5.0]
    assert [nobody.turn(row).arrival_s for row in range(4)] == [1.0, 1.5, None, None]
    assert [nobody.runs(row) for row in range(4)] == [[(0, 2)], [(5, 2)], [(0, 4)], [(0, 5)]]


def test_chains_that_follow_each_other_stay_two(make_trace: MakeTrace) -> None:
    """Block 20 follows the end of the first chain, but far from it in number."""
    trace = make_trace(
        run_starts=[[7], [10], [7, 20], [7, 20]], run_lengths=[[2], [2], [2, 2], [2, 3]]
    )
    alone = transform.first_sessions(trace, 1)
    assert [transform.anonymise(trace).runs(row) for row in (0, 2, 3)] == [
        [(0, 2)], [(0, 2), (4, 2)], [(0, 2), (4, 3)],
    ]  # fmt: skip
    assert [transform.anonymise(alone).runs(row) for row in range(3)] == [
        [(0, 2)], [(0, 2), (3, 2)], [(0, 2), (3, 3)],
    ]  # fmt: skip


def test_scaled_time_scales_gates_and_records(make_trace: MakeTrace) -> None:
    slow = transform.scale_time(make_trace(), 2)
    assert slow.column("recorded_s").tolist() == [0.0, 1.0, 4.0, 10.0]
    assert [slow.turn(row).arrival_s for row in range(4)] == [0.0, 1.0, None, None]
    assert [slow.turn(row).delay_s for row in range(4)] == [None, None, 2.0, 4.0]
    assert slow.header.changes == {"times_scaled_by_2": 4}
    assert transform.scale_time(make_trace(), 1).header == make_trace().header
    with pytest.raises(ConfigError, match=r"factor is 0: give a number, above 0"):
        transform.scale_time(make_trace(), 0)


def test_starts_leave_their_ticks_and_turns_follow_their_sessions(make_trace: MakeTrace) -> None:
    """Twenty sessions start on one tick, each with a second turn 1 s after its first."""
    rows = 40
    ticking = make_trace(
        session=[*range(20), *range(20)],
        turn_index=[0] * 20 + [1] * 20,
        parents=[[]] * 20 + [[row] for row in range(20)],
        recorded_s=[0.0] * 20 + [1.0] * 20,
        arrival_s=[0.0] * 20 + [None] * 20,
        delay_s=[None] * 20 + [0.25] * 20,
        input_tokens=[64] * rows,
        output_tokens=[1] * rows,
        run_starts=[[row % 20] for row in range(rows)],
        run_lengths=[[1]] * rows,
        agent=["main"] * rows,
    )
    spread = transform.jitter(ticking, 3.0, 7)
    recorded, arrival = spread.column("recorded_s"), spread.column("arrival_s")
    roots = ~np.isnan(arrival)
    assert len(set(arrival[roots].tolist())) == 20
    assert 0 <= arrival[roots].min() < arrival[roots].max() < 3
    assert (np.diff(recorded) >= 0).all()
    for turn in (spread.turn(row) for row in range(rows)):
        if turn.parents:
            assert spread.turn(turn.parents[0]).session == turn.session
            start_s = recorded[turn.parents[0]]
            assert turn.recorded_s == pytest.approx(start_s + 1)
            assert turn.runs == spread.turn(turn.parents[0]).runs
        else:
            assert turn.recorded_s == turn.arrival_s
    assert transform.jitter(ticking, 3.0, 7).table.equals(spread.table)
    assert not transform.jitter(ticking, 3.0, 8).table.equals(spread.table)
    assert spread.header.changes == {"start_jittered_within_3_s": 40}


def test_turns_wait_for_what_a_left_out_turn_waited_for(make_trace: MakeTrace) -> None:
    """A tool between two turns of the main agent, and one before the first."""
    trace = make_trace(
        session=[0, 0, 0, 0, 1],
        turn_index=[0, 1, 2, 3, 0],
        parents=[[], [0], [1], [2, 1], []],
        recorded_s=[0.0, 1.0, 2.0, 3.0, 4.0],
        arrival_s=[0.5, None, None, None, 4.0],
        delay_s=[None, 1.0, 2.0, 4.0, None],
        input_tokens=[64] * 5,
        output_tokens=[1] * 5,
        run_starts=[[0]] * 5,
        run_lengths=[[1]] * 5,
        agent=["tool", "main", "tool", "main", "tool"],
    )
    alone = transform.only_agents(trace, ["main"])
    assert alone.session.tolist() == [0, 0]
    assert alone.column("turn_index").tolist() == [0, 1]
    first, second = alone.turn(0), alone.turn(1)
    assert (first.parents, first.arrival_s, first.delay_s) == ((), 1.5, None)
    assert (second.parents, second.arrival_s, second.delay_s) == ((0,), None, 6.0)
    assert alone.header.changes == {
        "turns_of_other_agents_left_out": 3,
        "hit_tokens_lost_with_left_out_turns": 64,
    }
    tools = transform.only_agents(trace, ["tool"])
    assert tools.turn(1).parents == (0,)
    assert tools.turn(1).delay_s == 3.0
    assert transform.only_agents(trace, ["tool", "main"]).table.equals(trace.table)


def test_agents_that_are_not_there_are_refused(make_trace: MakeTrace) -> None:
    trace = three_sessions(make_trace)
    with pytest.raises(ConfigError, match="no turn is of cook; the trace has coder, planner, test"):
        transform.only_agents(trace, ["coder", "cook"])
    wrong: Any
    for wrong in ("coder", [], 3):
        with pytest.raises(ConfigError, match="give a list of names; the trace has coder"):
            transform.only_agents(trace, wrong)


def sharing_across_sessions(make_trace: MakeTrace) -> Trace:
    """Sessions 0 and 1 use the same two blocks, and session 0 goes on with more of them."""
    return make_trace(
        run_starts=[[0]] * 4, output_tokens=[200, 3, 3, 3], agent=["a", "b", "b", "b"]
    )


LEAVING_OUT: dict[str, Callable[[Trace], Trace]] = {
    "between": lambda trace: transform.between(trace, 0.5, 9),
    "only_agents": lambda trace: transform.only_agents(trace, ["b"]),
    "within_context": lambda trace: transform.within_context(trace, 327),
    "sample_sessions": lambda trace: next(
        made for seed in range(50) if len(made := transform.sample_sessions(trace, 0.7, seed)) == 1
    ),
}


@pytest.mark.parametrize("name", LEAVING_OUT)
def test_hits_lost_with_left_out_turns_are_counted(make_trace: MakeTrace, name: str) -> None:
    made = LEAVING_OUT[name](sharing_across_sessions(make_trace))
    assert made.ideal_hit_tokens[0] == 0
    assert made.header.changes["hit_tokens_lost_with_left_out_turns"] == 128
    first = transform.first_sessions(sharing_across_sessions(make_trace), 1)
    assert first.header.changes == {"turns_of_later_sessions_left_out": 1}


def test_starts_that_nobody_recorded_cannot_be_gone_by(make_trace: MakeTrace) -> None:
    trace = make_trace(replace(make_trace().header, session_starts="unknown"))
    with pytest.raises(ConfigError, match=r"transform.jitter: this trace does not say.*=poisson"):
        transform.jitter(trace, 3.0, 1)
    with pytest.raises(ConfigError, match=r"transform.between: this trace does not say.*=poisson"):
        transform.between(trace, 0, 9)


def test_sampling_draws_from_a_stream_of_its_own(make_trace: MakeTrace) -> None:
    trace = three_sessions(make_trace)
    chosen = stream(3, "transform.sample_sessions").random(3) < 0.5
    assert transform.sample_sessions(trace, 0.5, 3).sessions == chosen.sum() > 0


def test_a_turn_recorded_before_what_it_waits_for_goes_with_it(make_trace: MakeTrace) -> None:
    trace = make_trace(
        parents=[[], [], [3], [0]],
        input_tokens=[128, 128, 128, 600],
        run_lengths=[[2], [2], [2], [5]],
    )
    assert transform.within_context(trace, 300).column("recorded_s").tolist() == [0.0, 0.5]
