"""kv-cache-tester's sessions: one JSON object a file, sub-agents inside, times in seconds.

Format: https://github.com/callanjfox/kv-cache-tester, docs/trace_replay_tester.md. What that page
leaves open was measured on the published files:

- A prompt has floor(in / block_size) ids, local to the file; sub-agents share them.
- A sub-agent's `t` is when its result came *back*, so it started `duration_ms` before (trace_0277:
  three agents whose `t` are 79, 184 and 211 s all start within 10 ms, 0.7 s after the turn that
  called them ended). The times of its own requests count from its start.
- Turns on the main line have whole seconds, so a result may seem to come back up to 1 s after the
  turn that used it began.

A turn waits for the one before it on its line; the first of a sub-agent for the turn that called
it; the turn after the call also for each sub-agent that was back by then. What waits, waits from
the end of the last of these (`t + api_time`) as long as it did in the recording.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Final, Literal

from harness.errors import TraceError
from harness.trace import MAX_TOKENS, Header, Trace
from traces.builder import TraceBuilder
from traces.faults import require_sound, seen, spared
from traces.source import Row, json_document, listing, locate, locate_file, microseconds, read_text

# The fields that are read, and those that are known and left alone.
_FILE = ("id", "block_size", "hash_id_scope", "requests")
_FILE_OPTIONAL = ("models", "tool_tokens", "system_tokens", "totals")
_REQUEST = ("t", "type", "in", "out", "hash_ids")
_REQUEST_OPTIONAL = (
    *("api_time", "think_time", "ttft", "model"),
    *("input_types", "output_types", "stop"),
)
_SUBAGENT = ("t", "type", "subagent_type", "requests")
_SUBAGENT_OPTIONAL = (
    *("agent_id", "duration_ms", "total_tokens", "tool_use_count"),
    *("status", "models", "tool_tokens", "system_tokens"),
)
_SCOPES: Final[dict[str, Literal["file", "global"]]] = {"local": "file", "global": "global"}

_WHOLE_SECOND_S = 1.0
"""How much later than it was the main line's clock may show a turn's predecessors."""


@dataclass(slots=True, eq=False)
class _Call:
    """One request, with its times from the session's zero."""

    row: Row
    agent: str
    start_s: float
    api_s: float | None
    output_tokens: int
    ended_by_s: float = math.inf
    """When whatever waited for it went on."""
    waits_for: list[_Call] = field(default_factory=list)

    def wait_for(self, other: _Call) -> None:
        self.waits_for.append(other)
        other.ended_by_s = min(other.ended_by_s, self.start_s)

    def end_s(self, s_per_token: float) -> float:
        if self.api_s is not None:
            return self.start_s + self.api_s
        estimate = self.start_s + self.output_tokens * s_per_token
        return max(self.start_s, min(estimate, self.ended_by_s))


class _Session:
    """The requests of one file and what waits for what."""

    def __init__(self, file: Row) -> None:
        self.calls: list[_Call] = []
        self.changes: Counter[str] = Counter()
        self._follow(file.rows("requests"), "main", 0.0, None)
        self.calls.sort(key=lambda call: call.start_s)

    def _follow(
        self, entries: list[Row], agent: str, zero_s: float, caller: _Call | None
    ) -> list[_Call]:
        """The requests on one agent's line, each behind the one before, the first behind `caller`.

        The agents it calls are followed too.
        """
        line: list[_Call] = []
        called: list[Row] = []
        seen(len(entries))
        for entry in entries:
            with spared():
                kind = entry.values.get("type")
                if kind == "subagent":
                    entry.expect(_SUBAGENT, _SUBAGENT_OPTIONAL)
                    called.append(entry)
                    continue
                entry.expect(_REQUEST, _REQUEST_OPTIONAL)
                if kind not in ("n", "s"):
                    raise entry.error(f"{kind!r} is unknown", "give n, s or subagent", "type")
                line.append(_call(entry, agent, zero_s))
        self.changes["rows_out_of_order"] += sum(
            after.start_s < before.start_s for before, after in pairwise(line)
        )
        line.sort(key=lambda call: call.start_s)
        for before, call in zip([caller, *line], line, strict=False):
            if before is not None:
                call.wait_for(before)
        self.calls += line
        for entry in called:
            with spared():
                self._call_agent(entry, line, zero_s, caller)
        return line

    def _call_agent(
        self, entry: Row, line: list[_Call], zero_s: float, caller: _Call | None
    ) -> None:
        """Hang a sub-agent between the turn on `line` that called it and the turn after."""
        back_s = zero_s + entry.time_s("t")
        duration_s = entry.time_s_or_none("duration_ms", "ms")
        start_s = back_s if duration_s is None else microseconds(back_s - duration_s)
        after = max(1, bisect_right(line, start_s, key=lambda call: call.start_s))
        if line:
            caller = line[after - 1]
        own = self._follow(entry.rows("requests"), entry.text("subagent_type"), start_s, caller)
        if not own:
            self.changes["subagent_without_requests_dropped"] += 1
            return
        if duration_s is None:
            self.changes["background_subagent_not_joined"] += 1
            return
        own[-1].ended_by_s = min(own[-1].ended_by_s, back_s)
        if after < len(line):
            if back_s <= line[after].start_s + _WHOLE_SECOND_S:
                line[after].wait_for(own[-1])
            else:
                self.changes["background_subagent_not_joined"] += 1

    def s_per_token(self) -> list[float]:
        """Seconds an output token took, of each request that says."""
        return [
            call.api_s / call.output_tokens
            for call in self.calls
            if call.api_s is not None and call.output_tokens
        ]

    def add_to(self, builder: TraceBuilder, name: str, s_per_token: float | None) -> None:
        """Add all requests; where one does not say how long it took, `s_per_token` estimates it."""
        self.changes["session_without_requests_dropped"] += not self.calls
        untimed = sum(call.api_s is None for call in self.calls)
        known = "api_time_estimated" if s_per_token is not None else "api_time_unknown_taken_as_0"
        self.changes[known] += untimed
        rate = s_per_token or 0.0
        for call in self.calls:
            delay_s = None
            if call.waits_for:
                end_s = max(each.end_s(rate) for each in call.waits_for)
                delay_s = microseconds(call.start_s - end_s)
                self.changes["negative_delay_clamped_to_0"] += delay_s < 0
            with spared():
                builder.add(
                    (name, call.row.within),
                    session=name,
                    parents=[(name, each.row.within) for each in call.waits_for],
                    recorded_s=call.start_s - self.calls[0].start_s,
                    arrival_s=None if call.waits_for else call.start_s - self.calls[0].start_s,
                    delay_s=None if delay_s is None else max(0.0, delay_s),
                    input_tokens=call.row.tokens("in"),
                    output_tokens=call.output_tokens,
                    block_ids=call.row.block_ids("hash_ids"),
                    agent=call.agent,
                    within=call.row.within,
                )
        for change, turns in self.changes.items():
            if turns:
                builder.count(change, turns)


