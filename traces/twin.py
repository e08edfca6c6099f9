"""A synthetic trace like a given one: its twin, drawn from a sketch of it (`traces.sketch`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness import settings
from harness.stream import Stream
from harness.trace import MAX_TOKENS, Header
from traces.sketch import VARIABLES, WITHIN, Line, Sketch, load
from traces.spread import Floats
from traces.starts import Chunk, Starts, chunk_sessions
from traces.weave import Path as Blocks
from traces.weave import Weaver, cut, size

_OPENINGS = 32_768
"""Openings that a later one may share with."""
_NEAR = 256
"""Openings before and after that are looked at first."""
_FACTORS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.1)
"""What a line's additions may be multiplied by so that they fit the context."""
_A_FEW = 200
_SESSIONS_AT_ONCE = 20
"""Where starts are unknown: sessions that overlap, on the nominal clock that orders the rows."""


def generate(*, sketch: str | Path, sessions: int, seed: int) -> Stream:
    """So many sessions like those of the trace that the file `sketch` was made of.

    Session i is the same whatever the number of sessions. Raises `TraceError`, `ConfigError`.
    """
    settings.whole("trace.sessions", sessions, least=1)
    settings.whole("trace.seed", seed, least=0)
    return twin(load(sketch), sessions, seed)


def twin(sketch: Sketch, sessions: int, seed: int) -> Stream:
    """As `generate`, from a sketch at hand."""
    header = Header(
        format="twin",
        block_tokens=sketch.block_tokens,
        partial_block=sketch.partial_block,
        id_scope="global",
        time_unit="s",
        licence=f"generated from a sketch of a trace under: {sketch.licence}",
        session_starts="unknown" if sketch.starts is None else "recorded",
        prefix_data="generated" if sketch.prefixes else "absent",
        parameters={"source": sketch.source, "sessions": sessions, "seed": seed},
    )
    like = {name: spread.to_json() for name, spread in sketch.like.items()}
    return Stream(header, _Drawing(sketch, seed).tables(sessions), like)


@dataclass(frozen=True)
class _Drawn:
    """The turns of many lines, one line after another: a list entry a turn."""

    offsets: list[int]
    """Line i has the turns from offsets[i] to offsets[i + 1]."""
    added: list[int]
    """The opening's: its length."""
    output: list[int]
    delay_s: list[float]
    kept: list[float]
    """Share of the blocks before that is kept; 1: all. The opening's: what it shares."""
    ratio: list[float]
    lag: list[int]
    """Of each line: how many openings ago what its opening shares was last laid."""
    common: list[int]
    """Of each line: how many blocks its opening shares if that was before the first."""


