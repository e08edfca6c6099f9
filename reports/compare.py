"""What differs between runs: along a sweep as lines, else each figure's ratio to the first run.

Ratios of percentiles have an interval by the bootstrap over sessions, so that a nightly job sees
what changed beyond noise. Runs of one trace are paired: each resample draws the same sessions in
all of them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
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
    honest,
    measured,
    tpot,
)
from harness.report import Figure
from harness.result import Run
from reports.bootstrap import SESSION_FLOOR, Ranked, interval, ratios, resamples
from reports.canvas import FAINT, INK, canvas, log_axis
from reports.palette import colours, given, labels
from reports.remarks import remarks
from reports.units import number, seconds

_DRAWS = 200
_NAN = (math.nan, math.nan)
_WIDE = 20.0
"""Largest over smallest value from which a linear axis, or its ticks, would hide the small."""
_MOST_TICKS = 6
"""Swept values that are written below a narrow panel."""
_LINES = (("o", "-"), ("s", "--"), ("^", ":"))
"""Marker and dash of the first, second and third line of a panel."""
_SEED = "seed"
"""A swept setting that is a number and no quantity: no line goes through it."""

_READ = [
    "session",
    "turn_index",
    "scheduled_s",
    "sent_s",
    "first_token_s",
    "last_token_s",
    "served_output_tokens",
    "status",
]


@dataclass(frozen=True)
class _Metric:
    name: str
    key: str
    """Of `harness.metrics.SUMMARY`."""
    quantile: float | None = None
    """None: a rate, which has no interval; more of it is better."""

    def write(self, value: float) -> str:
        """The value as a person reads it."""
        return number(value) if self.quantile is None else seconds(value)

    @property
    def unit(self) -> str:
        """`TTFT P50, s`; `goodput, requests/s`."""
        return f"{self.name}, {'requests/s' if self.quantile is None else 's'}"


_QUANTILES = {"TTFT": QUANTILES, "TPOT": (0.50,), "E2E": QUANTILES}
_PERCENTILES = tuple(
    _Metric(f"{kind} P{round(100 * q)}", f"{kind.lower()}_p{round(100 * q)}_s", q)
    for kind, quantiles in _QUANTILES.items()
    for q in quantiles
)
_RATES = (
    _Metric("throughput", "requests_per_s"),
    _Metric("goodput", "goodput_requests_per_s"),
)
_METRICS = (*_PERCENTILES, *_RATES)

_COLUMNS = [
    ("run", pa.string()),
    ("metric", pa.string()),
    ("base", pa.float64()),
    ("value", pa.float64()),
    ("ratio", pa.float64()),
    ("ratio_low", pa.float64()),
    ("ratio_high", pa.float64()),
    ("changed_beyond_noise", pa.bool_()),
]


@dataclass(frozen=True)
class _Sample:
    """One run: its label, its whole-run summary, its requests that count."""

    label: str
    run: Run
    row: dict[str, Any]
    session: NDArray[np.int64]
    """As the trace numbers them: (rows,)."""
    lasted_s: Mapping[str, NDArray[np.float64]]
    """TTFT, TPOT, E2E: (rows,) each; +inf of a failure, NaN where there is none."""

    @classmethod
    def of(cls, label: str, run: Run) -> _Sample:
        records = run.records(_READ)
        records = records.filter(pa.array(measured(records, run.window)))
        lasted_s = {
            "TTFT": honest(records, "scheduled_s", "first_token_s"),
            "TPOT": tpot(records),
            "E2E": honest(records, "scheduled_s", "last_token_s"),
        }
        session = records.column("session").to_numpy().astype(np.int64)
        return cls(label, run, run.summary().to_pylist()[0], session, lasted_s)

    @property
    def trace(self) -> str:
        return str(self.run.manifest["trace"]["digest"])

    def value(self, metric: _Metric) -> float:
        """NaN where it was not measured."""
        value = self.row[metric.key]
        return math.nan if value is None else float(value)

    def supports(self, metric: _Metric) -> bool:
        """Whether there are requests enough for this percentile to mean something."""
        return metric.quantile is None or len(self.session) >= SAMPLE_FLOOR.get(metric.quantile, 0)


@dataclass(frozen=True)
class _Change:
    """A figure of one run beside that of the first. NaN: cannot be known."""

    sample: _Sample
    metric: _Metric
    base: float
    value: float
    limits: tuple[float, float]
    """Of the ratio."""
    trusted: bool
    """Whether requests and sessions are enough for the interval to tell noise from change."""

    @property
    def ratio(self) -> float:
        """NaN where both are infinite: of two that failed so, neither is the slower."""
        if math.isinf(self.base) and math.isinf(self.value):
            return math.nan
        return float(ratios(np.array(self.value), np.array(self.base)))

    @property
    def beyond_noise(self) -> bool | None:
        """None where that cannot be told."""
        if not self.trusted or math.isnan(self.ratio) or math.isnan(self.limits[0]):
            return None
        return not self.limits[0] <= 1 <= self.limits[1]

    @property
    def numbers(self) -> dict[str, Any]:
        """A row of the table."""
        low, high = self.limits
        return {
            "run": self.sample.label,
            "metric": self.metric.unit,
            "base": self.base,
            "value": self.value,
            "ratio": self.ratio,
            "ratio_low": low,
            "ratio_high": high,
            "changed_beyond_noise": self.beyond_noise,
        }


class Compare:
    """Lines over the one number that was swept, or dots of ratios, a row a figure."""

    def render(self, runs: Sequence[Run], out: Path) -> list[Figure]:
        """One figure; none of a single run, nor where the first or all others measured nothing.

        Raises `ResultError` where a run cannot be read.
        """
        if len(runs) < 2:  # noqa: PLR2004 - one run and another
            return []
        samples = [_Sample.of(*each) for each in zip(labels(runs), runs, strict=True)]
        base, *others = samples
        if not len(base.session) or not any(len(each.session) for each in others):
            return []
        changes = _changes(samples)
        swept = _swept(runs)
        path = out / "compare.png"
        columns = list(_COLUMNS)
        rows = [each.numbers for each in changes]
        if swept is None:
            height = 1.3 + len(_METRICS) * max(0.36, 0.22 * len(others))
            with canvas(path, 8.5, height) as figure:
                _draw_ratios(figure.subplots(), base.label, changes)
            title = f"Change against {base.label}"
        else:
            name, values = swept
            columns.insert(1, (name, pa.float64()))
            at = dict(zip([each.label for each in samples], values, strict=True))
            rows = [row | {name: at[row["run"]]} for row in rows]
            with canvas(path, 9.5, 3.6) as figure:
                _draw_lines(figure, samples, name, values)
            title = f"Along {name}"
        numbers = {
            key: pa.array([row[key] for row in rows], kind, from_pandas=True)
            for key, kind in columns
        }
        return [Figure(path, title, _caption(samples, changes, swept), pa.table(numbers))]


def _swept(runs: Sequence[Run]) -> tuple[str, list[float]] | None:
    """The one setting given to these runs of one backend in which they differ, a number in each.

    None where there is no such setting. Folders to write to do not count.
    """
    asked = [given(run) for run in runs]
    names = dict.fromkeys(name for each in asked for name in each)
    differing = [name for name in names if len({each.get(name) for each in asked}) > 1]
    if len({run.name for run in runs}) > 1 or len(differing) != 1 or differing[0] == _SEED:
        return None
    try:
        values = [float(each[differing[0]]) for each in asked]
    except (KeyError, ValueError):
        return None
    return (differing[0], values) if np.isfinite(values).all() else None


def _changes(samples: list[_Sample]) -> list[_Change]:
    """Every metric of every run but the first, run by run."""
    base = samples[0]
    draws = _resampled(samples)
    promised = {each.run.slo.words for each in samples}
    metrics = [each for each in _METRICS if each.name != "goodput" or len(promised) == 1]
    sessions = {each.label: len(np.unique(each.session)) for each in samples}
    changes = []
    for sample, metric in itertools.product(samples[1:], metrics):
        pair = (base, sample)
        fewest = min(sessions[each.label] for each in pair)
        limits = _NAN
        if metric.quantile is not None and fewest > 1:
            at = _PERCENTILES.index(metric)
            limits = interval(ratios(*(draws[each.label][:, at] for each in reversed(pair))))
        trusted = fewest >= SESSION_FLOOR and all(each.supports(metric) for each in pair)
        was, now = (each.value(metric) for each in pair)
        changes.append(_Change(sample, metric, was, now, limits, trusted))
    return changes


def _resampled(samples: list[_Sample]) -> dict[str, NDArray[np.float64]]:
    """Each run's percentiles under resampled sessions, by label: (draws, percentiles).

    Runs of one trace are resampled alike, draw by draw; runs of another trace apart from them.
    """
    found = {}
    for trace in dict.fromkeys(each.trace for each in samples):
        group = [each for each in samples if each.trace == trace]
        seen, index = np.unique(
            np.concatenate([each.session for each in group]), return_inverse=True
        )
        ends = np.cumsum([len(each.session) for each in group])[:-1]
        ranked = {
            each.label: _ranked(each, session, len(seen))
            for each, session in zip(group, np.split(index, ends), strict=True)
        }
        for each in group:
            found[each.label] = np.full((_DRAWS, len(_PERCENTILES)), np.nan)
        drawn = resamples(len(seen), _DRAWS, f"compare {trace}") if len(seen) else ()
        for at, weights in enumerate(drawn):
            for label, all_of_it in ranked.items():
                found[label][at] = np.concatenate([one.percentiles(weights) for one in all_of_it])
    return found


def _ranked(sample: _Sample, session: NDArray[np.int64], sessions: int) -> list[Ranked]:
    """In the order of `_PERCENTILES`."""
    return [
        Ranked(sample.lasted_s[kind], session, sessions, quantiles)
        for kind, quantiles in _QUANTILES.items()
    ]


def _draw_ratios(axes: Axes, base: str, changes: list[_Change]) -> None:
    """A row a figure, in it a line a run; the values stand in the margin on the right."""
    runs = list(dict.fromkeys(each.sample.label for each in changes))
    metrics = list(dict.fromkeys(each.metric for each in changes))
    shades = colours([base, *runs])
    _axis(axes, changes)
    for each in changes:
        offset = (runs.index(each.sample.label) + 0.5) / len(runs) - 0.5
        place = metrics.index(each.metric) + 0.8 * offset
        _dot(axes, each, place, shades[each.sample.label])
    axes.axvline(1, color=INK, lw=1, ls=":", zorder=1)
    axes.axhline(len(_PERCENTILES) - 0.5, color=FAINT, lw=0.6)
    axes.set_yticks(range(len(metrics)), [each.name for each in metrics])
    axes.set_ylim(len(metrics) - 0.45, -0.55)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"ratio to {base} (log scale)")
    keys = [Line2D([], [], color=shades[run], lw=4, label=run) for run in runs]
    marks = {
        "changed beyond noise": ("o", INK),
        "within noise": ("o", "white"),
        "cannot be told": ("x", INK),
    }
    keys += [
        Line2D([], [], color=INK, marker=mark, mfc=face, ls="", label=word)
        for word, (mark, face) in marks.items()
    ]
    axes.legend(
        handles=keys,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=4,
        fontsize=9,
        borderaxespad=0.2,
    )


def _axis(axes: Axes, changes: list[_Change]) -> None:
    """Set the x axis to suit: all that is neither 0 nor infinite lies within it, and so does 1."""
    shown = np.array([1.0, *(x for each in changes for x in (each.ratio, *each.limits))])
    shown = shown[np.isfinite(shown) & (shown > 0)]
    low, high = shown.min() / 1.01, shown.max() * 1.01
    room = (high / low) ** 0.06
    log_axis(axes.xaxis)
    axes.set_xlim(low / room, high * room)


def _dot(axes: Axes, change: _Change, place: float, shade: str) -> None:
    """The ratio with its interval, at the edge with an arrow where it is 0 or infinite."""
    least, most = axes.get_xlim()
    if not math.isnan(change.limits[0]):
        axes.plot(np.clip(change.limits, least, most), [place, place], color=shade, lw=1.6)
    words = f"{change.metric.write(change.base)} → {change.metric.write(change.value)}"
    if not math.isnan(change.ratio):
        mark = "<" if change.ratio < least else ">" if change.ratio > most else "o"
        beyond = change.beyond_noise
        if beyond is None and mark == "o":
            mark = "x"
        axes.plot(
            [min(max(change.ratio, least), most)],
            [place],
            mark,
            color=shade,
            mfc=shade if beyond else "white",
            ms=6,
            zorder=3,
            clip_on=False,
        )
        words += f" ({_times(change.ratio)})"
    axes.annotate(
        words,
        (1.02, place),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=8,
        annotation_clip=False,
    )


def _draw_lines(figure: Canvas, samples: list[_Sample], name: str, values: list[float]) -> None:
    """Three panels over the swept value: TTFT, TPOT, rates."""
    order = np.argsort(values, kind="stable")
    swept = np.array(values)[order]
    ordered = [samples[at] for at in order]
    shade = colours([samples[0].run.name])[samples[0].run.name]
    panels = {
        "TTFT, s": [each for each in _PERCENTILES if each.name.startswith("TTFT")],
        "TPOT P50, s": [each for each in _PERCENTILES if each.name.startswith("TPOT")],
        "Requests/s": list(_RATES),
    }
    for axes, (title, metrics) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        drawn = [np.array([each.value(metric) for each in ordered]) for metric in metrics]
        for metric, heights, (mark, dash) in zip(metrics, drawn, _LINES, strict=False):
            finite = np.where(np.isinf(heights), np.nan, heights)
            axes.plot(swept, finite, dash, marker=mark, ms=5, color=shade, label=metric.name)
        _scales(axes, swept, np.concatenate(drawn))
        for heights, (mark, _) in zip(drawn, _LINES, strict=False):
            at_top = swept[np.isinf(heights)]
            axes.plot(
                at_top,
                [0.95] * len(at_top),
                mark,
                color=shade,
                mfc="white",
                ms=6,
                transform=axes.get_xaxis_transform(),
            )
        axes.set(title=title, xlabel=name.rpartition(".")[2])
        if len(metrics) > 1:
            axes.legend(fontsize=8, loc="best")


def _scales(axes: Axes, swept: NDArray[np.float64], values: NDArray[np.float64]) -> None:
    """Logarithmic where a linear axis would hide the small; else from zero."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        axes.set_ylim(0, 1)
        axes.set_yticks([])
    elif finite.min() > 0 and finite.max() / finite.min() > _WIDE:
        log_axis(axes.yaxis)
        axes.set_ylim(top=finite.max() * (finite.max() / finite.min()) ** 0.15)
    else:
        axes.set_ylim(0, 1.15 * finite.max() or 1)
    if swept.min() > 0 and swept.max() / swept.min() > _WIDE:
        log_axis(axes.xaxis)
    if len(ticks := np.unique(swept)) <= _MOST_TICKS:
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


