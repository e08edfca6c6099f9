"""A small valid file of each format, as JSON values or as cells: what a fuzzer begins with.

Each has what its reader treats apart: two sessions, what waits and what is called, shared blocks.
"""

from __future__ import annotations

import json
from typing import Any

MOONCAKE = [
    {"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 27.5, "input_length": 900, "output_length": 0, "hash_ids": [0, 3]},
    {"timestamp": 30, "input_length": 0, "output_length": 7, "hash_ids": []},
]

MOONCAKE_SESSIONS = [
    *MOONCAKE[:2],
    {"timestamp": 40, "session_id": "a", "input_length": 700, "output_length": 9, "hash_ids": [0]},
    {"session_id": "a", "delay": 12, "input_length": 900, "output_length": 9, "hash_ids": [0, 4]},
    {"session_id": "b", "input_length": 60, "output_length": 9, "hash_ids": [7], "request_id": "r"},
    {
        "timestamp": 90,
        "session_id": "a",
        "delay_ms": 3.5,
        "input_length": 1200,
        "output_length": 9,
        "hash_ids": [0, 4, 5],
    },
]


def _asked(name: str, play: str, session: str, *waits: tuple[str, str, float]) -> dict[str, Any]:
    return {
        "request_id": name,
        "play_id": play,
        "session_id": session,
        "input_length": 100,
        "output_length": 10,
        "hash_ids": [1, 2],
        "not_before_ms": 0 if waits else 250,
        "recorded_api_time_ms": 31.5,
        "dependencies": [
            {"request_id": other, "trigger": trigger, "delay_ms": delay_ms}
            for other, trigger, delay_ms in waits
        ],
    }


MOONCAKE_AGENTIC = [
    {
        "schema": "dynamo.agentic_mooncake",
        "version": 2,
        "block_size": 64,
        "hash_id_scope": "local",
    },
    _asked("a", "one", "main"),
    _asked("b", "one", "sub", ("a", "dispatch", 4.5)),
    _asked("c", "one", "main", ("a", "completion", 9), ("b", "completion", 2)),
    _asked("d", "two", "main"),
]


def _event(kind: str, **more: Any) -> dict[str, Any]:
    return {"schema": "dynamo.request.trace.v1", "event_type": kind, **more}


def _ended(name: str, begin_ms: int, session: str, **parent: str) -> dict[str, Any]:
    return _event(
        "request_end",
        event_time_unix_ms=begin_ms + 200,
        agent_context={"session_id": session, **parent},
        request={
            "request_id": name,
            "input_tokens": 40,
            "output_tokens": 5,
            "request_received_ms": begin_ms,
            "total_time_ms": 200.5,
            "replay": {
                "trace_block_size": 16,
                "input_length": 40,
                "input_sequence_hashes": [1, 2, 2**64 - 1],
            },
        },
    )


DYNAMO = [
    _ended("r1", 1000, "root"),
    _event(
        "tool_end",
        event_time_unix_ms=2100,
        agent_context={"session_id": "root"},
        tool={
            "tool_call_id": "t",
            "tool_class": "agent",
            "started_at_unix_ms": 1210,
            "ended_at_unix_ms": 1900,
            "duration_ms": 690,
            "claude": {
                "source_request_id": "r1",
                "consumer_request_id": "r3",
                "child_session_id": "child",
                "execution_mode": "blocking",
            },
        },
    ),
    {"timestamp": 1, "event": _ended("r2", 1300, "child", parent_session_id="root")},
    _ended("r3", 2000, "root"),
    _ended("r4", 1500, "other", parent_session_id="child"),
    _event("request_payload"),
]


def _session_request(t: float, tokens: int, *ids: int, **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": tokens, "out": 20, "hash_ids": [*ids], **more}


KV_CACHE_TESTER = {
    "id": "trace_0001",
    "models": ["m"],
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [
        _session_request(0, 130, 1, 2, api_time=1.5),
        {
            "t": 9.0,
            "type": "subagent",
            "agent_id": "x",
            "subagent_type": "Explore",
            "duration_ms": 6000,
            "requests": [
                _session_request(0, 70, 5, api_time=2),
                _session_request(3, 140, 5, 6),
            ],
        },
        _session_request(10, 200, 1, 2, 3, ttft=0.5, think_time=0.1, stop="tool_use"),
    ],
}


def _round(session: str, index: int, prefix: int, added: int, second: int) -> dict[str, Any]:
    return {
        "session_id": session,
        "round_index": index,
        "input_tokens_total": prefix + added,
        "prefix_tokens": prefix,
        "newly_append_tokens": added,
        "output_tokens": 30,
        "timing_events": [
            {"event_type": "user_message", "timestamp": f"2026-06-01T05:40:{second:02}.151Z"},
            {"event_type": "text", "timestamp": f"2026-06-01T05:40:{second + 3:02}+00:00"},
        ],
        "tools": [{"tool_wall_latency_ms": 120.5}],
    }


TRACELAB = [
    _round("a", 0, 0, 200, 1),
    _round("a", 1, 190, 40, 9),
    _round("b", 3, 20, 60, 5),
    _round("a", 2, 230, 100, 20) | {"timing_events": []},
]


def _message(role: str, *branch: int, **more: Any) -> dict[str, Any]:
    event = {"event_type": "message", "branch_path": [*branch], "conversation_id": 0, "role": role}
    return event | more


def _answer(*branch: int, prompt: int) -> dict[str, Any]:
    more = {"prompt_tokens": prompt, "completion_tokens": 8, "reasoning_tokens": 2}
    return _message("assistant", *branch, **more)


TENSORRT_LLM = {
    "trace_id": "run",
    "events": [
        _message("system", tokens=40, system_prompt_id="s"),
        _message("user", tokens=10, message_index=1),
        _answer(prompt=55),
        {"event_type": "tool_call", "branch_path": [], "tool_call_id": "t", "duration_ms": 30.5},
        {"event_type": "parallel_start", "branch_path": [], "num_branches": 2},
        _message("tool", 0, tokens=25),
        _answer(0, prompt=90),
        _answer(1, prompt=70),
        {"event_type": "parallel_end"},
        {
            "event_type": "parallel_start",
            "children": [{"event_type": "tool_call", "duration_ms": 5}, _answer(prompt=64)],
        },
        {"event_type": "drop_kv_cache"},
        _answer(prompt=120),
    ],
}


def _span(name: str, start: int, parent: str | None, *texts: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text} for text in texts]
    return {
        "trace_id": "t",
        "span_id": name,
        "parent_span_id": parent,
        "name": "chat m",
        "start_time": f"2026-02-25T10:00:{start:02}.5Z",
        "end_time": f"2026-02-25T10:00:{start + 2:02}",
        "status": {"code": 1},
        "attributes": {
            "gen_ai.operation.name": "chat",
            "gen_ai.usage.input_tokens": 40,
            "gen_ai.usage.output_tokens": 5,
            "gen_ai.input.messages": json.dumps(messages) if len(texts) == 1 else messages,
            "gen_ai.agent.name": "main",
        },
    }


OTEL = {
    "spans": [
        _span("a", 1, None, "x" * 80),
        _span("b", 4, "a", "x" * 80, "y" * 90),
        {
            "trace_id": "t",
            "span_id": "c",
            "parent_span_id": "b",
            "name": "tool",
            "start_time": "2026-02-25T10:00:06Z",
            "end_time": "2026-02-25T10:00:07Z",
        },
        _span("d", 9, "c", "x" * 80, "z")
        | {
            "attributes": {
                "gen_ai.operation.name": "chat",
                "session.id": "s",
                "gen_ai.input.messages": [{"role": "user", "content": [{"text": "x"}]}],
                "gen_ai.system_instructions": "be short",
                "gen_ai.output.text": "yes",
            }
        },
    ]
}


def _chat(number: int, parent: int, timestamp: float, *ids: int) -> dict[str, Any]:
    return {
        "chat_id": number,
        "parent_chat_id": parent,
        "timestamp": timestamp,
        "input_length": 16 * len(ids) - 3,
        "output_length": 4,
        "type": "text",
        "turn": 1,
        "hash_ids": [*ids],
    }


QWEN_BAILIAN = [
    _chat(0, -1, 0.5, 1, 2),
    _chat(1, 0, 3.25, 1, 2, 3),
    _chat(2, 77, 3.5, 9),
    _chat(3, 1, 8, 1, 2, 3, 4),
]

AZURE = [
    ["TIMESTAMP", "ContextTokens", "GeneratedTokens"],
    ["2023-11-16 18:17:03.9799600", "4808", "10"],
    ["2023-11-16 18:17:04.0319600", "110", "0"],
    ["2024-05-12 00:00:00.001163+00:00", "0", "27"],
]

BURSTGPT = [
    [
        *("Timestamp", "Model", "Request tokens", "Response tokens"),
        *("Total tokens", "Log Type", "Session ID", "Elapsed time"),
    ],
    ["5", "ChatGPT", "472", "18", "490", "Conversation log", "", ""],
    ["45.5", "GPT-4", "1087", "0", "1087", "API log", "s1", "3.25"],
    ["118", "GPT-4", "417", "276", "690", "API log", "s1", "0"],
]

SHAREGPT = [
    {
        "id": "one",
        "system": "a b",
        "conversations": [
            {"from": "human", "value": "a b c a b c"},
            {"from": "gpt", "value": "c b"},
            {"from": "human", "value": "a"},
            {"from": "gpt", "value": "b b b"},
        ],
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a b"}, {"type": "image"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "t"}]},
            {"role": "tool", "content": "c"},
            {"role": "assistant", "content": "b"},
        ],
        "tools": [{"name": "t"}],
    },
]

CANONICAL = [
    {
        "relaybench": {
            "format": "mine",
            "block_tokens": 64,
            "partial_block": "floor",
            "id_scope": "global",
            "time_unit": "s",
            "licence": "none",
            "session_starts": "recorded",
            "prefix_data": "recorded",
            "sources": [{"name": "a", "sha256": "0"}],
            "changes": {"dropped": 1},
            "parameters": {"seed": 1},
        }
    },
    {
        "session": 0,
        "turn_index": 0,
        "parents": [],
        "recorded_s": 0.0,
        "arrival_s": 0.0,
        "input_tokens": 128,
        "output_tokens": 20,
        "runs": [[0, 2]],
        "agent": "main",
    },
    {
        "session": 1,
        "turn_index": 0,
        "parents": [],
        "recorded_s": 1.5,
        "arrival_s": 1.5,
        "input_tokens": 200,
        "output_tokens": 20,
        "runs": [[0, 1], [3, 2]],
        "agent": "main",
    },
    {
        "session": 0,
        "turn_index": 1,
        "parents": [0],
        "recorded_s": 4.5,
        "delay_s": 1.5,
        "input_tokens": 192,
        "output_tokens": 30,
        "runs": [[0, 3]],
        "agent": "sub",
    },
]
