"""What a trace is like, before anything is replayed: lengths, hits, arrivals, capacity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from harness.metrics import HIT_LABELS, column
from harness.report import Figure
from reports.canvas import FAINT, canvas, log_axis
from reports.likeness import COLUMNS, draw
from reports.palette import HIT_COLOURS
from reports.units import number, percent

_LINE = "#0072B2"
_QUANTILES = ("P50", "P90", "P99")


class Measured(Protocol):
    """What `traces.profile.measure` gives: see there for the columns."""

    profile: Any
    capacity: pa.Table
    working_set: pa.Table
    distributions: pa.Table
    load: pa.Table


class Portrait:
    """A trace's profile, in figures."""

    def render(self, measured: Measured, out: Path) -> list[Figure]:
        """Hits, lengths, distributions, hits by capacity, working set, load; PNGs into `out`.

        Without those that would show nothing: of hits where there is no prefix data, the load where
        the trace does not say when its sessions began.
        """
        profile, used = asdict(measured.profile), measured.working_set
        known = profile["prefix_data"] != "absent"
        hits = known and profile["enough_tokens"] > 0 and len(measured.capacity) > 1
        uses = known and len(used) > 1 and column(used, "max_tokens").max() > 0
        spreads = _varied(measured.distributions)
        figures = [
            _bins(profile, out) if known else None,
            _lengths(profile, out),
            _distributions(spreads, out) if len(spreads) else None,
            _capacity(profile, measured.capacity, out) if hits else None,
            _working_set(used, profile, out) if uses else None,
            _load(measured.load, profile, out) if len(measured.load) else None,
        ]
        return [figure for figure in figures if figure]


def _bins(profile: Mapping[str, Any], out: Path) -> Figure:
    path = out / "hits.png"
    with canvas(path, 7.5, 3.2) as figure:
        axes: Axes = figure.subplots()
        at = np.arange(len(HIT_LABELS))
        decoded = {"color": "none", "edgecolor": FAINT, "hatch": "////"}
        for name, shift, style in (
            ("bins", -0.2, {"color": HIT_COLOURS}),
            ("decoded_bins", 0.2, decoded),
        ):
            bars = axes.bar(at + shift, profile[name], width=0.38, **style)
            axes.bar_label(bars, [percent(each) for each in profile[name]], padding=2, fontsize=6)
        axes.set_xticks(at, HIT_LABELS)
        axes.set(xlabel="ideal prefix-hit rate of a request", ylabel="share of requests")
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    caption = (
        f"What an endless cache would hit, in the order of the trace: "
        f"{percent(profile['ideal_hit_mean'])} mean over {profile['requests']:,} requests, "
        f"{percent(profile['ideal_hit_token_weighted'])} of input tokens, "
        f"{percent(profile['above_95'])} of requests above 95%. Hatched: if the tokens of answers "
        f"are in the cache too, at most; then {percent(profile['decoded_hit_mean'])} mean, "
        f"{percent(profile['decoded_above_95'])} above 95%."
    )
    numbers = pa.table(
        {
            "ideal_hit_rate": list(HIT_LABELS),
            "requests_share": profile["bins"],
            "with_decoded_share": profile["decoded_bins"],
        }
    )
    return Figure(path, "Prefix hits", caption, numbers)


def _lengths(profile: Mapping[str, Any], out: Path) -> Figure:
    rows = {
        "input tokens": profile["input_tokens"],
        "output tokens": profile["output_tokens"],
        "turns a session": profile["turns"],
        "delay before a turn, s": profile["delay_s"],
    }
    if profile["requests"] == profile["sessions"]:
        del rows["turns a session"]
    rows = {name: values for name, values in rows.items() if not np.isnan(values).all()}
    path = out / "lengths.png"
    with canvas(path, 7.5, 0.9 + 0.4 * len(rows)) as figure:
        draw_quantiles(figure.subplots(), rows)
    numbers = pa.table(
        {"of": list(rows)}
        | {
            name: [float(values[at]) for values in rows.values()]
            for at, name in enumerate(_QUANTILES)
        }
    )
    return Figure(path, "Lengths, turns, delays", _counts(profile), numbers)


def draw_quantiles(axes: Axes, rows: Mapping[str, Sequence[float]]) -> None:
    """A line a row, P50 to P99, and its numbers in the margin: counts, where not in seconds."""
    margin: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center"}
    axes.text(1.02, -0.8, " / ".join(_QUANTILES), fontsize=8, **margin)
    for at, (name, values) in enumerate(rows.items()):
        drawn = np.maximum(values, 0.01)
        axes.plot(drawn, [at] * 3, color=FAINT, lw=1, zorder=1)
        for marker, value in zip("o^s", drawn, strict=True):
            axes.scatter(value, at, marker=marker, color=_LINE, s=30, zorder=2)
        words = [number(value) if name.endswith(", s") else f"{value:,.0f}" for value in values]
        axes.text(1.02, at, " / ".join(words), fontsize=8, **margin)
    log_axis(axes.xaxis)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.7)
    axes.grid(visible=False)
    axes.set_xlabel("P50 (circle), P90 (triangle), P99 (square), log scale")


