"""Where decoding happens: a pool of cards and the prefix cache beside it."""

from __future__ import annotations

from dataclasses import dataclass

from adapters.simulator.cache import KvCache
from adapters.simulator.costs import require
from adapters.simulator.decode import DecodePool
from adapters.simulator.engine import Engine
from harness.backend import Request


@dataclass
class DecodeSite:
    """`cache` is the decode-side prefix cache (DRC): what it holds of a prompt need not be sent.

    A cache of 0 bytes is none: every prompt is sent whole.
    """

    pool: DecodePool
    cache: KvCache

    def __post_init__(self) -> None:
        require(isinstance(self.pool, DecodePool), "decode.pool", self.pool, "a DecodePool")
        require(isinstance(self.cache, KvCache), "decode.cache", self.cache, "a KvCache")

    def attach(self, engine: Engine) -> None:
        """Live on this engine, idle and cold."""
        self.pool.attach(engine)
        self.cache.clear()

    @property
    def cards(self) -> float:
        """For a routing: the cards that decode."""
        return self.pool.cards

    @property
    def load(self) -> float:
        """For a routing: tokens that are in memory or wait to be, per card."""
        return self.pool.load

    def held_tokens(self, request: Request) -> int:
        """For a routing: what it has of a prompt."""
        return self.cache.look_up(request)
