"""Share of requests in seven bins of the prefix-hit rate, over time: what could hit, what did.

*Ideal* is what an infinite cache would have held, in the order of the trace; *served* is what the
system says its prefill found in its cache. Windows of time hold equal numbers of requests, so
that no share rests on a handful.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from numpy.typing import NDArray

from harness.metrics import (
    HIT_EDGES,
    HIT_LABELS,
    column,
    hit_bin,
    ideal_hit_rates,
    served_hit_rates,
    status_is,
)
from harness.record import OK
from harness.report import Figure
from harness.result import Run
from reports.canvas import FAINT, canvas
from reports.palette import HIT_COLOURS, labels
from reports.units import percent

_WINDOW_REQUESTS = 100
"""Fewest requests a window, where the run has as many: a share is then good to some 5 points."""
_MOST_WINDOWS = 60
_BINS = len(HIT_LABELS)
_READABLE_SHARE = 0.055
_DARK_BINS = 4

_COLUMNS = [
    "scheduled_s",
    "input_tokens",
    "ideal_hit_tokens",
    "served_input_tokens",
    "served_hit_tokens",
    "status",
]


@dataclass(frozen=True)
class Panel:
    """Hit rates of some requests over time, counted in windows and bins."""

    label: str
    measure: str
    """`ideal` or `served`."""
    edges_s: NDArray[np.float64]
    """(windows + 1,)"""
    counts: NDArray[np.int64]
    """Requests: (windows, bins)."""
    mean: float
    above_95: float

    @classmethod
    def of(
        cls,
        label: str,
        measure: str,
        scheduled_s: NDArray[np.float64],
        rates: NDArray[np.float64],
    ) -> Panel:
        """Count the requests whose rate is known (not NaN) and that were scheduled."""
        known = ~np.isnan(scheduled_s) & ~np.isnan(rates)
        order = np.argsort(scheduled_s[known], kind="stable")
        times_s, rates = scheduled_s[known][order], rates[known][order]
        windows = min(_MOST_WINDOWS, max(1, len(rates) // _WINDOW_REQUESTS)) if len(rates) else 0
        firsts = np.arange(windows) * len(rates) // max(windows, 1)
        edges_s = np.append(times_s[firsts], times_s[-1:])
        window = np.searchsorted(firsts, np.arange(len(rates)), side="right") - 1
        counts = np.bincount(window * _BINS + hit_bin(rates), minlength=windows * _BINS)
        return cls(
            label,
            measure,
            edges_s,
            counts.reshape(windows, _BINS),
            float(rates.mean()) if len(rates) else np.nan,
            float((rates > HIT_EDGES[2]).mean()) if len(rates) else np.nan,
        )


class HitRate:
    """Stacked areas: the ideal on top, below it each run that replayed the same trace."""

    def render(self, runs: Sequence[Run], out: Path) -> list[Figure]:
        """One figure a trace; none of a trace of which no request was scheduled."""
        names = dict(zip([run.path for run in runs], labels(runs), strict=True))
        by_trace = sorted(runs, key=_digest)
        figures = []
        for count, (_, group) in enumerate(itertools.groupby(by_trace, _digest), 1):
            panels = _panels(list(group), names)
            if not panels[0].counts.size:
                continue
            path = out / ("hitrate.png" if count == 1 else f"hitrate-{count}.png")
            with canvas(path, 7.5, 0.9 + 1.45 * len(panels)) as figure:
                _draw(figure, panels)
            title = "Prefix-hit rates over time"
            figures.append(Figure(path, title, _caption(panels), _numbers(panels)))
        return figures


def _digest(run: Run) -> str:
    return str(run.manifest["trace"]["digest"])


def _panels(runs: list[Run], names: dict[Path, str]) -> list[Panel]:
    panels: list[Panel] = []
    for run in runs:
        records = run.records(_COLUMNS)
        scheduled_s = column(records, "scheduled_s")
        label = names[run.path]
        if not panels:
            panels.append(Panel.of(label, "ideal", scheduled_s, ideal_hit_rates(records)))
        served = served_hit_rates(records)
        served[~status_is(records, OK)] = np.nan
        panels.append(Panel.of(label, "served", scheduled_s, served))
    return panels


def _draw(figure: Canvas, panels: list[Panel]) -> None:
    """A row a panel: over time on the left, the whole run in one column on the right."""
    grid = figure.subplots(
        len(panels), 2, squeeze=False, width_ratios=[7, 1], sharex="col", sharey=True
    )
    for (over_time, whole), panel in zip(grid, panels, strict=True):
        over_time.set_title(_title(panel), fontsize=10)
        over_time.set(ylim=(0, 1), ylabel="share")
        over_time.grid(visible=False)
        over_time.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        if panel.counts.size:
            _areas(over_time, panel)
            _column(whole, panel)
        else:
            words = "no served hits reported"
            over_time.text(0.5, 0.5, words, ha="center", transform=over_time.transAxes)
            whole.set_axis_off()
    last_s = max(panel.edges_s.max(initial=0) for panel in panels)
    grid[-1, 0].set_xlim(0, last_s or 1)
    grid[-1, 0].set_xlabel("scheduled time in the run, s")
    grid[-1, 0].xaxis.set_major_formatter("{x:,.0f}")
    grid[-1, 1].set_xticks([])
    handles, words = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles[::-1], words[::-1], loc="outside right upper", title="hit rate")


def _title(panel: Panel) -> str:
    what = "ideal, with an infinite cache" if panel.measure == "ideal" else f"{panel.label}, served"
    if not panel.counts.size:
        return what
    return f"{what}: mean {percent(panel.mean)}, {percent(panel.above_95)} above 95%"


def _areas(axes: Axes, panel: Panel) -> None:
    shares = panel.counts / panel.counts.sum(axis=1, keepdims=True)
    shares = np.vstack([shares, shares[-1:]])  # a step lasts until the next edge
    edges_s = panel.edges_s if np.ptp(panel.edges_s) else panel.edges_s + np.linspace(0, 1, 2)
    axes.stackplot(edges_s, shares.T, step="post", colors=HIT_COLOURS, labels=HIT_LABELS)


def _column(axes: Axes, panel: Panel) -> None:
    counts = panel.counts.sum(axis=0)
    shares = counts / counts.sum()
    bottoms = np.cumsum(shares) - shares
    axes.bar(np.zeros(_BINS), shares, 1, bottoms, color=HIT_COLOURS, edgecolor="white", lw=0.6)
    axes.set_xlim(-0.5, 0.5)
    axes.set_axis_off()
    for at, (share, bottom) in enumerate(zip(shares, bottoms, strict=True)):
        if share >= _READABLE_SHARE:
            colour = "white" if at < _DARK_BINS else "black"
            axes.text(
                0,
                bottom + share / 2,
                f"{share:.0%}",
                ha="center",
                va="center",
                fontsize=8,
                color=colour,
            )
    axes.set_title("whole run", fontsize=8, color=FAINT, loc="center")


def _caption(panels: list[Panel]) -> str:
    windows, requests = panels[0].counts.shape[0], int(panels[0].counts.sum())
    words = (
        "How many requests of each stretch of time found how much of their prompt in a cache; dark "
        "is what had to be computed and moved. Ideal: every block seen before is a hit, in the "
        f"order of the trace (drawn at {panels[0].label}'s scheduled times). Served: as the system "
        "itself reports, answered requests only. Bins hold their lower edge. "
        f"{windows} windows of about {requests // windows:,} requests each."
    )
    silent = [panel.label for panel in panels if not panel.counts.size]
    return f"{words} No served hits reported by: {', '.join(silent)}." if silent else words


def _numbers(panels: list[Panel]) -> pa.Table:
    """A row a window: how many requests in each bin."""
    windows = [len(panel.counts) for panel in panels]
    counts = np.concatenate([panel.counts for panel in panels])
    columns = {
        "run": np.repeat([panel.label for panel in panels], windows),
        "measure": np.repeat([panel.measure for panel in panels], windows),
        "window_start_s": np.concatenate([panel.edges_s[:-1] for panel in panels]),
        "window_end_s": np.concatenate([panel.edges_s[1:] for panel in panels]),
        "requests": counts.sum(axis=1),
    }
    columns |= {f"requests_hit_{label}": counts[:, at] for at, label in enumerate(HIT_LABELS)}
    return pa.table(columns)