def _counts(profile: Mapping[str, Any]) -> str:
    single = profile["requests"] == profile["sessions"]
    words = (
        f"Nearest rank. {profile['requests']:,} requests, {profile['sessions']:,} sessions"
        f"{': every session has one turn' if single else ''}. "
        f"{percent(profile['outputs_under_500'])} of answers under 500 tokens."
    )
    if profile["prefix_data"] == "absent":
        words += (
            " No prefix data: what prompts share was not recorded, so neither hits nor a working "
            "set are drawn."
        )
    return words


def _capacity(profile: Mapping[str, Any], capacity: pa.Table, out: Path) -> Figure:
    path = out / "capacity.png"
    tokens, shares = column(capacity, "capacity_tokens"), column(capacity, "hit_share")
    with canvas(path, 7.5, 3.6) as figure:
        axes: Axes = figure.subplots()
        axes.plot(tokens, shares, color=_LINE, lw=1.8)
        axes.axhline(profile["ideal_hit_token_weighted"], color=FAINT, lw=1, ls="--")
        log_axis(axes.xaxis)
        axes.set(
            xlabel="cache capacity, tokens (log scale)", ylabel="hits, of input tokens", ylim=0
        )
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    caption = (
        "Exact, for one cache that loses the least recently used first, leaves before what they "
        "hang on; prompts only. Dashed: an endless cache, "
        f"{percent(profile['ideal_hit_token_weighted'])}. Enough for all of it: "
        f"{profile['enough_tokens']:,} tokens. Of its hits "
        f"{percent(profile['within_session_share'])} are on what the same session had used."
    )
    return Figure(path, "Hits against cache capacity", caption, capacity)


def _varied(distributions: pa.Table) -> pa.Table:
    """Those that have more values than one."""
    widths = distributions.group_by("of", use_threads=False).aggregate(
        [("value", "min"), ("value", "max")]
    )
    names = [row["of"] for row in widths.to_pylist() if row["value_min"] < row["value_max"]]
    kept = pc.is_in(distributions.column("of"), pa.array(names, pa.string()))
    return distributions.filter(kept)


def _distributions(distributions: pa.Table, out: Path) -> Figure:
    path = out / "distributions.png"
    names = distributions.column("of").unique().to_pylist()
    rows = ceil(len(names) / COLUMNS)
    with canvas(path, 9, 2.4 * rows) as figure:
        grid = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
        for axes, name in zip(grid, names, strict=False):
            of = distributions.filter(pc.equal(distributions.column("of"), name))
            draw(axes, name, column(of, "value"), column(of, "share"), _LINE)
        for axes in grid[len(names) :]:
            axes.set_axis_off()
    caption = (
        "Share of requests (of sessions, for turns and starts) at or under a value; what has one "
        "value only is not drawn."
    )
    return Figure(path, "Distributions", caption, distributions)


def _working_set(table: pa.Table, profile: Mapping[str, Any], out: Path) -> Figure:
    path = out / "working_set.png"
    windows = column(table, "window_requests")
    with canvas(path, 7.5, 3.2) as figure:
        axes: Axes = figure.subplots()
        axes.plot(windows, column(table, "max_tokens"), color=FAINT, lw=1.2, ls="--", label="most")
        axes.plot(windows, column(table, "mean_tokens"), color=_LINE, lw=1.8, label="mean")
        log_axis(axes.xaxis)
        log_axis(axes.yaxis)
        axes.set(xlabel="requests in a row", ylabel="distinct tokens of their prompts")
        axes.legend()
    caption = (
        f"The working set: what so many requests use, each block counted once. All "
        f"{profile['requests']:,}: {number(float(column(table, 'max_tokens')[-1]))} tokens."
    )
    return Figure(path, "Working set", caption, table)


def _load(table: pa.Table, profile: Mapping[str, Any], out: Path) -> Figure:
    path = out / "load.png"
    with canvas(path, 7.5, 2.6) as figure:
        axes: Axes = figure.subplots()
        draw_load(axes, column(table, "start_s"), column(table, "sessions"))
        axes.axhline(profile["starts_per_s"], color=FAINT, lw=1, ls="--")
        axes.set(xlabel="time in the trace, s", ylabel="session starts a second", ylim=0)
    caption = (
        f"Session starts in {len(table)} equal parts. Mean (dashed) "
        f"{number(profile['starts_per_s'])} a second; the busiest part has "
        f"{number(profile['starts_peak'])} times that. Burstiness, each 1 for a Poisson process: "
        f"deviation over mean of the gaps {number(profile['starts_variation'])}, variance over "
        f"mean of the parts' counts {number(profile['starts_dispersion'])}."
    )
    return Figure(path, "Load", caption, table)


def draw_load(axes: Axes, starts_s: np.ndarray, sessions: np.ndarray) -> None:
    """Session starts a second in equal parts, each from where it starts to its end."""
    width_s = float(starts_s[1] - starts_s[0])
    edges_s = np.append(starts_s, starts_s[-1] + width_s)
    axes.stairs(sessions / width_s, edges_s, color=_LINE, lw=1.2)
