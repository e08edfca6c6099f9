"""Turns in, session by session; the rows of a trace out, in the order of `recorded_s`.

What a generator needs beside its draws: blocks get their numbers here, so that a prompt that goes
on where another stood shares its front, and rows are sorted as far as nothing earlier can come.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harness.trace import SCHEMA, build_table, list_column
from traces.rows import Ints, changed
from traces.spread import Floats

Path = list[tuple[int, int]]
"""A prompt's blocks, as runs: (first id, length)."""


@dataclass
class _Batch:
    """The turns added between two takings, in the order of `recorded_s`."""

    table: pa.Table
    recorded_s: Floats
    turn: Ints
    """Which of the batch's turns each row is, counted as they were added."""
    first_turn: int
    row: Ints
    """The row among all ever taken that each of its turns has; of those that have one."""
    taken: int = 0
    """So many of the table's rows."""

    def ready(self, before_s: float) -> slice:
        """The rows, not yet taken, that were recorded before."""
        return slice(self.taken, int(np.searchsorted(self.recorded_s, before_s)))

    def take(self, part: slice, rows: Ints) -> pa.Table:
        """These, which come to stand in `rows`; their parents are rows too."""
        self.row[self.turn[part]] = rows
        table = self.table.slice(part.start, len(rows))
        parents = table.column("parents")
        flat = self.row[pc.list_flatten(parents).to_numpy() - self.first_turn]
        counts = pc.list_value_length(parents).to_numpy()
        self._let_go(part.stop)
        return changed(table, {"parents": list_column("parents", counts, flat)})

    def _let_go(self, taken: int) -> None:
        """Of the rows that were taken, once they are as many as those left."""
        self.taken = taken
        if 2 * taken >= len(self.table):
            self.table = self.table.take(np.arange(taken, len(self.table)))
            self.recorded_s, self.turn = self.recorded_s[taken:].copy(), self.turn[taken:].copy()
            self.taken = 0


class Weaver:
    """Holds the turns that are not yet given out: a few hundred bytes each."""

    def __init__(self) -> None:
        self._next_block = 0
        self._turns = 0
        self._rows = 0
        self._batches: list[_Batch] = []
        self._clear()

    def _clear(self) -> None:
        self._session = array("i")
        self._turn_index = array("i")
        self._recorded_s = array("d")
        self._gate_s = array("d")
        self._inputs = array("i")
        self._outputs = array("i")
        self._agents: list[str] = []
        self._parents = array("q")
        self._parents_end = array("q", [0])
        self._starts = array("q")
        self._lengths = array("i")
        self._runs_end = array("q", [0])

    def lay(self, path: Path, blocks: int) -> None:
        """So many new blocks at the end of `path`, which is changed."""
        if blocks <= 0:
            return
        if path and sum(path[-1]) == self._next_block:
            path[-1] = (path[-1][0], path[-1][1] + blocks)
        else:
            path.append((self._next_block, blocks))
        self._next_block += blocks

    def relay(self, path: Path, keep: int, blocks: int) -> Path:
        """The prompt of so many blocks that begins as `path` does, for `keep` blocks."""
        path = cut(path, keep)
        self.lay(path, blocks - keep)
        return path

    def add(
        self,
        session: int,
        turn_index: int,
        recorded_s: float,
        gate_s: float,
        parents: Iterable[int],
        input_tokens: int,
        output_tokens: int,
        path: Path,
        agent: str = "main",
    ) -> int:
        """A turn, and its number among all that were added, by which others name it a parent.

        `gate_s` is the delay where there are parents, else the arrival. Parents come first, since
        rows were last taken, and were not recorded later.
        """
        self._session.append(session)
        self._turn_index.append(turn_index)
        self._recorded_s.append(recorded_s)
        self._gate_s.append(gate_s)
        self._inputs.append(input_tokens)
        self._outputs.append(output_tokens)
        self._agents.append(agent)
        self._parents.extend(parents)
        self._parents_end.append(len(self._parents))
        for start, length in path:
            self._starts.append(start)
            self._lengths.append(length)
        self._runs_end.append(len(self._starts))
        self._turns += 1
        return self._turns - 1

    def take(self, before_s: float = inf) -> pa.Table:
        """The rows that were recorded before, in order, and not taken yet: of `SCHEMA`.

        Nothing that is added later may be recorded before that. Their parents are rows of all that
        was ever taken.
        """
        if self._session:
            self._batches.append(self._added())
            self._clear()
        ready = [(each, each.ready(before_s)) for each in self._batches]
        recorded_s = [each.recorded_s[part] for each, part in ready]
        order = np.argsort(np.concatenate([np.empty(0), *recorded_s]), kind="stable")
        rows = np.empty(len(order), np.int64)
        rows[order] = np.arange(self._rows, self._rows + len(order))
        self._rows += len(order)
        tables = [SCHEMA.empty_table()]
        for batch, part in ready:
            mine, rows = np.split(rows, [part.stop - part.start])
            tables.append(batch.take(part, mine))
        self._batches = [each for each in self._batches if len(each.table)]
        return pa.concat_tables(tables).take(order).combine_chunks()

    def _added(self) -> _Batch:
        """What was added since the last time."""
        gate_s = np.array(self._gate_s)
        later = np.diff(np.array(self._parents_end)) > 0
        turns = len(self._session)
        table = build_table(
            {
                "session": np.array(self._session, np.int32),
                "turn_index": np.array(self._turn_index, np.int32),
                "parents": list_column(
                    "parents", np.diff(self._parents_end), np.array(self._parents)
                ),
                "recorded_s": np.array(self._recorded_s),
                "arrival_s": pa.array(gate_s, mask=later),
                "delay_s": pa.array(gate_s, mask=~later),
                "input_tokens": np.array(self._inputs, np.int32),
                "output_tokens": np.array(self._outputs, np.int32),
                "run_starts": list_column(
                    "run_starts", np.diff(self._runs_end), np.array(self._starts)
                ),
                "run_lengths": list_column(
                    "run_lengths", np.diff(self._runs_end), np.array(self._lengths)
                ),
                "agent": self._agents,
            }
        )
        recorded_s = np.array(self._recorded_s)
        order = np.argsort(recorded_s, kind="stable")
        first, rows = self._turns - turns, np.full(turns, -1)
        return _Batch(table.take(order), recorded_s[order], order, first, rows)


def size(path: Path) -> int:
    """How many blocks a prompt has."""
    return sum(length for _, length in path)


def cut(path: Path, blocks: int) -> Path:
    """The front of a prompt, at most `blocks` long."""
    front: Path = []
    for start, length in path:
        if blocks <= 0:
            break
        front.append((start, min(length, blocks)))
        blocks -= length
    return front
