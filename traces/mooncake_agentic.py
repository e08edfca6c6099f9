"""Dynamo's agentic Mooncake dialect: JSONL, a header and one request a line, times in ms.

Format: https://github.com/ai-dynamo/dynamo, `dynamo.agentic_mooncake` version 2 (lib/mocker,
loadgen). It is not Mooncake's format with more fields: it begins with a header that gives the
block size, and a request waits for others by name. What the source leaves open follows Dynamo's
own replay:

- A prompt is whole, with up to ceil(input_length / block_size) ids of 64 bits. `hash_id_scope` is
  always `local`: ids are local to the file, and its plays share them.
- `not_before_ms` counts from the start of the trace. A play is one job, whatever sessions it has.
- A dependency names a request, and a delay after its end (`completion`) or its start (`dispatch`).

A turn of a trace has one gate: a delay after the end of the last of its parents. So what waits for
the start of a request waits for what that request waited for, by so much longer. Where delays
differ the shortest is taken, which is the one after the last to end wherever the delays were
measured from one recording.
"""

from __future__ import annotations

import graphlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from harness.trace import MAX_TOKENS, Header, Trace
from traces.builder import TraceBuilder
from traces.events import need, u64_ids
from traces.faults import require_sound, sound, spared
from traces.source import Row, json_rows, locate_file, microseconds

SCHEMA = "dynamo.agentic_mooncake"
VERSION = 2

_ALIASES = {"input_length": "input_tokens", "output_length": "output_tokens"}
_TRIGGERS = ("completion", "dispatch")


class _Wait(NamedTuple):
    """A dependency: on which request, and how long after its end or start."""

    row: Row
    name: str
    trigger: str
    delay_s: float


@dataclass(slots=True, eq=False)
class _Request:
    """A row, and its gate: parents and a delay after them, or an arrival."""

    row: Row
    name: str
    play: str
    session: str
    not_before_s: float
    took_s: float
    input_tokens: int
    output_tokens: int
    block_ids: list[int]
    waits_for: list[_Wait]
    parents: tuple[str, ...] = ()
    gate_s: float = 0.0
    """The delay where there are parents, else the arrival."""
    start_s: float = 0.0
    depth: int = 0
    """How many are before it, one behind the other; orders those that start at one time."""


def read(path: Path | str) -> Trace:
    """Read a file: whole prompts, one session a play, starts as `not_before_ms` gives them.

    When a request began that waits for others is not in the format: they are ordered as if answers
    took no time, or the `recorded_api_time_ms` that a row may have. Raises `TraceError`.
    """
    path = locate_file(path)
    changes: Counter[str] = Counter()

    def count(change: str) -> None:
        changes[change] += 1

    rows = json_rows(path, count)
    first_row = next(rows)
    require_sound(path)
    builder = TraceBuilder(_header(first_row), ids_field="hash_ids")
    builder.file(path)
    requests: dict[str, _Request] = {}
    for row in rows:
        with spared():
            request = _request(row)
            if request.name in requests:
                raise row.error(
                    f"{request.name!r} is in line {requests[request.name].row.line} too",
                    "remove one of the two",
                    "request_id",
                )
            requests[request.name] = request
    first: dict[str, str] = {}
    for request in requests.values():
        first.setdefault(request.play, request.session)
    if sound():
        for request in _parents_first(requests):
            _set_gate(request, requests, changes)
    zero_s = min((each.start_s for each in requests.values()), default=0.0)
    for request in sorted(requests.values(), key=lambda each: (each.start_s, each.depth)):
        start_s = microseconds(request.start_s - zero_s)
        with spared():
            builder.add(
                request.name,
                session=request.play,
                parents=request.parents,
                recorded_s=start_s,
                arrival_s=None if request.parents else start_s,
                delay_s=request.gate_s if request.parents else None,
                input_tokens=request.input_tokens,
                output_tokens=request.output_tokens,
                block_ids=request.block_ids,
                agent="main" if request.session == first[request.play] else request.session,
                line=request.row.line,
            )
    for change, turns in changes.items():
        if turns:
            builder.count(change, turns)
    return builder.build()


