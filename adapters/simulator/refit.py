"""`relaybench refit`: the coefficients of a model on a chip, from measured kernels.

The package `aiconfigurator` (NVIDIA, Apache-2.0; needs no GPU) composes tables of measured kernels
into the time of a whole step. Here a grid of such steps is fitted by least squares in relative
error, and the fit is checked on the half of the grid that it has not seen. Only the coefficients
are kept, with their provenance.

Look at the errors before you trust a fit: some of its tables are far off (SGLang's decode of latent
attention on long contexts; small fp8 products with vLLM, most of all on Blackwell).
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import orjson

from adapters.simulator.costs import Fitted
from harness.errors import ConfigError, InstallError, ResultError
from harness.settings import whole

_DIGITS = 4
"""Of a coefficient: more than its error leaves meaningful."""
_POINTS = 4
"""On each axis, so that half a grid still tells the terms apart."""
_PREFILL = ("t0_s", "a_s", "b_s")
_DECODE = ("d0_s", "d1_s", "d2_s", "d3_s")


class Kernels(Protocol):
    """Times of whole steps of one instance, in s."""

    def prefill_s(self, new: int, cached: int) -> float:
        """A step of one prompt: `new` tokens on `cached`."""
        ...

    def decode_s(self, batch: int, context: int) -> float:
        """A step of `batch` sequences of `context` cached tokens each."""
        ...


class Sample(NamedTuple):
    """A step of the grid: (new, cached) tokens in prefill, (batch, context) in decode."""

    at: tuple[int, int]
    seconds: float
    held_out: bool
    """Every other point, as the black squares of a chessboard."""


Steps = Callable[[int, int], float]


def sample(seconds: Steps, rows: Sequence[int], columns: Sequence[int], most: int) -> list[Sample]:
    """The times at a grid's points, less those whose product is above `most`."""
    return [
        Sample((row, column), seconds(row, column), (i + j) % 2 == 1)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
        if row * column <= most
    ]


def fit(prefill: Sequence[Sample], decode: Sequence[Sample], cards: int) -> dict[str, Any]:
    """The coefficients of `Fitted` with the least squares of relative errors over these samples."""
    return {
        "cards": cards,
        "prefill": _least(prefill, _PREFILL, lambda n, p: (1, n, n * (p + 0.5 * n))),
        "decode": _least(decode, _DECODE, lambda b, c: (1, b, b * c, sqrt(b))),
    }


def _least(
    samples: Sequence[Sample],
    names: Sequence[str],
    terms: Callable[[int, int], tuple[float, ...]],
) -> dict[str, float]:
    rows = np.array([terms(*each.at) for each in samples])
    rows /= np.array([[each.seconds] for each in samples])
    found = np.linalg.lstsq(rows, np.ones(len(rows)))[0]
    return {name: float(f"{value:.{_DIGITS}g}") for name, value in zip(names, found, strict=True)}


def errors(chip: Fitted, prefill: Sequence[Sample], decode: Sequence[Sample]) -> dict[str, Any]:
    """How far the chip's times are off these: mean and largest absolute relative error."""
    of_prefill = [chip.prefill_s([each.at]) / each.seconds - 1 for each in prefill]
    of_decode = [
        chip.decode(each.at[0], each.at[0] * each.at[1])[0] / each.seconds - 1 for each in decode
    ]
    return {"prefill": _spread(of_prefill), "decode": _spread(of_decode)}


def _spread(off: Sequence[float]) -> dict[str, float]:
    size = np.abs(off)
    return {"mean": round(float(size.mean()), 4), "worst": round(float(size.max()), 4)}


def _half(samples: Sequence[Sample], held_out: bool) -> list[Sample]:
    return [each for each in samples if each.held_out is held_out]


class Measured:
    """The kernels that `aiconfigurator` has for a model on a system with a backend.

    Raises `InstallError` without the package, `ConfigError` for what it does not have.
    """

    def __init__(self, model: str, system: str, backend: str, tp: int, ep: int) -> None:
        try:
            engine = importlib.import_module("aiconfigurator_core.sdk.engine")
            tables = importlib.import_module("aiconfigurator_core.sdk.perf_database")
        except ImportError as error:
            raise InstallError(
                "aiconfigurator, which has the kernels, is not installed: "
                "pip install 'relaybench[fit]'"
            ) from error
        has = tables.get_supported_databases()
        if backend not in has.get(system, ()):
            choices = "; ".join(f"{name}: {', '.join(sorted(has[name]))}" for name in sorted(has))
            raise ConfigError(f"aiconfigurator has no {backend} on {system}. It has {choices}")
        self.package = importlib.metadata.version("aiconfigurator")
        self.backend_version = str(tables.resolve_query_version(system, backend, "current"))
        self.unmeasured: set[str] = set()
        """How those of its times came about that are not all measured."""
        try:
            self._steps = engine.EngineHandle.compile(
                model, system, backend, tp_size=tp, moe_tp_size=tp // ep, moe_ep_size=ep
            )
        except Exception as error:
            raise ConfigError(f"aiconfigurator has no {model} on {system}: {error}") from error

    def prefill_s(self, new: int, cached: int) -> float:
        """As `Kernels` says."""
        return self._time(self._steps.predict_prefill_latency, 1, cached + new, cached)

    def decode_s(self, batch: int, context: int) -> float:
        """As `Kernels` says."""
        return self._time(self._steps.predict_decode_latency, batch, context)

    def _time(self, latency_ms: Callable[..., float], *step: int) -> float:
        try:
            seconds = latency_ms(*step) / 1e3
        except Exception as error:
            raise ConfigError(f"aiconfigurator cannot tell {step}: {error}") from error
        if tier := self._steps.last_provenance():
            self.unmeasured.add(tier)
        return seconds


