"""Time to first token, P50, P90 and P99, of every run side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import seaborn as sns
from matplotlib.axes import Axes
from numpy.typing import NDArray

from harness.metrics import SAMPLE_FLOOR
from harness.report import Figure
from harness.result import Run
from reports.canvas import FAINT, canvas, log_axis
from reports.palette import colours, labels
from reports.units import seconds

_PERCENTILES = ("p50", "p90", "p99")
_LOG_ABOVE = 20.0
"""Largest over smallest bar from which a linear axis would flatten the small ones."""

_COLUMNS = [
    ("measured", pa.int64()),
    *((f"ttft_{p}_s", pa.float64()) for p in _PERCENTILES),
    *((f"ttft_sent_{p}_s", pa.float64()) for p in _PERCENTILES),
    ("p90_supported", pa.bool_()),
    ("p99_supported", pa.bool_()),
]
"""Of the summary; `ttft` counts from the scheduled time, `ttft_sent` from the send."""


class Ttft:
    """Grouped bars: a group a percentile, a colour a run."""

    def render(self, runs: Sequence[Run], out: Path) -> list[Figure]:
        """One figure; none where no run has a measured request."""
        names = labels(runs)
        rows = [run.summary().to_pylist()[0] for run in runs]
        if not any(row["measured"] for row in rows):
            return []
        path = out / "ttft.png"
        with canvas(path, max(7.5, 1.9 * len(runs) + 1.0), 4.2) as figure:
            _draw(figure.subplots(), names, rows)
        numbers = {"run": pa.array(names, pa.string())}
        numbers |= {key: pa.array([row[key] for row in rows], kind) for key, kind in _COLUMNS}
        return [Figure(path, "Time to first token", _caption(names, rows), pa.table(numbers))]


def _draw(axes: Axes, names: list[str], rows: list[dict[str, Any]]) -> None:
    values = np.array(
        [[_value(row[f"ttft_{p}_s"]) for p in _PERCENTILES] for row in rows], dtype=float
    )
    top, scale = _limits(axes, values)
    drawn = np.where(np.isinf(values), top, np.nan_to_num(values))
    bars = pd.DataFrame(
        {
            "percentile": [p.upper() for p in _PERCENTILES] * len(names),
            "run": np.repeat(names, len(_PERCENTILES)),
            "ttft_s": drawn.ravel(),
        }
    )
    sns.barplot(
        bars,
        x="percentile",
        y="ttft_s",
        hue="run",
        hue_order=names,
        palette=colours(names),
        saturation=1,
        width=0.86,
        errorbar=None,
        ax=axes,
    )
    for container, heights, row in zip(axes.containers, values, rows, strict=True):
        for patch, value, p in zip(container, heights, _PERCENTILES, strict=True):
            _write_on(axes, patch, value, supported=row.get(f"{p}_supported", True))
    axes.set(xlabel="", ylabel=f"TTFT from the scheduled time, s ({scale})")
    axes.legend(title=None, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2)


def _value(value_s: float | None) -> float:
    return math.nan if value_s is None else value_s


def _limits(axes: Axes, values: NDArray[np.float64]) -> tuple[float, str]:
    """Set the y axis to suit: (its top, its name). An infinite bar reaches the top."""
    finite = values[np.isfinite(values)]
    largest = float(finite.max(initial=0.0)) or 1.0
    smallest = float(finite.min(initial=largest))
    if smallest > 0 and largest / smallest > _LOG_ABOVE:
        top = largest * (largest / smallest) ** 0.25
        log_axis(axes.yaxis)
        axes.set_ylim(10 ** math.floor(math.log10(smallest) - 0.1), top)
        return top, "log scale"
    top = 1.22 * largest
    axes.set_ylim(0, top)
    return top, "linear scale"


def _write_on(axes: Axes, patch: Any, value_s: float, *, supported: bool) -> None:
    """The bar's value above it, or inside its top where it is infinite."""
    words = "no request" if math.isnan(value_s) else seconds(value_s)
    if not supported and not math.isnan(value_s):
        words += "\nn too small"
    infinite = math.isinf(value_s)
    if infinite:
        patch.set_hatch("///")
        patch.set_alpha(0.55)
    height = 0.0 if math.isnan(value_s) else patch.get_height()
    axes.annotate(
        words,
        (patch.get_x() + patch.get_width() / 2, max(height, axes.get_ylim()[0])),
        xytext=(0, -4 if infinite else 3),
        textcoords="offset points",
        ha="center",
        va="top" if infinite else "bottom",
        fontsize=8,
        linespacing=1.1,
        color=None if supported else FAINT,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0} if infinite else None,
    )


def _caption(names: list[str], rows: list[dict[str, Any]]) -> str:
    counts = ", ".join(f"{name} {row['measured']:,}" for name, row in zip(names, rows, strict=True))
    words = (
        "From the time a request was due to its first token, so waiting to be sent counts. Exact "
        "nearest-rank percentiles; a request that failed counts as infinitely slow. "
        f"Requests measured: {counts}."
    )
    if any(math.isinf(_value(row[f"ttft_{p}_s"])) for row in rows for p in _PERCENTILES):
        words += " A hatched bar to the top is infinite: more requests failed than it leaves out."
    if not all(row["p99_supported"] for row in rows):
        words += (
            f" 'n too small': a P90 needs {SAMPLE_FLOOR[0.90]} requests and a P99 "
            f"{SAMPLE_FLOOR[0.99]} to mean something; the figure is given and is not supported."
        )
    return words
