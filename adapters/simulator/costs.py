"""What a step costs: fitted equations of prefill and decode, and the bytes of a KV cache.

The forms are first principles (linear layers, causal attention, weights read once a step), the
coefficients are fits to measured kernels; each YAML file in `conf/model` says to which.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from harness.errors import ConfigError
from harness.settings import number


def require(good: bool, name: str, value: object, wanted: str) -> None:
    """Raise the `ConfigError` of a setting that cannot be."""
    if not good:
        raise ConfigError(f"{name} is {value}: give {wanted}")


@dataclass(frozen=True)
class PrefillCost:
    """Seconds to prefill n new tokens on p cached: t0 + a n + b n (p + n/2), on 8 cards.

    a: linear layers; b: causal attention, each new token to all before it and half its own chunk.
    """

    t0_s: float
    a_s: float
    b_s: float

    def __post_init__(self) -> None:
        for name in ("t0_s", "a_s", "b_s"):
            value = getattr(self, name)
            number(f"model.prefill.{name}", value, least=0)

    def chunk_s(self, new: int, cached: int) -> float:
        """The part of a step that `new` tokens on `cached` add; the step adds `t0_s` once."""
        return new * (self.a_s + self.b_s * (cached + 0.5 * new))

    def extend_s(self, tokens: int, context: int) -> float:
        """What a decode step grows by when it takes in `tokens` at once: t(k) - t(1).

        As in speculative verification; `context` is what is cached before them.
        """
        return self.chunk_s(tokens, context) - self.chunk_s(1, context)


@dataclass(frozen=True)
class DecodeCost:
    """Seconds of one decode step, batch b, total context S: d0 + d1 b + d2 S + d3 sqrt(b), 8 cards.

    sqrt(b) stands for the experts that a batch activates. Fits may bend down for small batches;
    a step is never taken to be cheaper than that of one sequence.
    """

    d0_s: float
    d1_s: float
    d2_s: float
    d3_s: float

    def __post_init__(self) -> None:
        for name in ("d0_s", "d1_s", "d3_s"):
            number(f"model.decode.{name}", getattr(self, name), least=-1e6, most=1e6)
        alone = f"{self.alone_s} s for a batch of 1"
        require(self.alone_s > 0, "model.decode", alone, "coefficients above 0 in sum")
        number("model.decode.d2_s", self.d2_s, least=0)

    @property
    def alone_s(self) -> float:
        """`batch_s` of one sequence."""
        return self.d0_s + self.d1_s + self.d3_s

    def batch_s(self, batch: float) -> float:
        """The part that depends on the batch alone."""
        return max(self.alone_s, self.d0_s + self.d1_s * batch + self.d3_s * sqrt(batch))


@dataclass(frozen=True)
class KvBytes:
    """Bytes of a KV cache: `per_token` tokens + `fixed` (the window state of hybrid models)."""

    per_token: float
    fixed: float = 0.0

    def __post_init__(self) -> None:
        number("model.kv.per_token", self.per_token, above=0)
        number("model.kv.fixed", self.fixed, least=0)

    def of(self, tokens: int) -> float:
        """Bytes to move the cache of so many tokens."""
        return self.per_token * tokens + self.fixed

    def blocks(self, capacity_bytes: float, block_tokens: int) -> float:
        """How many blocks fit a cache of so many bytes."""
        return capacity_bytes / (self.per_token * block_tokens)
