"""Transfer latency by prefix hit: why its P50 is low and its tail long.

What a decode site already holds of a prompt is not sent. So where most of an agent's requests hit
nearly all, most send little, and the few that hit little send most of the bytes: the tail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from harness.metrics import (
    HIT_LABELS,
    QUANTILES,
    SAMPLE_FLOOR,
    column,
    hit_bin,
    measured,
    nearest_rank,
    served_hit_rates,
    status_is,
)
from harness.record import OK
from harness.report import Figure
from harness.result import Run
from reports.canvas import FAINT, INK, canvas, log_axis
from reports.palette import HIT_COLOURS, labels
from reports.remarks import remarks
from reports.units import percent, seconds

_BINS = len(HIT_LABELS)
_LOWEST = 0.25
"""Which share of requests, those that hit least, the caption tells the bytes of."""
_GREY = "#B9C4CF"

_COLUMNS = [
    "turn_index",
    "scheduled_s",
    "sent_s",
    "served_input_tokens",
    "served_hit_tokens",
    "decode_hit_tokens",
    "transfer_start_s",
    "transfer_end_s",
    "transfer_bytes",
    "status",
]

_NUMBERS = [
    ("run", pa.string()),
    ("hits_at", pa.string()),
    ("hit_rate", pa.string()),
    ("requests", pa.int64()),
    ("request_share", pa.float64()),
    ("transfer_bytes", pa.float64()),
    ("byte_share", pa.float64()),
    *((f"transfer_p{100 * q:.0f}_s", pa.float64()) for q in QUANTILES),
    *((f"p{100 * q:.0f}_supported", pa.bool_()) for q in SAMPLE_FLOOR),
]


@dataclass(frozen=True)
class Transfers:
    """The transfers of a run's answered requests, from prefill to decode."""

    label: str
    side: str
    """Whose hits `rates` are: `decode`, or `prefill` where the decode side held nothing."""
    rates: NDArray[np.float64]
    """Share of the prompt that was a hit: (requests,)."""
    lasted_s: NDArray[np.float64]
    """(requests,)"""
    sent_bytes: NDArray[np.float64]
    """(requests,); NaN where not known."""
    unfinished: int
    """Requests whose answer was whole before their transfer: in none of the above."""

    @classmethod
    def of(cls, label: str, run: Run) -> Transfers:
        """Those of the measured window. Raises `ResultError` where records cannot be read."""
        records = run.records(_COLUMNS)
        inside = measured(records, run.window)
        answered = records.filter(pa.array(inside & status_is(records, OK)))
        at_decode = decode_hit_rates(answered)
        side = "decode" if np.nansum(at_decode) > 0 else "prefill"
        rates = at_decode if side == "decode" else served_hit_rates(answered)
        lasted_s = column(answered, "transfer_end_s") - column(answered, "transfer_start_s")
        sent_bytes = column(answered, "transfer_bytes")
        known = ~np.isnan(lasted_s) & ~np.isnan(rates)
        unfinished = int((np.isnan(lasted_s) & ~np.isnan(sent_bytes)).sum())
        return cls(label, side, rates[known], lasted_s[known], sent_bytes[known], unfinished)

    def percentile_s(self, q: float, at: int | None = None) -> float:
        """Of the bin `at`, or of all: nearest rank, s. NaN of nothing."""
        chosen = slice(None) if at is None else hit_bin(self.rates) == at
        return nearest_rank(self.lasted_s[chosen], q)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Requests a bin: (bins,)."""
        return np.bincount(hit_bin(self.rates), minlength=_BINS)

    @property
    def bin_bytes(self) -> NDArray[np.float64]:
        """Bytes a bin, of those known: (bins,)."""
        sent = np.bincount(hit_bin(self.rates), np.nan_to_num(self.sent_bytes), _BINS)
        return sent.astype(np.float64)

    @property
    def lowest_byte_share(self) -> float:
        """What share of the bytes the quarter of requests that hit least sent. NaN of no bytes."""
        sent_bytes = np.nan_to_num(self.sent_bytes[np.argsort(self.rates, kind="stable")])
        count = math.ceil(_LOWEST * len(sent_bytes))
        return _over(sent_bytes[:count].sum(), sent_bytes.sum())


class Transfer:
    """A column a run: latency by hit rate above, shares of requests and of bytes beneath."""

    def render(self, runs: Sequence[Run], out: Path) -> list[Figure]:
        """One figure; none where no run tells transfer times and hits."""
        named = dict(zip(labels(runs), runs, strict=True))
        every = [Transfers.of(name, run) for name, run in named.items()]
        panels = [each for each in every if len(each.rates)]
        if not panels:
            return []
        path = out / "transfer.png"
        with canvas(path, max(7.5, 3.0 * len(panels) + 0.8), 5.2) as figure:
            _draw(figure, panels)
        caption = _caption(panels)
        caption += remarks(named, [each.label for each in panels], "transfer times and hits")
        return [Figure(path, "Transfer latency by prefix hit", caption, _numbers(panels))]


def decode_hit_rates(records: pa.Table) -> NDArray[np.float64]:
    """What share of each prompt the decode side held: (rows,). NaN: it does not say."""
    return column(records, "decode_hit_tokens") / column(records, "served_input_tokens")


def _over(part: float, whole: float) -> float:
    return float(part / whole) if whole else math.nan


def _draw(figure: Canvas, panels: list[Transfers]) -> None:
    grid = figure.subplots(
        2, len(panels), squeeze=False, sharex="col", sharey="row", height_ratios=[2, 1]
    )
    for (upper, lower), panel in zip(grid.T, panels, strict=True):
        _latencies(upper, panel)
        _shares(lower, panel)
        lower.set_xlabel(f"hit rate at {panel.side}")
    grid[0, 0].set_ylabel("transfer, s (log scale)")
    grid[1, 0].set_ylabel("share")
    _limits(grid[0, 0], panels)
    handles = [
        Patch(facecolor="white", edgecolor=INK, label="P50 to P90"),
        Line2D([], [], color=INK, marker="_", label="P99"),
        Line2D([], [], color=INK, ls=":", label="n too small"),
        Line2D([], [], color=FAINT, lw=0.9, ls="--", label="P50, P99 of all"),
        Patch(color=_GREY, label="requests"),
        Patch(color=INK, label="bytes"),
    ]
    figure.legend(
        handles=handles, loc="outside upper left", ncols=6, fontsize=8.5, columnspacing=1.4
    )


def _latencies(axes: Axes, panel: Transfers) -> None:
    """A box from P50 to P90 a bin, a whisker to P99; P50 and P99 of all as lines across."""
    for at, count in enumerate(panel.counts):
        if not count:
            continue
        p50_s, p90_s, p99_s = (panel.percentile_s(q, at) for q in QUANTILES)
        floors = (SAMPLE_FLOOR[0.90], SAMPLE_FLOOR[0.99])
        box, whisker = ("-" if count >= floor else ":" for floor in floors)
        axes.plot([at, at], [p90_s, p99_s], color=INK, lw=1, ls=whisker)
        axes.plot([at], [p99_s], color=INK, marker="_", ms=9, ls="")
        axes.bar(
            at, p90_s - p50_s, 0.62, p50_s, color=HIT_COLOURS[at], edgecolor=INK, lw=0.8, ls=box
        )
        axes.plot([at - 0.31, at + 0.31], [p50_s, p50_s], color=INK, lw=2.2)
    p50_s, p99_s = panel.percentile_s(0.50), panel.percentile_s(0.99)
    for value_s in (p50_s, p99_s):
        axes.axhline(value_s, color=FAINT, lw=0.9, ls="--", zorder=0)
    axes.set_title(f"{panel.label}\nP50 {seconds(p50_s)}, P99 {seconds(p99_s)}", fontsize=10)


def _limits(axes: Axes, panels: list[Transfers]) -> None:
    """A log scale that holds every mark, with room below and above."""
    marks_s = np.array([panel.percentile_s(q, at) for panel in panels for q in QUANTILES
                        for at in (*range(_BINS), None)])  # fmt: skip
    marks_s = marks_s[marks_s > 0]
    if not len(marks_s):
        return
    log_axis(axes.yaxis)
    axes.set_ylim(marks_s.min() / 1.2, marks_s.max() * 1.2)


def _shares(axes: Axes, panel: Transfers) -> None:
    """Two bars a bin, each with its share written above it."""
    for offset, values, colour in (
        (-0.2, panel.counts, _GREY),
        (0.2, panel.bin_bytes, INK),
    ):
        shares = np.array([_over(value, values.sum()) for value in values])
        bars = axes.bar(np.arange(_BINS) + offset, np.nan_to_num(shares), 0.4, color=colour)
        words = [f"{100 * share:.0f}" if share > 0 else "" for share in shares]
        axes.bar_label(bars, words, fontsize=7, padding=1)
    axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
    axes.set_ylim(0, 1.12)
    turned: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(_BINS), HIT_LABELS, fontsize=8, **turned)


def _caption(panels: list[Transfers]) -> str:
    words = (
        "How long the KV cache took from prefill to decode, by how much of the prompt was a hit: "
        "at the decode side, which holds what is not sent. Beneath: which share of the requests "
        "is in a bin, and which share of the bytes sent, in percent. Answered requests whose "
        "transfer ended; exact nearest-rank percentiles."
    )
    if bare := [panel.label for panel in panels if panel.side == "prefill"]:
        words += (
            f" Nothing was held at the decode side of {', '.join(bare)}: there the bins are of "
            "hits at prefill."
        )
    for panel in panels:
        words += (
            f" {panel.label}: P50 {seconds(panel.percentile_s(0.50))}, P99 "
            f"{seconds(panel.percentile_s(0.99))} of {len(panel.rates):,} transfers; the quarter "
            f"of requests that hit least carries {percent(panel.lowest_byte_share)} of the bytes."
        )
        if panel.unfinished:
            words += f" {panel.unfinished:,} not over when the answer was whole: not counted."
    if min(min(panel.counts[panel.counts > 0]) for panel in panels) < SAMPLE_FLOOR[0.99]:
        words += (
            f" Dotted: fewer requests in the bin than its P90 ({SAMPLE_FLOOR[0.90]}) or P99 "
            f"({SAMPLE_FLOOR[0.99]}) needs to mean something."
        )
    return words


def _numbers(panels: list[Transfers]) -> pa.Table:
    """A row a run and bin, and one of all bins."""
    rows = []
    for panel in panels:
        counts, sent = panel.counts, panel.bin_bytes
        for at in (*range(_BINS), None):
            chosen = slice(None) if at is None else slice(at, at + 1)
            requests, size_bytes = int(counts[chosen].sum()), float(sent[chosen].sum())
            row = {
                "run": panel.label,
                "hits_at": panel.side,
                "hit_rate": "all" if at is None else HIT_LABELS[at],
                "requests": requests,
                "request_share": _over(requests, counts.sum()),
                "transfer_bytes": size_bytes,
                "byte_share": _over(size_bytes, sent.sum()),
            }
            row |= {f"transfer_p{100 * q:.0f}_s": panel.percentile_s(q, at) for q in QUANTILES}
            row |= {
                f"p{100 * q:.0f}_supported": requests >= floor for q, floor in SAMPLE_FLOOR.items()
            }
            rows.append(row)
    return pa.table(
        {
            name: pa.array([row[name] for row in rows], kind, from_pandas=True)
            for name, kind in _NUMBERS
        }
    )
