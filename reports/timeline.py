"""One request that hits little, as each run served it, part by part on one time axis.

Naive, it decodes only when its whole KV cache has crossed; with a relay it decodes meanwhile.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from numpy.typing import NDArray

from harness.metrics import HIT_EDGES, column, ideal_hit_rates, nearest_rank, status_is
from harness.record import OK
from harness.report import Figure
from harness.result import Run
from reports.canvas import FAINT, INK, canvas
from reports.palette import labels
from reports.remarks import remarks
from reports.units import DASH, percent, seconds

_PARTS = {
    "queue": "#B9C4CF",
    "prefill": "#0072B2",
    "transfer": "#D55E00",
    "relay decode": "#009E73",
    "handoff": "#CC79A7",
    "main decode": "#E69F00",
}
"""The rows, in the order in which they begin, and their colours."""
_DECODES = ("relay decode", "main decode")
_RELAY_PARTS = ("relay decode", "handoff")
_LOW_HIT = HIT_EDGES[1]
_CUT_ABOVE = 2.5
"""How many times longer than all that is compared decoding may take before the axis is cut."""
_INSIDE_FROM = 0.8
"""A bar that ends beyond this share of the axis has its words within."""

_COLUMNS = [
    "turn",
    "session",
    "turn_index",
    "input_tokens",
    "ideal_hit_tokens",
    "scheduled_s",
    "sent_s",
    "prefill_start_s",
    "prefill_end_s",
    "transfer_start_s",
    "transfer_end_s",
    "transfer_bytes",
    "decode_start_s",
    "first_token_s",
    "last_token_s",
    "relay_tokens",
    "handoff_start_s",
    "handoff_s",
    "status",
]


@dataclass(frozen=True)
class Bar:
    """A part of a request, in s since it was due. An end that never came is NaN."""

    part: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Lane:
    """The request as one run served it, in s since it was due."""

    label: str
    bars: Sequence[Bar]
    first_token_s: float
    last_token_s: float

    @classmethod
    def of(cls, label: str, turn: Mapping[str, Any], relay_end_s: float | None) -> Lane:
        """From a record of `_COLUMNS`; `relay_end_s` is when the relay's last token came."""
        relayed = turn["relay_tokens"] is not None
        ends = {
            "queue": (turn["sent_s"], turn["prefill_start_s"]),
            "prefill": (turn["prefill_start_s"], turn["prefill_end_s"]),
            "transfer": (turn["transfer_start_s"], turn["transfer_end_s"]),
            "relay decode": (turn["first_token_s"] if relayed else None, relay_end_s),
            "handoff": (turn["handoff_start_s"], turn["handoff_s"]),
            "main decode": (turn["decode_start_s"], turn["last_token_s"]),
        }
        due_s = turn["scheduled_s"]
        bars = [
            Bar(part, start_s - due_s, math.nan if end_s is None else end_s - due_s)
            for part, (start_s, end_s) in ends.items()
            if start_s is not None
        ]
        return cls(label, bars, turn["first_token_s"] - due_s, turn["last_token_s"] - due_s)

    @property
    def compared_s(self) -> float:
        """When all is over but the decoding that ends with the answer."""
        last = [bar for bar in self.bars if bar.part in _DECODES][-1:]
        ends_s = [bar.end_s for bar in self.bars if bar not in last and not math.isnan(bar.end_s)]
        return max(ends_s, default=0.0)


class Timeline:
    """A Gantt chart a run, of the same turn of the trace."""

    def render(self, runs: Sequence[Run], out: Path) -> list[Figure]:
        """One figure a trace; none of a trace of which no turn was answered in all its runs.

        Counted are runs with times of prefill and transfer. The turn is the one whose transfer in
        the first of them is the median, of those that hit little and were relayed.
        """
        named = sorted(zip(labels(runs), runs, strict=True), key=_digest)
        figures: list[Figure] = []
        for _, group in itertools.groupby(named, _digest):
            members = dict(group)
            records = {name: run.records(_COLUMNS) for name, run in members.items()}
            told = {name: each for name, each in records.items() if _tells(each)}
            chosen = _choose(list(told.values())) if told else None
            if chosen is None:
                continue
            turn, why = chosen
            lanes = [_lane(name, members[name], turn, each) for name, each in told.items()]
            path = out / (f"timeline-{len(figures) + 1}.png" if figures else "timeline.png")
            with canvas(path, 7.5, 0.9 + 1.8 * len(lanes)) as figure:
                _draw(figure, lanes)
            caption = _caption(lanes, _row(next(iter(told.values())), turn), why)
            caption += remarks(members, list(told), "times of prefill and transfer")
            figures.append(Figure(path, "One request that hits little", caption, _numbers(lanes)))
        return figures


