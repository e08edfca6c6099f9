"""TraceLab's rounds: prefixes from lengths, delays from event times, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError, TraceError
from harness.trace import Trace
from traces import tracelab

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces" / "tracelab"


def event(kind: str, second: float) -> dict[str, Any]:
    return {"event_type": kind, "timestamp": f"2026-06-01T05:40:{second:06.3f}Z", "source": "x"}


def turn(
    index: int, prefix: int, new: int, *events: Any, session: str = "s", **more: Any
) -> dict[str, Any]:
    return {
        "provider": "claude",
        "session_id": session,
        "round_index": index,
        "input_tokens_total": prefix + new,
        "prefix_tokens": prefix,
        "newly_append_tokens": new,
        "output_tokens": 5,
        "timing_events": list(events),
        "tools": [],
    } | more


def read(folder: Path, *rounds: Any, block_tokens: int = 10) -> Trace:
    path = folder / "rounds.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rounds))
    return tracelab.read(path, block_tokens)


def test_a_round_waits_for_the_tools_and_people_before_it(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        turn(0, 0, 50, event("user_message", 1), event("text", 3), event("tool_call", 3.5)),
        turn(1, 50, 9, event("tool_result", 4), event("tool_result", 6.25), event("text", 7)),
        turn(2, 59, 9, event("user_message", 20), event("reasoning", 21)),
    )
    assert trace.column("recorded_s").tolist() == [0.0, 5.25, 19.0]
    assert trace.column("delay_s")[1:].tolist() == [2.75, 13.0]
    assert [trace.turn(row).parents for row in range(3)] == [(), (0,), (1,)]
    header = trace.header
    assert (header.block_tokens, header.partial_block) == (10, "floor")
    assert (header.session_starts, header.prefix_data) == ("recorded", "recorded")
    assert header.changes == {}


def test_prompts_share_what_the_prefix_says(tmp_path: Path) -> None:
    """Rounded down to blocks; a prefix cut back gives new blocks from there on."""
    trace = read(
        tmp_path,
        turn(0, 0, 55, event("text", 1)),
        turn(1, 55, 40, event("text", 2)),
        turn(2, 29, 70, event("text", 3)),
        turn(3, 99, 1, event("text", 4)),
    )
    assert trace.ideal_hit_tokens.tolist() == [0, 50, 20, 90]
    assert trace.header.changes == {"begin_estimated_from_first_output": 4}


def test_a_prefix_may_reach_into_the_answer(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        turn(0, 20, 30, event("text", 1)),
        turn(1, 55, 45, event("text", 2)),
        turn(2, 200, 1, event("text", 3)),
    )
    assert trace.ideal_hit_tokens.tolist() == [0, 50, 100]
    assert trace.header.changes == {
        "begin_estimated_from_first_output": 3,
        "first_prefix_not_shared": 1,
        "prefix_longer_than_context": 1,
    }


def test_sessions_are_apart_and_rounds_come_in_any_order(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        turn(1, 50, 10, event("user_message", 9)),
        turn(0, 0, 50, event("user_message", 5), session="t"),
        turn(0, 0, 50, event("user_message", 1)),
    )
    assert trace.sessions == 2
    assert [trace.turn(row).parents for row in range(3)] == [(), (), (0,)]
    assert trace.column("arrival_s")[:2].tolist() == [0.0, 4.0]
    assert trace.ideal_hit_tokens.tolist() == [0, 0, 50]


def test_what_is_not_known_is_estimated_and_counted(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        turn(0, 0, 50),
        turn(
            *(1, 50, 10, event("user_message", 2)),
            tools=[{"tool_wall_latency_ms": 500}, {"tool_wall_latency_ms": 1500}, {}],
        ),
        turn(2, 60, 10, input_tokens_total=75, output_tokens=0),
        turn(3, 70, 10, event("user_message", 3), event("text", 4)),
    )
    assert trace.column("recorded_s").tolist() == [0.0, 0.0, 1.0, 1.5]
    assert trace.header.changes == {
        "input_tokens_not_their_sum": 1,
        "negative_delay_clamped_to_0": 1,
        "time_estimated": 2,
        "zero_output_clamped_to_1": 1,
    }


def test_a_session_without_any_time_starts_with_the_trace(tmp_path: Path) -> None:
    trace = read(tmp_path, turn(0, 0, 50, session="t"), turn(0, 0, 50, event("text", 30)))
    assert trace.column("arrival_s").tolist() == [0.0, 0.0]


def test_a_folder_is_one_trace(tmp_path: Path) -> None:
    for name, each in (("b", turn(0, 0, 50, event("text", 1))), ("a", turn(1, 50, 9))):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(each) + "\n")
    trace = tracelab.read(tmp_path, 10)
    assert [source.name for source in trace.header.sources] == ["a.jsonl", "b.jsonl"]
    assert (trace.sessions, trace.ideal_hit_tokens.tolist()) == (1, [0, 50])


def without(field: str) -> dict[str, Any]:
    return {name: value for name, value in turn(1, 50, 9).items() if name != field}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a prompt too long": (turn(1, 2**24, 1), "input_tokens_total: 16777217 is above"),
    "no session": (without("session_id"), "session_id: missing. Give session_id, round_index"),
    "no prefix": (without("prefix_tokens"), "prefix_tokens: missing"),
    "no events": (without("timing_events"), "timing_events: missing"),
    "a negative length": (turn(1, 50, -9), "newly_append_tokens: -9 is below|total: 41"),
    "no number": (turn(1, 50, 9, prefix_tokens=None), "prefix_tokens: null is not a whole number"),
    "a negative round": (turn(-1, 50, 9), "round_index: -1 is below"),
    "a wrong time": (
        turn(1, 50, 9, {"event_type": "text", "timestamp": "soon"}),
        r"timing_events\[0\].timestamp: 'soon' is not a time. Give ISO 8601",
    ),
    "a time as a number": (
        turn(1, 50, 9, {"event_type": "text", "timestamp": 17}),
        r"timing_events\[0\].timestamp: 17 is not a string",
    ),
    "half an event": (turn(1, 50, 9, {"event_type": "text"}), r"\[0\].timestamp: missing"),
    "a negative tool time": (
        turn(1, 50, 9, tools=[{"tool_wall_latency_ms": -3}]),
        r"tools\[0\].tool_wall_latency_ms: -3 is not a time",
    ),
    "one round twice": (
        turn(0, 0, 50, event("text", 1)),
        "round_index: round 0 of session 's' is in rounds.jsonl line 1 too",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_round_is_refused(tmp_path: Path, case: str) -> None:
    bad, message = BAD[case]
    with pytest.raises(TraceError, match=r"rounds\.jsonl:2: .*(" + message + ")"):
        read(tmp_path, turn(0, 0, 50, event("text", 1)), bad)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        (json.dumps(turn(0, 0, 50))[:-9], ":1: half a line: the file looks cut off here"),
        ('{"prefix_tokens": NaN}\n', ":1: not usable JSON: NaN"),
        ("session_id,round_idx\n0,0\n", ":1: not JSON"),
        ('{"timestamp": 0, "input_length": 1, "hash_ids": []}\n', "Read it with trace=mooncake$"),
        ('{"timestamp": 0, "event": {}}\n', "Read it with trace=dynamo$"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"rounds\.jsonl.*" + message):
        tracelab.read(path)


def test_a_block_has_a_token_or_more(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="block_tokens is 0: give 1 or more"):
        read(tmp_path, turn(0, 0, 50), block_tokens=0)


def test_the_published_example() -> None:
    path = SHARED / "example_sessions" / "sanitized" / "round_trace.jsonl"
    if not path.exists():
        pytest.skip("../shared is absent: no published trace to read")
    trace = tracelab.read(path)
    assert (len(trace), trace.sessions) == (19, 2)
    assert trace.header.changes == {"first_prefix_not_shared": 2}
    assert trace.ideal_hit_token_weighted == pytest.approx(0.85302, abs=1e-5)
