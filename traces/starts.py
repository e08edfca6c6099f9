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
_PARTS = 24
_ENOUGH = 40
"""Session starts a part of the day must have in the mean before a profile is fitted."""


CHUNK = 1024
"""Sessions drawn from one stream of random numbers, all of them whatever is kept: so session i is
the same whatever the number of sessions."""


class Chunk(NamedTuple):
    """Some sessions, one after another."""

    first: int
    """The number of the first."""
    starts_s: Floats
    """Up to `CHUNK` of them."""
    until_s: float
    """No session of a later chunk starts before."""
    random: np.random.Generator
    """For whatever else is drawn for `CHUNK` sessions."""


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
        settings.number(f"{name}.per_s", starts.per_s, above=0, most=1e9)
        settings.number(f"{name}.variation", starts.variation, least=0.01, most=100)
        settings.number(f"{name}.period_s", starts.period_s, above=0, most=1e9)
        for rate in starts.profile:
            settings.number(f"{name}.profile", rate, least=0, most=1e9)
        if sum(starts.profile) == 0:
            raise ConfigError(f"{name}.profile is all 0: no session would ever start")
        return starts

    @classmethod
    def fit(cls, trace: Trace) -> Self | None:
        """Of a trace's session starts; None where they are not known or there is one.

        The period is a day; of a trace that is shorter, its length.
        """
        at_s = session_starts(trace)
        if not len(at_s):
            return None
        per_s = (len(at_s) - 1) / at_s[-1]
        period_s = min(DAY_S, float(at_s[-1]))
        profile: tuple[float, ...] = (1.0,)
        if len(at_s) >= _ENOUGH * _PARTS:
            profile = _profile(at_s, period_s)
        flat = cls(per_s, 1.0, profile, period_s)
        gaps = np.diff(flat._busy(at_s))
        variation = float(gaps.std() / gaps.mean()) if len(gaps) > 1 else 1.0
        return cls(per_s, min(max(variation, 0.01), 100.0), profile, period_s)

    def to_json(self) -> dict[str, Any]:
        """What `of` takes."""
        return asdict(self)

    def chunks(self, sessions: int, stream: Sequence[int]) -> Iterator[Chunk]:
        """So many starts, from 0 on, `CHUNK` at a time, each with random numbers of its own.

        `stream` names the random numbers, beside the number of the chunk.
        """
        shape = self.variation**-2
        busy_s = zero_s = 0.0
        for first in range(0, sessions, CHUNK):
            random = np.random.default_rng([*stream, first // CHUNK])
            busy = busy_s + np.cumsum(random.gamma(shape, 1 / (shape * self.per_s), CHUNK))
            busy_s = float(busy[-1])
            at_s = self.clock(busy)
            zero_s = zero_s if first else float(at_s[0])
            at_s -= zero_s
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
