"""OpenTelemetry spans: which are calls, who waits for whom, what prompts share, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError, TraceError
from harness.trace import Trace
from traces import otel

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces" / "otel-inference-perf"


def said(*texts: str) -> str:
    """Messages by turns of a person and a model, as JSON in a string."""
    roles = ["user", "assistant"] * len(texts)
    return json.dumps(
        [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    )


def span(
    span_id: str, start: float, end: float, tokens: Any = 40, *texts: str, **more: Any
) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.usage.input_tokens": tokens,
        "gen_ai.usage.output_tokens": 5,
    }
    if texts:
        attributes["gen_ai.input.messages"] = said(*texts)
    return {
        "trace_id": "t",
        "span_id": span_id,
        "parent_span_id": None,
        "name": "chat m",
        "start_time": f"2026-02-25T10:00:{start:09.6f}Z",
        "end_time": f"2026-02-25T10:00:{end:09.6f}",
        "attributes": attributes | more.pop("attributes", {}),
    } | more


def read(folder: Path, *spans: Any, block_tokens: int = 10, name: str = "a.json") -> Trace:
    path = folder / name
    path.write_text(json.dumps({"spans": list(spans), "span_count": len(spans)}, indent=1))
    return otel.read(path, block_tokens)


def waits(trace: Trace) -> list[tuple[tuple[int, ...], float | None]]:
    """(parents, delay) of each turn."""
    turns = [trace.turn(row) for row in range(len(trace))]
    return [(turn.parents, turn.delay_s) for turn in turns]


def test_calls_wait_as_long_as_in_the_recording(tmp_path: Path) -> None:
    trace = read(tmp_path, span("b", 4, 5, 60, "x", "y"), span("a", 1, 2.5, 40, "x"))
    assert waits(trace) == [((), None), ((0,), 1.5)]
    assert trace.column("recorded_s").tolist() == [0.0, 3.0]
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([40, 60], [5, 5])
    header = trace.header
    assert (header.block_tokens, header.partial_block) == (10, "floor")
    assert (header.session_starts, header.prefix_data, header.changes) == (
        *("recorded", "recorded"),
        {},
    )


def test_calls_that_overlap_run_side_by_side(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        span("a", 0, 1),
        span("b", 2, 4),
        span("c", 2.5, 3),
        span("d", 3.5, 6),
        span("e", 7, 8),
    )
    assert waits(trace) == [
        *[((), None), ((0,), 1.0), ((0,), 1.5), ((2,), 0.5)],
        ((1, 3), 1.0),
    ]


def test_prompts_share_the_messages_at_their_front(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        span("a", 0, 1, 40, "front"),
        span("b", 2, 3, 80, "front", "answer", "more"),
        span("c", 4, 5, 90, "front", "another", "more"),
        span("d", 6, 7, 95, "front", "answer", "more", "and"),
        span("e", 8, 9, 30, "front"),
        span("f", 10, 11, 40, "other"),
        span("g", 12, 13, 40, "front", attributes={"gen_ai.tool.definitions": ["x"]}),
    )
    assert trace.ideal_hit_tokens.tolist() == [0, 40, 40, 80, 0, 0, 0]


def test_texts_are_the_same_in_all_files(tmp_path: Path) -> None:
    read(tmp_path, span("a", 0, 1, 40, "front"), name="b.json")
    read(tmp_path, span("a", 2, 3, 40, "front"), name="a.json")
    trace = otel.read(tmp_path, 10)
    assert [source.name for source in trace.header.sources] == ["a.json", "b.json"]
    assert trace.sessions == 2
    assert sorted(trace.ideal_hit_tokens.tolist()) == [0, 40]


def test_no_messages_no_prefix_data(tmp_path: Path) -> None:
    trace = read(tmp_path, span("a", 0, 1), span("b", 2, 3))
    assert trace.ideal_hit_tokens.tolist() == [0, 0]
    assert trace.header.prefix_data == "absent"
    assert trace.header.changes == {"call_without_messages_shares_nothing": 2}


def test_sessions_are_conversations_or_traces(tmp_path: Path) -> None:
    talk = {"gen_ai.conversation.id": "talk", "gen_ai.agent.name": "Plan"}
    trace = read(
        tmp_path,
        span("a", 0, 1),
        span("a", 2, 3, trace_id="u"),
        span("b", 4, 5, attributes=talk),
        span("c", 6, 7, trace_id="u", attributes=talk),
    )
    assert trace.sessions == 3
    assert [trace.turn(row).parents for row in range(4)] == [(), (), (), (2,)]
    assert [trace.turn(row).agent for row in range(4)] == ["main", "main", "Plan", "Plan"]


def test_what_is_no_call_is_counted(tmp_path: Path) -> None:
    failed = span("c", 2, 3, status={"code": 2, "message": "x"})
    other = span("d", 2, 3, name="execute_tool ls", attributes={"gen_ai.operation.name": "tool"})
    bare = span("e", 2, 3, None)
    again = span("a", 0, 1)
    trace = read(tmp_path, again, failed, other, bare, again, span("f", 9, 10, parent_span_id="z"))
    assert waits(trace) == [((), None), ((0,), 8.0)]
    assert trace.header.changes == {
        "call_without_messages_shares_nothing": 2,
        "call_without_tokens_dropped": 1,
        "duplicate_span_dropped": 1,
        "failed_call_dropped": 1,
        "other_span_dropped": 1,
        "parent_span_not_in_file": 1,
    }


def test_tokens_are_estimated_from_characters(tmp_path: Path) -> None:
    none = {"gen_ai.usage.output_tokens": None, "gen_ai.output.text": "x" * 21}
    trace = read(tmp_path, span("a", 0, 1, None, "x" * 41, "yy", attributes=none))
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([11], [5])
    assert trace.header.changes == {"tokens_estimated_from_characters": 1}


def test_messages_with_parts_and_older_names(tmp_path: Path) -> None:
    attributes = {
        "gen_ai.usage.input_tokens": None,
        "gen_ai.usage.prompt_tokens": 30,
        "gen_ai.input.messages": [
            {"role": "user", "parts": [{"type": "text", "content": "x"}]},
            {"role": "assistant", "content": None, "tool_calls": []},
        ],
    }
    trace = read(
        tmp_path,
        span("a", 0, 1, attributes=attributes),
        span("b", 2, 3, attributes=attributes, unknown={}),
    )
    assert trace.ideal_hit_tokens.tolist() == [0, 30]


def without(field: str) -> dict[str, Any]:
    return {name: value for name, value in span("b", 2, 3).items() if name != field}


BAD: dict[str, tuple[list[Any], str]] = {
    "a prompt too long": ([span("b", 2, 3, 2**24 + 1)], "input_tokens: 16777217 is above"),
    "no name": ([without("span_id")], r"spans\[1\].span_id: missing; .* Give trace_id, span_id"),
    "no end": ([without("end_time")], r"spans\[1\].end_time: missing"),
    "no object": ([5], r"spans\[1\]: 5 is not an object"),
    "attributes as a list": (
        [span("b", 2, 3) | {"attributes": [{"key": "x"}]}],
        r"spans\[1\].attributes: not an object",
    ),
    "a wrong time": (
        [span("b", 2, 3, start_time="10:00")],
        r"spans\[1\].start_time: '10:00' is not a time. Give ISO 8601",
    ),
    "nanoseconds": ([span("b", 2, 3, start_time=17 * 10**17)], "start_time: 17.* is not a string"),
    "an end before the begin": ([span("b", 3, 2)], "end_time: 2026.* is before start_time, 2026"),
    "a negative length": (
        [span("b", 2, 3, -1)],
        r"spans\[1\].attributes.gen_ai.usage.input_tokens: -1 is below",
    ),
    "a length as text": ([span("b", 2, 3, "40")], 'input_tokens: "40" is not a whole number'),
    "messages cut off": (
        [span("b", 2, 3, attributes={"gen_ai.input.messages": '[{"role"'})],
        r"spans\[1\].attributes.gen_ai.input.messages: not JSON",
    ),
    "messages of no list": (
        [span("b", 2, 3, attributes={"gen_ai.input.messages": "{}"})],
        "gen_ai.input.messages: not a list",
    ),
    "a message without a role": (
        [span("b", 2, 3, attributes={"gen_ai.input.messages": '[{"content": "x"}]'})],
        r"gen_ai.input.messages\[0\]: not a message. Give",
    ),
    "one span twice": (
        [span("a", 2, 3)],
        r"spans\[1\].span_id: 'a' is spans\[0\] too, with other values",
    ),
    "a span inside itself": (
        [span("b", 2, 3, parent_span_id="b")],
        r"spans\[1\].parent_span_id: is inside itself: b in b. Break the cycle",
    ),
    "two inside each other": (
        [span("b", 2, 3, parent_span_id="c"), span("c", 2, 3, parent_span_id="b")],
        "parent_span_id: is inside itself: b in c in b",
    ),
    "a parent as a number": ([span("b", 2, 3, parent_span_id=5)], "parent_span_id: 5 is not a str"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_span_is_refused(tmp_path: Path, case: str) -> None:
    spans, message = BAD[case]
    with pytest.raises(TraceError, match=r"a\.json: .*" + message):
        read(tmp_path, span("a", 0, 1), *spans)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ('{"resourceSpans": []}', "spans: missing; the closest field is 'resourceSpans'"),
        ('{"spans": {}}', "spans: an object is not a list"),
        ('{"spans": []}', "no turns"),
        ('{\n"spans": [{"trace', "half a line: the file looks cut off here"),
        ('{"spans": [NaN]}', "not usable JSON: NaN"),
        ('{"timestamp": 0, "input_length": 1, "hash_ids": []}\n' * 2, "with trace=mooncake$"),
        ('{"trace_id": "a", "events": []}', "Read it with trace=tensorrt_llm$"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"a\.json.*" + message):
        otel.read(path)


def test_a_block_has_a_token_or_more(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="block_tokens is 0: give 1 or more"):
        read(tmp_path, span("a", 0, 1), block_tokens=0)


@pytest.mark.parametrize(
    ("name", "calls", "sessions", "hit"),
    [
        ("advanced", 67, 10, 0.15611),
        ("simple", 6, 2, 0.58757),
        ("advanced/prefix_sharing_example.json", 7, 4, 0.49577),
    ],
)
def test_the_published_examples(name: str, calls: int, sessions: int, hit: float) -> None:
    if not SHARED.exists():
        pytest.skip("../shared is absent: no published traces to read")
    trace = otel.read(SHARED / name)
    assert (len(trace), trace.sessions) == (calls, sessions)
    assert trace.ideal_hit_token_weighted == pytest.approx(hit, abs=1e-5)


def test_the_published_fan_out_runs_side_by_side() -> None:
    path = SHARED / "advanced" / "code_review_workflow.json"
    if not path.exists():
        pytest.skip("../shared is absent: no published traces to read")
    trace = otel.read(path)
    assert [trace.turn(row).parents for row in (1, 2, 3, 4)] == [(0,), (0,), (0,), (1, 2, 3)]
