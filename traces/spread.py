"""A distribution that a person can write down and a program can fit: by its quantiles."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from harness import settings
from harness.errors import ConfigError

Floats = NDArray[np.float64]

_NAME = re.compile(r"p(\d{1,2}(?:\.\d+)?)")
_SHARES = np.unique(
    [*np.arange(65) / 64, 0.001, 0.005, 0.01, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995]
)
"""Where a fit looks: evenly, and closer in the tails."""


@dataclass(frozen=True)
class Spread:
    """Values of 0 or more at shares from 0 to 1; between two, even on the scale of log(1 + x)."""

    shares: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, given: Mapping[str, float] | float, name: str) -> Self:
        """From {min: 1, p50: 239, p90: 1127, max: 20000}, or one number that is always drawn.

        `name` is what it is called in messages. Raises `ConfigError`.
        """
        if not isinstance(given, Mapping):
            given = {"min": given, "max": given}
        points = []
        for key, value in given.items():
            match = _NAME.fullmatch(str(key))
            if match is None and key not in {"min", "max"}:
                raise ConfigError(f"{name}.{key} is unknown: give min, max, and p50, p99.9, ...")
            settings.number(f"{name}.{key}", value, least=0, most=sys.float_info.max)
            share = float(match[1]) / 100 if match else float(key == "max")
            points.append((share, float(value)))
        points.sort()
        if {0.0, 1.0} - {share for share, _ in points}:
            raise ConfigError(f"{name} is {dict(given)}: give min and max too")
        shares, values = zip(*points, strict=True)
        if list(values) != sorted(values):
            raise ConfigError(f"{name} is {dict(given)}: a higher share cannot have a lower value")
        if len(set(shares)) < len(shares):
            raise ConfigError(f"{name} is {dict(given)}: a share is given twice")
        return cls(shares, values)

    @classmethod
    def fit(cls, sample: Floats) -> Self:
        """Of a sample of one value or more: nearest rank, at 74 shares where it has so many."""
        ranked = np.sort(np.asarray(sample, np.float64))
        shares = _SHARES if len(ranked) > len(_SHARES) else np.linspace(0, 1, max(2, len(ranked)))
        at = np.rint(shares * (len(ranked) - 1)).astype(np.int64)
        return cls(tuple(shares.tolist()), tuple(ranked[at].tolist()))

    def to_json(self) -> dict[str, float]:
        """What `of` takes."""
        names = [
            {0.0: "min", 1.0: "max"}.get(share, f"p{share * 100:.10g}") for share in self.shares
        ]
        return dict(zip(names, self.values, strict=True))

    def at(self, shares: Floats) -> Floats:
        """The values at these shares, of any shape: of uniform draws, draws of this."""
        logs = np.interp(shares, self.shares, np.log1p(self.values))
        values: Floats = np.expm1(logs)
        return values.clip(self.values[0], self.values[-1])
