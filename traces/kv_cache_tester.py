"""kv-cache-tester's session files: real coding-agent sessions, one JSON object a file.

    {"id": "trace_0277", "block_size": 64, "hash_id_scope": "local", "requests": [
      {"t": 0.0, "type": "n", "in": 19560, "out": 1017, "api_time": 18.78, "think_time": 0.0,
       "hash_ids": [1, 2, ...], ...},
      {"t": 79.224, "type": "subagent", "duration_ms": 59750, "requests": [...]}, ...]}

Seconds from the session's start; whole prompts; an id for each *whole* block of 64 tokens; ids are
local to the file, which sub-agents share. Files do not say when they began relative to each other.

A sub-agent's `t` is when its result came *back*: `t` - `duration_ms` falls 0.7 s after the end of
the turn that called it, for all sub-agents of a turn alike, and the main turn after them begins
when the last has come back. Its requests' times count from its own start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from harness.errors import TraceError
from harness.trace import Header, Trace
from traces.builder import TraceBuilder
from traces.source import Row, json_file

_CLOCK_S = 1.0
"""Main turns are stamped in whole seconds: two times nearer than this may be either way round."""


@dataclass
class _Call:
    """One request of a session, on the session's clock."""

    row: Row
    start_s: float
    lasted_s: float | None
    agent: str


@dataclass
class _Thread:
    """The main line of turns, or one sub-agent's."""

    calls: list[_Call]
    branches: list[_Thread]
    back_s: float | None
    """When its result came back; None where that is not known: it runs in the background."""


def read(path: str) -> Trace:
    """A session file, or all `*.json` in a folder, by name. Raises `TraceError`."""
    files = _files(Path(path))
    builder: TraceBuilder | None = None
    for file in files:
        session = json_file(file)
        block_tokens = _block_tokens(session)
        if builder is None:
            builder = TraceBuilder(
                Header(
                    "kv_cache_tester", block_tokens, "floor", "file", "s", "Apache-2.0",
                    session_starts="unknown",
                )
            )  # fmt: skip
        elif builder.header.block_tokens != block_tokens:
            do = f"put it apart: the files before it have {builder.header.block_tokens}"
            raise session.error("block_size", f"blocks of {block_tokens} tokens", do)
        builder.source(file)
        _Session(builder, file, session).add()
    assert builder is not None  # noqa: S101 - `_files` found one
    return builder.build()


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if files := sorted(path.glob("*.json")):
        return files
    packed = sorted(each.name for each in path.iterdir())[:3]
    do = f"name a folder of session files; it holds {', '.join(packed) or 'nothing'}"
    raise TraceError("no *.json in this folder", do=do, path=path)


def _block_tokens(session: Row) -> int:
    if (scope := session.get("hash_id_scope")) != "local":
        raise session.error("hash_id_scope", f"{scope!r}", "only 'local' ids are known")
    block_tokens = session.count("block_size")
    if not block_tokens:
        raise session.error("block_size", "0 tokens", "give 1 or more")
    return block_tokens


