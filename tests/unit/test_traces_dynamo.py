"""Dynamo's request traces: sessions, sub-agents and tools, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import TraceError
from harness.trace import Trace
from traces import dynamo

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces" / "dynamo"


def request(
    name: str,
    start_ms: int,
    end_ms: int,
    session: str | None = "root",
    parent: str | None = None,
    **replay: Any,
) -> dict[str, Any]:
    """A request of two whole blocks of 16 tokens and a bit."""
    event: dict[str, Any] = {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": end_ms,
        "request": {
            "request_id": name,
            "model": "m",
            "input_tokens": 40,
            "output_tokens": 5,
            "request_received_ms": start_ms,
            "total_time_ms": end_ms - start_ms,
            "replay": {
                "trace_block_size": 16,
                "input_length": 40,
                "input_sequence_hashes": [1, 2, 2**64 - 1],
            }
            | replay,
        },
    }
    if session is not None:
        event["agent_context"] = {"session_id": session}
        if parent is not None:
            event["agent_context"]["parent_session_id"] = parent
    return event


def tool(session: str, kind: str = "tool_end", **more: Any) -> dict[str, Any]:
    return {
        "schema": "dynamo.request.trace.v1",
        "event_type": kind,
        "event_time_unix_ms": 1200,
        "agent_context": {"session_id": session},
        "tool": {
            "tool_call_id": "t",
            "tool_class": "agent",
            "started_at_unix_ms": 1100,
            "ended_at_unix_ms": 1200,
        }
        | more,
    }


def calls(source: str, consumer: str | None, child: str, mode: str = "blocking") -> dict[str, Any]:
    return {
        "claude": {
            "source_request_id": source,
            "consumer_request_id": consumer,
            "child_session_id": child,
            "execution_mode": mode,
        }
    }


def read(folder: Path, *events: Any) -> Trace:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return dynamo.read(path)


def waits(trace: Trace) -> list[tuple[tuple[int, ...], float | None]]:
    """(parents, delay) of each turn."""
    turns = [trace.turn(row) for row in range(len(trace))]
    return [(turn.parents, turn.delay_s) for turn in turns]


def test_turns_wait_as_long_as_in_the_recording(tmp_path: Path) -> None:
    trace = read(
        tmp_path, request("a", 1000, 2500), {"event_type": "tool_start"}, request("b", 4000, 5000)
    )
    assert waits(trace) == [((), None), ((0,), 1.5)]
    assert trace.column("recorded_s").tolist() == [0.0, 3.0]
    assert trace.ideal_hit_tokens.tolist() == [0, 40]
    header = trace.header
    assert (header.block_tokens, header.partial_block, header.id_scope) == (16, "ceil", "global")
    assert (header.session_starts, header.prefix_data) == ("recorded", "recorded")
    assert header.changes == {}


def test_hashes_are_64_bits_wide(tmp_path: Path) -> None:
    """Two that differ above bit 32 only are two blocks."""
    trace = read(
        tmp_path,
        request("a", 1000, 1100, input_sequence_hashes=[7, 8]),
        request("b", 1200, 1300, input_sequence_hashes=[7, 8 + 2**32]),
    )
    assert trace.ideal_hit_tokens.tolist() == [0, 16]
    assert trace.header.changes == {"fewer_hashes_than_blocks": 2}


def test_requests_that_ran_side_by_side_do_so_again(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        request("a", 1000, 2000),
        request("c", 2200, 2500),
        request("b", 2100, 3000),
        request("d", 3500, 3600),
    )
    assert waits(trace) == [((), None), ((0,), 0.1), ((0,), 0.2), ((1, 2), 0.5)]


def test_the_next_request_may_come_before_the_end_is_noted(tmp_path: Path) -> None:
    trace = read(tmp_path, request("a", 1000, 2000), request("b", 1995, 2500))
    assert waits(trace) == [((), None), ((0,), 0.0)]
    assert trace.header.changes == {"negative_delay_clamped_to_0": 1}


def test_a_tool_names_the_caller_and_the_user_of_a_child(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        request("a", 1000, 1100),
        tool("root", **calls("a", "c", "kid")),
        request("x", 1200, 1300, "kid", "root"),
        request("b", 1400, 1500),
        request("y", 1350, 1600, "kid", "root"),
        request("c", 1700, 1800),
    )
    assert [trace.turn(row).agent for row in range(5)] == ["main", "kid", "kid", "main", "main"]
    assert waits(trace) == [((), None), ((0,), 0.1), ((1,), 0.05), ((0,), 0.3), ((3, 2), 0.1)]
    assert trace.sessions == 1
    assert trace.header.changes == {"tool_events_kept_as_delay": 1}


def test_children_without_a_tool_event_run_side_by_side(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        request("a", 1000, 1100),
        request("x", 1200, 1600, "kid 1", "root"),
        request("y", 1250, 1500, "kid 2", "root"),
        request("z", 1550, 1580, "grandkid", "kid 2"),
        request("b", 1700, 1800),
    )
    assert waits(trace) == [((), None), ((0,), 0.1), ((0,), 0.15), ((2,), 0.05), ((0, 1, 2), 0.1)]
    assert trace.header.changes == {}


def test_a_child_in_the_background_is_not_joined(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        request("a", 1000, 1100),
        tool("root", **calls("a", None, "kid", "background")),
        request("x", 1200, 1300, "kid", "root"),
        request("b", 1400, 1500),
    )
    assert waits(trace) == [((), None), ((0,), 0.1), ((0,), 0.3)]
    assert trace.header.changes == {
        "background_subagent_not_joined": 1,
        "tool_events_kept_as_delay": 1,
    }


@pytest.mark.parametrize("event", [[], [tool("root", **calls("b", None, "kid"))]])
def test_a_child_that_its_caller_did_not_wait_for(tmp_path: Path, event: list[Any]) -> None:
    """It starts from what the caller started from."""
    first = [request("a", 1000, 1100)] if event else []
    trace = read(
        tmp_path,
        *first,
        request("b", 1200, 1900),
        *event,
        request("x", 1300, 1400, "kid", "root"),
    )
    last = waits(trace)[-1]
    assert last == (((0,), 0.2) if event else ((), None))
    assert trace.header.changes["spawned_before_its_caller_ended"] == 1


def test_requests_without_a_session_stand_for_themselves(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        {"event_type": "request_payload"},
        request("a", 1000, 2000, None),
        request("b", 1500, 1600, None),
    )
    assert (trace.sessions, waits(trace)) == (2, [((), None)] * 2)
    assert trace.column("arrival_s").tolist() == [0.0, 0.5]
    assert trace.header.changes == {"request_payload_skipped": 1}
    trace = read(tmp_path, request("a", 1000, 2000, None), request("b", 1500, 1600))
    assert trace.header.changes == {"requests_without_session": 1}


def test_wrapped_events_of_a_folder_are_one_trace(tmp_path: Path) -> None:
    wrapped = json.dumps({"timestamp": 3, "event": request("b", 2000, 2100, "kid", "root")})
    (tmp_path / "2.jsonl").write_text(wrapped + "\n\n")
    (tmp_path / "1.jsonl.gz").write_bytes(
        gzip.compress(json.dumps(request("a", 1000, 1100)).encode())
    )
    trace = dynamo.read(tmp_path)
    assert [source.name for source in trace.header.sources] == ["1.jsonl.gz", "2.jsonl"]
    assert waits(trace) == [((), None), ((0,), 0.9)]
    assert trace.ideal_hit_tokens.tolist() == [0, 40]


def test_times_that_are_not_given_come_from_the_event(tmp_path: Path) -> None:
    first, second = request("a", 1000, 1500), request("b", 1800, 2000)
    del first["request"]["total_time_ms"], second["request"]["request_received_ms"]
    trace = read(tmp_path, first, second)
    assert waits(trace) == [((), None), ((0,), 0.3)]
    assert trace.header.changes == {"begin_unknown_taken_from_end": 1}


def test_unknown_fields_are_left_alone_and_lengths_compared(tmp_path: Path) -> None:
    event = request("a", 1000, 1100, more=[])
    event["request"] |= {"input_tokens": 41, "output_tokens": 0, "nothing": None}
    trace = read(tmp_path, event | {"extra": {}})
    assert trace.input_tokens.tolist() == [40]
    assert trace.header.changes == {
        "input_tokens_not_input_length": 1,
        "zero_output_clamped_to_1": 1,
    }


def without(field: str) -> dict[str, Any]:
    event = request("b", 2000, 2100)
    for within in (event, event["request"], event["request"]["replay"]):
        within.pop(field, None)
    return event


BAD: dict[str, tuple[list[Any], str]] = {
    "no event_type": ([{"schema": 1}], "event_type: missing. Give event_type"),
    "an unknown event": ([{"event_type": "x"}], "event_type: 'x' is unknown. Give request_end"),
    "another version": (
        [request("b", 1, 2) | {"schema": "dynamo.request.trace.v9"}],
        "schema: 'dynamo.request.trace.v9' is unknown. Give dynamo.request.trace.v1",
    ),
    "no schema": ([without("schema")], "schema: missing"),
    "no request": ([without("request")], "request: missing"),
    "no hashes": ([without("replay")], "request.replay: missing"),
    "no length": (
        [without("input_length")],
        "request.replay.input_length: missing",
    ),
    "no output": ([without("output_tokens")], "request.output_tokens: missing"),
    "not an object": (
        [request("b", 1, 2) | {"request": []}],
        'request: not an object. Give {"name"',
    ),
    "a negative length": (
        [request("b", 2000, 2100, input_length=-1)],
        "request.replay.input_length: -1 is below",
    ),
    "a hash below 0": (
        [request("b", 2000, 2100, input_sequence_hashes=[1, -2])],
        r"input_sequence_hashes\[1\]: -2 is not a block id",
    ),
    "a hash beyond 64 bits": (
        [request("b", 2000, 2100, input_sequence_hashes=[2**64])],
        r"input_sequence_hashes\[0\]: 18446744073709551616 is not",
    ),
    "a rounded hash": (
        [request("b", 2000, 2100, input_sequence_hashes=[1, 1.5e19])],
        r"input_sequence_hashes\[1\]: 1.5e\+19 is not a block id",
    ),
    "hashes as strings": (
        [request("b", 2000, 2100, input_sequence_hashes=["17"])],
        "input_sequence_hashes: '17' is a string. Give integers",
    ),
    "too many hashes": (
        [request("b", 2000, 2100, input_sequence_hashes=[1, 2, 3, 4])],
        "request.replay.input_sequence_hashes: 4 block ids, but 40 input tokens hold at most 3",
    ),
    "another block size": (
        [request("b", 2000, 2100, trace_block_size=32)],
        "trace_block_size: 32, where requests before have 16",
    ),
    "a block of nothing": (
        [request("b", 2000, 2100, trace_block_size=0)],
        "trace_block_size: 0 is below",
    ),
    "a time before 1970": ([request("b", -5, 2100)], "request_received_ms: -5 is below"),
    "an end before the begin": (
        [
            {
                **request("b", 2000, 1500),
                "request": request("b", 2000, 1500)["request"] | {"total_time_ms": None},
            }
        ],
        "event_time_unix_ms: 1500 is before request_received_ms, 2000",
    ),
    "a negative duration": ([request("b", 2000, 1999)], "total_time_ms: -1 is not a time"),
    "one request twice": ([request("a", 2000, 2100)], "turn 'a' is here twice, first in"),
    "a parent that is not there": (
        [request("b", 2000, 2100, "kid", "gone")],
        "agent_context.parent_session_id: an orphan: session 'gone' has no requests",
    ),
    "a session inside itself": (
        [request("b", 2000, 2100, "kid", "kid")],
        "agent_context.parent_session_id: waits for itself: 'kid' called by 'kid'",
    ),
    "two sessions inside each other": (
        [request("b", 2000, 2100, "x", "y"), request("c", 2000, 2100, "y", "x")],
        "waits for itself: '[xy]' called by '[xy]' called by",
    ),
    "two parents": (
        [request("b", 2000, 2100, "x", "root"), request("c", 2000, 2100, "x", "y")],
        "parent_session_id: 'y', where line 2 has 'root'",
    ),
    "a tool that ends before it starts": (
        [tool("root", ended_at_unix_ms=5)],
        "tool.ended_at_unix_ms: 5 is before started_at_unix_ms, 1100",
    ),
    "a tool's negative time": ([tool("root", duration_ms=-1)], "tool.duration_ms: -1 is not"),
    "a tool of an unknown request": (
        [tool("root", **calls("z", None, "kid"))],
        "tool.claude.source_request_id: 'z' is no request of session 'root'",
    ),
    "an unknown mode": (
        [tool("root", **calls("a", None, "kid", "odd"))],
        "tool.claude.execution_mode: unknown. Give blocking or background",
    ),
    "a child with two tools": (
        [
            request("b", 2000, 2100, "kid", "root"),
            tool("root", **calls("a", None, "kid")),
            tool("root", **calls("a", None, "kid")),
        ],
        "tool.claude.child_session_id: 'kid' is of line 3 too",
    ),
    "a child that its caller's caller waits for": (
        [
            request("b", 2000, 2100),
            request("x", 2200, 2300, "kid", "root"),
            tool("root", **calls("b", "a", "kid")),
        ],
        "waits for itself: '[abx]' after '[abx]' after",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_event_is_refused(tmp_path: Path, case: str) -> None:
    events, message = BAD[case]
    with pytest.raises(TraceError, match=r"trace\.jsonl:\d+: .*(?:" + message + ")"):
        read(tmp_path, request("a", 1000, 1100), *events)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ('{"event_type": "request_payload"}\n', "no request_end in it. Record with DYN_REQUEST"),
        (json.dumps(request("a", 1, 2))[:-40], ":1: half a line: the file looks cut off here"),
        ('{"event_type": NaN}\n', ":1: not usable JSON: NaN"),
        ('{"timestamp": 0, "input_length": 1, "hash_ids": []}\n', "Read it with trace=mooncake$"),
        ('{"schema": "x", "hash_id_scope": "local"}\n', "Read it with trace=mooncake_agentic"),
        ('{"block_size": 64, "requests": []}\n', "Read it with trace=kv_cache_tester"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"trace\.jsonl.*" + message):
        dynamo.read(path)


def test_a_folder_without_traces_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(TraceError, match=r"no \*\.jsonl or \*\.jsonl\.gz.* it has notes\.txt"):
        dynamo.read(tmp_path)


def test_a_real_run_with_sub_agents() -> None:
    path = SHARED / "pi_request_trace.jsonl.gz"
    if not path.exists():
        pytest.skip("../shared is absent: no published trace to read")
    trace = dynamo.read(path)
    assert (len(trace), trace.sessions) == (17, 2)
    assert trace.header.changes == {"tool_events_kept_as_delay": 22}
    assert trace.ideal_hit_token_weighted == pytest.approx(0.71678, abs=1e-5)
    agents = {trace.turn(row).agent for row in range(17)}
    assert len(agents) == 4
    # Three sub-agents start within 40 ms, and one turn waits for all of them.
    assert [trace.turn(row).parents for row in (3, 4, 5)] == [(2,)] * 3
    assert len(trace.turn(14).parents) == 4


def test_the_published_example_with_a_tool() -> None:
    path = SHARED / "fixtures" / "dynamo-agentic.jsonl"
    if not path.exists():
        pytest.skip("../shared is absent: no published trace to read")
    assert waits(dynamo.read(path)) == [((), None), ((0,), 0.01), ((1,), 0.02), ((0, 2), 0.04)]
