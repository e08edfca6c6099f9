"""Checks of settings, so that each bad one is one message: its name, its value, what to give."""

from __future__ import annotations

from math import inf, isnan
from typing import Any

from harness.errors import ConfigError


def number(
    name: str, value: Any, *, least: float = -inf, most: float = inf, above: float = -inf
) -> None:
    """Raise `ConfigError` unless `value` is a number from `least` to `most`, above `above`."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and not isnan(value)
    if not good or not least <= value <= most or not (value > above or above == -inf):
        raise ConfigError(f"{name} is {value!r}: give a number, {_range(least, most, above)}")


def whole(name: str, value: Any, *, least: int, most: float = inf) -> None:
    """Raise `ConfigError` unless `value` is a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        end = " or more" if most == inf else f" to {most}"
        raise ConfigError(f"{name} is {value!r}: give a whole number, {least}{end}")


def _range(least: float, most: float, above: float) -> str:
    if above > -inf:
        return f"above {above:g}" + ("" if most == inf else f", at most {most:g}")
    return f"{least:g} or more" if most == inf else f"{least:g} to {most:g}"
