"""What every reader fills: turns in, a `Trace` out, with file and line in every complaint.

A reader names its files, adds each turn under a key of its own with its parents by their keys, and
hands over the prompt's block ids as the file has them. The builder numbers blocks, sessions and
turns, sorts them, drops and clamps what cannot be replayed (each under a name, counted in the
header) and finds what is wrong with the graph.
"""

from __future__ import annotations

import graphlib
from array import array
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.errors import TraceError
from harness.interner import BlockIds, Interner, Stretches
from harness.trace import SCHEMA, Header, Source, Trace, build_table, file_digest, list_column
from traces.faults import require_sound, spared

_CYCLES = 10
"""So many of a trace's cycles are told, where faults are gathered: each costs a look at it all."""


@dataclass(slots=True)
class _Turn:
    """A turn on its way in; parents are numbers of turns once `_link` has run."""

    key: Hashable
    session: Hashable
    parents: tuple[Hashable, ...]
    recorded_s: float
    arrival_s: float | None
    delay_s: float | None
    input_tokens: int
    output_tokens: int
    agent: str
    path: Path
    line: int | None
    within: str
    runs: int
    waits_for: list[int]

    def error(self, problem: str, do: str, field: str = "") -> TraceError:
        name = ".".join(part for part in (self.within, field) if part)
        return TraceError(problem, do=do, path=self.path, line=self.line, field=name or None)


