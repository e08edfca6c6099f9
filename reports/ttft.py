"""Time to first token, P50, P90 and P99, by system."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from matplotlib.axes import Axes

from harness.report import Figure
from harness.result import Run
from reports import palette

_QUANTILES = (50, 90, 99)
_WIDE = 20
"""A log axis from this ratio of the largest to the smallest bar."""


class Ttft:
    """Grouped bars: a group a percentile, a colour a system."""

    def render(self, runs: Sequence[Run], out: Path) -> list[Figure]:
        """One figure; none where no run has measured a request."""
        rows = [run.summary().to_pylist()[0] for run in runs]
        rows = [row for row in rows if row["measured"]]
        if not rows:
            return []
        made = palette.figure()
        axes = made.subplots()
        _draw(axes, rows)
        return [
            Figure(
                palette.save(made, out / "ttft.png"),
                "Time to first token",
                "From the time a request was due to its first token; exact, nearest rank, "
                "requests that failed as infinitely slow. "
                + " ".join(
                    f"{row['backend']}: {row['measured']:,} requests"
                    f"{'' if row['p99_supported'] else ', too few for a P99'}."
                    for row in rows
                ),
                _numbers(rows),
            )
        ]


def _numbers(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.table(
        {
            "system": [row["backend"] for row in rows],
            "requests measured": [row["measured"] for row in rows],
            **{f"TTFT P{q}, s": [row[f"ttft_p{q}_s"] for row in rows] for q in _QUANTILES},
            **{
                f"TTFT P{q} from the send, s": [row[f"ttft_sent_p{q}_s"] for row in rows]
                for q in _QUANTILES
            },
        }
    )


def _seconds(value: float) -> str:
    return f"{value:#.3g}" if value < 1000 else f"{value:,.0f}"  # noqa: PLR2004 - a thousand


def _draw(axes: Axes, rows: list[dict[str, Any]]) -> None:
    colours = palette.colours([row["backend"] for row in rows])
    finite = [
        row[f"ttft_p{q}_s"]
        for row in rows
        for q in _QUANTILES
        if math.isfinite(row[f"ttft_p{q}_s"])
    ]
    top, bottom = max(finite, default=1.0), min(finite, default=1.0)
    log = bottom > 0 and top / bottom >= _WIDE
    width = 0.8 / len(rows)
    for at, row in enumerate(rows):
        for group, q in enumerate(_QUANTILES):
            seconds = row[f"ttft_p{q}_s"]
            known = math.isfinite(seconds)
            supported = q == _QUANTILES[0] or row[f"p{q}_supported"]
            bar = axes.bar(
                group + (at - (len(rows) - 1) / 2) * width,
                seconds if known else top * 1.15,
                width * 0.94,
                color=colours[row["backend"]],
                edgecolor="black" if not known else "none",
                alpha=1.0 if supported else 0.45,
                hatch=None if known else "//",
                label=row["backend"] if group == 0 else None,
            )
            text = _seconds(seconds) if known else "failed"
            axes.bar_label(
                bar, [text if supported else f"{text}\nfew samples"], fontsize=8, padding=2
            )
    axes.set_xticks(range(len(_QUANTILES)), [f"P{q}" for q in _QUANTILES])
    axes.set_yscale("log" if log else "linear")
    axes.set_ylim(bottom * 0.5 if log else 0, top * (2 if log else 1.2))
    axes.set_ylabel("TTFT from the schedule, s" + (" (log scale)" if log else ""))
    axes.set_title("Time to first token by system")
    axes.legend(frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
