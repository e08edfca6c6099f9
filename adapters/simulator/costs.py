"""What a step costs: how long one takes on a chip, and the bytes of a KV cache.

A `Chip` stands for one instance of some cards that serves one model. `Fitted` is measured kernels,
condensed into seven coefficients; `Roofline` is what a chip's four numbers allow, for chips that
nobody has measured. `docs/simulator.md` says how far each is off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from math import floor, inf, sqrt
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import orjson

from harness.errors import ConfigError
from harness.settings import number, whole


def require(good: bool, name: str, value: object, wanted: str) -> None:
    """Raise the `ConfigError` of a setting that cannot be."""
    if not good:
        raise ConfigError(f"{name} is {value}: give {wanted}")


@runtime_checkable
class Chip(Protocol):
    """Step times of one instance of `cards` cards, for one model. Times in s."""

    cards: int

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """One step over these chunks: (new tokens, tokens cached before them) each."""
        ...

    def decode(self, batch: float, context: float) -> tuple[float, float, float]:
        """A run of decode steps of `batch` sequences, now with `context` cached tokens in sum.

        (first_s, growth_s, steps): the first takes first_s, each later one growth_s more than the
        one before it; that line holds for `steps` steps, at least one.
        """
        ...

    def extend_s(self, batch: float, tokens: int, context: int) -> float:
        """What a decode step of `batch` is longer by if one of them takes in `tokens` at once.

        As in speculative verification. `context`: what that sequence has cached before them.
        """
        ...


class Fitted:
    """Step times of the measured kernels that the coefficients are fitted to.

    Prefill: t0 + sum(a n + b n (p + n/2)), n new tokens on p cached. a: linear layers; b: causal
    attention, each new token to all before it and half its own chunk. Decode: d0 + d1 b + d2 S
    + d3 sqrt(b), batch b, S cached tokens in sum; sqrt(b) stands for the experts that a batch
    activates. A fit may bend down; a step is never taken to be cheaper than one of a smaller batch.

    `coefficients`: the name of a shipped file, the path of one that `relaybench refit` wrote, or
    what such a file holds. The speeds say how many times as fast as the measured card this is.
    """

    def __init__(
        self,
        coefficients: str | Mapping[str, Any],
        prefill_speed: float = 1.0,
        decode_speed: float = 1.0,
    ) -> None:
        number("chip.prefill_speed", prefill_speed, above=0, most=1e9)
        number("chip.decode_speed", decode_speed, above=0, most=1e9)
        found = _read(coefficients)
        whole("coefficients.cards", found.get("cards"), least=1)
        t0, a, b = _part(found, "prefill", "t0_s", "a_s", "b_s")
        d0, d1, d2, d3 = _part(found, "decode", "d0_s", "d1_s", "d2_s", "d3_s")
        for name, value in (("t0_s", t0), ("a_s", a), ("b_s", b), ("d2_s", d2)):
            number(f"coefficients.{name}", value, least=0)
        alone = d0 + d1 + d3
        require(alone > 0, "coefficients.decode", f"{alone} s for a batch of 1", "more than 0")
        self.cards: int = found["cards"]
        self.prefill_speed = prefill_speed
        self.decode_speed = decode_speed
        self._found = found
        self._t0, self._a, self._b = (value / prefill_speed for value in (t0, a, b))
        self._d0, self._d1, self._d2, self._d3, self._alone = (
            value / decode_speed for value in (d0, d1, d2, d3, alone)
        )
        self._extend_t0, self._extend_a, self._extend_b = (
            value / decode_speed for value in (t0, a, b)
        )
        self._peak = (d3 / (2 * d1)) ** 2 if d1 < 0 < d3 else inf
        """The batch from which the fit would fall."""

    @property
    def numbers(self) -> dict[str, object]:
        """The coefficients as fitted, the speeds, and what was measured."""
        return {
            "source": self._found.get("source"),
            "cards": self.cards,
            "prefill": dict(self._found["prefill"]),
            "decode": dict(self._found["decode"]),
            "prefill_speed": self.prefill_speed,
            "decode_speed": self.decode_speed,
        }

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """As `Chip` says."""
        seconds, a, b = self._t0, self._a, self._b
        for new, cached in chunks:
            seconds += new * (a + b * (cached + 0.5 * new))
        return seconds

    def decode(self, batch: float, context: float) -> tuple[float, float, float]:
        """As `Chip` says; the line holds for ever."""
        d2 = self._d2
        return self._batch_s(batch) + d2 * context, d2 * batch, inf

    def extend_s(self, batch: float, tokens: int, context: int) -> float:
        """As `Chip` says: the linear layers take as many rows more, and attention is added.

        More rows cost what they make the step read (as so many sequences more would) or what
        they make it compute (as in prefill), whichever is more; but no more than a prefill step
        of their own, as decode is not measured in batches of thousands.
        """
        more = tokens - 1
        read_s = self._batch_s(batch + more) - self._batch_s(batch)
        pairs = tokens * (context + 0.5 * tokens) - (context + 0.5)
        rows_s = max(read_s, self._extend_a * more)
        return min(rows_s, self._extend_t0 + self._extend_a * tokens) + self._extend_b * pairs

    def _batch_s(self, batch: float) -> float:
        """The part of a decode step that depends on the batch alone."""
        batch = min(batch, self._peak)
        return max(self._alone, self._d0 + self._d1 * batch + self._d3 * sqrt(batch))


def _read(coefficients: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """What a file of coefficients holds."""
    if isinstance(coefficients, Mapping):
        return coefficients
    if not isinstance(coefficients, str):
        raise ConfigError(
            f"chip.coefficients is {coefficients!r}: this model has not been measured. "
            "Choose a chip by name, as in chip@chip_a=h200 chip@chip_b=h20"
        )
    shipped = files("adapters.simulator") / "coefficients"
    path = Path(coefficients) if coefficients.endswith(".json") else None
    try:
        text = (path or shipped / f"{coefficients}.json").read_bytes()
    except OSError as error:
        names = sorted(each.name.removesuffix(".json") for each in shipped.iterdir())
        raise ConfigError(
            f"chip.coefficients: {coefficients} cannot be read: give the path of a .json file, "
            f"or one of {', '.join(names)}"
        ) from error
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"chip.coefficients: {coefficients} is no JSON: {error}") from error
    require(isinstance(found, dict), "chip.coefficients", coefficients, "a JSON object")
    return found  # type: ignore[no-any-return]


def _part(found: Mapping[str, Any], part: str, *names: str) -> list[float]:
    """The coefficients of one equation."""
    given = found.get(part)
    require(isinstance(given, Mapping), f"coefficients.{part}", given, ", ".join(names))
    values = [given.get(name) for name in names]  # type: ignore[union-attr]
    for name, value in zip(names, values, strict=True):
        number(f"coefficients.{part}.{name}", value, least=-1e6, most=1e6)
    return values


@dataclass(frozen=True)
class Architecture:
    """What one token makes a model read and compute, on whatever chip.

    `attention_flops`: per new token and token of context, over all layers (twice the
    multiply-adds of scores and values). `kv_bytes`: of one token. `kv_heads`: in how many parts
    that can be split over cards; latent attention keeps it whole on each card. A model without
    experts has one, which every token uses.
    """

    parameters: float
    active_parameters: float
    bytes_per_parameter: float
    layers: int
    hidden: int
    attention_flops: float
    kv_bytes: float
    kv_heads: int
    experts: int = 1
    experts_per_token: int = 1

    def __post_init__(self) -> None:
        for name in ("parameters", "active_parameters", "bytes_per_parameter", "kv_bytes"):
            number(f"model.architecture.{name}", getattr(self, name), above=0, most=1e18)
        number("model.architecture.attention_flops", self.attention_flops, least=0, most=1e18)
        for name in ("layers", "hidden", "kv_heads", "experts", "experts_per_token"):
            whole(f"model.architecture.{name}", getattr(self, name), least=1)
        number("model.architecture.active_parameters", self.active_parameters, most=self.parameters)
        number("model.architecture.experts_per_token", self.experts_per_token, most=self.experts)
        least = self.parameters * (1 - self.idle_share)
        number("model.architecture.active_parameters", self.active_parameters, least=least)

    @property
    def idle_share(self) -> float:
        """Share of the experts that one token leaves alone."""
        return 1 - self.experts_per_token / self.experts

    @property
    def expert_parameters(self) -> float:
        """Those of the routed experts: what one token leaves alone, by the share it does."""
        idle = self.parameters - self.active_parameters
        return idle / self.idle_share if idle else 0.0


class Roofline:
    """Step times that a chip's four numbers allow: the slower of computing and of reading memory.

        max((2 N_active n + F pairs) / (g peak eta_c), (weights + KV) / (g bandwidth eta_m))
            + all-reduces + t0

    over g cards in tensor and expert parallel; pairs: new tokens x tokens before them. A batch
    reads the experts that it activates, 1 - (1 - k/E)^n of them, and every card all the KV that
    cannot be split over them. Each layer reduces its activations (bf16) twice over all cards, in a
    ring. Not counted: the window state of hybrid models.

    `tflops` is the dense peak in bf16: fp8 products of these sizes are measured to be hardly faster
    on big chips. `expert_cost`: how many times as long as a dense product an expert's takes, for
    its small products and for the busiest card. `t0_s`: launches and waits of a step.
    """

    def __init__(
        self,
        name: str,
        model: Architecture,
        cards: int,
        tflops: float,
        memory_gb: float,
        bandwidth_tb_s: float,
        interconnect_gb_s: float,
        eta_compute: float,
        expert_cost: float,
        eta_memory: float,
        t0_s: float,
    ) -> None:
        require(isinstance(model, Architecture), "chip.model", model, "a model's architecture")
        whole("chip.cards", cards, least=1)
        number("chip.tflops", tflops, above=0, most=1e12)
        number("chip.memory_gb", memory_gb, above=0, most=1e12)
        number("chip.bandwidth_tb_s", bandwidth_tb_s, above=0, most=1e12)
        number("chip.interconnect_gb_s", interconnect_gb_s, above=0, most=1e12)
        number("chip.eta_compute", eta_compute, above=0, most=1)
        number("chip.expert_cost", expert_cost, least=1, most=100)
        number("chip.eta_memory", eta_memory, above=0, most=1)
        number("chip.t0_s", t0_s, least=0, most=1e6)
        self.name = name
        self.model = model
        self.cards = cards
        self.tflops = tflops
        self.memory_gb = memory_gb
        self.bandwidth_tb_s = bandwidth_tb_s
        self.interconnect_gb_s = interconnect_gb_s
        self.eta_compute = eta_compute
        self.expert_cost = expert_cost
        self.eta_memory = eta_memory
        self.t0_s = t0_s
        flop_s = 1 / (cards * tflops * 1e12 * eta_compute)
        byte_s = 1 / (cards * bandwidth_tb_s * 1e12 * eta_memory)
        experts = model.expert_parameters
        in_experts = experts * (1 - model.idle_share)
        self._token_s = 2 * (model.active_parameters + (expert_cost - 1) * in_experts) * flop_s
        self._pair_s = model.attention_flops * flop_s
        self._weights_s = model.parameters * model.bytes_per_parameter * byte_s
        """To read them all."""
        self._experts_s = experts * model.bytes_per_parameter * byte_s
        """To read the experts of them."""
        self._idle_share = model.idle_share
        self._kv_s = model.kv_bytes * cards / min(cards, model.kv_heads) * byte_s
        reduced = 2 * model.layers * model.hidden * 2
        self._link_s = reduced * 2 * (cards - 1) / cards / (interconnect_gb_s * 1e9)
        """To reduce one token's activations."""

    @property
    def room_bytes(self) -> float:
        """What an instance's memory has beside the weights; below 0, they do not fit."""
        weights = self.model.parameters * self.model.bytes_per_parameter
        return self.cards * self.memory_gb * 1e9 - weights

    @property
    def numbers(self) -> dict[str, object]:
        """The chip's numbers and the model's."""
        shown = {key: value for key, value in vars(self).items() if not key.startswith("_")}
        return shown | {"model": asdict(self.model)}

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """As `Chip` says."""
        new = pairs = held = 0.0
        for tokens, cached in chunks:
            new += tokens
            pairs += tokens * (cached + 0.5 * tokens)
            held += cached + tokens
        return self._step_s(new, pairs, held) + self.t0_s

    def decode(self, batch: float, context: float) -> tuple[float, float, float]:
        """As `Chip` says; the line holds until memory and compute change places as the slower."""
        compute_s, compute_growth_s = self._compute_s(batch, context), self._pair_s * batch
        memory_s, memory_growth_s = self._memory_s(batch, context), self._kv_s * batch
        rest_s = self._link_s * batch + self.t0_s
        gap_s, closing_s = compute_s - memory_s, memory_growth_s - compute_growth_s
        if gap_s < 0:
            compute_s, compute_growth_s = memory_s, memory_growth_s
            gap_s, closing_s = -gap_s, -closing_s
        steps = floor(gap_s / closing_s) + 1 if closing_s > 0 else inf
        return compute_s + rest_s, compute_growth_s, steps

    def extend_s(self, batch: float, tokens: int, context: int) -> float:
        """As `Chip` says; the others are taken to have as much context."""
        others = (batch - 1) * context
        pairs = others + tokens * (context + 0.5 * tokens)
        more = tokens - 1
        longer_s = self._step_s(batch + more, pairs, batch * context + tokens)
        return longer_s - self._step_s(batch, others + context + 0.5, batch * context + 1)

    def _step_s(self, new: float, pairs: float, held: float) -> float:
        """A step of so many new tokens, without its fixed part."""
        return max(self._compute_s(new, pairs), self._memory_s(new, held)) + self._link_s * new

    def _compute_s(self, new: float, pairs: float) -> float:
        return self._token_s * new + self._pair_s * pairs

    def _memory_s(self, new: float, held: float) -> float:
        idle: float = self._idle_share**new
        return self._weights_s - self._experts_s * idle + self._kv_s * held


@dataclass(frozen=True)
class KvBytes:
    """Bytes of a KV cache: `per_token` tokens + `fixed` (the window state of hybrid models)."""

    per_token: float
    fixed: float = 0.0

    def __post_init__(self) -> None:
        number("model.kv.per_token", self.per_token, least=1e-3, most=1e12)
        number("model.kv.fixed", self.fixed, least=0, most=1e15)

    def of(self, tokens: int) -> float:
        """Bytes to move the cache of so many tokens."""
        return self.per_token * tokens + self.fixed

    def blocks(self, capacity_bytes: float, block_tokens: int) -> float:
        """How many blocks fit a cache of so many bytes."""
        return capacity_bytes / (self.per_token * block_tokens)