def _call(entry: Row, agent: str, zero_s: float) -> _Call:
    return _Call(
        entry,
        agent,
        microseconds(zero_s + entry.time_s("t")),
        entry.time_s_or_none("api_time"),
        entry.tokens("out"),
    )


def read(path: Path | str) -> Trace:
    """Read one session file, or all `*.json` of a folder in the order of their names.

    Sessions have no common clock: each starts at 0, and the header says `session_starts="unknown"`.
    Raises `TraceError`.
    """
    documents = _documents(_files(locate(path)))
    first = next(documents)
    header = _header(first)
    builder = TraceBuilder(header, ids_field="hash_ids")
    names: dict[str, Path] = {}
    untimed: list[tuple[Path, str, _Session]] = []
    s_per_token: list[float] = []
    for document in chain([first], documents):
        with spared():
            name = document.text("id")
            if name in names:
                raise document.error(
                    f"session {name!r} is in {names[name].name} too", "remove one of the two", "id"
                )
            names[name] = document.path
            _same(header, document, first.path)
            session = _Session(document)
            own = session.s_per_token()
            s_per_token += own
            if own:
                builder.file(document.path)
                session.add_to(builder, name, median(own))
            else:
                untimed.append((document.path, name, session))
    for each, name, session in untimed:
        builder.file(each)
        session.add_to(builder, name, median(s_per_token) if s_per_token else None)
    return builder.build()


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [locate_file(path)]
    files = sorted(path.glob("[!.]*.json"))
    if not files:
        held = listing(sorted(each.name for each in path.iterdir())) or "nothing"
        raise TraceError(
            "no *.json in this folder",
            do=f"name a folder of session files; it has {held}",
            path=path,
        )
    return files


def _documents(files: list[Path]) -> Iterator[Row]:
    """The session of each file, one at least."""
    found = False
    for each in files:
        sound = None
        with spared():
            document = _document(each)
            _header(document)
            sound = document
        if sound is not None:
            found = True
            yield sound
    if not found:
        require_sound(files[0])


def _document(path: Path) -> Row:
    """The session of a file."""
    text = read_text(locate_file(path))
    packed = text.find('"hash_runs"')
    if packed >= 0:
        raise TraceError(
            "packed: runs of ids in place of hash_ids",
            do="unpack it into one JSON file a session, as published",
            path=path,
            line=text.count("\n", 0, packed) + 1,
            field="hash_runs",
        )
    document = json_document(text, path)
    document.expect(_FILE, _FILE_OPTIONAL)
    return document


def _header(document: Row) -> Header:
    scope = document.text("hash_id_scope")
    if scope not in _SCOPES:
        raise document.error(
            f"{scope!r} is unknown", f"give {' or '.join(_SCOPES)}", "hash_id_scope"
        )
    return Header(
        format="kv_cache_tester",
        block_tokens=document.integer("block_size", 1, MAX_TOKENS, " tokens"),
        partial_block="floor",
        id_scope=_SCOPES[scope],
        time_unit="s",
        licence="Apache-2.0",
        session_starts="unknown",
    )


def _same(header: Header, document: Row, first: Path) -> None:
    """Refuse a file whose blocks are not those of the first."""
    other = _header(document)
    for name, here, there in (
        ("block_size", other.block_tokens, header.block_tokens),
        ("hash_id_scope", other.id_scope, header.id_scope),
    ):
        if here != there:
            raise document.error(
                f"{document.values[name]!r}, where {first.name} has another",
                "read files of one kind at a time",
                name,
            )
