"""Handing a relay's tokens over: ids, which the main decode computes anew, against their KV cache.

How long it takes, and how many bytes cross for each token.
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
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from harness.metrics import (
    QUANTILES,
    SAMPLE_FLOOR,
    breakdown,
    column,
    measured,
    nearest_rank,
    status_is,
)
from harness.record import OK
from harness.report import Figure
from harness.result import Run
from reports.canvas import FAINT, INK, canvas, log_axis
from reports.palette import colours, labels
from reports.remarks import remarks
from reports.units import number, seconds

_WAYS = ("one-shot", "catch-up", "kv")
_LOG_ABOVE = 20.0
"""Largest over smallest latency from which a linear axis would flatten the small ones."""
_GOLDEN_TURN = 0.618034
_MARKS = {0.50: "o", 0.90: "^", 0.99: "s"}
_MARKS_BELOW = 0.36
"""How far beneath its dots a line has its percentiles."""

_COLUMNS = [
    "turn_index",
    "scheduled_s",
    "sent_s",
    "prefill_start_s",
    "prefill_end_s",
    "transfer_start_s",
    "transfer_end_s",
    "decode_start_s",
    "first_token_s",
    "last_token_s",
    "longest_gap_s",
    "relay_tokens",
    "handoff",
    "handoff_bytes",
    "handoff_start_s",
    "handoff_s",
    "status",
]

_NUMBERS = pa.schema(
    [
        ("source", pa.string()),
        ("handoff", pa.string()),
        ("handoffs", pa.int64()),
        ("tokens_mean", pa.float64()),
        ("bytes_per_token", pa.float64()),
        ("handoff_mean_s", pa.float64()),
        *((f"handoff_p{100 * q:.0f}_s", pa.float64()) for q in QUANTILES),
        ("handoff_max_s", pa.float64()),
        ("handoff_std_s", pa.float64()),
    ]
)


@dataclass(frozen=True)
class Published:
    """A row of a published table: what it took to hand over `tokens`. Null: not given."""

    name: str
    tokens: int
    payload_bytes: float
    mean_s: float
    max_s: float
    std_s: float | None = None
    copies_s: float | None = None
    """Of device copies, not in the others."""

    @property
    def words(self) -> str:
        """As in `kv: 100 tokens, mean 185 ms, max 513 ms`."""
        said = f"{self.name}: {self.tokens:,} tokens, mean {seconds(self.mean_s)}, "
        said += f"max {seconds(self.max_s)}"
        if self.std_s is not None:
            said += f", std {seconds(self.std_s)}"
        return said if self.copies_s is None else f"{said}, plus {seconds(self.copies_s)} of copies"


@dataclass(frozen=True)
class Group:
    """The handoffs of one run that went one way, of answered requests."""

    run: str
    way: str
    lasted_s: NDArray[np.float64]
    """From the first of the relay's tokens sent to the first from the main decode: (requests,)."""
    tokens: NDArray[np.float64]
    """The relay's: (requests,)."""
    token_bytes: NDArray[np.float64]
    """Bytes that crossed, for each of them: (requests,); NaN where not known."""

    @property
    def row(self) -> dict[str, Any]:
        """Its row of the numbers."""
        known = self.token_bytes[~np.isnan(self.token_bytes)]
        return {
            "source": self.run,
            "handoff": self.way,
            "handoffs": len(self.lasted_s),
            "tokens_mean": float(self.tokens.mean()),
            "bytes_per_token": float(known.mean()) if len(known) else None,
            "handoff_mean_s": float(self.lasted_s.mean()),
            **{f"handoff_p{100 * q:.0f}_s": nearest_rank(self.lasted_s, q) for q in QUANTILES},
            "handoff_max_s": float(self.lasted_s.max()),
            "handoff_std_s": float(self.lasted_s.std()),
        }


