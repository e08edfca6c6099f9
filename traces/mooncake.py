"""Mooncake's trace: JSONL, one request a line, times in milliseconds.

Format: https://github.com/kvcache-ai/Mooncake, FAST25-release. Rows stand for themselves: the
source does not say which of them belong to one conversation, so each is a session of one turn.

Two dialects add `session_id` and `delay` (or `delay_ms`), and do not agree. In Dynamo's `mooncake`
a row is still a whole prompt. In AIPerf's `mooncake_trace` and Dynamo's `mooncake-delta` it is what
the turn adds to the prompt and the answer before it, which no file says of itself: `turns` must.
Both wait `delay` ms after the answer before. Without it Dynamo waits, after that answer, for as
long as lies between the two timestamps, and so do we: too long by what the answer took, which no
row tells. `request_id` may stand in a row of either, and is not used.

Blocks of a prompt that a session added to: what lies wholly inside the first prompt keeps the
file's ids. After the first answer nothing stands at a multiple of a block any more, and answers
have no ids; so from there on a block is its session's own, known by its place in it. A last block
that is partly filled is known by how far, too: once the next turn fills it up, it is another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harness import settings
from harness.errors import ConfigError
from harness.interner import BlockIds, Stretches
from harness.trace import MAX_TOKENS, Header, Trace
from traces.builder import TraceBuilder
from traces.columns import NotPlain, plain_rows, trace_of_columns
from traces.events import MAX_PROMPT
from traces.faults import sound, spared
from traces.source import MAX_TIME_S, Row, json_rows, locate_file, microseconds

FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")

Turns = Literal["whole", "added"]

_START_UNKNOWN = "session_start_unknown_taken_as_0"
_DELAYS = ("delay", "delay_ms")
_SESSION_FIELDS = ("session_id", *_DELAYS, "request_id")
_PLAIN = pa.schema(
    [
        pa.field("timestamp", pa.float64()),
        pa.field("input_length", pa.int64()),
        pa.field("output_length", pa.int64()),
        pa.field("hash_ids", pa.list_(pa.uint64())),
    ]
)


def read(path: Path | str, block_tokens: int = 512, turns: Turns | None = None) -> Trace:
    """Read a Mooncake file: arrivals as recorded, block ids valid across the file.

    `block_tokens` is the tokens a hash id stands for; the last block of a prompt may be partly
    filled. `turns` says what a row with a `session_id` is: `whole`, a prompt from its first token,
    or `added`, what the turn adds to the prompt and the answer before it; files without sessions
    need none. Where the file does not say when a session begins, it is at 0 and the header has
    `session_starts: unknown`. Raises `TraceError`, also for sessions where `turns` is not given,
    and `ConfigError` for blocks of less than a token or other `turns`.
    """
    settings.whole("trace.block_tokens", block_tokens, least=1, most=MAX_TOKENS)
    if turns not in (None, "whole", "added"):
        raise ConfigError(f"trace.turns is {turns}: give whole, added or null")
    path = locate_file(path)
    header = Header(
        format="mooncake",
        block_tokens=block_tokens,
        partial_block="ceil",
        id_scope="global",
        time_unit="ms",
        licence="Apache-2.0",
    )
    try:
        return _read_columns(path, header)
    except NotPlain:
        return _read_rows(path, header, turns)


def _read_columns(path: Path, header: Header) -> Trace:
    """The trace of a file that has no sessions, and nothing that a row reader would tell."""
    times_ms, inputs, outputs, blocks = [], [], [], []
    for rows in plain_rows(path, _PLAIN):
        times_ms.append(rows["timestamp"].to_numpy())
        inputs.append(rows["input_length"].to_numpy())
        outputs.append(rows["output_length"].to_numpy())
        lengths = pc.list_value_length(rows["hash_ids"]).to_numpy().astype(np.int64)
        blocks.append(Stretches.of(pc.list_flatten(rows["hash_ids"]).to_numpy(), lengths))
    if not times_ms:
        raise NotPlain
    recorded_ms, input_tokens, output_tokens = map(np.concatenate, (times_ms, inputs, outputs))
    if (
        np.signbit(recorded_ms).any()  # -0.0 is a time, but not the same one
        or not (recorded_ms <= MAX_TIME_S * 1000).all()
        or min(input_tokens.min(), output_tokens.min()) < 0
        or max(input_tokens.max(), output_tokens.max()) > MAX_TOKENS
    ):
        raise NotPlain
    return trace_of_columns(
        header,
        path,
        recorded_s=recorded_ms / 1000,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        blocks=Stretches.joined(blocks),
    )


def _read_rows(path: Path, header: Header, turns: Turns | None) -> Trace:
    """The trace of any file, row by row."""
    builder = TraceBuilder(header, ids_field="hash_ids")
    builder.file(path)
    sessions = _Sessions(builder, turns, header.block_tokens)
    for row in json_rows(path, builder.count):
        with spared():
            if row.values.get("session_id") is None:
                _add_alone(builder, row, turns)
            else:
                sessions.add(row)
    trace = builder.build()
    if sessions.start_unknown:
        trace = Trace(trace.table, replace(trace.header, session_starts="unknown"))
    return trace


def _add_alone(builder: TraceBuilder, row: Row, turns: Turns | None) -> None:
    """Add a request that is a session of its own."""
    row.expect(FIELDS, _SESSION_FIELDS)
    _check_name(row)
    if _delay_s(row):  # 0 says nothing
        raise row.error(
            "a delay, and no session in which it could follow an answer",
            "give a session_id, or no delay",
            _delay_field(row),
        )
    arrival_s = row.time_s("timestamp", "ms")
    ids = row.block_ids("hash_ids")
    builder.add(
        row.line,
        session=row.line,
        recorded_s=arrival_s,
        arrival_s=arrival_s,
        input_tokens=row.tokens("input_length"),
        output_tokens=row.tokens("output_length"),
        block_ids=_named(ids) if turns == "added" else ids,
        line=row.line,
    )


@dataclass(slots=True)
class _Session:
    """A session up to its last turn so far."""

    line: int | None
    recorded_s: float
    shared: list[str]
    """Ids of the blocks wholly inside the first prompt, where turns are added."""
    tokens: int
    """The last prompt and its answer."""


class _Sessions:
    """Rows with a session_id, added to `builder` each behind the one before it."""

    def __init__(self, builder: TraceBuilder, turns: Turns | None, block_tokens: int) -> None:
        self._builder = builder
        self._turns = turns
        self._block_tokens = block_tokens
        self._sessions: dict[str, _Session] = {}
        self.start_unknown = False
        """Whether a session had no time to begin at."""

    def add(self, row: Row) -> None:
        """Add a row. Nothing of it is kept where it is at fault."""
        row.expect(FIELDS[1:], (FIELDS[0], *_SESSION_FIELDS))
        if self._turns is None:
            raise row.error(
                "a session, of which no row says whether it is a whole prompt or only what a turn "
                "adds to it",
                "set trace.turns=added for rows made for AIPerf or Dynamo's mooncake-delta "
                "(input_length and hash_ids are what the turn adds to the prompt and the answer "
                "before it), or trace.turns=whole for Dynamo's mooncake (they are the whole "
                "prompt's)",
                "session_id",
            )
        _check_name(row)
        name = row.text("session_id")
        before = self._sessions.get(name)
        recorded_s, delay_s, changes = _gate(row, before)
        tokens, output = row.tokens("input_length"), row.tokens("output_length")
        ids: BlockIds = row.block_ids("hash_ids")
        shared: list[str] = []
        if self._turns == "added":
            if before is not None and before.tokens:
                self._check_added(row, tokens, len(ids))
                tokens, shared = before.tokens + tokens, before.shared
                ids = self._grown(row, name, tokens, shared)
                changes.append("added_made_whole")
            else:
                ids = _named(ids)
                shared = ids[: tokens // self._block_tokens]
        self._builder.add(
            row.line,
            session=("session", name),
            recorded_s=recorded_s,
            arrival_s=recorded_s if before is None else None,
            parents=[] if before is None else [before.line],
            delay_s=delay_s,
            input_tokens=tokens,
            output_tokens=output,
            block_ids=ids,
            line=row.line,
        )
        for change in changes:
            self._builder.count(change)
        self.start_unknown |= _START_UNKNOWN in changes
        self._sessions[name] = _Session(row.line, recorded_s, shared, tokens + output)

    def _check_added(self, row: Row, tokens: int, blocks: int) -> None:
        """The builder's check, of ids that it will not see."""
        room = -(-tokens // self._block_tokens)
        if blocks > room:
            raise row.error(
                f"{blocks} block ids, but {tokens} added tokens hold at most {room} blocks of "
                f"{self._block_tokens}",
                "check the input's length and the size of a block",
                "hash_ids",
            )

    def _grown(self, row: Row, name: str, tokens: int, shared: list[str]) -> list[str]:
        """Ids of a prompt of so many tokens that begins with the blocks `shared`."""
        if tokens > MAX_PROMPT:
            raise row.error(
                f"with all before it a prompt of {tokens} tokens, which no model takes",
                "check whether rows are whole prompts: trace.turns=whole",
                "input_length",
            )
        whole, rest = divmod(tokens, self._block_tokens)
        own = [f"{name!r} {at}" for at in range(len(shared), whole)]
        return [*shared, *own, *([f"{name!r} {whole} {rest}"] if rest else [])]


def _gate(row: Row, before: _Session | None) -> tuple[float, float | None, list[str]]:
    """When the turn began, its delay after the one before, and what was made up of it."""
    recorded_s = row.time_s_or_none("timestamp", "ms")
    delay_s = _delay_s(row)
    if before is None:
        # Where rows were at fault, this may not be the first one.
        if delay_s and sound():
            raise row.error(
                "a delay in the first row of a session, before any answer",
                "give the first row a timestamp only",
                _delay_field(row),
            )
        if recorded_s is None:
            return 0.0, None, [_START_UNKNOWN]
        return recorded_s, None, []
    changes = []
    if delay_s is None and recorded_s is None:
        delay_s = 0.0
        changes.append("delay_absent_taken_as_0")
    if recorded_s is None:
        recorded_s = microseconds(before.recorded_s + (delay_s or 0.0))
        changes.append("timestamp_estimated")
    gap_s = microseconds(recorded_s - before.recorded_s)
    if gap_s < 0:
        raise row.error(
            f"{1000 * gap_s:g} ms after line {before.line}, the row before of its session",
            "put the rows of a session in the order of time",
            "timestamp",
        )
    if delay_s is None:
        delay_s = gap_s
        changes.append("delay_from_timestamps")
    return recorded_s, delay_s, changes


def _delay_field(row: Row) -> str:
    return next((name for name in _DELAYS if row.values.get(name) is not None), _DELAYS[0])


def _delay_s(row: Row) -> float | None:
    if all(row.values.get(name) is not None for name in _DELAYS):
        raise row.error("given beside delay", "give one of the two: both are ms", "delay_ms")
    return row.time_s_or_none(_delay_field(row), "ms")


def _check_name(row: Row) -> None:
    if row.values.get("request_id") is not None:
        row.text("request_id")


def _named(ids: BlockIds) -> list[str]:
    """The file's ids beside those that `_grown` makes: 5 and "5" stay two ids."""
    return [repr(each) for each in ids]