class _Drawing:
    """Sessions drawn from a sketch, laid on a loom."""

    def __init__(self, sketch: Sketch, seed: int) -> None:
        self._sketch = sketch
        self._seed = seed
        self._weaver = Weaver()
        self._openings = {main: _Openings() for main in (True, False)}

    def tables(self, sessions: int) -> Iterator[pa.Table]:
        """The rows, in order, as soon as nothing earlier can come."""
        starts = self._sketch.starts or Starts(_SESSIONS_AT_ONCE / self._mean_session_s())
        size = chunk_sessions(self._turns())
        for chunk in starts.chunks(sessions, (self._seed, 2), size):
            drawn = _draw(self._sketch.main, size, chunk.random)
            calls = self._calls(len(drawn.added), chunk.random)
            lines = int(calls.sum())
            called = _draw(self._sketch.called or self._sketch.main, lines, chunk.random)
            joins = chunk.random.random(lines) < self._sketch.joined
            self._lay(chunk, drawn, calls, called, joins)
            yield self._weaver.take(chunk.until_s)
        yield self._weaver.take()

    def _mean_session_s(self) -> float:
        """Of a few sessions: for a nominal clock."""
        drawn = _draw(self._sketch.main, _A_FEW, np.random.default_rng([self._seed, 3]))
        answers_s = self._sketch.nominal_s * len(drawn.output)
        answers_s += self._sketch.nominal_token_s * sum(drawn.output)
        return max(1e-3, (sum(drawn.delay_s) + answers_s) / _A_FEW)

    def _turns(self) -> float:
        """Of a session, those of sub-agents too, in the mean."""
        sketch = self._sketch
        called = sketch.called.turns.mean if sketch.called else 0.0
        return sketch.main.turns.mean * (1 + sketch.calling * sketch.calls.mean * called)

    def _calls(self, turns: int, random: np.random.Generator) -> NDArray[np.int64]:
        """How many sub-agents each turn calls."""
        number = np.maximum(1, np.rint(self._sketch.calls.at(random.random(turns))))
        calling = random.random(turns) < self._sketch.calling
        return np.where(calling, number, 0).astype(np.int64)

    def _lay(
        self,
        chunk: Chunk,
        drawn: _Drawn,
        calls: NDArray[np.int64],
        called: _Drawn,
        joins: NDArray[np.bool_],
    ) -> None:
        """The sessions of a chunk, turn by turn."""
        sketch, weaver = self._sketch, self._weaver
        before = np.concatenate(([0], np.cumsum(calls))).tolist()
        for number, start_s in enumerate(chunk.starts_s.tolist()):
            session, index = chunk.first + number, 0
            walk = self._walk(drawn, number, main=True)
            now_s = start_s
            waits: list[int] = []
            for turn, tokens, path in walk:
                delay_s = drawn.delay_s[turn] if waits else 0.0
                now_s += delay_s
                handle = weaver.add(
                    session, index, now_s, delay_s if waits else start_s, waits,
                    tokens, drawn.output[turn], path,
                )  # fmt: skip
                index += 1
                now_s += sketch.nominal_s + sketch.nominal_token_s * drawn.output[turn]
                end_s, waits = now_s, [handle]
                for line in range(before[turn], before[turn + 1]):
                    last, last_s, index = self._call(called, line, session, index, handle, end_s)
                    if joins[line]:
                        waits.append(last)
                        now_s = max(now_s, last_s)

    def _call(
        self, drawn: _Drawn, line: int, session: int, index: int, caller: int, now_s: float
    ) -> tuple[int, float, int]:
        """A sub-agent's line: its last turn, when that ends, and the next index."""
        sketch, waits = self._sketch, caller
        for turn, tokens, path in self._walk(drawn, line, main=False):
            now_s += drawn.delay_s[turn]
            waits = self._weaver.add(
                session, index, now_s, drawn.delay_s[turn], [waits],
                tokens, drawn.output[turn], path, sketch.agent,
            )  # fmt: skip
            index += 1
            now_s += sketch.nominal_s + sketch.nominal_token_s * drawn.output[turn]
        return waits, now_s, index

    def _walk(self, drawn: _Drawn, line: int, *, main: bool) -> Iterator[tuple[int, int, Blocks]]:
        """(number of the draw, prompt's tokens, prompt's blocks) of a line's turns.

        The blocks are to be used before the next is asked for. Ends before a prompt would be
        longer than the context.
        """
        limit, weaver = self._sketch.context_tokens, self._weaver
        low, high = drawn.offsets[line], drawn.offsets[line + 1]
        tokens = min(drawn.added[low], limit)
        whole, blocks = self._blocks(tokens)
        shared = round(drawn.kept[low] * blocks)
        path = self._openings[main].front(shared, drawn.lag[line], drawn.common[line])
        weaver.lay(path, blocks - size(path))
        self._openings[main].add(path, blocks)
        yield low, tokens, path
        slower = self._slower(drawn, low, high, limit)
        for turn in range(low + 1, high):
            keep = whole
            if drawn.kept[turn] < 1:
                keep = max(0, min(round(drawn.kept[turn] * whole), whole - 1))
                tokens = max(
                    1,
                    keep * self._sketch.block_tokens,
                    min(limit, round(drawn.ratio[turn] * tokens)),
                )
            else:
                tokens += max(1, int(slower * drawn.added[turn]))
                if tokens > limit:
                    return
            whole, now = self._blocks(tokens)
            path, blocks = weaver.relay(path, min(keep, blocks), now), now
            yield turn, tokens, path

    def _blocks(self, tokens: int) -> tuple[int, int]:
        """How many blocks a prompt fills, and how many have an id."""
        whole, rest = divmod(tokens, self._sketch.block_tokens)
        return whole, whole + (rest > 0 and self._sketch.partial_block == "ceil")

    def _slower(self, drawn: _Drawn, low: int, high: int, limit: int) -> float:
        """What a line's additions are multiplied by so that all its turns fit the context."""
        for factor in _FACTORS:
            tokens: float = min(drawn.added[low], limit)
            for turn in range(low + 1, high):
                if drawn.kept[turn] < 1:
                    tokens = min(limit, drawn.ratio[turn] * tokens)
                else:
                    tokens += factor * drawn.added[turn]
                if tokens > limit:
                    break
            else:
                return factor
        return _FACTORS[-1]


