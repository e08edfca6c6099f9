"""What was drawn beside what was asked for: distribution functions, one over the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from harness.metrics import column
from harness.report import Figure
from reports.canvas import FAINT, canvas, log_axis
from reports.units import percent

_LINE = "#0072B2"
NAMES = {
    "input_tokens": "input tokens",
    "output_tokens": "output tokens",
    "new_tokens": "input tokens not hit",
    "ideal_hit_rate": "ideal hit rate",
    "turns": "turns a session",
    "delay_s": "delay before a turn, s",
    "start_gap_s": "time between session starts, s",
}
"""What the distributions of a trace are called."""
COLUMNS = 3


class Fit(Protocol):
    """What `traces.likeness.compare` gives."""

    @property
    def table(self) -> pa.Table:
        """`of`, `values`, `wanted_mean`, `mean`, `ks`, `distance`."""
        ...

    @property
    def quantiles(self) -> pa.Table:
        """`of`, `share`, `wanted`, `got`."""
        ...


class Likeness:
    """One figure: a small one for each distribution."""

    def render(self, fit: Fit, out: Path) -> list[Figure]:
        """A PNG and a PDF into `out`."""
        path = out / "likeness.png"
        rows = fit.table.to_pylist()
        with canvas(path, 9, 2.6 * ceil(len(rows) / COLUMNS)) as figure:
            grid = figure.subplots(ceil(len(rows) / COLUMNS), COLUMNS, squeeze=False).ravel()
            for axes, row in zip(grid, rows, strict=False):
                of = fit.quantiles.filter(pc.equal(fit.quantiles.column("of"), row["of"]))
                draw(axes, row["of"], column(of, "wanted"), column(of, "share"), FAINT, "wanted")
                draw(axes, row["of"], column(of, "got"), column(of, "share"), _LINE, "drawn", "--")
                axes.set_title(f"KS {row['ks']:.3f}", fontsize=9)
            for axes in grid[len(rows) :]:
                axes.set_axis_off()
            grid[0].legend(fontsize=8)
        worst = max(rows, key=lambda row: float(row["ks"]))
        caption = (
            "Share of requests (of sessions, for turns and starts) at or under a value: what was "
            "asked for, and what was drawn. A fit, of what was drawn first: "
            f"{_measured(rows)}. Farthest apart: "
            f"{NAMES.get(worst['of'], worst['of'])}, by {percent(worst['ks'])} of requests at one "
            f"value, and by {percent(worst['distance'])} of the mean value."
        )
        return [Figure(path, "Fit", caption, fit.table)]


def _measured(rows: Sequence[Mapping[str, Any]]) -> str:
    """On how much: a trace may be longer than what is looked at of it."""
    counted = {"turns": "sessions", "input_tokens": "requests"}
    found = {row["of"]: f"{row['values']:,}" for row in rows}
    return ", ".join(f"{found[of]} {what}" for of, what in counted.items() if of in found)


def draw(
    axes: Axes, of: str, values: np.ndarray, shares: np.ndarray, colour: str,
    label: str | None = None, style: str = "-",
) -> None:  # fmt: skip
    """A distribution function of what is named `of`, on a log scale where that is no share."""
    if of != "ideal_hit_rate":
        values = np.maximum(values, 0.01 if of.endswith("_s") else 1)
        log_axis(axes.xaxis)
    else:
        axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.plot(values, shares, style, color=colour, lw=1.6, label=label)
    axes.set_xlabel(NAMES.get(of, of), fontsize=9)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.tick_params(labelsize=8)
    axes.set_ylim(0, 1.02)
