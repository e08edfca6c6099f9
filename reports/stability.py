"""Whether a system with a relay stays as it is: shares, hits and latency over time, run by run.

What a relay finishes by itself (P-RLD) is not sent, so the main decode may hold less of the
session's next prompt, whose transfer is then longer, and a relay likelier. Windows of time hold
equal numbers of requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from harness.metrics import column, honest, nearest_rank, served_hit_rates, status_is
from harness.record import OK
from harness.report import Figure
from harness.result import Run
from reports.canvas import FAINT, canvas, log_axis
from reports.palette import HIT_COLOURS, colours, labels
from reports.remarks import remarks
from reports.transfer import decode_hit_rates
from reports.units import percent, seconds

_WINDOW_REQUESTS = 100
"""Fewest requests a window, where the run has as many: a share is then good to some 5 points."""
_MOST_WINDOWS = 40
_LOG_ABOVE = 20.0
"""Largest over smallest median from which a linear axis would flatten the small ones."""
_PALE = 0.35
_AT_PREFILL, _AT_DECODE = HIT_COLOURS[0], HIT_COLOURS[4]

_COLUMNS = [
    "scheduled_s",
    "sent_s",
    "first_token_s",
    "served_input_tokens",
    "served_hit_tokens",
    "decode_hit_tokens",
    "relay_tokens",
    "handoff_s",
    "status",
]

_NUMBERS = [
    ("run", pa.string()),
    ("window_start_s", pa.float64()),
    ("window_end_s", pa.float64()),
    ("requests", pa.int64()),
    ("relayed_share", pa.float64()),
    ("finished_at_relay_share", pa.float64()),
    ("prefill_hit_mean", pa.float64()),
    ("decode_hit_mean", pa.float64()),
    ("ttft_p50_s", pa.float64()),
]


@dataclass(frozen=True)
class Stretch:
    """Some requests that were sent one after the other."""

    start_s: float
    end_s: float
    requests: int
    relayed: float
    """Share of the answered; so is the next. NaN where none was."""
    finished_at_relay: float
    prefill_hit: float
    """Mean hit rate of the answered, so is the next. NaN where it is not told."""
    decode_hit: float
    ttft_p50_s: float
    """From the scheduled time; a request that failed is infinitely slow."""

    @classmethod
    def of(cls, records: pa.Table, end_s: float) -> Stretch:
        """Of records in the order of their times, one at least, up to `end_s`."""
        answered = records.filter(pa.array(status_is(records, OK)))
        relayed = ~np.isnan(column(answered, "relay_tokens"))
        return cls(
            float(column(records, "scheduled_s")[0]),
            end_s,
            records.num_rows,
            _mean(relayed.astype(float)),
            _mean((relayed & np.isnan(column(answered, "handoff_s"))).astype(float)),
            _mean(served_hit_rates(answered)),
            _mean(decode_hit_rates(answered)),
            nearest_rank(honest(records, "scheduled_s", "first_token_s"), 0.5),
        )


@dataclass(frozen=True)
class Course:
    """A run over time."""

    label: str
    windows: Sequence[Stretch]
    thirds: Sequence[Stretch]
    """The first and the last; none of fewer than three requests."""

    @classmethod
    def of(cls, label: str, records: pa.Table) -> Course:
        """Of the records of `_COLUMNS` that were sent."""
        count = records.num_rows
        windows = _split(records, min(_MOST_WINDOWS, max(1, count // _WINDOW_REQUESTS)))
        thirds = _split(records, 3)[::2] if count >= 3 else []  # noqa: PLR2004 - a third is of three
        return cls(label, windows, thirds)


class Stability:
    """A column a run: share relayed, hit rates, median TTFT."""

    def render(self, runs: Sequence[Run], out: Path) -> list[Figure]:
        """One figure; none where no request was relayed."""
        named = dict(zip(labels(runs), runs, strict=True))
        sent = {name: _sent(run) for name, run in named.items()}
        courses = [
            Course.of(name, records)
            for name, records in sent.items()
            if not np.isnan(column(records, "relay_tokens")).all()
        ]
        if not courses:
            return []
        path = out / "stability.png"
        with canvas(path, max(7.5, 3.1 * len(courses) + 1.6), 5.6) as figure:
            _draw(figure, courses, colours(list(named)))
        caption = _caption(courses) + remarks(
            named, [course.label for course in courses], "a relayed request"
        )
        return [Figure(path, "With a relay, over time", caption, _numbers(courses))]


def _sent(run: Run) -> pa.Table:
    """The records of what was sent, by scheduled time."""
    records = run.records(_COLUMNS)
    records = records.filter(pa.array(~np.isnan(column(records, "sent_s"))))
    return records.take(np.argsort(column(records, "scheduled_s"), kind="stable"))


def _split(records: pa.Table, parts: int) -> list[Stretch]:
    """So many stretches of equal numbers of requests; each ends where the next begins."""
    times_s = column(records, "scheduled_s")
    firsts = np.arange(parts + 1) * len(times_s) // parts
    ends_s = [*times_s[firsts[1:-1]], times_s[-1]]
    return [
        Stretch.of(records.slice(first, past - first), float(end_s))
        for first, past, end_s in zip(firsts[:-1], firsts[1:], ends_s, strict=True)
    ]


def _mean(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def _draw(figure: Canvas, courses: list[Course], colour: Mapping[str, str]) -> None:
    grid = figure.subplots(3, len(courses), squeeze=False, sharex=True, sharey="row")
    for (shares, hits, ttft), course in zip(grid.T, courses, strict=True):
        tint = colour[course.label]
        _steps(shares, course, "relayed", color=tint, alpha=_PALE, fill=True)
        _steps(shares, course, "finished_at_relay", color=tint, fill=True)
        _steps(hits, course, "prefill_hit", color=_AT_PREFILL, lw=3, label="at prefill")
        _steps(hits, course, "decode_hit", color=_AT_DECODE, lw=1.4, label="at main decode")
        _steps(ttft, course, "ttft_p50_s", color=tint, lw=1.6)
        shares.set_title(course.label, fontsize=10)
        ttft.set_xlabel("scheduled time in the run, s")
        ttft.xaxis.set_major_formatter("{x:,.0f}")
    for axes, name in zip(grid[:, 0], ("share of requests", "mean hit rate"), strict=False):
        axes.set_ylabel(name)
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
    _ttft_scale(grid[2, 0], courses)
    keys = [
        Patch(color=FAINT, alpha=_PALE, label="relayed"),
        Patch(color=FAINT, label="and finished\nat the relay"),
    ]
    for axes, handles in ((grid[0, -1], keys), (grid[1, -1], None)):
        axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=9)


def _steps(axes: Axes, course: Course, name: str, **style: Any) -> None:
    """A step a window. What is not known, or infinite, is a gap."""
    values = np.array([getattr(each, name) for each in course.windows])
    edges_s = np.array([each.start_s for each in course.windows] + [course.windows[-1].end_s])
    if not np.ptp(edges_s):
        edges_s = edges_s + np.linspace(0, 1, len(edges_s))
    values[~np.isfinite(values)] = np.nan
    axes.stairs(values, edges_s, baseline=0 if style.get("fill") else None, **style)


def _ttft_scale(axes: Axes, courses: list[Course]) -> None:
    values_s = np.array([each.ttft_p50_s for course in courses for each in course.windows])
    values_s = values_s[np.isfinite(values_s) & (values_s > 0)]
    log = len(values_s) and values_s.max() / values_s.min() > _LOG_ABOVE
    axes.set_ylabel(f"TTFT P50, s ({'log' if log else 'linear'})")
    if log:
        log_axis(axes.yaxis)
        axes.set_ylim(values_s.min() / 1.3, values_s.max() * 1.3)
    elif len(values_s):
        axes.set_ylim(0, 1.1 * values_s.max())


def _caption(courses: list[Course]) -> str:
    words = (
        "Every step is a window of equal numbers of requests. Share relayed, and finished at the "
        "relay so that nothing was taken over by the main decode, of the answered; mean hit rate "
        "as prefill and main decode report it; median TTFT from the scheduled time, a failed "
        "request being infinitely slow. First third of the requests against the last:"
    )
    for course in courses:
        if not course.thirds:
            words += f" {course.label}: too few requests to compare."
            continue
        first, last = course.thirds
        pairs = {
            "relayed": (percent(first.relayed), percent(last.relayed)),
            "finished there": (percent(first.finished_at_relay), percent(last.finished_at_relay)),
            "hits at prefill": (percent(first.prefill_hit), percent(last.prefill_hit)),
            "at the main decode": (percent(first.decode_hit), percent(last.decode_hit)),
            "TTFT P50": (seconds(first.ttft_p50_s), seconds(last.ttft_p50_s)),
        }
        said = ", ".join(f"{name} {one} then {other}" for name, (one, other) in pairs.items())
        slowest_s = max(each.ttft_p50_s for each in course.windows)
        words += f" {course.label}: {said}; in the slowest window {seconds(slowest_s)}."
    if any(math.isinf(each.ttft_p50_s) for course in courses for each in course.windows):
        words += " A gap in the TTFT is infinite: most of the window's requests failed."
    return words


def _numbers(courses: list[Course]) -> pa.Table:
    """A row a run and window."""
    rows = [
        {
            "run": course.label,
            "window_start_s": each.start_s,
            "window_end_s": each.end_s,
            "requests": each.requests,
            "relayed_share": each.relayed,
            "finished_at_relay_share": each.finished_at_relay,
            "prefill_hit_mean": each.prefill_hit,
            "decode_hit_mean": each.decode_hit,
            "ttft_p50_s": each.ttft_p50_s,
        }
        for course in courses
        for each in course.windows
    ]
    return pa.table(
        {
            name: pa.array([row[name] for row in rows], kind, from_pandas=True)
            for name, kind in _NUMBERS
        }
    )