class Refit:
    """The settings of one fit; `model`, `system` and `backend` as `aiconfigurator` names them.

    `tp`: cards in tensor parallel; `ep`: those of them in expert parallel. The grids hold every
    combination, decode less those with above `most_tokens` of context in sum. `out`: a new file.
    """

    def __init__(
        self,
        model: str,
        system: str,
        backend: str,
        tp: int,
        ep: int,
        out: str,
        new: Sequence[int],
        cached: Sequence[int],
        batch: Sequence[int],
        context: Sequence[int],
        most_tokens: int,
    ) -> None:
        for name, value in {"model": model, "system": system, "backend": backend}.items():
            if not value or value != str(value):
                raise ConfigError(f"refit.{name} is {value!r}: give a name")
        if not str(out).endswith(".json"):
            raise ConfigError(f"refit.out is {out!r}: name a new .json file")
        whole("refit.tp", tp, least=1)
        whole("refit.ep", ep, least=1)
        if tp % ep:
            raise ConfigError(f"refit.ep is {ep}: give a divisor of tp, {tp}")
        axes = {
            "new": (new, 1),
            "cached": (cached, 0),
            "batch": (batch, 1),
            "context": (context, 1),
        }
        for name, (values, least) in axes.items():
            if not isinstance(values, list) or len(values) < _POINTS:
                raise ConfigError(f"refit.{name} is {values!r}: give {_POINTS} numbers or more")
            for value in values:
                whole(f"refit.{name}", value, least=least)
        whole("refit.most_tokens", most_tokens, least=1)
        self.model, self.system, self.backend = model, system, backend
        self.tp, self.ep = tp, ep
        self.out = Path(out)
        self.new, self.cached, self.batch, self.context = new, cached, batch, context
        self.most_tokens = most_tokens

    def run(self, say: Callable[[str], None]) -> None:
        """Sample, fit, say how good the fit is, and write it."""
        if self.out.exists():
            raise ConfigError(f"{self.out} exists, and is never overwritten. Choose another (out)")
        kernels = Measured(self.model, self.system, self.backend, self.tp, self.ep)
        found = self.fitted(kernels)
        found["source"] = (
            f"aiconfigurator {kernels.package}: {self.model} on {self.tp} {self.system}, "
            f"{self.backend} {kernels.backend_version}, tp {self.tp}, ep {self.ep}"
        )
        found["date"] = f"{datetime.now(UTC):%Y-%m-%d}"
        found["unmeasured"] = sorted(kernels.unmeasured)
        self._say(found, say)
        try:
            self.out.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))
        except OSError as error:
            raise ResultError(f"{self.out} cannot be written: {error.strerror}") from error
        say(f"Coefficients: {self.out}")

    def fitted(self, kernels: Kernels) -> dict[str, Any]:
        """Coefficients, their errors on all of the grid and on the half kept out, and the grid."""
        new, cached, batch, context = self.new, self.cached, self.batch, self.context
        prefill = sample(kernels.prefill_s, new, cached, max(new) * max(cached))
        decode = sample(kernels.decode_s, batch, context, self.most_tokens)
        found = fit(prefill, decode, self.tp)
        half = Fitted(fit(_half(prefill, False), _half(decode, False), self.tp))
        return found | {
            "errors": errors(Fitted(found), prefill, decode),
            "errors_held_out": errors(half, _half(prefill, True), _half(decode, True)),
            "grid": {"new": new, "cached": cached, "batch": batch, "context": context}
            | {"most_tokens": self.most_tokens},
        }

    def _say(self, found: Mapping[str, Any], say: Callable[[str], None]) -> None:
        say(f"{found['source']}")
        for part in ("prefill", "decode"):
            here, unseen = found["errors"][part], found["errors_held_out"][part]
            terms = "  ".join(f"{name} {value:g}" for name, value in found[part].items())
            say(f"{part:<8}{terms}")
            say(
                f"{'':<8}off by {here['mean']:.1%} in the mean, {here['worst']:.1%} at worst; "
                f"on the half not fitted {unseen['mean']:.1%} and {unseen['worst']:.1%}"
            )
        if found["unmeasured"]:
            say(f"warning: not all of it is measured: {', '.join(found['unmeasured'])}")