class TraceBuilder:
    """Collects the turns of one trace.

    `header` says how to read the numbers; its sources and changes are filled in here. `ids_field`
    is what the format calls a prompt's block ids.
    """

    def __init__(self, header: Header, *, ids_field: str) -> None:
        self._header = header
        self._ids_field = ids_field
        self._sources: list[Source] = []
        self._changes: Counter[str] = Counter(header.changes)
        self._turns: list[_Turn] = []
        self._numbers: dict[Hashable, int] = {}
        self._interner = Interner()
        self._run_starts = array("q")
        self._run_lengths = array("i")
        self._path = Path()
        self._latest_s = 0.0

    def file(self, path: Path) -> None:
        """What is added from here on is from this file."""
        self._path = path
        self._latest_s = 0.0
        self._sources.append(file_digest(path))
        if self._header.id_scope == "file":
            self._interner.new_scope()

    def count(self, change: str, turns: int = 1) -> None:
        """Note in the header that this happened to so many turns."""
        self._changes[change] += turns

    def add(
        self,
        key: Hashable,
        *,
        session: Hashable,
        recorded_s: float,
        input_tokens: int,
        output_tokens: int,
        block_ids: BlockIds,
        parents: Iterable[Hashable] = (),
        arrival_s: float | None = None,
        delay_s: float | None = None,
        agent: str = "main",
        line: int | None = None,
        within: str = "",
    ) -> None:
        """Add one turn; its parents may come later.

        A turn without parents has `arrival_s`, one with parents `delay_s`. `line` and `within`
        (the field that holds it, in a nested format) say where it stands. No output becomes one
        token: the prompt reached the server and filled its cache, and without the turn the hits of
        those after it would be false. Raises `TraceError` for a key given twice, two gates or none,
        and more ids than `input_tokens` can hold; then nothing is added.
        """
        turn = _Turn(
            key,
            session,
            tuple(dict.fromkeys(parents)),
            recorded_s,
            arrival_s,
            delay_s,
            input_tokens,
            output_tokens,
            agent,
            self._path,
            line,
            within,
            0,
            [],
        )
        self._check(turn, len(block_ids))
        if output_tokens == 0:
            turn.output_tokens = 1
            self.count("zero_output_clamped_to_1")
        if len(set(block_ids)) < len(block_ids):
            self.count("repeated_block_id_told_apart")
        if recorded_s < self._latest_s:
            self.count("rows_out_of_order")
        self._latest_s = max(self._latest_s, recorded_s)
        starts, lengths = self._interner.runs(block_ids)
        turn.runs = len(starts)
        self._run_starts.extend(starts)
        self._run_lengths.extend(lengths)
        self._numbers[key] = len(self._turns)
        self._turns.append(turn)

    def _check(self, turn: _Turn, blocks: int) -> None:
        if turn.key in self._numbers:
            first = self._turns[self._numbers[turn.key]]
            where = f"{first.path.name}" + (f" line {first.line}" if first.line else "")
            raise turn.error(f"turn {turn.key!r} is here twice, first in {where}", "remove one")
        if turn.arrival_s is not None and (turn.parents or turn.delay_s is not None):
            raise turn.error(
                "two gates: a time of arrival, and parents or a delay",
                "give a turn with parents a delay only, one without a time of arrival only",
            )
        if turn.arrival_s is None and (not turn.parents or turn.delay_s is None):
            raise turn.error(
                "no gate: neither a time of arrival, nor parents and a delay",
                "give one of them",
            )
        header = self._header
        room = header.blocks(turn.input_tokens)
        if blocks > room:
            raise turn.error(
                f"{blocks} block ids, but {turn.input_tokens} input tokens hold at most {room} "
                f"blocks of {header.block_tokens} ({header.partial_block})",
                "check the input's length and the size of a block",
                self._ids_field,
            )

    def build(self) -> Trace:
        """The trace. Raises `TraceError` for an orphan, a cycle, or no turns at all."""
        require_sound(self._path)
        self._link()
        self._lift_empty(self._parents_first())
        kept = [number for number, turn in enumerate(self._turns) if turn.input_tokens]
        if len(kept) < len(self._turns):
            self.count("empty_input_dropped", len(self._turns) - len(kept))
        header = replace(
            self._header, sources=tuple(self._sources), changes=dict(sorted(self._changes.items()))
        )
        return Trace(self._table(kept), header)

    def _link(self) -> None:
        for turn in self._turns:
            for parent in turn.parents:
                with spared():
                    number = self._numbers.get(parent)
                    if number is None:
                        raise turn.error(
                            f"an orphan: its parent {parent!r} is not in the trace",
                            "add the parent, or drop the turn",
                        )
                    turn.waits_for.append(number)
        require_sound(self._path)

    def _parents_first(self) -> Iterable[int]:
        """Numbers of turns, each after its parents."""
        graph = {number: turn.waits_for for number, turn in enumerate(self._turns)}
        if all(parent < number for number, waits in graph.items() for parent in waits):
            return graph
        order: list[int] = []
        for _ in range(_CYCLES):
            with spared():
                try:
                    order = list(graphlib.TopologicalSorter(graph).static_order())
                    break
                except graphlib.CycleError as error:
                    numbers: list[int] = error.args[1][:-1]
                cycle = [self._turns[number] for number in numbers]
                graph |= {number: [] for number in numbers}
                keys = " after ".join(repr(turn.key) for turn in [*reversed(cycle), cycle[-1]])
                raise cycle[-1].error(f"waits for itself: {keys}", "break the cycle")
        require_sound(self._path)
        return order

    def _lift_empty(self, parents_first: Iterable[int]) -> None:
        """Put in place of each empty turn what it waited for."""
        for number in parents_first:
            turn = self._turns[number]
            empty = [each for each in turn.waits_for if not self._turns[each].input_tokens]
            if not empty:
                continue
            lifted = [self._turns[each] for each in empty]
            waits = [each for each in turn.waits_for if each not in empty]
            waits += [parent for each in lifted for parent in each.waits_for]
            turn.waits_for = list(dict.fromkeys(waits))
            delay_s = turn.delay_s or 0.0
            if turn.waits_for:
                turn.delay_s = delay_s + max(each.delay_s or 0.0 for each in lifted)
            else:
                turn.delay_s = None
                turn.arrival_s = delay_s + max(each.arrival_s or 0.0 for each in lifted)

    def _table(self, kept: list[int]) -> pa.Table:
        """Rows in the order of `recorded_s`; zero is the earliest turn, be it dropped."""
        turns = [self._turns[number] for number in kept]
        recorded = np.array([turn.recorded_s for turn in turns], np.float64)
        order = np.argsort(recorded, kind="stable")
        rows = np.empty(len(self._turns), np.int64)
        rows[np.array(kept, np.int64)[order]] = np.arange(len(kept))
        zero_s = min((turn.recorded_s for turn in self._turns), default=0.0)
        sessions = {each: at for at, each in enumerate(dict.fromkeys(t.session for t in turns))}
        waits = [turn.waits_for for turn in turns]
        parents = rows[np.array([parent for each in waits for parent in each], np.int64)]
        arrivals = [turn.arrival_s for turn in turns]
        runs = [turn.runs for turn in turns]
        table = build_table(
            {
                "session": [sessions[turn.session] for turn in turns],
                "turn_index": np.zeros(len(turns), np.int32),
                "parents": list_column("parents", [len(each) for each in waits], parents),
                "recorded_s": recorded - zero_s,
                "arrival_s": [None if each is None else each - zero_s for each in arrivals],
                "delay_s": [turn.delay_s for turn in turns],
                "input_tokens": [turn.input_tokens for turn in turns],
                "output_tokens": [turn.output_tokens for turn in turns],
                "run_starts": list_column("run_starts", runs, self._run_starts),
                "run_lengths": list_column("run_lengths", runs, self._run_lengths),
                "agent": [turn.agent for turn in turns],
            }
        ).take(order)
        at = table.schema.get_field_index("turn_index")
        index = _count_within(table.column("session").to_numpy())
        return table.set_column(at, SCHEMA.field(at), pa.array(index, pa.int32()))


