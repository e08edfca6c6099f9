"""How a relay hands its tokens over to the main decode: which way, and when to change it."""

from __future__ import annotations

from typing import Literal, get_args

from adapters.simulator.costs import require
from harness.settings import number, whole

Way = Literal["one-shot", "catch-up", "kv"]
"""One-shot: the relay stops, and the ids of all its tokens are taken in by one extended step.
Catch-up: they are taken in by batches, and the relay goes on until little is left.
kv: the relay stops, and the KV cache of its tokens crosses the WAN: the rival of ids."""


class Handoff:
    """One way always, or `auto`: catch-up while the relay has room, one-shot when it is loaded.

    `auto` goes over to one-shot when the share of the relay's memory that is taken rises to
    `high`, and back to catch-up when it falls to `low`. A batch is of `batch_tokens` at most;
    catch-up ends when no more than `rest_tokens` are left. An id takes `id_bytes` on the WAN (too
    few to fill it); KV sent instead takes `copy_s` for copies between device and host.
    """

    def __init__(
        self,
        way: Literal["auto"] | Way = "auto",
        batch_tokens: int = 64,
        rest_tokens: int = 4,
        high: float = 0.75,
        low: float = 0.5,
        id_bytes: float = 15.0,
        copy_s: float = 24.5e-3,
    ) -> None:
        ways = ("auto", *get_args(Way))
        require(way in ways, "handoff.way", way, f"one of {', '.join(ways)}")
        whole("handoff.batch_tokens", batch_tokens, least=1)
        whole("handoff.rest_tokens", rest_tokens, least=1)
        number("handoff.high", high, least=0, most=1)
        number("handoff.low", low, least=0, most=high)
        number("handoff.id_bytes", id_bytes, least=0, most=1e9)
        number("handoff.copy_s", copy_s, least=0, most=1e6)
        self.way = way
        self.batch_tokens = batch_tokens
        self.rest_tokens = rest_tokens
        self.high = high
        self.low = low
        self.id_bytes = id_bytes
        self.copy_s = copy_s
        self.clear()

    def clear(self) -> None:
        """As at the start: the relay is empty."""
        self._loaded = False
        self.switches = 0
        """How often `auto` has changed the way."""

    def choose(self, filled: float) -> Way:
        """The way for a request whose KV cache has crossed, with so much of the relay taken."""
        if self.way != "auto":
            return self.way
        loaded = filled > self.low if self._loaded else filled >= self.high
        self.switches += loaded is not self._loaded
        self._loaded = loaded
        return "one-shot" if loaded else "catch-up"