class Handoff:
    """A line a run and way: latencies on the left, bytes a token on the right."""

    def __init__(self, published: Mapping[str, Published]) -> None:
        self.published = list(published.values())

    def render(self, runs: Sequence[Run], out: Path) -> list[Figure]:
        """One figure; none where no relay handed anything over."""
        named = dict(zip(labels(runs), runs, strict=True))
        found, unfinished = {}, 0
        for name, run in named.items():
            found[name], without_end = _groups(name, run)
            unfinished += without_end
        groups = [group for each in found.values() for group in each]
        if not groups:
            return []
        path = out / "handoff.png"
        with canvas(path, 9.0, 1.5 + 0.55 * (len(groups) + len(self.published))) as figure:
            self._draw(figure, groups, colours(list(named)))
        caption = self._caption(groups, unfinished)
        drawn = [name for name, each in found.items() if each]
        caption += remarks(named, drawn, "a relay that handed over")
        rows = [group.row for group in groups] + [_row(each) for each in self.published]
        numbers = pa.Table.from_pylist(rows, _NUMBERS)
        return [Figure(path, "Handing over: ids or KV cache", caption, numbers)]

    def _draw(self, figure: Canvas, groups: list[Group], colour: Mapping[str, str]) -> None:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[2.4, 1])
        for place, group in enumerate(groups):
            _strip(left, place, group.lasted_s, colour[group.run])
            row = group.row
            for q, marker in reversed(_MARKS.items()):
                value_s = row[f"handoff_p{100 * q:.0f}_s"]
                tint = FAINT if len(group.lasted_s) < SAMPLE_FLOOR.get(q, 0) else INK
                left.plot(
                    [value_s],
                    [place + _MARKS_BELOW],
                    marker,
                    color=tint,
                    ms=6,
                    mec="white",
                    mew=0.5,
                )
            _bytes(right, place, row["bytes_per_token"], colour[group.run])
        for place, each in enumerate(self.published, len(groups)):
            left.plot([each.mean_s, each.max_s], [place, place], color=FAINT, lw=1, ls=":")
            left.plot([each.mean_s], [place], "D", color=FAINT, ms=6)
            left.plot([each.max_s], [place], ">", color=FAINT, ms=6)
            _bytes(right, place, each.payload_bytes / each.tokens, FAINT)
        words = [f"{g.run}\n{g.way}, n = {len(g.lasted_s):,}" for g in groups]
        words += [f"published:\n{each.name}, {each.tokens:,} tokens" for each in self.published]
        left.set_yticks(range(len(words)), words, fontsize=9)
        left.set_ylim(len(words) - 0.4, -0.6)
        for axes in (left, right):
            axes.grid(visible=True, axis="x")
            axes.grid(visible=False, axis="y")
            axes.tick_params(axis="y", length=0)
        _latency_scale(left, groups, self.published)
        log_axis(right.xaxis)
        right.set_xlabel("bytes a token (log scale)")
        right.margins(x=0.35)
        handles = [
            Line2D([], [], color=INK, marker=marker, ls="", ms=5, label=f"P{100 * q:.0f}")
            for q, marker in _MARKS.items()
        ]
        if self.published:
            handles += [
                Line2D([], [], color=FAINT, marker="D", ls="", label="published mean"),
                Line2D([], [], color=FAINT, marker=">", ls="", label="published maximum"),
            ]
        figure.legend(handles=handles, loc="outside upper left", ncols=5, fontsize=9)

    def _caption(self, groups: list[Group], unfinished: int) -> str:
        words = (
            "From the first of the relay's tokens sent to the first token of the main decode; a "
            "dot an answered request. Ids are taken in by an extended step (one-shot), or by "
            "batches while the relay goes on, so that the latency is no pause (catch-up); kv sends "
            "the KV cache of those tokens. Right: bytes sent for each of the relay's tokens."
        )
        for group in groups:
            row = group.row
            words += (
                f" {group.run}, {group.way}: mean {seconds(row['handoff_mean_s'])}, max "
                f"{seconds(row['handoff_max_s'])}, std {seconds(row['handoff_std_s'])}, "
                f"{number(row['tokens_mean'])} tokens on average."
            )
        if unfinished:
            words += f" {unfinished:,} answered before the handoff ended: not counted."
        if min(len(group.lasted_s) for group in groups) < SAMPLE_FLOOR[0.99]:
            words += (
                f" Grey marks: too few requests for a P90 ({SAMPLE_FLOOR[0.90]}) or P99 "
                f"({SAMPLE_FLOOR[0.99]}) to mean something."
            )
        if self.published:
            said = "; ".join(each.words for each in self.published)
            words += f" Published, not from these runs: {said}."
        return words


def _groups(name: str, run: Run) -> tuple[list[Group], int]:
    """(handoffs of a run by way, how many began and did not end) in the measured window."""
    records = run.records(_COLUMNS)
    inside = measured(records, run.window)
    answered = records.filter(pa.array(inside & status_is(records, OK)))
    ways = np.array(answered.column("handoff").to_pylist(), dtype=object)
    lasted_s, tokens = breakdown(answered)["handoff"], column(answered, "relay_tokens")
    with np.errstate(divide="ignore", invalid="ignore"):
        token_bytes = np.where(tokens > 0, column(answered, "handoff_bytes") / tokens, np.nan)
    known = ~np.isnan(lasted_s) & ~np.isnan(tokens)
    begun = ~np.isnan(column(answered, "handoff_start_s"))
    groups = []
    for way in (*_WAYS, *sorted({str(each) for each in ways if each} - set(_WAYS))):
        chosen = known & (ways == way)
        if chosen.any():
            groups.append(Group(name, way, lasted_s[chosen], tokens[chosen], token_bytes[chosen]))
    return groups, int((begun & np.isnan(lasted_s)).sum())


def _row(published: Published) -> dict[str, Any]:
    """Its row of the numbers: what it does not give is null."""
    return {
        "source": "published",
        "handoff": published.name,
        "tokens_mean": float(published.tokens),
        "bytes_per_token": published.payload_bytes / published.tokens,
        "handoff_mean_s": published.mean_s,
        "handoff_max_s": published.max_s,
        "handoff_std_s": published.std_s,
    }


def _strip(axes: Axes, place: int, lasted_s: NDArray[np.float64], colour: str) -> None:
    """Every handoff as a dot, spread evenly about its line."""
    spread = (np.arange(len(lasted_s)) * _GOLDEN_TURN) % 1 - 0.5
    axes.scatter(
        lasted_s, place + 0.5 * spread, s=7, color=colour, alpha=0.35, lw=0, rasterized=True
    )


def _bytes(axes: Axes, place: int, token_bytes: float | None, colour: str) -> None:
    if not token_bytes:
        return
    axes.plot([token_bytes], [place], "o", color=colour, ms=8)
    axes.annotate(
        f"{number(token_bytes)} B",
        (token_bytes, place),
        xytext=(0, 6),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=8,
    )


def _latency_scale(axes: Axes, groups: list[Group], published: list[Published]) -> None:
    said_s = [value_s for each in published for value_s in (each.mean_s, each.max_s)]
    values_s = np.concatenate([*(group.lasted_s for group in groups), said_s])
    smallest, largest = float(values_s.min()), float(values_s.max())
    log = smallest > 0 and largest / smallest > _LOG_ABOVE
    axes.set_xlabel(f"handoff, s ({'log' if log else 'linear'} scale)")
    if log:
        log_axis(axes.xaxis)
        axes.set_xlim(smallest / 1.2, largest * 1.2)
    elif math.isfinite(largest) and largest > 0:
        axes.set_xlim(0, 1.05 * largest)
