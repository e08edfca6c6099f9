"""Share of requests in each bin of the prefix-hit rate, over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from numpy.typing import NDArray

from harness import metrics, record
from harness.report import Figure
from harness.result import Run
from reports import palette

_WINDOWS = 40
"""At most."""
_PER_WINDOW = 60
"""Requests in each window at the least: fewer make noise look like news."""

_COLUMNS = [
    "scheduled_s",
    "sent_s",
    "input_tokens",
    "ideal_hit_tokens",
    "served_input_tokens",
    "served_hit_tokens",
    "status",
]


class HitRate:
    """Stacked areas, a panel for the ideal hits and one for those that each system served."""

    def render(self, runs: Sequence[Run], out: Path) -> list[Figure]:
        """One figure; none where nothing was sent."""
        panels: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        for run in runs:
            records = run.records(_COLUMNS)
            scheduled_s = metrics.column(records, "scheduled_s")
            served = metrics.column(records, "served_hit_tokens") / metrics.column(
                records, "served_input_tokens"
            )
            known = metrics.status_is(records, record.OK) & ~np.isnan(served)
            sent = ~np.isnan(metrics.column(records, "sent_s"))
            ideal = metrics.column(records, "ideal_hit_tokens") / metrics.column(
                records, "input_tokens"
            )
            if sent.any() and not panels:
                panels["ideal: an infinite cache"] = scheduled_s[sent], ideal[sent]
            if known.any():
                panels[f"served by {run.name}"] = scheduled_s[known], served[known]
        if not panels:
            return []
        made = palette.figure(9.0, 2.2 + 2.0 * len(panels))
        grid = made.subplots(len(panels), 1, sharex=True, squeeze=False)
        for axes, (name, (times_s, rates)) in zip(grid[:, 0], panels.items(), strict=True):
            _draw(axes, name, times_s, rates)
        grid[-1, 0].set_xlabel("time a request was due, minutes into the run")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        made.legend(
            handles[::-1], labels[::-1], title="prefix-hit rate", frameon=False,
            loc="outside right upper",
        )  # fmt: skip
        return [
            Figure(
                palette.save(made, out / "hitrate.png"),
                "Prefix-hit rate over time",
                "Share of requests in each of seven bins of the hit rate (cached over all input "
                "tokens). Ideal: what an infinite cache would have held, in the trace's order. "
                "Served: what the system says its prefill found, answered requests only. "
                "Windows hold "
                "equal numbers of requests, so their widths differ.",
                _numbers(panels),
            )
        ]


def shares(rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """Share of requests in each of the seven bins: (7,), adding up to 1."""
    counts = np.bincount(metrics.hit_bin(rates), minlength=len(metrics.HIT_LABELS))
    return counts / max(1, len(rates))


def _numbers(panels: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]) -> pa.Table:
    table: dict[str, list[object]] = {
        "hit rate": list(panels),
        "requests": [len(rates) for _, rates in panels.values()],
        "mean, %": [round(100 * float(rates.mean()), 2) for _, rates in panels.values()],
    }
    for at, label in enumerate(metrics.HIT_LABELS):
        table[f"{label}, % of requests"] = [
            round(100 * float(shares(rates)[at]), 2) for _, rates in panels.values()
        ]
    return pa.table(table)


def _draw(axes: Axes, name: str, times_s: NDArray[np.float64], rates: NDArray[np.float64]) -> None:
    windows = int(np.clip(len(rates) // _PER_WINDOW, 1, _WINDOWS))
    # Windows of as many requests each, so that a thin hour is not a row of noise.
    edges = np.unique(np.quantile(times_s, np.linspace(0, 1, windows + 1)))
    edges = edges if len(edges) > 1 else np.array([edges[0], edges[0] + 1])
    windows = len(edges) - 1
    window = np.clip(np.searchsorted(edges, times_s, side="right") - 1, 0, windows - 1)
    counts = np.zeros((len(metrics.HIT_LABELS), windows))
    np.add.at(counts, (metrics.hit_bin(rates), window), 1)
    totals = counts.sum(axis=0)
    stacked = np.divide(counts, totals, out=np.zeros_like(counts), where=totals > 0)
    # A step holds its share over the whole window.
    stacked = np.concatenate((stacked, stacked[:, -1:]), axis=1)
    axes.stackplot(
        edges / 60, 100 * stacked, labels=metrics.HIT_LABELS, step="post",
        colors=palette.hit_scale(len(metrics.HIT_LABELS)),
    )  # fmt: skip
    axes.set_title(name, loc="left", fontsize=10)
    axes.set_ylabel("% of requests")
    axes.set_ylim(0, 100)
    axes.set_xlim(edges[0] / 60, edges[-1] / 60)
    axes.spines[["top", "right"]].set_visible(False)
