"""The rules of a trace: each broken one is a TraceError that names the turn and the column."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.errors import TraceError
from harness.trace import SCHEMA, Header, Trace

MakeTrace = Callable[..., Trace]

BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "nothing at all": (
        {name: [] for name in SCHEMA.names},
        "no turns",
    ),
    "zero input": ({"input_tokens": [128, 0, 256, 320]}, "turn 1.*fewer than 1 token"),
    "zero output": ({"output_tokens": [3, 3, 0, 3]}, "turn 2.*fewer than 1 token"),
    "time not finite": ({"recorded_s": [0.0, float("nan"), 2.0, 5.0]}, "not a finite time"),
    "out of order": ({"recorded_s": [0.0, 3.0, 2.0, 5.0]}, "turn 2.*earlier than the row before"),
    "session numbers with a hole": ({"session": [0, 2, 0, 0]}, "session 1 has no turns"),
    "index twice": ({"turn_index": [0, 0, 1, 1]}, "index 1 twice"),
    "both gates": ({"arrival_s": [0.0, 0.5, 1.0, None]}, "turn 2.*both arrival_s and delay_s"),
    "no gate": ({"arrival_s": [0.0, None, None, None]}, "turn 1.*neither"),
    "parents without a delay": (
        {"arrival_s": [0.0, 0.5, 2.0, None], "delay_s": [None, None, None, 2.0]},
        "turn 2.*parents and no delay",
    ),
    "negative delay": ({"delay_s": [None, None, -1.0, 2.0]}, "turn 2.*negative"),
    "orphan": ({"parents": [[], [], [9], [2]]}, "turn 2.*orphan"),
    "parent of another session": ({"parents": [[], [], [1], [2]]}, "turn 2.*another session"),
    "cycle": ({"parents": [[], [], [3], [2]]}, "waits for itself"),
    "own parent": ({"parents": [[], [], [2], [2]]}, "turn 2.*waits for itself"),
    "more blocks than input": ({"run_lengths": [[3], [2], [4], [5]]}, "turn 0.*more blocks"),
    "empty run": ({"run_lengths": [[0], [2], [4], [5]]}, "turn 0.*empty run"),
    "one id after two": (
        {"run_starts": [[0], [10], [0, 20], [10, 20]], "run_lengths": [[2], [2], [2, 1], [2, 1]]},
        "block 20 follows two different blocks",
    ),
    "inside a chain": ({"run_starts": [[0], [1], [0], [0]]}, "block 1, inside a chain"),
    "runs not joined": (
        {"run_starts": [[0], [10], [0, 2], [0]], "run_lengths": [[2], [2], [2, 2], [2]]},
        "block 2, inside a chain",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_named(make_trace: MakeTrace, case: str) -> None:
    columns, message = BROKEN[case]
    with pytest.raises(TraceError, match=message):
        make_trace(**columns)


def test_the_ideal_hit_counts_whole_prompts_before(make_trace: MakeTrace) -> None:
    trace = make_trace()
    assert trace.ideal_hit_tokens.tolist() == [0, 0, 128, 256]


def test_a_partly_filled_last_block_hits_no_more_than_the_input(make_trace: MakeTrace) -> None:
    trace = make_trace(
        Header("hand", 64, "ceil", "global", "ms", "none"),
        input_tokens=[100, 128, 230, 230],
        run_starts=[[0], [10], [0], [0]],
        run_lengths=[[2], [2], [4], [4]],
    )
    assert trace.ideal_hit_tokens.tolist() == [0, 0, 128, 230]


def test_the_digest_is_of_what_is_replayed(make_trace: MakeTrace) -> None:
    trace = make_trace()
    assert trace.digest == make_trace().digest
    assert trace.digest != make_trace(output_tokens=[3, 3, 3, 4]).digest
    assert trace.digest != make_trace(delay_s=[None, None, 1.0, 2.5]).digest
    assert trace.digest != make_trace(run_lengths=[[2], [2], [4], [4]]).digest


def test_turns_and_sessions_read_back(make_trace: MakeTrace) -> None:
    trace = make_trace()
    assert [len(session.turns) for session in trace.by_session()] == [3, 1]
    turn = trace.turn(3)
    assert (turn.session, turn.turn_index, turn.parents) == (0, 2, (2,))
    assert (turn.delay_s, turn.arrival_s, turn.runs) == (2.0, None, [(0, 5)])


def test_a_header_survives_json() -> None:
    header = Header("x", 16, "ceil", "file", "ms", "MIT", changes={"dropped": 2})
    assert Header.from_json(header.to_json()) == header
