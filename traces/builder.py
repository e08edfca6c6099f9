"""Turns of any format into a `Trace`: gates resolved, block ids dense, changes named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import TraceError
from harness.trace import Header, Trace, build_table, file_digest


class Interner:
    """Dense numbers for raw block ids, by (the block before, raw id).

    So a number stands for the block and all before it by construction, and blocks that are new
    together get consecutive numbers: `runs` of a prompt are its stretches of them.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Hashable], int] = {}
        self._next = 0
        self._raw: Sequence[Hashable] = ()
        self._dense: list[int] = []

    def scope(self) -> None:
        """Ids seen so far mean nothing any more: those to come are of another file."""
        self._numbers.clear()
        self._raw, self._dense = (), []

    def runs(self, raw: Sequence[Hashable]) -> list[tuple[int, int]]:
        """The prompt's blocks as (first number, length)."""
        same = _common_prefix(self._raw, raw)
        dense = self._dense[:same]
        before = dense[-1] if dense else -1
        numbers = self._numbers
        for each in raw[same:]:
            key = (before, each)
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = self._next
                self._next += 1
            dense.append(number)
            before = number
        self._raw, self._dense = raw, dense
        return _stretches(dense)


def _common_prefix(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """How long two sequences agree: by halving, since slices compare at C speed."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _stretches(dense: list[int]) -> list[tuple[int, int]]:
    if not dense:
        return []
    numbers = np.array(dense)
    starts = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)
    lengths = np.diff(starts, append=len(numbers))
    return list(zip(numbers[starts].tolist(), lengths.tolist(), strict=True))


@dataclass(frozen=True)
class _Turn:
    key: Hashable
    session: Hashable
    parents: tuple[Hashable, ...]
    recorded_s: float
    delay_s: float
    """After its parents; unused for a turn without any."""
    input_tokens: int
    output_tokens: int
    runs: list[tuple[int, int]]
    agent: str
    path: Path
    line: int | None


class TraceBuilder:
    """Collects turns in the source's order; `build` makes the `Trace`.

    Zero outputs are clamped to one token, since the prompt was sent and filled its cache; empty
    inputs are dropped, and who waited for them waits for their parents. Both are counted.
    """

    def __init__(self, header: Header) -> None:
        self.header = header
        self.changes: Counter[str] = Counter()
        self.interner = Interner()
        self._turns: list[_Turn] = []
        self._keys: dict[Hashable, _Turn] = {}
        self._dropped: dict[Hashable, _Turn] = {}
        self._sources: list[Path] = []

    def source(self, path: Path) -> None:
        """What follows comes from this file."""
        self._sources.append(path)
        if self.header.id_scope == "file":
            self.interner.scope()

    def turn(
        self,
        key: Hashable,
        *,
        session: Hashable,
        recorded_s: float,
        input_tokens: int,
        output_tokens: int,
        blocks: Sequence[Hashable],
        path: Path,
        line: int | None,
        parents: Sequence[Hashable] = (),
        delay_s: float = 0.0,
        agent: str = "main",
    ) -> None:
        """Add one. A turn without parents arrives at `recorded_s`."""
        if key in self._keys or key in self._dropped:
            raise TraceError(f"turn {key} twice", do="make ids unique", path=path, line=line)
        block = self.header.block_tokens
        ceil = self.header.partial_block == "ceil"
        room = -(-input_tokens // block) if ceil else input_tokens // block
        if len(blocks) > room:
            rule = self.header.partial_block
            raise TraceError(
                f"{len(blocks)} block ids for {input_tokens} tokens, which hold {room}",
                do=f"check the block size: {block} tokens, partial blocks by {rule}",
                path=path,
                line=line,
            )
        if output_tokens == 0:
            self.changes["zero_output_clamped_to_1"] += 1
        new = _Turn(
            key, session, tuple(parents), recorded_s, delay_s, input_tokens, max(1, output_tokens),
            self.interner.runs(blocks), agent, path, line,
        )  # fmt: skip
        if input_tokens == 0:
            self.changes["empty_input_dropped"] += 1
            self._dropped[key] = new
        else:
            self._turns.append(new)
            self._keys[key] = new

    def build(self) -> Trace:
        """The trace. Raises `TraceError` for an orphan or a cycle, with its line."""
        if not self._turns:
            names = ", ".join(path.name for path in self._sources[:3])
            changes = ", ".join(f"{name} {count}" for name, count in self.changes.items())
            raise TraceError(
                f"no turns ({changes or 'nothing was dropped'})", do="check the file", path=names
            )
        turns = [self._adopt(turn) for turn in self._turns]
        self._refuse_cycles(turns)
        ordered = sorted(turns, key=lambda turn: turn.recorded_s)
        moved = sum(one is not other for one, other in zip(turns, ordered, strict=True))
        if moved and self.header.session_starts == "recorded":
            self.changes["out_of_order_rows_sorted"] += moved
        return Trace(self._table(ordered), self._final_header())

    def _final_header(self) -> Header:
        sources = tuple(file_digest(path) for path in self._sources)
        return replace(self.header, sources=sources, changes=dict(self.changes))

    def _adopt(self, turn: _Turn) -> _Turn:
        """Replace dropped parents by theirs; the delays add up."""
        seen: set[Hashable] = set()
        while any(parent in self._dropped for parent in turn.parents):
            gone = next(parent for parent in turn.parents if parent in self._dropped)
            if gone in seen:
                raise self._cycle(turn)
            seen.add(gone)
            lost = self._dropped[gone]
            kept = [parent for parent in turn.parents if parent != gone]
            parents = dict.fromkeys([*kept, *lost.parents])
            turn = replace(turn, parents=tuple(parents), delay_s=turn.delay_s + lost.delay_s)
        for parent in turn.parents:
            if parent not in self._keys:
                raise TraceError(
                    f"turn {turn.key} waits for {parent}, which is not in the trace: an orphan",
                    do="add its parent, or drop the turn",
                    path=turn.path,
                    line=turn.line,
                )
        return turn

    def _cycle(self, turn: _Turn) -> TraceError:
        return TraceError(
            f"turn {turn.key} waits for itself through its parents: a cycle",
            do="break the cycle",
            path=turn.path,
            line=turn.line,
        )

    def _refuse_cycles(self, turns: list[_Turn]) -> None:
        left = {turn.key: len(turn.parents) for turn in turns}
        children: dict[Hashable, list[Hashable]] = {}
        for turn in turns:
            for parent in turn.parents:
                children.setdefault(parent, []).append(turn.key)
        ready = [key for key, count in left.items() if not count]
        while ready:
            for child in children.get(ready.pop(), ()):
                left[child] -= 1
                if not left[child]:
                    ready.append(child)
        for turn in turns:
            if left[turn.key]:
                raise self._cycle(turn)

    def _table(self, turns: list[_Turn]) -> Any:
        sessions = {key: at for at, key in enumerate(dict.fromkeys(t.session for t in turns))}
        rows = {turn.key: row for row, turn in enumerate(turns)}
        zero_s = turns[0].recorded_s
        indices: Counter[Hashable] = Counter()
        turn_index = []
        for turn in turns:
            turn_index.append(indices[turn.session])
            indices[turn.session] += 1
        return build_table(
            {
                "session": [sessions[turn.session] for turn in turns],
                "turn_index": turn_index,
                "parents": [[rows[parent] for parent in turn.parents] for turn in turns],
                "recorded_s": [turn.recorded_s - zero_s for turn in turns],
                "arrival_s": [None if t.parents else t.recorded_s - zero_s for t in turns],
                "delay_s": [turn.delay_s if turn.parents else None for turn in turns],
                "input_tokens": [turn.input_tokens for turn in turns],
                "output_tokens": [turn.output_tokens for turn in turns],
                "run_starts": [[start for start, _ in turn.runs] for turn in turns],
                "run_lengths": [[length for _, length in turn.runs] for turn in turns],
                "agent": [turn.agent for turn in turns],
            }
        )
