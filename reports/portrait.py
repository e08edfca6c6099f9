"""What a trace is like, before anything is replayed: lengths, hits, arrivals, capacity."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, PercentFormatter

from harness.metrics import HIT_LABELS, column
from harness.report import Figure
from reports.canvas import FAINT, canvas
from reports.palette import HIT_COLOURS
from reports.units import number, percent

_LINE = "#0072B2"
_QUANTILES = ("P50", "P90", "P99")


class Portrait:
    """Three figures of one trace's profile."""

    def render(self, profile: Mapping[str, Any], capacity: pa.Table, out: Path) -> list[Figure]:
        """Hit rates, hits against cache capacity, and lengths; PNGs and PDFs into `out`.

        `profile`: the figures of `traces.profile.Profile` by name. `capacity`: `capacity_tokens`,
        `hit_share`.
        """
        figures = [_bins(profile, out), _lengths(profile, out)]
        return [*figures, _capacity(profile, capacity, out)] if capacity.num_rows else figures


def _bins(profile: Mapping[str, Any], out: Path) -> Figure:
    path = out / "hits.png"
    with canvas(path, 7.5, 3.2) as figure:
        axes: Axes = figure.subplots()
        bars = axes.bar(HIT_LABELS, profile["bins"], color=HIT_COLOURS, width=0.8)
        axes.bar_label(bars, [percent(share) for share in profile["bins"]], padding=2, fontsize=8)
        axes.set(xlabel="ideal prefix-hit rate of a request", ylabel="share of requests")
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    caption = (
        f"What an endless cache would hit, in the order of the trace: "
        f"{percent(profile['ideal_hit_mean'])} mean over {profile['requests']:,} requests, "
        f"{percent(profile['ideal_hit_token_weighted'])} of input tokens, "
        f"{percent(profile['above_95'])} of requests above 95%."
    )
    numbers = pa.table({"ideal_hit_rate": list(HIT_LABELS), "requests_share": profile["bins"]})
    return Figure(path, "Prefix hits", caption, numbers)


def _lengths(profile: Mapping[str, Any], out: Path) -> Figure:
    rows = {
        "input tokens": profile["input_tokens"],
        "output tokens": profile["output_tokens"],
        "turns a session": profile["turns"],
        "delay before a turn, s": profile["delay_s"],
    }
    rows = {name: values for name, values in rows.items() if not np.isnan(values).all()}
    path = out / "lengths.png"
    with canvas(path, 7.5, 0.6 + 0.55 * len(rows)) as figure:
        axes: Axes = figure.subplots()
        for at, values in enumerate(rows.values()):
            drawn = np.maximum(values, 0.01)
            axes.plot(drawn, [at] * 3, color=FAINT, lw=1, zorder=1)
            for marker, value, shown, up in zip("o^s", drawn, values, (6, -13, 6), strict=True):
                axes.scatter(value, at, marker=marker, color=_LINE, s=30, zorder=2)
                axes.annotate(
                    number(shown), (value, at), (0, up), textcoords="offset points",
                    ha="center", fontsize=8,
                )  # fmt: skip
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_ylim(len(rows) - 0.5, -0.7)
        axes.grid(visible=False)
        axes.set_xlabel("P50 (circle), P90 (triangle), P99 (square), log scale")
    numbers = pa.table(
        {"of": list(rows)}
        | {
            name: [float(values[at]) for values in rows.values()]
            for at, name in enumerate(_QUANTILES)
        }
    )
    caption = (
        f"Nearest rank. {profile['sessions']:,} sessions; "
        f"{percent(profile['outputs_under_500'])} of answers under 500 tokens."
    )
    return Figure(path, "Lengths, turns, delays", caption, numbers)


def _capacity(profile: Mapping[str, Any], capacity: pa.Table, out: Path) -> Figure:
    path = out / "capacity.png"
    tokens, shares = column(capacity, "capacity_tokens"), column(capacity, "hit_share")
    with canvas(path, 7.5, 3.6) as figure:
        axes: Axes = figure.subplots()
        axes.plot(tokens, shares, color=_LINE, lw=1.8)
        axes.axhline(profile["ideal_hit_token_weighted"], color=FAINT, lw=1, ls="--")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
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
