"""A distribution that a person can write down and a program can fit: by its quantiles."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
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
_DIGITS = 9
"""Of a share."""
_MEAN = 1e-4
"""What the mean between two shares may be off by, over the whole mean, before it is mended."""


@dataclass(frozen=True)
class Spread:
    """Values of 0 or more at shares from 0 to 1; between two, even on the scale of log(1 + x)."""

    shares: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def of(
        cls,
        given: Mapping[str, float] | float,
        name: str,
        *,
        least: float = 0,
        most: float = sys.float_info.max,
    ) -> Self:
        """From {min: 1, p50: 239, p90: 1127, max: 20000}, or one number that is always drawn.

        `name` is what it is called in messages; values are from `least`, 0 or more, to `most`.
        Raises `ConfigError`.
        """
        if not isinstance(given, Mapping):
            given = {"min": given, "max": given}
        points = []
        for key, value in given.items():
            match = _NAME.fullmatch(str(key))
            if match is None and key not in {"min", "max"}:
                raise ConfigError(f"{name}.{key} is unknown: give min, max, and p50, p99.9, ...")
            settings.number(f"{name}.{key}", value, least=least, most=most)
            share = float(f"{match[1]}e-2") if match else float(key == "max")
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
        """Of a sample of one value or more: its quantiles at 74 shares, all where it has fewer.

        Between two of them the scale of log(1 + x) makes another mean than the sample's; where
        that tells, one of the two is held for as long as mends it.
        """
        ranked = np.sort(np.asarray(sample, np.float64))
        count = len(ranked)
        shares = _SHARES
        if count <= len(_SHARES):
            shares = np.concatenate(([0.0], (np.arange(count) + 0.5) / count, [1.0]))
        shares = shares.round(_DIGITS)
        values = ranked[np.minimum((shares * count).astype(np.int64), count - 1)]
        scale = max(ranked[-1], 1.0)  # sums of the largest numbers there are stay finite
        sums = np.concatenate(([0.0], np.cumsum(ranked / scale)))
        widths = np.diff(shares)
        below = np.interp(shares * count, np.arange(count + 1), sums) / count
        wanted, found = np.diff(below) / widths * scale, _means(values)
        short = wanted > found
        held = np.where(short, values[1:], values[:-1])
        mends = np.abs(wanted - found) / scale * widths > _MEAN * sums[-1] / count
        part = (wanted - found)[mends] / (held - found)[mends]
        from_end = shares[1:][mends] - part * widths[mends]
        from_start = shares[:-1][mends] + part * widths[mends]
        at = np.where(short[mends], from_end, from_start).round(_DIGITS)
        knots, first = np.unique(np.concatenate((shares, at)), return_index=True)
        every = np.concatenate((values, held[mends]))[first]
        same = np.diff(every) == 0
        told = np.concatenate(([True], ~(same[:-1] & same[1:]), [True]))
        return cls(tuple(knots[told].tolist()), tuple(every[told].tolist()))

    def to_json(self) -> dict[str, float]:
        """What `of` takes."""
        names = [
            {0.0: "min", 1.0: "max"}.get(share, f"p{(Decimal(repr(share)) * 100).normalize():f}")
            for share in self.shares
        ]
        return dict(zip(names, self.values, strict=True))

    @property
    def mean(self) -> float:
        """Of all that can be drawn."""
        return float(np.dot(np.diff(self.shares), _means(np.array(self.values))))

    def at(self, shares: Floats) -> Floats:
        """The values at these shares, of any shape: of uniform draws, draws of this."""
        logs = np.interp(shares, self.shares, np.log1p(self.values))
        values: Floats = np.expm1(logs)
        return values.clip(self.values[0], self.values[-1])


def _means(values: Floats) -> Floats:
    """The mean between each of ascending values and the next, even on the scale of log(1 + x)."""
    low, high = values[:-1], values[1:]
    logs = np.diff(np.log1p(values))
    means: Floats = np.where(logs > 0, (high - low) / np.where(logs > 0, logs, 1.0) - 1, low)
    return means.clip(low, high)