def _header(row: Row) -> Header:
    need(row, "schema", "version", "block_size", "hash_id_scope", reader="mooncake_agentic")
    for name, wanted in (("schema", SCHEMA), ("version", VERSION), ("hash_id_scope", "local")):
        if row.values[name] != wanted:
            raise row.error(f"{row.values[name]!r} is unknown", f"give {wanted!r}", name)
    return Header(
        format="mooncake_agentic",
        block_tokens=row.integer("block_size", 1, MAX_TOKENS, " tokens"),
        partial_block="ceil",
        id_scope="file",
        time_unit="ms",
        licence="unknown",
    )


def _alias(row: Row, name: str) -> str:
    """What the row calls the field: Dynamo takes either name."""
    return _ALIASES[name] if name not in row.values and _ALIASES[name] in row.values else name


def _request(row: Row) -> _Request:
    lengths = (_alias(row, name) for name in _ALIASES)
    need(row, "request_id", "play_id", "session_id", *lengths, "hash_ids", "not_before_ms")
    waits_for = row.rows("dependencies") if "dependencies" in row.values else []
    return _Request(
        Row({}, row.path, row.line),  # what is read of it stands below
        row.text("request_id"),
        row.text("play_id"),
        row.text("session_id"),
        row.time_s("not_before_ms", "ms"),
        row.time_s_or_none("recorded_api_time_ms", "ms") or 0.0,
        row.tokens(_alias(row, "input_length")),
        row.tokens(_alias(row, "output_length")),
        u64_ids(row, "hash_ids"),
        [_wait(each) for each in waits_for],
    )


def _wait(row: Row) -> _Wait:
    need(row, "request_id", "trigger", "delay_ms")
    trigger = row.text("trigger")
    if trigger not in _TRIGGERS:
        raise row.error(f"{trigger!r} is unknown", f"give {' or '.join(_TRIGGERS)}", "trigger")
    return _Wait(row, row.text("request_id"), trigger, row.time_s("delay_ms", "ms"))


def _parents_first(requests: dict[str, _Request]) -> list[_Request]:
    """The requests, each after those it waits for, which are in the file and of its play."""
    graph: dict[str, list[str]] = {}
    for request in requests.values():
        graph[request.name] = []
        for wait in request.waits_for:
            with spared():
                other = requests.get(wait.name)
                if other is None:
                    raise wait.row.error(
                        f"an orphan: {wait.name!r} is not in the trace",
                        "add the request, or drop the dependency",
                        "request_id",
                    )
                if other.play != request.play:
                    raise wait.row.error(
                        f"{other.name!r} is of play {other.play!r}, not of {request.play!r}",
                        "give both one play_id",
                        "request_id",
                    )
                graph[request.name].append(other.name)
    if not sound():
        return []
    try:
        return [requests[name] for name in graphlib.TopologicalSorter(graph).static_order()]
    except graphlib.CycleError as error:
        cycle: list[str] = error.args[1]
        names = " after ".join(map(repr, reversed(cycle)))
        raise requests[cycle[0]].row.error(
            f"waits for itself: {names}", "break the cycle", "dependencies"
        ) from None


def _set_gate(request: _Request, requests: dict[str, _Request], changes: Counter[str]) -> None:
    parents: list[str] = []
    delays: set[float] = set()
    arrival_s = request.not_before_s
    arrivals = 0
    for wait in request.waits_for:
        other = requests[wait.name]
        request.depth = max(request.depth, other.depth + 1)
        delay_s = wait.delay_s
        if wait.trigger == "completion":
            parents.append(other.name)
            delays.add(delay_s)
        elif other.parents:
            parents += other.parents
            delays.add(microseconds(other.gate_s + delay_s))
        else:
            arrivals += 1
            arrival_s = max(arrival_s, microseconds(other.gate_s + delay_s))
    request.parents = tuple(dict.fromkeys(parents))
    request.start_s = request.gate_s = arrival_s
    if parents:
        request.gate_s = min(delays)
        ends = (requests[name].start_s + requests[name].took_s for name in request.parents)
        request.start_s = max(request.not_before_s, microseconds(max(ends) + request.gate_s))
        changes["unequal_delays_taken_as_shortest"] += len(delays) > 1
        changes["dispatch_beside_completion_dropped"] += arrivals > 0
        changes["not_before_of_a_dependent_dropped"] += request.not_before_s > 0
