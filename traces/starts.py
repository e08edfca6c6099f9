"""When sessions start: a rate that may change over the day, and burstiness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from harness import settings
from harness.errors import ConfigError
from harness.pacing import first_arrivals
from harness.trace import Trace

Floats = NDArray[np.float64]

DAY_S = 86_400.0
_SLOWEST, _FASTEST = 1e-9, 1e9
"""Starts a second."""
_PARTS = 24
_ENOUGH = 40
"""Session starts a part of the day must have in the mean before a profile is fitted."""
_IN_WINDOW = 50
"""Session starts, in the mean, in each of the windows that burstiness is fitted on."""
_WINDOWS = 10
"""So many of them must be there."""


CHUNK = 1024
"""Sessions drawn from one stream of random numbers, at most; all of them whatever is kept, so
session i is the same whatever the number of sessions."""
_LEAST_CHUNK = 64
_TURNS = 2**17
"""About so many turns are in a chunk, at most."""
MOST_TURNS = 1_000_000
"""Of a session."""


def chunk_sessions(turns: float) -> int:
    """How many sessions of so many turns in the mean are drawn at once."""
    return int(min(max(_TURNS / turns, _LEAST_CHUNK), CHUNK))


class Chunk(NamedTuple):
    """Some sessions, one after another."""

    first: int
    """The number of the first."""
    starts_s: Floats
    """Of those that are wanted: not all in the last chunk."""
    until_s: float
    """No session of a later chunk starts before."""
    random: np.random.Generator
    """For whatever else is drawn for a whole chunk of sessions."""


def session_starts(trace: Trace) -> Floats:
    """Session starts in order, from 0; none where the trace does not know them, or all are one."""
    at_s = np.sort(first_arrivals(trace))
    at_s -= at_s[0]
    known = trace.header.session_starts == "recorded" and at_s[-1] > 0
    return at_s if known else at_s[:0]


@dataclass(frozen=True)
class Starts:
    """A renewal process with gamma gaps, on a clock that runs as fast as the hour is busy."""

    per_s: float
    """Sessions a second, over a whole period."""
    variation: float = 1.0
    """Standard deviation over mean of the gaps, the profile taken out: 1 is a Poisson process."""
    profile: tuple[float, ...] = (1.0,)
    """Relative rates of the equal parts of a period: 24 numbers are hours of a day."""
    period_s: float = DAY_S
    tick_s: float = 0.0
    """Starts are rounded down to multiples of it, as a coarse clock tells them; 0: they are not."""

    @classmethod
    def of(cls, name: str, **given: Any) -> Self:
        """As given, checked; `name` is what it is called in messages. Raises `ConfigError`."""
        profile = given.get("profile", (1.0,))
        if not isinstance(profile, Sequence) or not profile or isinstance(profile, str):
            raise ConfigError(f"{name}.profile is {profile!r}: give a list of relative rates")
        try:
            starts = cls(**{**given, "profile": tuple(profile)})
        except TypeError as error:
            raise ConfigError(f"{name}: {error}") from error
        settings.number(f"{name}.per_s", starts.per_s, least=_SLOWEST, most=_FASTEST)
        settings.number(f"{name}.variation", starts.variation, least=0.01, most=100)
        settings.number(f"{name}.tick_s", starts.tick_s, least=0, most=1e9)
        settings.number(f"{name}.period_s", starts.period_s, above=0, most=1e9)
        for rate in starts.profile:
            settings.number(f"{name}.profile", rate, least=0, most=1e9)
        if sum(starts.profile) == 0:
            raise ConfigError(f"{name}.profile is all 0: no session would ever start")
        return starts

    @classmethod
    def fit(cls, trace: Trace) -> Self | None:
        """Of a trace's session starts; None where they are not known or there is one.

        The period is a day; of a trace that is shorter, its length. Many starts have the variation
        of gaps with which as many fall into windows as unevenly as theirs do: their own gaps tell
        of the clock, and of bursts within bursts. Few have that of their gaps, or 1 where only a
        coarse clock made these.
        """
        at_s = session_starts(trace)
        if not len(at_s):
            return None
        per_s = float(min(max((len(at_s) - 1) / at_s[-1], _SLOWEST), _FASTEST))
        period_s = min(DAY_S, float(at_s[-1]))
        profile: tuple[float, ...] = (1.0,)
        if len(at_s) >= _ENOUGH * _PARTS:
            profile = _profile(at_s, period_s)
        tick_s = clock_tick_s(at_s)
        flat = cls(per_s, 1.0, profile, period_s)
        variation = _variation(flat._busy(at_s), tick_s)
        return cls(per_s, min(max(variation, 0.01), 100.0), profile, period_s, tick_s)

    def to_json(self) -> dict[str, Any]:
        """What `of` takes."""
        return asdict(self)

    def chunks(self, sessions: int, stream: Sequence[int], size: int = CHUNK) -> Iterator[Chunk]:
        """So many starts, from 0 on, `size` at a time, each with random numbers of its own.

        `stream` names the random numbers, beside the number of the chunk.
        """
        shape = self.variation**-2
        busy_s = zero_s = 0.0
        for first in range(0, sessions, size):
            random = np.random.default_rng([*stream, first // size])
            busy = busy_s + np.cumsum(random.gamma(shape, 1 / (shape * self.per_s), size))
            busy_s = float(busy[-1])
            at_s = self.clock(busy)
            zero_s = zero_s if first else float(at_s[0])
            at_s -= zero_s
            if self.tick_s:
                at_s = np.floor(at_s / self.tick_s) * self.tick_s
            yield Chunk(first, at_s[: sessions - first], float(at_s[-1]), random)

    def clock(self, busy_s: Floats) -> Floats:
        """The time, in s, at these times of the clock of busy time."""
        knots = self._knots()
        periods, rest = np.divmod(busy_s, self.period_s)
        parts = np.linspace(0, self.period_s, len(self.profile) + 1)
        return periods * self.period_s + np.interp(rest, knots, parts)

    def _knots(self) -> Floats:
        """Busy time at the ends of the parts; a whole period is as long on both clocks."""
        total = np.concatenate(([0.0], np.cumsum(self.profile)))
        knots: Floats = total * (self.period_s / total[-1])
        return knots

    def _busy(self, at_s: Floats) -> Floats:
        """The other way than `clock`."""
        parts = np.linspace(0, self.period_s, len(self.profile) + 1)
        periods, rest = np.divmod(at_s, self.period_s)
        return periods * self.period_s + np.interp(rest, parts, self._knots())


def clock_tick_s(at_s: Floats) -> float:
    """How far apart the times mostly are that two starts or more share in the mean; else 0."""
    times_s = np.unique(at_s)
    if len(at_s) < 2 * len(times_s) or len(times_s) < 2:  # noqa: PLR2004 - as it says
        return 0.0
    return float(np.median(np.diff(times_s)))


def _variation(busy_s: Floats, tick_s: float) -> float:
    """Of gaps: by the counts in windows, whose variance over mean is its square in the long run."""
    windows = len(busy_s) // _IN_WINDOW
    if windows >= _WINDOWS:
        counts = np.histogram(busy_s, windows, (0.0, busy_s[-1]))[0]
        return float(counts.std() / np.sqrt(counts.mean()))
    gaps = np.diff(busy_s)
    return 1.0 if tick_s or len(gaps) < 2 else float(gaps.std() / gaps.mean())  # noqa: PLR2004


def _profile(at_s: Floats, period_s: float) -> tuple[float, ...]:
    """Starts a second in each part of the period, over their mean; parts seen in part count so."""
    width_s = period_s / _PARTS
    counts = np.bincount((at_s % period_s // width_s).astype(np.int64).clip(max=_PARTS - 1))
    counts = np.pad(counts, (0, _PARTS - len(counts)))
    whole, rest_s = divmod(float(at_s[-1]), period_s)
    seen_s = whole * width_s + np.clip(rest_s - width_s * np.arange(_PARTS), 0, width_s)
    rates = counts / np.maximum(seen_s, 1e-9)
    rates[seen_s < width_s / 2] = rates[seen_s >= width_s / 2].mean()  # too little seen to tell
    return tuple((rates / rates.mean()).round(4).tolist())
