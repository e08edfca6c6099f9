"""A trace: what a population of agents asked, in columns, in one form whatever file it came from.

One row a turn, ordered by `recorded_s` (ties keep the source's order). The rules, each checked by
`Trace` and so true of every trace the rest of the project sees:

- a turn without parents has `arrival_s`; one with parents has `delay_s`, counted from the end of
  the last of them. Never both: there is one gate a turn.
- parents are rows of the same session, without a cycle. Within a session `turn_index` is unique.
- `input_tokens` is the whole prompt (a format of deltas is lowered by its reader), 1 or more;
  `output_tokens` is 1 or more.
- `runs` are the prompt's blocks as (first id, length). Ids count from 0, and an id stands for the
  block and all before it: every run starts a *chain* (see `harness.prefix`).
- `recorded_s` is when the source says the turn began. It orders the trace and gates nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.errors import TraceError
from harness.prefix import PrefixCache, Runs

SCHEMA = pa.schema(
    [
        pa.field("session", pa.int32(), nullable=False),
        pa.field("turn_index", pa.int32(), nullable=False),
        pa.field("parents", pa.list_(pa.field("item", pa.int64(), nullable=False)), nullable=False),
        pa.field("recorded_s", pa.float64(), nullable=False),
        pa.field("arrival_s", pa.float64()),
        pa.field("delay_s", pa.float64()),
        pa.field("input_tokens", pa.int32(), nullable=False),
        pa.field("output_tokens", pa.int32(), nullable=False),
        pa.field(
            "run_starts", pa.list_(pa.field("item", pa.int64(), nullable=False)), nullable=False
        ),
        pa.field(
            "run_lengths", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False
        ),
        pa.field("agent", pa.string(), nullable=False),
    ]
)

MAX_TOKENS = 2**31 - 1
"""The largest count of tokens a turn may have: the columns are 32 bits wide."""

MAX_BLOCK = 2**62
"""The largest block id: with the length of a run it is still within 64 bits."""

Tokens = TypeVar("Tokens", int, NDArray[np.int64])


@dataclass(frozen=True)
class Source:
    """A file a trace was read from: its name (no folder) and the SHA-256 of its bytes."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Header:
    """What must be known to read the numbers right, and what was done to them on the way in."""

    format: str
    """The reader that made it: `mooncake`, `kv_cache_tester`, `agentic`."""
    block_tokens: int
    partial_block: Literal["floor", "ceil"]
    """Whether the tokens after the last whole block have an id (`ceil`) or not (`floor`)."""
    id_scope: Literal["file", "global"]
    """How far the source's block ids reach: ids of two files never meet where it is `file`."""
    time_unit: str
    """The source's unit of time. Inside the trace it is seconds."""
    licence: str
    session_starts: Literal["recorded", "unknown"] = "recorded"
    """`unknown`: the source does not say when one session began relative to another."""
    prefix_data: Literal["recorded", "generated", "absent"] = "recorded"
    """`generated`: what prompts share was drawn, as the whole trace may be. `absent`: nobody knows
    what they share, so they share nothing, and no claim about hit rates can rest on them."""
    sources: tuple[Source, ...] = ()
    changes: Mapping[str, int] = field(default_factory=dict)
    """What was dropped, clamped or estimated, by name, with how many turns it touched; where the
    name begins with `hit_tokens`, how many tokens."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """What a generator or a transform was given; JSON-able."""

    def blocks(self, tokens: Tokens) -> Tokens:
        """How many blocks, at most, a prompt of so many tokens has ids for; of many, in 64 bits."""
        rounded_up = self.block_tokens - 1 if self.partial_block == "ceil" else 0
        return (tokens + rounded_up) // self.block_tokens

    def to_json(self) -> str:
        """One line, keys sorted."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The header that `to_json` wrote."""
        values = json.loads(text)
        values["sources"] = tuple(Source(**source) for source in values["sources"])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Turn:
    """One row, for people and tests; the replay reads columns."""

    row: int
    session: int
    turn_index: int
    parents: tuple[int, ...]
    recorded_s: float
    arrival_s: float | None
    delay_s: float | None
    input_tokens: int
    output_tokens: int
    runs: Runs
    agent: str


@dataclass(frozen=True, slots=True)
class Session:
    """The turns of one agent task, in turn order."""

    session: int
    turns: tuple[Turn, ...]