def _count_within(groups: NDArray[np.int32]) -> NDArray[np.int64]:
    """For each row, how many rows before it are of its group."""
    order = np.argsort(groups, kind="stable")
    ranked = groups[order]
    within = np.empty(len(groups), np.int64)
    within[order] = np.arange(len(groups)) - np.searchsorted(ranked, ranked)
    return within


def single_turns(
    header: Header,
    path: Path,
    *,
    recorded_s: NDArray[np.float64],
    input_tokens: NDArray[np.int64],
    output_tokens: NDArray[np.int64],
    runs: Stretches | None = None,
    agents: pa.StringArray | None = None,
) -> Trace:
    """A trace of sessions of one turn, of the rows of one file, all at once.

    The same as adding each row to a `TraceBuilder`, which takes 9 s a million: sorted by time, ties
    in the file's order; no output becomes one token; a row without input is dropped, and may have
    no runs; each counted under the builder's name. `runs`: none unless given; `agents`: "main".
    Raises `TraceError` for no turns.
    """
    require_sound(path)
    changes = Counter(header.changes)
    kept = input_tokens > 0
    for change, rows in (
        ("rows_out_of_order", recorded_s < np.maximum.accumulate(recorded_s)),
        ("zero_output_clamped_to_1", output_tokens == 0),
        ("empty_input_dropped", ~kept),
    ):
        if rows.any():
            changes[change] += int(rows.sum())
    arrival_s = recorded_s[kept] - recorded_s.min(initial=np.inf)
    turns = len(arrival_s)
    none = np.zeros(turns, np.int64)
    counts, starts, lengths = runs or Stretches(np.zeros(len(kept), np.int64), none[:0], none[:0])
    counts = counts[kept]
    order = np.argsort(arrival_s, kind="stable")
    place = pa.array(order)
    table = build_table(
        {
            "session": order.astype(np.int32),
            "turn_index": none,
            "parents": list_column("parents", none, []),
            "recorded_s": arrival_s[order],
            "arrival_s": arrival_s[order],
            "delay_s": pa.nulls(turns, pa.float64()),
            "input_tokens": input_tokens[kept][order],
            "output_tokens": np.maximum(output_tokens[kept][order], 1),
            "run_starts": list_column("run_starts", counts, starts).take(place),
            "run_lengths": list_column("run_lengths", counts, lengths).take(place),
            "agent": pa.repeat(pa.scalar("main"), turns)
            if agents is None
            else agents.filter(pa.array(kept)).take(place),
        }
    )
    made = dict(sorted(changes.items()))
    return Trace(table, replace(header, sources=(file_digest(path),), changes=made))