def _digest(named: tuple[str, Run]) -> str:
    return str(named[1].manifest["trace"]["digest"])


def _tells(records: pa.Table) -> bool:
    """Whether any answered request has times of prefill and of transfer."""
    return bool((_answered(records) & ~np.isnan(_transfers_s(records))).any())


def _answered(records: pa.Table) -> NDArray[np.bool_]:
    """Which were answered, and have all times a chart needs: (rows,)."""
    needed = ("scheduled_s", "sent_s", "prefill_start_s", "prefill_end_s", "first_token_s",
              "last_token_s")  # fmt: skip
    known = ~np.isnan([column(records, name) for name in needed]).any(axis=0)
    return status_is(records, OK) & known


def _transfers_s(records: pa.Table) -> NDArray[np.float64]:
    return column(records, "transfer_end_s") - column(records, "transfer_start_s")


def _choose(tables: list[pa.Table]) -> tuple[int, list[str]] | None:
    """(turn, what those it was chosen of have in common), or None where there is none.

    Of the turns answered in all tables: those that hit little, if there are any; of these those
    that were relayed in the first table that has relays, if there are any; of these the one with
    the median transfer in the first table.
    """
    turns = [each.filter(pa.array(_answered(each))).column("turn").to_numpy() for each in tables]
    common = turns[0]
    for each in turns[1:]:
        common = np.intersect1d(common, each)
    relayed = (
        each.column("turn").to_numpy()[~np.isnan(column(each, "relay_tokens"))] for each in tables
    )
    relays = next((each for each in relayed if len(each)), np.empty(0, np.int64))
    first = tables[0]
    mine = first.column("turn").to_numpy()
    left = np.isin(mine, common) & ~np.isnan(_transfers_s(first))
    wishes = {
        f"an ideal hit rate below {_LOW_HIT:.0%}": ideal_hit_rates(first) < _LOW_HIT,
        "a relay": np.isin(mine, relays),
    }
    granted = []
    for what, wish in wishes.items():
        if (left & wish).any():
            left &= wish
            granted.append(what)
    if not left.any():
        return None
    lasted_s = _transfers_s(first)[left]
    at_median = lasted_s == nearest_rank(lasted_s, 0.5)
    return int(mine[left][at_median].min()), granted


def _row(records: pa.Table, turn: int) -> dict[str, Any]:
    place = int(np.flatnonzero(records.column("turn").to_numpy() == turn)[0])
    row: dict[str, Any] = records.slice(place, 1).to_pylist()[0]
    return row


def _lane(name: str, run: Run, turn: int, records: pa.Table) -> Lane:
    row = _row(records, turn)
    return Lane.of(name, row, _relay_end_s(run, turn) if row["relay_tokens"] else None)


def _relay_end_s(run: Run, turn: int) -> float | None:
    """When the relay's last token came, where tokens have times of their own."""
    row = run.record(turn, ["first_token_s", "gaps_us", "timed_by", "relay_tokens"])
    if row is None or row["timed_by"] != "token" or row["gaps_us"] is None:
        return None
    tokens, gaps_us = row["relay_tokens"], row["gaps_us"]
    return float(row["first_token_s"] + sum(gaps_us[: tokens - 1]) / 1e6)


def _end_s(lanes: Sequence[Lane]) -> float:
    """Where the time axis ends, s: cut where decoding would flatten all the rest."""
    last_s = max(lane.last_token_s for lane in lanes)
    compared_s = max(max(lane.compared_s, lane.first_token_s) for lane in lanes)
    return 1.5 * compared_s if last_s > _CUT_ABOVE * compared_s > 0 else 1.02 * last_s or 1.0


