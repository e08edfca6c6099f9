"""Traces made smaller or calmer keep their rules and say what was done to them."""

from __future__ import annotations

from collections.abc import Callable

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
