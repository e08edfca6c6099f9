"""Dynamo's agentic Mooncake dialect: gates from typed dependencies, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import TraceError
from harness.trace import Trace
from traces import mooncake_agentic

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces" / "dynamo" / "fixtures"

HEADER = {
    "schema": "dynamo.agentic_mooncake",
    "version": 2,
    "block_size": 64,
    "hash_id_scope": "local",
    "source": {"format": "test", "digest": "x"},
}


def row(name: str, *dependencies: Any, **more: Any) -> dict[str, Any]:
    """A request of two blocks, the last partly filled."""
    return {
        "request_id": name,
        "play_id": "play",
        "session_id": "root",
        "model": "m",
        "input_length": 100,
        "output_length": 5,
        "hash_ids": [1, 2**64 - 1],
        "not_before_ms": 0,
        "dependencies": list(dependencies),
    } | more


def after(name: str, delay_ms: Any = 0, trigger: str = "completion", **more: Any) -> dict[str, Any]:
    return {"request_id": name, "trigger": trigger, "delay_ms": delay_ms, "relation": "x"} | more


def read(folder: Path, *rows: Any, **header: Any) -> Trace:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in [HEADER | header, *rows]))
    return mooncake_agentic.read(path)


def gates(trace: Trace) -> list[tuple[tuple[int, ...], float | None, float | None]]:
    """(parents, arrival, delay) of each turn."""
    turns = [trace.turn(number) for number in range(len(trace))]
    return [(turn.parents, turn.arrival_s, turn.delay_s) for turn in turns]


def test_a_request_waits_for_the_end_of_others(tmp_path: Path) -> None:
    trace = read(tmp_path, row("a", not_before_ms=1500), row("b", after("a", 250)))
    assert gates(trace) == [((), 0.0, None), ((0,), None, 0.25)]
    assert trace.ideal_hit_tokens.tolist() == [0, 100]
    header = trace.header
    assert (header.block_tokens, header.partial_block, header.id_scope) == (64, "ceil", "file")
    assert (header.session_starts, header.changes) == ("recorded", {})


def test_what_waits_for_a_start_waits_for_what_that_waited_for(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        row("a", not_before_ms=1000),
        row("b", after("a", 5, "dispatch"), session_id="kid"),
        row("c", after("a", 100)),
        row("d", after("c", 20, "dispatch"), session_id="kid 2"),
        row("e", after("d", 1), after("c", 1)),
    )
    assert gates(trace) == [
        *[((), 0.0, None), ((), 0.005, None), ((0,), None, 0.1), ((0,), None, 0.12)],
        ((3, 2), None, 0.001),
    ]
    assert [trace.turn(number).agent for number in range(5)] == [
        *("main", "kid", "main", "kid 2", "main")
    ]
    assert trace.header.changes == {}


def test_plays_are_sessions_that_share_ids(tmp_path: Path) -> None:
    trace = read(tmp_path, row("a"), row("b", play_id="other", session_id="s", not_before_ms=7))
    assert trace.sessions == 2
    assert trace.ideal_hit_tokens.tolist() == [0, 100]
    assert [trace.turn(number).agent for number in (0, 1)] == ["main", "main"]


def test_ids_are_64_bits_wide(tmp_path: Path) -> None:
    trace = read(tmp_path, row("a", hash_ids=[5, 6]), row("b", after("a"), hash_ids=[5 + 2**32, 6]))
    assert trace.ideal_hit_tokens.tolist() == [0, 0]


def test_what_one_gate_cannot_say_is_counted(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        row("a"),
        row("b", after("a", 10), recorded_api_time_ms=5000),
        row("c", after("a", 300), after("b", 20), not_before_ms=400),
        row("d", after("a", 10, "dispatch"), after("c", 30)),
    )
    assert gates(trace)[2:] == [((0, 1), None, 0.02), ((2,), None, 0.03)]
    assert trace.column("recorded_s").tolist() == [0.0, 0.01, 5.03, 5.06]
    assert trace.header.changes == {
        "dispatch_beside_completion_dropped": 1,
        "not_before_of_a_dependent_dropped": 1,
        "unequal_delays_taken_as_shortest": 1,
    }


def test_aliases_unknown_fields_and_any_order(tmp_path: Path) -> None:
    second = row("b", after("a"), extra=1)
    second["input_tokens"] = second.pop("input_length")
    second["output_tokens"] = second.pop("output_length")
    first = row("a")
    del first["dependencies"], first["model"]
    trace = read(tmp_path, second, first, producer="x")
    assert gates(trace) == [((), 0.0, None), ((0,), None, 0.0)]


BAD: dict[str, tuple[list[Any], str]] = {
    "no request_id": ([{}], "request_id: missing. Give request_id, play_id"),
    "a wrong name": (
        [{"output_len" if key == "output_length" else key: x for key, x in row("b").items()}],
        "output_length: missing; the closest field is 'output_len'",
    ),
    "a negative length": ([row("b", input_length=-1)], "input_length: -1 is below"),
    "a boolean": ([row("b", output_length=True)], "output_length: true is not a whole number"),
    "an id below 0": ([row("b", hash_ids=[-1])], r"hash_ids\[0\]: -1 is not a block id"),
    "an id beyond 64 bits": ([row("b", hash_ids=[2**64])], r"hash_ids\[0\]: 1844.* is not a block"),
    "ids as strings": ([row("b", hash_ids=["1"])], "hash_ids: '1' is a string"),
    "too many ids": ([row("b", hash_ids=[1, 2, 3])], "hash_ids: 3 block ids, but 100 input tokens"),
    "a negative start": ([row("b", not_before_ms=-1)], "not_before_ms: -1 is not a time"),
    "a date as start": ([row("b", not_before_ms=1.78e12)], "over ten years: the unit is probably"),
    "a negative delay": ([row("b", after("a", -1))], r"dependencies\[0\].delay_ms: -1 is not a"),
    "no delay": ([row("b", {"request_id": "a", "trigger": "x"})], "delay_ms: missing"),
    "an unknown trigger": (
        [row("b", after("a", 0, "start"))],
        r"dependencies\[0\].trigger: 'start' is unknown. Give completion or dispatch",
    ),
    "dependencies of numbers": ([row("b", 1)], r"dependencies\[0\]: 1 is not an object"),
    "one request twice": ([row("a")], "request_id: 'a' is in line 2 too"),
    "an orphan": (
        [row("b", after("z"))],
        r"dependencies\[0\].request_id: an orphan: 'z' is not in the trace",
    ),
    "another play": (
        [row("b", after("a"), play_id="other")],
        r"dependencies\[0\].request_id: 'a' is of play 'play', not of 'other'",
    ),
    "itself": ([row("b", after("b"))], "dependencies: waits for itself: 'b' after 'b'. Break"),
    "a cycle": (
        [row("b", after("c", 0, "dispatch")), row("c", after("b"))],
        "dependencies: waits for itself: '[bc]' after '[bc]' after '[bc]'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_refused(tmp_path: Path, case: str) -> None:
    rows, message = BAD[case]
    with pytest.raises(TraceError, match=r"trace\.jsonl:[34]: .*" + message):
        read(tmp_path, row("a"), *rows)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"schema": "x"}, "schema: 'x' is unknown. Give 'dynamo.agentic_mooncake'"),
        ({"version": 1}, "version: 1 is unknown. Give 2"),
        ({"hash_id_scope": "global"}, "hash_id_scope: 'global' is unknown. Give 'local'"),
        ({"block_size": 0}, "block_size: 0 is below what is possible"),
        ({"block_size": "64"}, 'block_size: "64" is not a whole number'),
    ],
)
def test_a_bad_header_is_refused(tmp_path: Path, header: Any, message: str) -> None:
    with pytest.raises(TraceError, match=r"trace\.jsonl:1: " + message):
        read(tmp_path, row("a"), **header)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        (json.dumps(HEADER) + "\n", "no turns"),
        (json.dumps(HEADER) + "\n" + json.dumps(row("a"))[:-30], ":2: half a line"),
        (json.dumps(HEADER) + '\n{"not_before_ms": Infinity}\n', ":2: not usable JSON: Infinity"),
        (json.dumps(row("a")) + "\n", ":1: schema: missing. Give schema, version"),
        ('{"timestamp": 0, "input_length": 1, "hash_ids": []}\n', "Read it with trace=mooncake$"),
        ('{"timestamp": 0, "event": {}}\n', "Read it with trace=dynamo$"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"trace\.jsonl.*" + message):
        mooncake_agentic.read(path)


def test_the_published_example() -> None:
    path = SHARED / "agentic-mooncake.jsonl"
    if not path.exists():
        pytest.skip("../shared is absent: no published trace to read")
    trace = mooncake_agentic.read(path)
    assert gates(trace) == [((), 0.0, None), ((), 0.005, None), ((0, 1), None, 0.001)]
    assert (trace.sessions, trace.header.changes) == (1, {})
