"""Which of several a request goes to: instances of a prefill cluster, or clusters, or decode sites.

A policy sees of each candidate its load and what it holds of the prompt, both as they are when the
prompt comes, and decides once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Protocol, TypeVar

from harness.backend import Request

_64_BITS = (1 << 64) - 1


class Candidate(Protocol):
    """One that a request may go to."""

    @property
    def cards(self) -> float:
        """Cards it is made of."""
        ...

    @property
    def load(self) -> float:
        """What it has to do, in tokens per card: to compute or, where it decodes, in memory."""
        ...

    def held_tokens(self, request: Request) -> int:
        """Tokens of the prompt that its cache holds."""
        ...


C = TypeVar("C", bound=Candidate)


class Policy(Protocol):
    """Chooses. Of several that are alike, the first."""

    def choose(self, request: Request, candidates: Sequence[C]) -> C:
        """One of the candidates, which always come in the same order."""
        ...


class LeastLoad:
    """To the one with the least to do."""

    def choose(self, request: Request, candidates: Sequence[C]) -> C:
        """The least loaded."""
        del request
        return min(candidates, key=lambda each: each.load)


class CacheAware:
    """To the one that would have the least to do with this prompt added.

    Load and what it lacks of the prompt are both tokens to compute per card: a cached token weighs
    as much as a token of queue. Attention, by which a token on a long context costs more than one
    on a short, is left out on both sides.
    """

    def choose(self, request: Request, candidates: Sequence[C]) -> C:
        """The least loaded with what it lacks of the prompt."""

        def loaded(each: C) -> float:
            return each.load + (request.input_tokens - each.held_tokens(request)) / each.cards

        return min(candidates, key=loaded)


class Sticky:
    """A session always to the same one, each in proportion to its cards. Keeps no state.

    Rendezvous hashing: for each candidate the session draws, by a hash of its number, the time of
    an exponential clock that runs as fast as the candidate has cards; the first to ring has it. So
    if the last candidate goes, only its sessions move.
    """

    def choose(self, request: Request, candidates: Sequence[C]) -> C:
        """The session's own."""
        session = _mixed(request.session)

        def rings(at: int) -> float:
            return -log(_share(_mixed(session + at))) / candidates[at].cards

        return candidates[min(range(len(candidates)), key=rings)]


def _mixed(number: int) -> int:
    """64 bits that look random: a step of SplitMix64 (Steele, Lea and Flood, 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & _64_BITS
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return number ^ (number >> 31)


def _share(bits: int) -> float:
    """Of 64 random bits, a number between 0 and 1, neither included."""
    return ((bits >> 12) + 0.5) / (1 << 52)
