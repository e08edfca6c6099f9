"""What was replayed: its hit rates and lengths, beside real agent sessions and a published account.

From the trace alone: ideal hit rates and the lengths wanted, whatever the systems made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch

from harness.errors import ConfigError
from harness.metrics import HIT_EDGES, HIT_LABELS, column, hit_bin, ideal_hit_rates, nearest_rank
from harness.report import Figure
from harness.result import Run
from reports.canvas import canvas, log_axis
from reports.units import percent

_QUANTILES = (0.50, 0.90, 0.99)
_GENERATED = "agentic"
_SHORT_OUTPUT_TOKENS = 500
_THIS, _REAL, _PUBLISHED = "#0072B2", "#B9C4CF", "black"
COLUMNS = ["input_tokens", "output_tokens", "ideal_hit_tokens"]
"""What `profile_of` reads of a record."""


@dataclass(frozen=True)
class Profile:
    """A workload in figures. Shares and hit rates are of 1; percentiles are P50, P90, P99."""

    name: str
    requests: int
    hit_shares: Sequence[float]
    """Of requests, in the seven bins of `harness.metrics.HIT_EDGES`."""
    hit_mean: float
    above_95: float
    input_tokens: Sequence[float]
    output_tokens: Sequence[float]
    under_500: float
    """Share of requests with fewer than 500 output tokens."""

    def __post_init__(self) -> None:
        for name, length in (
            ("hit_shares", len(HIT_LABELS)),
            ("input_tokens", 3),
            ("output_tokens", 3),
        ):
            if len(getattr(self, name)) != length:
                raise ConfigError(f"workload reference {self.name}: {name} needs {length} numbers")


@dataclass(frozen=True)
class Published:
    """What a published account says in words: ranges and round numbers, of 1."""

    name: str
    above_95: Sequence[float]
    """(lowest, highest)"""
    hit_mean: float
    under_500: float


class Workload:
    """Three panels: hit-rate bins, the figures that sum them up, lengths."""

    def __init__(self, real: Profile, published: Published) -> None:
        self.real = real
        self.published = published

    def render(self, runs: Sequence[Run], out: Path) -> list[Figure]:
        """One figure a trace; none of a trace without a record."""
        traces = {str(run.manifest["trace"]["digest"]): run for run in reversed(runs)}
        figures = []
        for count, run in enumerate(reversed(traces.values()), 1):
            records = run.records(COLUMNS)
            if not records.num_rows:
                continue
            profile = profile_of(records, str(run.manifest["trace"]["format"]))
            path = out / ("workload.png" if count == 1 else f"workload-{count}.png")
            with canvas(path, 7.5, 6.2) as figure:
                self._draw(figure, profile)
            caption = self._caption(run, profile)
            numbers = self._numbers(profile)
            figures.append(Figure(path, f"The workload: {profile.name}", caption, numbers))
        return figures

    def _draw(self, figure: Canvas, this: Profile) -> None:
        (upper,), (lower,) = figure.subfigures(2, 1, squeeze=False, height_ratios=[1.15, 1])
        _bins(upper.subplots(), this, self.real)
        sums, lengths = lower.subplots(1, 2)
        _sums(sums, this, self.real, self.published)
        _lengths(lengths, this, self.real)
        words = [f"this trace: {this.name}", self.real.name, self.published.name]
        keys = [Patch(color=colour) for colour in (_THIS, _REAL, _PUBLISHED)]
        upper.legend(keys, words, loc="outside upper left", ncols=3, fontsize=9)

    def _caption(self, run: Run, this: Profile) -> str:
        trace = run.manifest["trace"]
        if trace["format"] == _GENERATED:
            words = (
                f"This workload is generated, and fitted to {self.real.name}: that the two agree "
                "is a fit, not a finding."
            )
        else:
            words = f"Nothing was fitted here; {self.real.name} stand beside it to compare."
        if trace["prefix_data"] == "absent":
            words += " The source has no prefix data: no claim about hit rates can rest on it."
        words += (
            f" {this.requests:,} requests recorded of {trace['turns']:,}; hit rates are ideal, "
            f"with an infinite cache. Black: {self.published.name}."
        )
        return words

    def _numbers(self, this: Profile) -> pa.Table:
        """A row a figure: this trace, the real sessions, the published account."""
        low, high = self.published.above_95
        said = {
            "ideal hit rate, mean": percent(self.published.hit_mean),
            "requests above 95%": f"{low:.0%} to {high:.0%}",
            "outputs under 500 tokens": percent(self.published.under_500),
        }
        mine, real = _figures(this), _figures(self.real)
        return pa.table(
            {
                "figure": list(mine),
                "this trace": list(mine.values()),
                self.real.name: list(real.values()),
                self.published.name: [said.get(name) for name in mine],
            }
        )


def profile_of(records: pa.Table, name: str) -> Profile:
    """The figures of one or more records, or turns of a trace: needs `COLUMNS`."""
    inputs, outputs = column(records, "input_tokens"), column(records, "output_tokens")
    ideal = ideal_hit_rates(records)
    return Profile(
        name=name,
        requests=records.num_rows,
        hit_shares=(np.bincount(hit_bin(ideal), minlength=len(HIT_LABELS)) / len(ideal)).tolist(),
        hit_mean=float(ideal.mean()),
        above_95=float((ideal > HIT_EDGES[2]).mean()),
        input_tokens=[nearest_rank(inputs, q) for q in _QUANTILES],
        output_tokens=[nearest_rank(outputs, q) for q in _QUANTILES],
        under_500=float((outputs < _SHORT_OUTPUT_TOKENS).mean()),
    )


def _figures(profile: Profile) -> dict[str, str]:
    shares = zip(HIT_LABELS, profile.hit_shares, strict=True)
    figures = {"requests": f"{profile.requests:,}"}
    figures |= {f"requests with ideal hit {label}": percent(share) for label, share in shares}
    figures["ideal hit rate, mean"] = percent(profile.hit_mean)
    figures["requests above 95%"] = percent(profile.above_95)
    for what in ("input", "output"):
        for q, tokens in zip(_QUANTILES, getattr(profile, f"{what}_tokens"), strict=True):
            figures[f"{what} tokens, P{round(100 * q)}"] = f"{tokens:,.0f}"
    figures["outputs under 500 tokens"] = percent(profile.under_500)
    return figures


def _bins(axes: Axes, this: Profile, real: Profile) -> None:
    """Two bars a bin, each with its share written above it."""
    places = np.arange(len(HIT_LABELS))
    for offset, profile, colour in ((-0.2, this, _THIS), (0.2, real, _REAL)):
        bars = axes.bar(places + offset, profile.hit_shares, 0.38, color=colour)
        words = [f"{100 * share:.1f}" for share in profile.hit_shares]
        axes.bar_label(bars, words, fontsize=8, padding=1.5)
    axes.yaxis.set_major_formatter(_as_percent)
    axes.set_xticks(places, HIT_LABELS)
    axes.margins(y=0.15)
    axes.set(title="Requests by ideal hit rate, %", xlabel="ideal prefix-hit rate")


def _sums(axes: Axes, this: Profile, real: Profile, published: Published) -> None:
    rows = {
        "mean hit rate": "hit_mean",
        "above 95%": "above_95",
        "output < 500": "under_500",
    }
    for place, name in enumerate(rows.values()):
        mine, theirs = getattr(this, name), getattr(real, name)
        said = np.atleast_1d(getattr(published, name))
        axes.plot(said, [place + 0.3] * len(said), color=_PUBLISHED, lw=3, marker="|", ms=8)
        words = f"{100 * mine:.1f} | {100 * theirs:.1f} | " + " to ".join(
            f"{100 * s:.0f}" for s in said
        )
        _mark(axes, place, mine, theirs, words)
    _rows(axes, list(rows))
    axes.xaxis.set_major_formatter(_as_percent)
    axes.set(title="This trace | real | published, %", xlabel="share of requests, or hit rate")


def _lengths(axes: Axes, this: Profile, real: Profile) -> None:
    rows = [(what, at) for what in ("input", "output") for at in range(len(_QUANTILES))]
    for place, (what, at) in enumerate(rows):
        mine, theirs = (getattr(each, f"{what}_tokens")[at] for each in (this, real))
        _mark(axes, place, mine, theirs, f"{mine:,.0f} | {theirs:,.0f}")
    log_axis(axes.xaxis)
    _rows(axes, [f"{what} P{round(100 * _QUANTILES[at])}" for what, at in rows])
    axes.set(title="This trace | real, tokens", xlabel="tokens (log scale)")


def _mark(axes: Axes, place: int, mine: float, theirs: float, words: str) -> None:
    """Two dots on one line, ours on theirs, and both numbers in the margin on the right."""
    axes.plot([mine, theirs], [place, place], color=_REAL, lw=2, zorder=1)
    axes.scatter([theirs], [place], s=64, color=_REAL, zorder=2)
    axes.scatter([mine], [place], s=26, color=_THIS, zorder=3)
    axes.annotate(
        words,
        (1.02, place),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=8,
        annotation_clip=False,
    )


def _rows(axes: Axes, names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.margins(x=0.08)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")


def _as_percent(share: float, _: float) -> str:
    return f"{share:.0%}"