def _caption(
    samples: list[_Sample], changes: list[_Change], swept: tuple[str, list[float]] | None
) -> str:
    base = samples[0].label
    values = [x for each in changes for x in (each.base, each.value)]
    infinite = any(map(math.isinf, values))
    if swept:
        words = (
            f"The same system at {len(samples)} values of {swept[0]}. Percentiles are exact "
            "nearest rank; a request that failed counts as infinitely slow."
        )
        words += " A hollow mark at the top is infinite." if infinite else ""
        words += f" The numbers below compare each run with {base}."
    else:
        words = (
            f"{_verdict(changes)} Each figure over that of {base}, with its values on the right; "
            "less is better for times, more for throughput and goodput. Percentiles are exact "
            "nearest rank; a request that failed counts as infinitely slow."
        )
        words += " Where both are infinite there is no dot." if infinite else ""
    return f"{words} {_method(samples)}{_cautions(samples)}"


def _verdict(changes: list[_Change]) -> str:
    """What changed beyond noise, or why that is not known."""
    told = [each for each in changes if each.beyond_noise is not None]
    if not told:
        return "Too few requests or sessions to tell a change from noise."
    runs = dict.fromkeys(each.sample.label for each in changes)
    beyond = [each for each in told if each.beyond_noise]
    if len(runs) == 1:
        said = ", ".join(f"{each.metric.name} ({_times(each.ratio)})" for each in beyond)
        return f"Changed beyond noise: {said or 'nothing'}."
    counts = Counter(each.sample.label for each in beyond)
    said = ", ".join(f"{counts[run]} of {run}" for run in runs)
    return f"Changed beyond noise, of {len(_PERCENTILES)} percentiles each: {said}."