class _Session:
    """One file: its threads of turns, and how they wait for each other."""

    def __init__(self, builder: TraceBuilder, file: Path, session: Row) -> None:
        self.builder = builder
        self.file = file
        self.main = _thread(session, 0.0, "main", None)
        known = [
            call.lasted_s / call.row.count("out")
            for call in _all_calls(self.main)
            if call.lasted_s is not None and call.row.count("out")
        ]
        self.token_s = median(known) if known else 0.0

    def add(self) -> None:
        """Give the builder all turns of the file."""
        self._add_thread(self.main, None, "")

    def _add_thread(
        self, thread: _Thread, caller: tuple[str, float] | None, place: str
    ) -> tuple[str, float] | None:
        """Add a thread called by a turn, (key, end). Returns its own last turn, likewise."""
        before = caller
        waiting = sorted(thread.branches, key=lambda branch: branch.calls[0].start_s)
        returned: list[tuple[float, tuple[str, float]]] = []
        for at, call in enumerate(thread.calls):
            while waiting and at and waiting[0].calls[0].start_s < call.start_s:
                self._add_branch(waiting.pop(0), before, place, returned)
            joins = [last for back_s, last in returned if back_s <= call.start_s + _CLOCK_S]
            returned = [each for each in returned if each[0] > call.start_s + _CLOCK_S]
            parents = [*([before] if before else []), *joins]
            following = thread.calls[at + 1].start_s if at + 1 < len(thread.calls) else None
            key = f"{self.file.name}:{place}{at}"
            self._add_turn(key, call, parents)
            before = (key, call.start_s + self._lasted_s(call, following))
        while waiting:
            self._add_branch(waiting.pop(0), before, place, returned)
        self.builder.changes["background_subagents"] += len(returned)
        if not self.builder.changes["background_subagents"]:
            del self.builder.changes["background_subagents"]
        return before

    def _add_branch(
        self,
        branch: _Thread,
        caller: tuple[str, float] | None,
        place: str,
        returned: list[tuple[float, tuple[str, float]]],
    ) -> None:
        name = f"{place}{len(returned)}.{branch.calls[0].start_s:g}/"
        last = self._add_thread(branch, caller, name)
        assert last is not None  # noqa: S101 - a branch has at least one call
        returned.append((branch.back_s if branch.back_s is not None else float("inf"), last))

    def _add_turn(self, key: str, call: _Call, parents: list[tuple[str, float]]) -> None:
        row = call.row
        delay_s = call.start_s - max((end_s for _, end_s in parents), default=call.start_s)
        if delay_s < -_CLOCK_S:
            self.builder.changes["overlapping_turn_delay_clamped_to_0"] += 1
        self.builder.turn(
            key,
            session=self.file.name,
            recorded_s=call.start_s,
            parents=[parent for parent, _ in parents],
            delay_s=max(0.0, delay_s),
            input_tokens=row.count("in"),
            output_tokens=row.count("out"),
            blocks=row.ids("hash_ids"),
            agent=call.agent,
            path=self.file,
            line=None,
        )

    def _lasted_s(self, call: _Call, following_s: float | None) -> float:
        """How long the answer took; where the file does not say, at the session's usual pace."""
        if call.lasted_s is not None:
            return call.lasted_s
        self.builder.changes["api_time_estimated"] += 1
        estimate_s = self.token_s * call.row.count("out")
        return estimate_s if following_s is None else min(estimate_s, following_s - call.start_s)


def _all_calls(thread: _Thread) -> Iterator[_Call]:
    yield from thread.calls
    for branch in thread.branches:
        yield from _all_calls(branch)


def _thread(owner: Row, start_s: float, agent: str, back_s: float | None) -> _Thread:
    """The requests of a session or a sub-agent that began at `start_s`."""
    requests = owner.get("requests")
    if not isinstance(requests, list) or not requests:
        raise owner.error("requests", "no list of requests", "give at least one")
    thread = _Thread([], [], back_s)
    for at, values in enumerate(requests):
        place = f"{owner.place}requests[{at}]."
        if not isinstance(values, dict):
            raise owner.error(f"requests[{at}]", "no object", "give one {...} a request")
        row = Row(values, owner.path, None, place)
        if "hash_runs" in values:
            raise row.error("hash_runs", "packed block ids", "unpack it into its published form")
        at_s = start_s + row.seconds("t")
        match row.get("type"):
            case "n" | "s":
                thread.calls.append(_Call(row, at_s, _optional_s(row, "api_time"), agent))
            case "subagent":
                thread.branches.append(_branch(row, at_s))
            case other:
                do = "this reader knows 'n', 's' and 'subagent'"
                raise row.error("type", f"{other!r} is an unknown type of request", do)
    if not thread.calls:
        raise owner.error("requests", "only sub-agents, and nothing that calls them", "add it")
    return thread


def _branch(row: Row, at_s: float) -> _Thread:
    agent = str(row.values.get("subagent_type") or "subagent")
    lasted_s = _optional_s(row, "duration_ms", 1e-3)
    if lasted_s is None:
        return _thread(row, at_s, agent, None)
    return _thread(row, max(0.0, at_s - lasted_s), agent, at_s)


def _optional_s(row: Row, field: str, unit_s: float = 1.0) -> float | None:
    return None if row.values.get(field) is None else row.seconds(field, unit_s)
