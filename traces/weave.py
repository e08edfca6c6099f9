"""Turns in, session by session; the rows of a trace out, in the order of `recorded_s`.

What a generator needs beside its draws: blocks get their numbers here, so that a prompt that goes
on where another stood shares its front, and rows are sorted as far as nothing earlier can come.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from math import inf

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harness.trace import SCHEMA, build_table, list_column
from traces.rows import Ints, changed

Path = list[tuple[int, int]]
"""A prompt's blocks, as runs: (first id, length)."""

_TURN = pa.field("turn", pa.int64(), nullable=False)
_WAITING = pa.schema([*SCHEMA, _TURN])


class Weaver:
    """Holds the turns that are not yet given out: a few hundred bytes each."""

    def __init__(self) -> None:
        self._next_block = 0
        self._turns = 0
        self._rows = 0
        self._waiting: pa.Table = _WAITING.empty_table()
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

        `gate_s` is the delay where there are parents, else the arrival. Parents come first, and
        were not recorded later.
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
        table = pa.concat_tables([self._waiting, self._added()]).combine_chunks()
        self._clear()
        recorded = table.column("recorded_s").to_numpy()
        order = np.argsort(recorded, kind="stable")
        taken = int(np.searchsorted(recorded[order], before_s))
        table = table.take(order)
        turns = table.column("turn").to_numpy()[:taken]
        table = _with_rows(table, turns, self._rows)
        self._rows += taken
        self._waiting = table.slice(taken)
        done = table.slice(0, taken).drop_columns(["turn"])
        return changed(done, {"parents": _parents(done, ~_flat(done))})

    def _added(self) -> pa.Table:
        """What was added since the last time, in `_WAITING`'s columns."""
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
        numbers = pa.array(np.arange(self._turns - turns, self._turns), pa.int64())
        return table.append_column(_TURN, numbers)


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


def _flat(table: pa.Table) -> Ints:
    """All parents in a row."""
    parents: Ints = pc.list_flatten(table.column("parents")).to_numpy()
    return parents


def _parents(table: pa.Table, flat: Ints) -> pa.ListArray:
    """The column of parents, others in place of each."""
    counts = pc.list_value_length(table.column("parents")).to_numpy()
    return list_column("parents", counts, flat)


def _with_rows(table: pa.Table, turns: Ints, first_row: int) -> pa.Table:
    """Where a parent is among `turns`, which stand in rows from `first_row` on: ~row, below 0."""
    parents = _flat(table).copy()
    order = np.argsort(turns)
    if len(order):
        at = np.searchsorted(turns, parents, sorter=order).clip(max=len(order) - 1)
        rows = order[at]
        known = (parents >= 0) & (turns[rows] == parents)
        parents[known] = ~(first_row + rows[known])
    return changed(table, {"parents": _parents(table, parents)})