def _times(ratio: float) -> str:
    """`+4.21%`, or `3.20 times` where it is half or double at least."""
    if 1 / 2 < ratio < 2:  # noqa: PLR2004 - half and double
        change = round(100 * (ratio - 1), 2)
        return f"{change:+.3g}%" if change else "0%"
    return "now infinite" if math.isinf(ratio) else f"{number(ratio)} times"


def _method(samples: list[_Sample]) -> str:
    """How the intervals came about, and what they do not hold."""
    paired = len({each.trace for each in samples}) < len(samples)
    words = (
        f"Ratios of percentiles have intervals of 95%, by {_DRAWS} resamples of whole sessions; "
        "beyond noise means that 1 is outside. "
    )
    if paired:
        words += "Runs of one trace draw the same sessions in each resample. "
    return words + (
        "Of 20 figures that did not change one is expected outside all the same, and sessions of "
        "one run share its queues, so repeats may differ by more. Not told: throughput and "
        f"goodput; P90 of fewer than {SAMPLE_FLOOR[0.90]} requests and P99 of fewer than "
        f"{SAMPLE_FLOOR[0.99]}; fewer than {SESSION_FLOOR} sessions; an infinite pair."
    )


def _cautions(samples: list[_Sample]) -> str:
    words = ""
    if len({each.trace for each in samples}) > 1:
        words += (
            " BEWARE: these runs replayed different traces, so what changed may be the traffic."
        )
    if len({each.run.slo.words for each in samples}) > 1:
        words += " Goodput is left out of the ratios, as the runs have different promises."
    runs = {each.label: each.run for each in samples}
    return words + remarks(runs, list(runs), "a measured request")