class Trace:
    """Columns of `SCHEMA` and a `Header`. Raises `TraceError` unless every rule above holds."""

    def __init__(self, table: pa.Table, header: Header) -> None:
        self.header = header
        if not table.schema.equals(SCHEMA):
            raise self._error(
                f"columns are {table.schema.names}",
                f"make them {SCHEMA.names}, of the types in SCHEMA",
            )
        self.table: pa.Table = table.combine_chunks()
        self._check()

    def __len__(self) -> int:
        return int(self.table.num_rows)

    # ---- columns, as numpy arrays of shape (turns,) unless said otherwise

    def column(self, name: str) -> NDArray[Any]:
        """A plain column as a numpy array; nulls become NaN."""
        values: NDArray[Any] = self._flat(name).to_numpy(zero_copy_only=False)
        return values

    @cached_property
    def input_tokens(self) -> NDArray[np.int32]:
        """Whole prompts, in tokens."""
        return self.column("input_tokens")

    @cached_property
    def output_tokens(self) -> NDArray[np.int32]:
        """Answers wanted, in tokens."""
        return self.column("output_tokens")

    @cached_property
    def session(self) -> NDArray[np.int32]:
        """Which session each turn belongs to."""
        return self.column("session")

    @cached_property
    def sessions(self) -> int:
        """How many sessions: they are numbered from 0."""
        return int(self.session.max()) + 1 if len(self) else 0

    def runs(self, row: int) -> list[tuple[int, int]]:
        """The prompt's blocks: (first id, length) for each stretch of consecutive ids."""
        offsets, starts, lengths = self._run_columns
        low, high = offsets[row], offsets[row + 1]
        return list(zip(starts[low:high].tolist(), lengths[low:high].tolist(), strict=True))

    def parents(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(offsets of shape (turns + 1,), rows): turn i waits for rows[offsets[i]:offsets[i+1]]."""
        return self._lists("parents")

    @cached_property
    def blocks(self) -> int:
        """Block ids are below this; how many there are, where no number is left out."""
        _, starts, lengths = self._run_columns
        return int((starts + lengths).max()) if len(starts) else 0

    @cached_property
    def ideal_hit_tokens(self) -> NDArray[np.int32]:
        """Input tokens that an infinite cache would have held, each turn, in the trace's order.

        Prompts only: what the model generated counts as cached once a later prompt has carried it.
        """
        cache = PrefixCache()
        block_tokens = self.header.block_tokens
        hits = np.empty(len(self), np.int64)
        for row in range(len(self)):
            runs = self.runs(row)
            hits[row] = cache.match(runs)
            cache.insert(runs)
        return np.minimum(hits * block_tokens, self.input_tokens).astype(np.int32)

    @cached_property
    def ideal_hit_rates(self) -> NDArray[np.float64]:
        """Ideal hits over input tokens, each turn: 0 to 1."""
        rates: NDArray[np.float64] = self.ideal_hit_tokens / self.input_tokens
        return rates

    @property
    def ideal_hit_token_weighted(self) -> float:
        """Ideal hits of all turns over input tokens of all turns."""
        hits, inputs = self.ideal_hit_tokens, self.input_tokens
        return float(hits.sum(dtype=np.int64) / inputs.sum(dtype=np.int64))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the columns and the block rules: two traces that replay alike share it."""
        header = self.header
        hasher = hashlib.sha256(
            f"{header.block_tokens} {header.partial_block} {header.session_starts}".encode()
        )
        for column in SCHEMA:
            if pa.types.is_list(column.type):
                for part in self._lists(column.name):
                    hasher.update(part.tobytes())
            elif pa.types.is_string(column.type):
                hasher.update("\0".join(self._flat(column.name).to_pylist()).encode())
            else:
                hasher.update(self.column(column.name).tobytes())
        return hasher.hexdigest()

    # ---- rows, for people and tests

    def turn(self, row: int) -> Turn:
        """One row, whole."""
        values = self.table.slice(row, 1).to_pylist()[0]
        values["parents"] = tuple(values["parents"])
        del values["run_starts"], values["run_lengths"]
        return Turn(row=row, runs=self.runs(row), **values)

    def by_session(self) -> Iterator[Session]:
        """Sessions in their order, each with its turns in turn order."""
        order = np.lexsort((self.column("turn_index"), self.session))
        bounds = np.flatnonzero(np.diff(self.session[order], prepend=-1, append=-1))
        for low, high in itertools.pairwise(bounds):
            rows = order[low:high]
            yield Session(int(self.session[rows[0]]), tuple(self.turn(int(row)) for row in rows))

    # ---- checks

    def _flat(self, name: str) -> pa.Array:
        chunks = self.table.column(name).chunks
        return chunks[0] if chunks else pa.array([], SCHEMA.field(name).type)

    def _lists(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        array = self._flat(name)
        if not len(array):
            return np.zeros(1, np.int64), np.empty(0, np.int64)
        offsets = array.offsets.to_numpy().astype(np.int64)
        return offsets - offsets[0], array.flatten().to_numpy().astype(np.int64)

    @cached_property
    def _run_columns(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        offsets, starts = self._lists("run_starts")
        return offsets, starts, self._lists("run_lengths")[1]

    def _error(
        self, problem: str, do: str, *, row: int | None = None, column: str | None = None
    ) -> TraceError:
        sources = self.header.sources
        names = sources[0].name if sources else ""
        if len(sources) > 1:
            names += f" and {len(sources) - 1} more"
        where = "" if row is None else f"turn {row} (session {self.session[row]}): "
        return TraceError(where + problem, do=do, path=names or self.header.format, field=column)

    def _require(self, good: NDArray[np.bool_], column: str, problem: str, do: str) -> None:
        """Raise for the first row where `good` is false."""
        if not good.all():
            row = int(np.argmin(good))
            raise self._error(problem, do, row=row, column=column)

    def _check(self) -> None:
        if not len(self):
            raise self._error(
                "no turns",
                "check that the source holds requests, and what its header says was dropped",
            )
        for name in SCHEMA.names:
            if not SCHEMA.field(name).nullable and self.table.column(name).null_count:
                raise self._error("a null", "give every turn a value", column=name)
        self._check_numbers()
        self._check_sessions()
        self._check_gates()
        self._check_runs()

    def _check_numbers(self) -> None:
        block = self.header.block_tokens
        if not 1 <= block <= MAX_TOKENS:
            raise self._error(
                f"blocks of {block} tokens", f"give the source's block size, 1 to {MAX_TOKENS}"
            )
        for name in ("input_tokens", "output_tokens"):
            self._require(
                self.column(name) >= 1,
                name,
                "fewer than 1 token",
                "drop such turns under a name in the header",
            )
        recorded = self.column("recorded_s")
        self._require(
            np.isfinite(recorded),
            "recorded_s",
            "not a finite time",
            "give seconds from the trace's zero",
        )
        self._require(
            np.diff(recorded, prepend=recorded[0]) >= 0,
            "recorded_s",
            "earlier than the row before it",
            "sort the rows by recorded_s",
        )

    def _check_sessions(self) -> None:
        session, index = self.session, self.column("turn_index")
        self._require(session >= 0, "session", "a negative session", "number sessions from 0")
        present = np.zeros(min(self.sessions, len(self) + 1), bool)
        present[session[session < len(present)]] = True
        if not present.all():
            raise self._error(
                f"session {int(np.argmin(present))} has no turns",
                "number sessions densely from 0",
                column="session",
            )
        order = np.lexsort((index, session))
        same = (np.diff(session[order]) == 0) & (np.diff(index[order]) == 0)
        if same.any():
            row = int(order[int(np.argmax(same)) + 1])
            raise self._error(
                f"index {index[row]} twice",
                "number a session's turns uniquely",
                row=row,
                column="turn_index",
            )

    def _check_gates(self) -> None:
        offsets, rows = self.parents()
        counts = np.diff(offsets)
        arrival, delay = self.column("arrival_s"), self.column("delay_s")
        for name, values in (("arrival_s", arrival), ("delay_s", delay)):
            self._require(
                ~(np.isinf(values) | (values < 0)),
                name,
                "negative or infinite",
                "give seconds, 0 or more",
            )
        self._require(
            ~np.isnan(arrival) | ~np.isnan(delay),
            "arrival_s",
            "neither arrival_s nor delay_s",
            "give one of them",
        )
        self._require(
            np.isnan(arrival) | np.isnan(delay),
            "arrival_s",
            "both arrival_s and delay_s",
            "give one of them: a turn has one gate",
        )
        self._require(
            (counts == 0) == np.isnan(delay),
            "delay_s",
            "a delay and no parents, or parents and no delay",
            "give a turn with parents a delay_s, one without an arrival_s",
        )
        child = np.repeat(np.arange(len(self)), counts)
        inside = (rows >= 0) & (rows < len(self))
        self._require_parent(
            inside,
            child,
            "an orphan: its parent is not in the trace",
            "add the parent, or drop the turn",
        )
        self._require_parent(
            self.session[rows] == self.session[child],
            child,
            "its parent is of another session",
            "give both one session",
        )
        if (rows >= child).any():
            self._check_acyclic(offsets, rows)

    def _require_parent(
        self, good: NDArray[np.bool_], child: NDArray[np.int64], problem: str, do: str
    ) -> None:
        if not good.all():
            raise self._error(problem, do, row=int(child[int(np.argmin(good))]), column="parents")

    def _check_acyclic(self, offsets: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Peel off turns whose parents are all peeled; what is left stands on a cycle."""
        waits = np.diff(offsets)
        child = np.repeat(np.arange(len(self)), waits)
        by_parent = np.argsort(rows, kind="stable")
        first = np.searchsorted(rows[by_parent], np.arange(len(self) + 1))
        ready = np.flatnonzero(waits == 0).tolist()
        waits = waits.copy()
        done = 0
        while ready:
            row = ready.pop()
            done += 1
            for other in child[by_parent[first[row] : first[row + 1]]]:
                waits[other] -= 1
                if waits[other] == 0:
                    ready.append(int(other))
        if done < len(self):
            raise self._error(
                "waits for itself through its parents",
                "break the cycle",
                row=int(np.argmax(waits > 0)),
                column="parents",
            )

    def _check_runs(self) -> None:
        offsets, starts, lengths = self._run_columns
        lists = self._lists("run_lengths")[0]
        if not np.array_equal(offsets, lists):
            raise self._error(
                "run_starts and run_lengths differ in length",
                "give each run both",
                column="run_lengths",
            )
        turn = np.repeat(np.arange(len(self)), np.diff(offsets))
        if starts.max(initial=0) > MAX_BLOCK:
            raise self._error(
                f"{starts.max()} is above what is possible",
                f"give ids up to {MAX_BLOCK}",
                column="run_starts",
            )
        good = (lengths >= 1) & (starts >= 0)
        if not good.all():
            raise self._error(
                "an empty run or a negative id",
                "give ids 0 or more, runs of 1 or more",
                row=int(turn[int(np.argmin(good))]),
                column="run_starts",
            )
        totals = np.zeros(len(self), np.int64)
        np.add.at(totals, turn, lengths)
        header = self.header
        room = header.blocks(self.input_tokens.astype(np.int64))
        self._require(
            totals <= room,
            "run_lengths",
            "more blocks than the input can hold",
            f"check the block size ({header.block_tokens} tokens, {header.partial_block})",
        )
        self._check_chains(offsets, starts, lengths, turn)

    def _check_chains(
        self,
        offsets: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        turn: NDArray[np.int64],
    ) -> None:
        """Each id must always follow the same id, and each run start where its chain starts."""
        before = np.full(len(starts), -1, np.int64)
        before[1:] = starts[:-1] + lengths[:-1] - 1
        before[offsets[:-1][np.diff(offsets) > 0]] = -1
        order = np.lexsort((before, starts))
        same_start = np.diff(starts[order]) == 0
        clash = same_start & (np.diff(before[order]) != 0)
        if clash.any():
            at = order[int(np.argmax(clash)) + 1]
            raise self._error(
                f"block {starts[at]} follows two different blocks",
                "let an id stand for the block and all before it",
                row=int(turn[at]),
                column="run_starts",
            )
        unique, last = np.unique(starts[order], return_index=True)
        reach = np.maximum.reduceat((starts + lengths)[order], last) if len(last) else last
        overlap = unique[1:] < reach[:-1]
        inside = np.isin(starts, unique[1:][overlap]) | ((before == starts - 1) & (before >= 0))
        if inside.any():
            at = int(np.argmax(inside))
            raise self._error(
                f"a run starts at block {starts[at]}, inside a chain",
                "join runs of consecutive ids",
                row=int(turn[at]),
                column="run_starts",
            )


def build_table(columns: Mapping[str, Any]) -> pa.Table:
    """A table of `SCHEMA` from one sequence, numpy or Arrow array a column."""
    arrays = [
        column.cast(field.type)
        if isinstance(column := columns[field.name], pa.Array)
        else pa.array(column, field.type)
        for field in SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def list_column(name: str, lengths: Any, values: Any) -> pa.ListArray:
    """A list column of `SCHEMA`: the length of each list, (rows,), and all values in a row."""
    kind = SCHEMA.field(name).type
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(offsets, pa.array(values, kind.value_type), type=kind)


def file_digest(path: Path) -> Source:
    """The `Source` of a file: its name and the SHA-256 of its bytes."""
    with path.open("rb") as stream:
        return Source(path.name, hashlib.file_digest(stream, "sha256").hexdigest())
