"""Numbers as a person reads them. What was not measured is a dash, never 0."""

from __future__ import annotations

import math

DASH = "—"


def seconds(value_s: float | None) -> str:
    """`850 ms`, `4.21 s`, `1,204 s`; `inf` where too many requests failed to have a value."""
    if value_s is None or math.isnan(value_s):
        return DASH
    if math.isinf(value_s):
        return "inf"
    if value_s == 0:
        return "0 s"
    if abs(value_s) < 0.9995:  # noqa: PLR2004 - from here on it would read "1,000 ms"
        return f"{_three_digits(value_s * 1e3)} ms"
    return f"{_three_digits(value_s)} s"


def number(value: float | None) -> str:
    """Three digits that matter, more before the point: `0.0123`, `4.21`, `1,204`."""
    if value is None or math.isnan(value):
        return DASH
    return "inf" if math.isinf(value) else _three_digits(value)


def percent(share: float | None) -> str:
    """A share of 1 as `90.1%`."""
    return DASH if share is None or math.isnan(share) else f"{share:.1%}"


def _three_digits(value: float) -> str:
    if value == 0:
        return "0"
    exponent = int(f"{value:.2e}".rpartition("e")[2])  # of what it rounds to: 0.9999 is 1.00
    return f"{value:,.{max(0, 2 - exponent)}f}"