def _draw(figure: Canvas, lanes: list[Lane]) -> None:
    grid = figure.subplots(len(lanes), 1, squeeze=False, sharex=True)[:, 0]
    used = {bar.part for lane in lanes for bar in lane.bars}
    parts = [part for part in _PARTS if part not in _RELAY_PARTS or part in used]
    end_s = _end_s(lanes)
    for axes, lane in zip(grid, lanes, strict=True):
        axes.set_xlim(0, end_s)
        axes.set_yticks(range(len(parts)), parts, fontsize=9)
        axes.set_ylim(len(parts) - 0.4, -0.6)
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")
        axes.set_title(
            f"{lane.label}: first token after {seconds(lane.first_token_s)}", size=10, pad=9
        )
        for place in set(range(len(parts))) - {parts.index(bar.part) for bar in lane.bars}:
            axes.text(0.006 * end_s, place, DASH, va="center", fontsize=8, color=FAINT)
        for bar in lane.bars:
            _bar(axes, parts.index(bar.part), bar, lane.last_token_s, end_s)
        axes.axvline(lane.first_token_s, color=INK, lw=1.2, ls="--")
        axes.plot([lane.first_token_s], [-0.6], marker="v", color=INK, ms=8, clip_on=False)
    grid[-1].set_xlabel("time since the request was due, s (dashed: first token)")


def _bar(axes: Axes, place: int, bar: Bar, last_s: float, end_s: float) -> None:
    """A part, with how long it took beside it; hatched where its end never came."""
    stop_s = last_s if math.isnan(bar.end_s) else bar.end_s
    drawn = axes.barh(place, stop_s - bar.start_s, 0.72, bar.start_s, color=_PARTS[bar.part])
    words = seconds(stop_s - bar.start_s)
    if math.isnan(bar.end_s):
        drawn[0].set_hatch("///")
        words = "not over"
    if stop_s > end_s:
        words += f", until {seconds(stop_s)} \u2192"
    inside = stop_s > _INSIDE_FROM * end_s
    axes.annotate(
        words,
        (min(stop_s, end_s), place),
        xytext=(-4 if inside else 4, 0),
        textcoords="offset points",
        ha="right" if inside else "left",
        va="center",
        fontsize=8,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
    )


def _caption(lanes: list[Lane], turn: Mapping[str, Any], why: list[str]) -> str:
    of = f" of those with {' and '.join(why)}" if why else ""
    words = (
        f"Turn {turn['turn']:,} of the trace (session {turn['session']:,}, request "
        f"{turn['turn_index'] + 1:,} of it; {turn['input_tokens']:,} input tokens, ideal hit rate "
        f"{percent(turn['ideal_hit_tokens'] / turn['input_tokens'])}), chosen as the one whose "
        f"transfer in {lanes[0].label} is the median{of}. One request: an example, not a figure."
    )
    for lane in lanes:
        lasted = {bar.part: bar.end_s - bar.start_s for bar in lane.bars}
        words += (
            f" {lane.label}: transfer {seconds(lasted.get('transfer'))}, first token after "
            f"{seconds(lane.first_token_s)}, last after {seconds(lane.last_token_s)}."
        )
    if any(part in _RELAY_PARTS for lane in lanes for part in (bar.part for bar in lane.bars)):
        words += (
            " Relay decode is drawn from its first token to its last; the handoff lasts until the "
            "first token of the main decode."
        )
    if any(math.isnan(bar.end_s) for lane in lanes for bar in lane.bars):
        words += " Hatched: its end is not known, or did not come before the answer was whole."
    return words


def _numbers(lanes: list[Lane]) -> pa.Table:
    """A row a run and part, and one of its first token; s since the request was due."""
    rows = [
        (lane.label, bar.part, bar.start_s, None if math.isnan(bar.end_s) else bar.end_s)
        for lane in lanes
        for bar in (*lane.bars, Bar("first token", lane.first_token_s, lane.first_token_s))
    ]
    names = {
        "run": pa.string(),
        "part": pa.string(),
        "start_s": pa.float64(),
        "end_s": pa.float64(),
    }
    columns = zip(*rows, strict=True)
    return pa.table({
        name: pa.array(values, kind)
        for (name, kind), values in zip(names.items(), columns, strict=True)
    })  # fmt: skip
