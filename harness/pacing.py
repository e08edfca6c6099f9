"""When each session starts: at its recorded time, faster, at a Poisson rate, or when another ends.

A pacing only says when sessions *start*. Inside a session the trace's own gates hold: a turn
starts its delay after its parents end (an open loop between sessions, a closed one within).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from harness.errors import ConfigError
from harness.settings import number, whole
from harness.trace import Trace


@dataclass(frozen=True)
class Plan:
    """What a pacing decides before the run."""

    starts_s: NDArray[np.float64]
    """Start of each session, s from the run's zero, (sessions,); NaN: as soon as another ends."""
    order: NDArray[np.int64]
    """Sessions in the order in which they start, (sessions,)."""
    speed: float = 1.0
    """Divides the delays and gaps inside sessions."""


@dataclass(frozen=True)
class Shard:
    """The sessions that one of several workers replays: each `workers`th in the order of starts."""

    worker: int
    """From 0."""
    workers: int
    zero_s: float
    """The start common to all workers, on this worker's loop's clock."""

    def order(self, plan: Plan) -> NDArray[np.int64]:
        """Its sessions, in the order in which they start."""
        return plan.order[self.worker :: self.workers]


class Pacing(Protocol):
    """Decides when sessions start."""

    def plan(self, trace: Trace, random: np.random.Generator) -> Plan:
        """One start a session. Raises `ConfigError` where the trace cannot be paced so."""
        ...


class Scaled:
    """As recorded, with time running `speed` times as fast, delays inside sessions included."""

    def __init__(self, speed: float) -> None:
        number("pacing.speed", speed, above=0, most=1e9)
        self.speed = speed

    def plan(self, trace: Trace, random: np.random.Generator) -> Plan:  # noqa: ARG002 - nothing is drawn
        """Sessions start at their recorded times, the first at 0."""
        if trace.header.session_starts != "recorded":
            raise ConfigError(
                "this trace does not say when its sessions began relative to each other, so they "
                "cannot be replayed at recorded times. Choose pacing=poisson or pacing=closed"
            )
        recorded = first_arrivals(trace)
        starts = (recorded - recorded.min()) / self.speed
        return Plan(starts, np.argsort(starts, kind="stable"), self.speed)


class Recorded(Scaled):
    """At the times the trace recorded."""

    def __init__(self) -> None:
        super().__init__(speed=1.0)


class Poisson:
    """Sessions arrive as a Poisson process, at a rate that offers `requests_per_s` on the whole.

    The session rate is `requests_per_s` divided by the mean turns a session. For single-turn
    traces this is the usual request rate.
    """

    def __init__(self, requests_per_s: float) -> None:
        number("pacing.requests_per_s", requests_per_s, above=0, most=1e9)
        self.requests_per_s = requests_per_s

    def plan(self, trace: Trace, random: np.random.Generator) -> Plan:
        """Exponential gaps between sessions, which keep the trace's order."""
        order = np.argsort(first_arrivals(trace), kind="stable")
        gaps = random.exponential(len(trace) / trace.sessions / self.requests_per_s, trace.sessions)
        starts = np.empty(trace.sessions)
        starts[order] = np.cumsum(gaps) - gaps[0]
        return Plan(starts, order)


class Closed:
    """A closed loop: `sessions` at a time; when one ends the next starts at once."""

    def __init__(self, sessions: int) -> None:
        whole("pacing.sessions", sessions, least=1)
        self.sessions = sessions

    def plan(self, trace: Trace, random: np.random.Generator) -> Plan:  # noqa: ARG002 - nothing is drawn
        """The first `sessions` start at 0, in the trace's order."""
        order = np.argsort(first_arrivals(trace), kind="stable")
        starts = np.full(trace.sessions, np.nan)
        starts[order[: self.sessions]] = 0.0
        return Plan(starts, order)


def first_arrivals(trace: Trace) -> NDArray[np.float64]:
    """The earliest `arrival_s` of each session: (sessions,). Sessions have at least one root."""
    arrivals = trace.column("arrival_s")
    first = np.full(trace.sessions, np.inf)
    roots = ~np.isnan(arrivals)
    np.minimum.at(first, trace.session[roots], arrivals[roots])
    return first
