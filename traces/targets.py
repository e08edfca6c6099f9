"""A synthetic trace from targets alone: hits in seven bins, lengths, turns, delays, load.

For when there is no trace to be like, only figures: those of a paper, or of next year. Sessions are
lines of turns that wait for each other. What is asked for of hits and turns comes out by how turns
are drawn, up to the rounding to blocks; prompts' lengths are fitted on a sample.

- Each turn is given its hit rate. A session's first turns get the lowest of the distribution, as
  no turn of their own is before them: what they hit is a front that all sessions share.
- A later turn carries the prompt before whole, so its length is that of the prompt before over its
  hit rate (to the block), and grows the faster the less it hits. Where that rate is in the lowest
  bin, or the length would pass the longest, it is as long as the one before and breaks off: it
  keeps only the front.
- So a session's lengths are all in proportion to its first. That is drawn such that the lengths of
  all turns come out as asked: by fixed-point iteration on the quantiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness import settings
from harness.errors import ConfigError
from harness.metrics import HIT_EDGES, hit_shares
from harness.stream import Stream
from harness.trace import MAX_TOKENS, Header
from traces.spread import Floats, Spread
from traces.starts import CHUNK, MOST_TURNS, Starts, chunk_sessions
from traces.weave import Path as Blocks
from traces.weave import Weaver, cut, size

_PILOT = 4000
"""Sessions that lengths are fitted on."""
_ROUNDS = 12
_GRID = (np.arange(400) + 0.5) / 400
_PRINTED = 1e-4
"""So far beyond what bins can have a mean may be: it is told to four places."""
_LONGEST_S = 1e9
"""No delay is longer."""


@dataclass(frozen=True)
class Hits:
    """The distribution of hit rates: even within each bin, but for the lowest, which is a power."""

    bins: tuple[float, ...]
    power: float
    """In the lowest bin a rate is its upper edge times a uniform draw to this power: 1 is even."""

    @classmethod
    def of(cls, bins: Sequence[float], mean: float | None) -> Hits:
        """Raises `ConfigError` for bins that are none, and a mean that they cannot have."""
        bins = hit_shares("trace.hits", bins).tolist()
        if mean is None:
            return cls(tuple(bins), 1.0)
        edges = np.array(HIT_EDGES)
        centres = (edges[1:] + edges[:-1]) / 2
        rest = float(np.dot(bins[1:], centres[1:]))
        most = rest + bins[0] * HIT_EDGES[1]
        settings.number("trace.mean_hit", mean, least=0, most=1)
        if not rest - _PRINTED <= mean <= most + _PRINTED:
            raise ConfigError(
                f"trace.mean_hit is {mean:g}: with these bins it can be {rest:.4f} to {most:.4f}"
            )
        lowest = (mean - rest) / bins[0] if bins[0] else HIT_EDGES[1]
        return cls(tuple(bins), float(np.clip(HIT_EDGES[1] / max(lowest, 1e-9) - 1, 0, 1e6)))

    def at(self, shares: Floats) -> Floats:
        """The rates at these shares of the requests, lowest first."""
        ends = np.concatenate(([0.0], np.cumsum(self.bins)))
        ends[-1] = 1.0
        part = (np.searchsorted(ends, shares, side="right") - 1).clip(0, len(self.bins) - 1)
        low, width = ends[part], np.maximum(ends[part + 1] - ends[part], 1e-12)
        inside = ((shares - low) / width).clip(0, 1)
        edges = np.array(HIT_EDGES)
        even = edges[part] + inside * (edges[part + 1] - edges[part])
        rates: Floats = np.where(part == 0, HIT_EDGES[1] * inside**self.power, even)
        return rates


@dataclass(frozen=True)
class _Targets:
    hits: Hits
    input_tokens: Spread
    output_tokens: Spread
    turns: Spread
    delay_s: Spread
    starts: Starts
    block_tokens: int
    nominal_s: float
    nominal_token_s: float


def generate(
    *,
    sessions: int,
    seed: int,
    hits: Sequence[float],
    mean_hit: float | None,
    input_tokens: Mapping[str, float] | float,
    output_tokens: Mapping[str, float] | float,
    turns: Mapping[str, float] | float,
    delay_s: Mapping[str, float] | float,
    starts: Mapping[str, Any],
    block_tokens: int,
    nominal_s: float,
    nominal_token_s: float,
) -> Stream:
    """So many sessions. Raises `ConfigError`.

    `hits`: shares of requests whose ideal hit rate is in each of `metrics.HIT_LABELS`; `mean_hit`:
    their mean rate, None for whatever comes of it. Distributions are quantiles, or one number.
    `starts`: the fields of `Starts`. Session i is the same whatever the number of sessions.
    """
    settings.whole("trace.sessions", sessions, least=1)
    settings.whole("trace.seed", seed, least=0)
    settings.whole("trace.block_tokens", block_tokens, least=1, most=MAX_TOKENS)
    settings.number("trace.nominal_s", nominal_s, least=0, most=1e6)
    settings.number("trace.nominal_token_s", nominal_token_s, least=0, most=1e6)
    spreads = {
        name: Spread.of(given, f"trace.{name}", least=least, most=most)
        for name, given, least, most in (
            ("input_tokens", input_tokens, 1, MAX_TOKENS // 4),
            ("output_tokens", output_tokens, 1, MAX_TOKENS // 4),
            ("turns", turns, 1, MOST_TURNS),
            ("delay_s", delay_s, 0, _LONGEST_S),
        )
    }
    targets = _Targets(
        hits=Hits.of(list(hits), mean_hit),
        starts=Starts.of("trace.starts", **starts),
        block_tokens=block_tokens,
        nominal_s=nominal_s,
        nominal_token_s=nominal_token_s,
        **spreads,
    )
    asked = {
        "sessions": sessions, "seed": seed, "hits": list(hits), "mean_hit": mean_hit,
        "starts": targets.starts.to_json(), "nominal_s": nominal_s,
        "nominal_token_s": nominal_token_s,
        **{name: spread.to_json() for name, spread in spreads.items()},
    }  # fmt: skip
    header = Header(
        "targets", block_tokens, "floor", "global", "s", "Apache-2.0 (generated)",
        prefix_data="generated", parameters=asked,
    )  # fmt: skip
    rates = Spread.fit(targets.hits.at(_GRID))
    wanted = {name: each.to_json() for name, each in {**spreads, "ideal_hit_rate": rates}.items()}
    return Stream(header, _tables(targets, sessions, seed), wanted)


@dataclass(frozen=True)
class _Drawn:
    """Turns of many sessions, one session after another: arrays of one entry a turn."""

    offsets: NDArray[np.int64]
    rate: Floats
    grown: Floats
    """The logarithm of each prompt's length over that of its session's first."""
    carries: NDArray[np.bool_]
    """Whether it has the prompt before whole."""
    output: Floats
    delay_s: Floats
    score: Floats
    """A uniform draw a session: the place of its first prompt among the lengths."""


def _draw(targets: _Targets, sessions: int, random: np.random.Generator) -> _Drawn:
    turns = np.maximum(1, np.rint(targets.turns.at(_even(sessions, random)))).astype(np.int64)
    offsets = np.concatenate(([0], np.cumsum(turns)))
    total = int(offsets[-1])
    opening = np.zeros(total, bool)
    opening[offsets[:-1]] = True
    lowest = sessions / total
    shares = np.empty(total)
    shares[opening] = lowest * _even(sessions, random)
    shares[~opening] = lowest + (1 - lowest) * _even(total - sessions, random)
    rate = targets.hits.at(shares)
    carries = ~opening & (rate >= HIT_EDGES[1])
    steps = np.where(carries, -np.log(np.maximum(rate, HIT_EDGES[1])), 0.0)
    sums = np.cumsum(steps)
    grown = sums - np.repeat(sums[offsets[:-1]], turns)
    return _Drawn(
        offsets, rate, grown, carries,
        targets.output_tokens.at(_even(total, random)),
        targets.delay_s.at(_even(total, random)),
        _even(sessions, random),
    )  # fmt: skip


def _even(count: int, random: np.random.Generator) -> Floats:
    """Uniform draws that cover 0 to 1 evenly, in random order."""
    return (random.permutation(count) + random.random(count)) / max(count, 1)


def _first_lengths(targets: _Targets, seed: int) -> Spread:
    """The distribution of first prompts with which all prompts come out as asked: a fit."""
    sessions = int(_PILOT * chunk_sessions(targets.turns.mean) / CHUNK)
    drawn = _draw(targets, sessions, np.random.default_rng([seed, 4]))
    turns = np.diff(drawn.offsets)
    wanted = np.log(targets.input_tokens.at(_GRID))
    longest = targets.input_tokens.values[-1]
    # As high at each share as wanted, less what sessions grow by in the mean.
    first = wanted - drawn.grown.mean()
    for _ in range(_ROUNDS):
        lengths = np.interp(drawn.score, _GRID, first)
        every = np.minimum(np.repeat(lengths, turns) + drawn.grown, np.log(longest))
        got = np.quantile(every, _GRID)
        first = np.maximum.accumulate(first + (wanted - got) / 2)
        first = np.clip(first, 0.0, np.log(longest))
    values = np.exp(first)
    shares = (0.0, *_GRID.tolist(), 1.0)
    return Spread(shares, (float(values[0]), *values.tolist(), float(values[-1])))


def _tables(targets: _Targets, sessions: int, seed: int) -> Iterator[pa.Table]:
    first_lengths = _first_lengths(targets, seed)
    weaver, front = Weaver(), _Front()
    at_once = chunk_sessions(targets.turns.mean)
    for chunk in targets.starts.chunks(sessions, (seed, 5), at_once):
        drawn = _draw(targets, at_once, chunk.random)
        first = first_lengths.at(drawn.score).tolist()
        for number, start_s in enumerate(chunk.starts_s.tolist()):
            low, high = drawn.offsets[number : number + 2].tolist()
            _session(
                targets, weaver, front, chunk.first + number, start_s, first[number],
                drawn, low, high,
            )  # fmt: skip
        yield weaver.take(chunk.until_s)
    yield weaver.take()


class _Front:
    """What all sessions may share: the longest first prompt so far."""

    def __init__(self) -> None:
        self._path: Blocks = []
        self._held = 0

    def take(self, blocks: int) -> Blocks:
        """Its first blocks, as many as there are of those asked for."""
        return cut(self._path, blocks)

    def offer(self, path: Blocks, held: int) -> None:
        """Another first prompt."""
        if held > self._held:
            self._path, self._held = list(path), held


def _session(
    targets: _Targets, weaver: Weaver, front: _Front, session: int, now_s: float,
    first: float, drawn: _Drawn, low: int, high: int,
) -> None:  # fmt: skip
    """One session's turns, from the first prompt's length on."""
    block, longest = targets.block_tokens, targets.input_tokens.values[-1]
    rates, carries = drawn.rate[low:high].tolist(), drawn.carries[low:high].tolist()
    outputs = np.maximum(1, np.rint(drawn.output[low:high])).astype(np.int64).tolist()
    delays = drawn.delay_s[low:high].round(6).tolist()
    length = max(1.0, first)
    path: Blocks = []
    held = 0
    waits: list[int] = []
    for at, rate in enumerate(rates):
        # A carried prompt's length makes the rate: of its whole blocks, or the rate would be less.
        if carries[at] and held and held * block / rate <= longest:
            length = held * block / rate
            tokens = max(1, round(length))
            keep = held
        else:
            tokens = max(1, round(length))
            keep = min(round(rate * tokens / block), tokens // block)
            if not at:
                path = front.take(keep)
                held = keep = size(path)
            keep = min(keep, held)
        held = tokens // block
        path = weaver.relay(path, keep, held)
        if not at:
            front.offer(path, held)
        delay_s = delays[at] if waits else 0.0
        gate_s = delay_s if waits else now_s
        now_s += delay_s
        handle = weaver.add(session, at, now_s, gate_s, waits, tokens, outputs[at], path)
        now_s += targets.nominal_s + targets.nominal_token_s * outputs[at]
        waits = [handle]