class _Openings:
    """The last openings, of which later ones may have the front."""

    def __init__(self) -> None:
        self._count = 0
        self._paths: list[Blocks] = [[]] * _OPENINGS
        self._blocks = np.zeros(_OPENINGS, np.int64)
        self._again = np.zeros(_OPENINGS, np.int64)
        """So many blocks of each were laid again by a later one."""

    def add(self, path: Blocks, blocks: int) -> None:
        """One more; the oldest is forgotten."""
        at = self._count % _OPENINGS
        self._paths[at], self._blocks[at], self._again[at] = list(path), blocks, 0
        self._count += 1

    def front(self, blocks: int, lag: int, common: int) -> Blocks:
        """The first `blocks` of the next one: of one that laid as many about `lag` openings ago.

        If there is any, of one whose own nobody laid again since. Of what would be from before the
        first opening, `common` blocks are from the last one, and the others are new.
        """
        if lag > self._count:
            blocks, lag = min(blocks, common), 1
        if blocks <= 0 or not self._count:
            return []
        at = self._found(blocks, lag)
        self._again[at] = max(self._again[at], blocks)
        return cut(self._paths[at], blocks)

    def _found(self, blocks: int, lag: int) -> int:
        """Where that one is; the longest, where none has so many blocks."""
        held = min(self._count, _OPENINGS)
        lag = min(lag, held)
        for again in (blocks - 1, MAX_TOKENS):
            for reach in (0, _NEAR, held):
                ages = np.arange(max(1, lag - reach), min(held, lag + reach) + 1)
                at = (self._count - ages) % _OPENINGS
                fits = np.flatnonzero((self._blocks[at] >= blocks) & (self._again[at] <= again))
                if len(fits):
                    return int(at[fits[np.argmin(np.abs(ages[fits] - lag))]])
        return int(np.argmax(self._blocks))


def _ranked(scores: Floats, random: np.random.Generator) -> Floats:
    """Even shares from 0 to 1, in the order of the scores: a distribution comes out as it went in.

    Also where lines of many turns are unlike others, and would count twice: the distributions are
    over turns, and know of that already.
    """
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores, kind="stable")] = np.arange(len(scores))
    return (ranks + random.random(len(scores))) / max(len(scores), 1)


def _draw(line: Line, lines: int, random: np.random.Generator) -> _Drawn:
    """So many lines of a kind."""
    root = np.linalg.cholesky(np.array(line.correlation))
    own = dict(zip(VARIABLES, root @ random.standard_normal((len(VARIABLES), lines)), strict=True))
    turns = np.maximum(1, np.rint(line.turns.at(_ranked(own["turns"], random)))).astype(np.int64)
    if not line.phases:
        turns[:] = 1
    offsets = np.concatenate(([0], np.cumsum(turns)))
    total = int(offsets[-1])
    of_line = np.repeat(np.arange(lines), turns)
    turn = np.arange(total) - offsets[of_line]
    opening = turn == 0
    begins = np.array([phase.from_turn for phase in line.phases] or [1])
    phase = np.searchsorted(begins, turn, side="right") - 1
    noise = {name: random.standard_normal(total) for name in WITHIN}
    link = line.answer_in_added
    noise["added"] = link * np.roll(noise["output"], 1) + np.sqrt(1 - link**2) * noise["added"]
    score = {
        name: np.sqrt(share) * own[name][of_line] + np.sqrt(1 - share) * noise[name]
        for name, share in zip(WITHIN, line.within, strict=True)
    }
    breaks = random.random((3, total))
    added, output, delay_s = (np.zeros(total) for _ in range(3))
    kept, ratio = np.ones(total), np.ones(total)
    added[opening] = line.opening_tokens.at(_ranked(own["opening"], random))
    output[opening] = line.output_tokens.at(_ranked(score["output"][opening], random))
    delay_s[opening] = line.delay_s.at(_ranked(score["delay"][opening], random))
    shares = np.empty(lines)
    ranked = np.array_split(np.argsort(own["opening"], kind="stable"), len(line.opening_hits))
    for part, spread in zip(ranked, line.opening_hits, strict=True):
        shares[part] = spread.at(_ranked(breaks[0][opening][part], random))
    kept[opening] = shares
    for at, stretch in enumerate(line.phases):
        here = ~opening & (phase == at)
        added[here] = stretch.added_tokens.at(_ranked(score["added"][here], random))
        output[here] = stretch.output_tokens.at(_ranked(score["output"][here], random))
        delay_s[here] = stretch.delay_s.at(_ranked(score["delay"][here], random))
        broken = here & (breaks[0] < stretch.broken)
        kept[broken] = stretch.kept.at(breaks[1][broken])
        ratio[broken] = stretch.ratio.at(breaks[2][broken])
    hits = shares * added[opening]
    sharing = np.argsort(hits, kind="stable")[np.count_nonzero(hits == 0) :]
    common = line.opening_common.at(random.random(lines))
    lag = np.ones(lines)
    for part, spread in zip(
        np.array_split(sharing, len(line.opening_lags)), line.opening_lags, strict=True
    ):
        lag[part] = spread.at(random.random(len(part)))
    whole = [np.maximum(1, np.rint(each)).clip(max=MAX_TOKENS / 4) for each in (added, output)]
    return _Drawn(
        offsets.tolist(),
        whole[0].astype(np.int64).tolist(),
        whole[1].astype(np.int64).tolist(),
        delay_s.round(6).tolist(),
        kept.tolist(),
        ratio.tolist(),
        np.maximum(1, np.rint(lag)).astype(np.int64).tolist(),
        np.rint(common).astype(np.int64).tolist(),
    )
