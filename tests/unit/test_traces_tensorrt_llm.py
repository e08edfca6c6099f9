"""TensorRT-LLM's runs: growing conversations, tools, branches, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError, TraceError
from harness.trace import Trace
from traces import tensorrt_llm

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces" / "trtllm-blog27"


def message(role: str, tokens: int | None, *branch: int, **more: Any) -> dict[str, Any]:
    given = {} if tokens is None else {"tokens": tokens}
    return {
        "event_type": "message",
        "branch_path": list(branch),
        "conversation_id": 0,
        "role": role,
        **given,
    } | more


def answer(prompt: int | None, completion: int, *branch: int, **more: Any) -> dict[str, Any]:
    given = {} if prompt is None else {"prompt_tokens": prompt}
    made = {"completion_tokens": completion, "reasoning_tokens": 0, **given}
    return message("assistant", None, *branch) | made | more


def tool(duration_ms: Any, *branch: int) -> dict[str, Any]:
    return {
        "event_type": "tool_call",
        "branch_path": list(branch),
        "tool_call_id": "t",
        "duration_ms": duration_ms,
    }


def fork(branches: Any, *branch: int, **more: Any) -> dict[str, Any]:
    return {
        "event_type": "parallel_start",
        "branch_path": list(branch),
        "num_branches": branches,
    } | more


JOIN = {"event_type": "parallel_end"}


def read(folder: Path, *events: Any, block_tokens: int = 10, **more: Any) -> Trace:
    path = folder / "a.trace.json"
    path.write_text(json.dumps({"trace_id": "a", "events": list(events)} | more, indent=2))
    return tensorrt_llm.read(path, block_tokens)


def waits(trace: Trace) -> list[tuple[tuple[int, ...], float | None]]:
    """(parents, delay) of each turn."""
    turns = [trace.turn(row) for row in range(len(trace))]
    return [(turn.parents, turn.delay_s) for turn in turns]


def test_a_conversation_grows_and_tools_are_its_delays(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        message("system", 30),
        message("user", 15),
        answer(45, 20),
        tool(250.0),
        tool(500.0),
        message("tool", 5),
        answer(70, 7),
    )
    assert waits(trace) == [((), None), ((0,), 0.75)]
    assert trace.input_tokens.tolist() == [45, 70]
    assert trace.output_tokens.tolist() == [20, 7]
    assert trace.ideal_hit_tokens.tolist() == [0, 40]
    header = trace.header
    assert (header.block_tokens, header.partial_block) == (10, "floor")
    assert (header.session_starts, header.changes) == ("unknown", {})
    assert trace.turn(0).arrival_s == 0.0


def test_what_the_server_saw_holds(tmp_path: Path) -> None:
    """Longer by the chat template, shorter after re-tokenising: only what is new changes."""
    trace = read(
        tmp_path,
        message("user", 45),
        answer(52, 20, reasoning_tokens=8),
        message("tool", 5),
        answer(65, 7),
        message("tool", 5),
        answer(90, 7),
    )
    assert trace.ideal_hit_tokens.tolist() == [0, 50, 60]
    assert trace.header.changes == {"prompt_tokens_not_their_sum": 3}


def test_a_message_written_anew_ends_what_is_shared(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        message("system", 20, message_index=0),
        message("user", 30, message_index=1),
        answer(50, 10, message_index=2),
        message("user", 40, message_index=1),
        answer(70, 10, message_index=3),
    )
    assert trace.ideal_hit_tokens.tolist() == [0, 20]
    assert trace.header.changes == {}


def test_a_shorter_prompt_is_the_front(tmp_path: Path) -> None:
    trace = read(tmp_path, message("user", 60), answer(60, 10), answer(35, 10), answer(45, 10))
    assert trace.ideal_hit_tokens.tolist() == [0, 30, 30]
    assert trace.header.changes == {"prompt_tokens_not_their_sum": 1}


def test_branches_run_side_by_side_and_share_what_was_before(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        message("user", 40),
        answer(40, 10),
        tool(100),
        fork(2),
        message("user", 10, 0),
        answer(60, 10, 0),
        tool(50, 1),
        message("user", 10, 1),
        answer(60, 10, 1),
        tool(30, 0),
        answer(70, 10, 0),
        JOIN,
        message("tool", 10),
        answer(60, 5),
    )
    assert [trace.turn(row).agent for row in range(5)] == [
        *("main", "branch 0", "branch 0", "branch 1", "main")
    ]
    assert waits(trace) == [((), None), ((0,), 0.1), ((1,), 0.03), ((0,), 0.15), ((2, 3), 0.0)]
    assert trace.ideal_hit_tokens.tolist() == [0, 40, 60, 50, 50]
    assert trace.header.changes == {}


def test_branches_within_branches_and_at_the_very_start(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        tool(20),
        fork(2),
        message("user", 40, 0),
        answer(40, 10, 0),
        fork(2, 0),
        answer(50, 10, 0, 1),
        tool(40, 0, 1),
        JOIN,
        answer(50, 10, 0),
        message("user", 40, 1),
        answer(40, 10, 1),
        JOIN,
        message("user", 40),
        answer(40, 5),
    )
    assert waits(trace) == [((), None), ((0,), 0.0), ((), None), ((1,), 0.04), ((3, 2), 0.0)]
    assert trace.column("arrival_s")[[0, 2]].tolist() == [0.0, 0.0]
    assert trace.header.changes == {"unequal_ends_taken_as_longest": 1}


def test_tasks_of_one_step_are_branches_too(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        message("user", 40),
        answer(40, 10),
        fork(None, children=[tool(50), answer(50, 10), tool(10)]),
        answer(50, 10),
    )
    assert waits(trace) == [((), None), ((0,), 0.0), ((1,), 0.05)]
    assert trace.header.changes == {"unequal_ends_taken_as_longest": 1}


def test_system_prompts_of_one_id_are_shared_between_files(tmp_path: Path) -> None:
    for name, length, prompt in (("a", 30, "x"), ("b", 50, "x"), ("c", 50, "y"), ("d", 50, None)):
        events = [message("system", length, system_prompt_id=prompt), answer(None, 5)]
        (tmp_path / f"{name}.trace.json").write_text(
            json.dumps({"trace_id": name, "events": events})
        )
    (tmp_path / "a.full.json").touch()
    trace = tensorrt_llm.read(tmp_path, 10)
    assert trace.sessions == 4
    assert trace.ideal_hit_tokens.tolist() == [0, 30, 0, 0]
    assert trace.header.changes == {"prompt_tokens_taken_from_messages": 4}
    assert trace.column("arrival_s").tolist() == [0.0] * 4


def test_what_is_dropped_or_not_known_is_counted(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        message("user", None),
        message("assistant", 10),
        {"event_type": "drop_kv_cache"},
        answer(40, 10, reasoning_tokens=15),
        tool(None),
        answer(40, 0),
        more=1,
    )
    assert waits(trace)[1] == ((0,), 0.0)
    assert trace.header.changes == {
        "answer_without_request_kept_as_context": 1,
        "drop_kv_cache_dropped": 1,
        "message_tokens_unknown_taken_as_0": 1,
        "prompt_tokens_not_their_sum": 1,
        "reasoning_longer_than_answer": 1,
        "tool_time_unknown_taken_as_0": 1,
        "zero_output_clamped_to_1": 1,
    }


BAD: dict[str, tuple[Any, str]] = {
    "too many branches": (fork(2**31), "num_branches: 2147483648 is above"),
    "a prompt too long": (answer(2**24 + 1, 1), "prompt_tokens: 16777217 is above"),
    "no type": ({}, "event_type: missing. Give event_type"),
    "an unknown type": ({"event_type": "x"}, "event_type: 'x' is unknown. Give message, tool_call"),
    "no role": ({"event_type": "message", "conversation_id": 0}, "role: missing"),
    "an unknown role": (message("x", 1), "role: 'x' is unknown. Give system, user"),
    "no conversation": ({"event_type": "message", "role": "user"}, "conversation_id: missing"),
    "a negative length": (message("user", -1), "tokens: -1 is below"),
    "a negative answer": (answer(40, -1), "completion_tokens: -1 is below"),
    "a negative prompt": (answer(-1, 1), "prompt_tokens: -1 is below"),
    "a negative tool": (tool(-1), "duration_ms: -1 is not a time"),
    "a tool without number": (tool("1"), 'duration_ms: "1" is not a number'),
    "a branch as text": (message("user", 1) | {"branch_path": ["0"]}, "branch_path: '0' is a str"),
    "a branch below 0": (message("user", 1, -1), r"branch_path\[0\]: -1 is not"),
    "no parallel_start": (
        message("user", 1, 0),
        r"branch_path: an orphan: no parallel_start has opened branch \[0\]",
    ),
    "a fork of nothing known": (fork(2, 5), r"an orphan: .* branch \[5\]"),
    "how many branches": ({"event_type": "parallel_start"}, "num_branches: missing"),
    "a negative number": (fork(-1), "num_branches: -1 is below"),
    "no start": (JOIN, "parallel_end without a parallel_start"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_event_is_refused(tmp_path: Path, case: str) -> None:
    bad, message_ = BAD[case]
    with pytest.raises(TraceError, match=r"a\.trace\.json: events\[1\].*" + message_):
        read(tmp_path, message("user", 40), bad)


def test_a_branch_that_is_open_already(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"events\[1\]: branch \[0\] is open already. Close it"):
        read(tmp_path, fork(1), fork(1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ('{"trace_id": "a"}', "events: missing. Give trace_id, events"),
        ('{"trace_id": "a", "events": {}}', "events: an object is not a list"),
        ('{"trace_id": "a", "events": [3]}', r"events\[0\]: 3 is not an object"),
        ('{"trace_id": "a", "events": []}', "no turns"),
        ('{"trace_id": 5, "events": []}', "trace_id: 5 is not a string"),
        ('{"trace_id": "a",\n "events": [{"event', "half a line: the file looks cut off here"),
        ('{"trace_id": NaN}', "not usable JSON: NaN"),
        (
            '{"timestamp": 0, "input_length": 1, "hash_ids": []}\n' * 2,
            "Read it with trace=mooncake$",
        ),
        ('{\n"spans": []\n}', "Read it with trace=otel$"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.trace.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"a\.trace\.json.*" + message):
        tensorrt_llm.read(path)


def test_two_files_of_one_run(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.trace.json").write_text('{"trace_id": "x", "events": []}')
    with pytest.raises(TraceError, match=r"b.trace.json: trace_id: 'x' is of a.trace.json too"):
        tensorrt_llm.read(tmp_path)


def test_a_block_has_a_token_or_more(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="block_tokens is 0: give 1 or more"):
        read(tmp_path, answer(1, 1), block_tokens=0)


def test_the_published_runs() -> None:
    if not SHARED.exists():
        pytest.skip("../shared is absent: no published traces to read")
    trace = tensorrt_llm.read(SHARED)
    assert (len(trace), trace.sessions) == (27, 2)
    assert trace.header.changes == {"prompt_tokens_not_their_sum": 25}
    assert trace.ideal_hit_token_weighted == pytest.approx(0.89555, abs=1e-5)
    assert 39.132699 in trace.column("delay_s")
