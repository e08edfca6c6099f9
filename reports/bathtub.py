"""Throughput and business benefit against the prefix-hit rate: the bathtub.

A cached input token is paid at a fraction of a computed one, so hits must gain more throughput
than they lose price. They do so only near the top: between lies a floor, and on it singular points
where chunked prefill leaves small tails that cost as much as whole chunks.

Each run replays requests that are alike, at one hit rate, and is kept saturated (pacing=closed).
Its numbers are these; requests are those of its measured window, answered whole:

    achieved hit   input tokens that the prefill found cached, of all input tokens
    requests/s     whole answers that *ended* in the window, over its length
    goodput        those of them within the SLO, over the same length
    revenue        what users pay for a request, the mean; a second: that times requests/s
    gain           revenue a second over that at the smallest achieved hit of the curve

A closed loop sends the next request when an answer ends, so up to its last send the system is full
and what ends is what it can do. The summary's requests/s counts what was *sent* in the window, up
to the last of its answers: that has the drain in it, when the system is not full. What is not
steady at the start, the first fill and the cold misses, belongs into the warm-up.

Runs of one hit rate and one cache size, as of several seeds, are one point: the median of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Self

import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from harness import metrics
from harness.errors import ConfigError
from harness.record import OK
from harness.report import Figure
from harness.result import Run
from reports.canvas import FAINT, INK, canvas
from reports.palette import colours, curves, labels
from reports.units import percent

_FEWEST_HITS = 3
"""Distinct achieved hits that make a curve."""
_NO_HITS = 0.01
_QUEUED = 0.1
"""Of a saturated system the median request waits longer than this share of its prefill."""
_DIP = 0.01
"""A local minimum lies at least so far below both its neighbours, as a share of itself."""
_NAMED = 4
_LINE_IN = 0.24
_APART = (0.07, 0.1)
"""Words nearer than this, in shares of the axes, would lie on each other."""

_STYLES: dict[bool, dict[str, Any]] = {
    False: {"lw": 1.8, "marker": "o", "ms": 4.5},
    True: {"lw": 1.0, "marker": "s", "ms": 7.5, "mfc": "none"},
}
"""Of a curve over the trace's hits, and of one over the size of the cache."""

_COLUMNS = [
    ("curve", pa.string()),
    ("runs", pa.int64()),
    ("ideal_hit_share", pa.float64()),
    ("achieved_hit_share", pa.float64()),
    ("cache_bytes", pa.float64()),
    ("measured_requests", pa.int64()),
    ("failed_requests", pa.int64()),
    ("requests_per_s", pa.float64()),
    ("goodput_requests_per_s", pa.float64()),
    ("currency", pa.string()),
    ("revenue_per_request", pa.float64()),
    ("revenue_per_s", pa.float64()),
    ("gain", pa.float64()),
    ("tail_tokens", pa.float64()),
    ("chunk_tokens", pa.int64()),
    ("mark", pa.string()),
]


@dataclass(frozen=True)
class _Sample:
    """What one run comes to. NaN: it cannot be known."""

    run: Run
    load: str
    """Runs of one load differ in nothing but their hits."""
    ideal: float
    cache_bytes: float | None
    """Of all its prefill clusters; None where it does not say."""
    chunk_tokens: int | None
    hit: float
    new_tokens: float
    """Computed for a request, the median."""
    measured: int
    failed: int
    requests_per_s: float
    goodput_per_s: float
    revenue: float
    """Paid for an answered request, the mean."""
    queued: bool
    """Requests waited for their prefill, as where a system is saturated; or it does not say."""

    @classmethod
    def of(cls, run: Run) -> Self:
        """Read its records. Raises `ResultError`."""
        records = run.records([*metrics.COLUMNS, "prefill_start_s", "prefill_end_s"])
        window = run.window
        first_s, last_s = window.bounds(records)
        inside = metrics.measured(records, window)
        answered = inside & metrics.status_is(records, OK)
        asked = metrics.column(records, "served_input_tokens")[answered]
        found = metrics.column(records, "served_hit_tokens")[answered]
        paid = run.prices.revenue(records)[answered]
        ends_s = metrics.column(records, "last_token_s")
        ended = metrics.status_is(records, OK) & (ends_s > first_s) & (ends_s <= last_s)
        per_s = 1 / (last_s - first_s) if last_s > first_s else math.nan
        clusters = _prefills(run.manifest).values()
        chunks = {each.get("chunk_tokens") for each in clusters if _alike(run.manifest["trace"])}
        started_s = metrics.column(records, "prefill_start_s")[answered]
        waited_s = started_s - metrics.column(records, "sent_s")[answered]
        lasted_s = metrics.column(records, "prefill_end_s")[answered] - started_s
        caches = [float(each["cache_bytes"]) for each in clusters if "cache_bytes" in each]
        return cls(
            run=run,
            load=_load(run.manifest),
            ideal=float(run.manifest["trace"]["ideal_hit_token_weighted"]),
            cache_bytes=sum(caches) if caches else None,
            chunk_tokens=chunks.pop() if len(chunks) == 1 else None,
            hit=float(found.sum() / asked.sum()) if len(asked) else math.nan,
            new_tokens=float(np.median(asked - found)) if len(asked) else math.nan,
            measured=int(inside.sum()),
            failed=int((inside & ~answered).sum()),
            requests_per_s=int(ended.sum()) * per_s,
            goodput_per_s=int((ended & run.slo.met(records)).sum()) * per_s,
            revenue=float(paid.mean()) if len(paid) else math.nan,
            queued=not len(paid) or not np.median(waited_s) < _QUEUED * np.median(lasted_s),
        )

    @property
    def placed(self) -> bool:
        """Whether it has a place in the figure: every answer's tokens and hit are known."""
        return not any(map(math.isnan, (self.hit, self.revenue, self.requests_per_s)))


@dataclass(frozen=True)
class _Point:
    """Runs of one hit rate and cache size: the median of each number."""

    samples: Sequence[_Sample]

    def _median(self, name: str) -> float:
        return float(median(getattr(each, name) for each in self.samples))

    @property
    def hit(self) -> float:
        return self._median("hit")

    @property
    def requests_per_s(self) -> float:
        return self._median("requests_per_s")

    @property
    def goodput_per_s(self) -> float:
        return self._median("goodput_per_s")

    @property
    def revenue(self) -> float:
        return self._median("revenue")

    @property
    def revenue_per_s(self) -> float:
        return float(median(each.revenue * each.requests_per_s for each in self.samples))

    @property
    def cache_bytes(self) -> float:
        """0 where the runs do not say."""
        return self.samples[0].cache_bytes or 0.0

    @property
    def tail_tokens(self) -> float | None:
        """What a request leaves for its last chunk: 0 where all are whole."""
        chunk_tokens = self.samples[0].chunk_tokens
        return self._median("new_tokens") % chunk_tokens if chunk_tokens else None


@dataclass(frozen=True)
class _Curve:
    """Points of one system by their achieved hit, ascending, and what each gains over the first."""

    label: str
    points: Sequence[_Point]
    gains: Sequence[float]
    sized: bool
    """Whether its points differ in the size of the cache, not in the trace."""

    @classmethod
    def of(cls, label: str, samples: Sequence[_Sample], *, sized: bool) -> Self:
        """Raises `ConfigError` where the first earns nothing."""
        points = sorted(_points(samples), key=lambda point: (point.hit, point.cache_bytes))
        least = points[0].revenue_per_s
        if not least > 0:
            raise ConfigError(
                f"{label} earns nothing at its fewest hits, so nothing can be compared to that: "
                "give prices.input, prices.cached_input or prices.output"
            )
        return cls(label, points, [point.revenue_per_s / least for point in points], sized)

    @property
    def lowest(self) -> int:
        """Which point is the valley."""
        return int(np.argmin(self.gains))

    @property
    def highest(self) -> int:
        """Which point gains most."""
        return int(np.argmax(self.gains))

    @property
    def minima(self) -> list[int]:
        """Which points are local minima."""
        return [
            at
            for at in range(1, len(self.gains) - 1)
            if min(self.gains[at - 1], self.gains[at + 1]) > self.gains[at] * (1 + _DIP)
        ]


class Bathtub:
    """Two panels, one above the other: throughput with goodput, and the gain in revenue."""

    def render(self, runs: Sequence[Run], out: Path) -> list[Figure]:
        """One figure; none where no system has runs at three hit rates.

        A line a system; where runs of a system differ in nothing but the size of its prefill cache
        they are a line too. Raises `ConfigError` where the runs are not of one price sheet.
        """
        samples = [_Sample.of(run) for run in runs]
        drawn = _curves([each for each in samples if each.placed])
        if not drawn:
            return []
        _refuse_mixed(drawn)
        path = out / "bathtub.png"
        with canvas(path, 7.5, 6.4 + _LINE_IN * len(drawn)) as figure:
            _draw(figure, drawn)
        title = "Benefit against prefix-hit rate"
        caption = " ".join([*_caption(drawn), *_cautions(samples, drawn)])
        return [Figure(path, title, caption, _numbers(drawn))]


def _load(manifest: Mapping[str, Any]) -> str:
    """What was asked, and how: constant traces of one hit rate each are alike but for that."""
    trace = manifest["trace"]
    words = f"trace {trace['digest'][:8]}"
    if _alike(trace):
        made = trace["parameters"]
        words = f"{made['input_tokens']:,} + {made['output_tokens']:,} tokens"
    paced = [f"{value} {name}" for name, value in manifest["pacing"].items() if name != "_target_"]
    return ", ".join([words, *paced])


def _alike(trace: Mapping[str, Any]) -> bool:
    """Whether its requests differ in nothing, the hit rate included."""
    return trace["format"] == "constant" and len(set(trace["parameters"]["hits"])) == 1


def _prefills(manifest: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Its prefill clusters by name: none where the backend does not say."""
    found = manifest["backend"]["details"].get("prefill")
    clusters = found.items() if isinstance(found, Mapping) else ()
    return {name: each for name, each in clusters if isinstance(each, Mapping)}


def _without_sizes(run: Run) -> Run:
    """The same, as if its prefill caches had no size."""
    backend = run.manifest["backend"]
    clusters = {
        name: {key: value for key, value in each.items() if key != "cache_bytes"}
        for name, each in _prefills(run.manifest).items()
    }
    details = backend["details"] | ({"prefill": clusters} if clusters else {})
    return replace(run, manifest=run.manifest | {"backend": backend | {"details": details}})


def _curves(samples: Sequence[_Sample]) -> list[_Curve]:
    """Of each system and load its lines over the trace's hits, a cache size each.

    What such a line has no use for makes lines over the cache's size, one an ideal hit.
    """
    known = {each.run.path: each for each in samples}
    found = []
    for system, some in curves([_without_sizes(each.run) for each in samples]).items():
        loads = _by([known[run.path] for run in some], "load")
        for load, alike in loads.items():
            label = system if len(loads) == 1 else f"{system}, {load}"
            tubs = {
                size: each for size, each in _by(alike, "cache_bytes").items() if _is_curve(each)
            }
            for size, each in tubs.items():
                words = label if len(tubs) == 1 else f"{label}, {_size(size)} of cache"
                found.append(_Curve.of(words, each, sized=False))
            rest = [each for each in alike if each.cache_bytes not in tubs]
            for ideal, each in _by(rest, "ideal").items():
                if _is_curve(each):
                    words = f"{label}, caches of several sizes at {ideal:.0%} ideal"
                    found.append(_Curve.of(words, each, sized=True))
    return found


def _by(samples: Iterable[_Sample], name: str) -> dict[Any, list[_Sample]]:
    groups: dict[Any, list[_Sample]] = {}
    for each in samples:
        groups.setdefault(getattr(each, name), []).append(each)
    return groups


def _points(samples: Sequence[_Sample]) -> list[_Point]:
    of_one_hit = _by(samples, "ideal").values()
    return [
        _Point(alike) for each in of_one_hit for alike in _by(each, "cache_bytes").values()
    ]  # fmt: skip


def _is_curve(samples: Sequence[_Sample]) -> bool:
    return len({round(point.hit, 3) for point in _points(samples)}) >= _FEWEST_HITS


def _refuse_mixed(drawn: Sequence[_Curve]) -> None:
    sheets = {
        f"{sheet.name!r} of {sheet.as_of}, {sheet.input:g}, {sheet.cached_input:g} and "
        f"{sheet.output:g} {sheet.currency}"
        for sheet in (each.run.prices for each in _samples(drawn))
    }
    if len(sheets) > 1:
        raise ConfigError(
            "the runs are of several price sheets, so their revenues cannot be compared: "
            f"{'; '.join(sorted(sheets))} a million tokens. Draw the runs of each by themselves"
        )


def _samples(drawn: Iterable[_Curve]) -> list[_Sample]:
    return [each for curve in drawn for point in curve.points for each in point.samples]


def _draw(figure: Canvas, drawn: Sequence[_Curve]) -> None:
    rates, gains = figure.subplots(2, 1, sharex=True, height_ratios=[1, 1.6])
    shades = colours([curve.label for curve in drawn])
    gains.axhline(1, color=FAINT, lw=1, zorder=1)
    for curve in drawn:
        hits = [point.hit for point in curve.points]
        style: dict[str, Any] = {"color": shades[curve.label], **_STYLES[curve.sized]}
        rates.plot(hits, [point.requests_per_s for point in curve.points], **style)
        within = style | {"ls": (0, (3, 2)), "marker": "", "lw": 1.2}
        rates.plot(hits, [point.goodput_per_s for point in curve.points], **within)
        gains.plot(hits, curve.gains, label=curve.label, **style)
    rates.set(ylabel="requests/s", ylim=(0, None))
    gains.set(
        xlabel="achieved prefix-hit rate, of input tokens",
        ylabel=f"revenue a second, over that {_base(drawn)}",
        xlim=(-0.04, 1.04),
        ylim=_limits([gain for curve in drawn for gain in curve.gains]),
    )
    gains.set_xticks(np.linspace(0, 1, 11))
    gains.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    _mark(gains, drawn, shades)
    handles = [
        Line2D([], [], color=INK, lw=1.8, label="answered"),
        Line2D([], [], color=INK, lw=1.2, ls=(0, (3, 2)), label="answered within the SLO"),
    ]
    rates.legend(handles=handles, loc="upper left")
    figure.legend(loc="outside upper left", handles=gains.get_legend_handles_labels()[0])


def _limits(gains: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis with room for words above and below."""
    least, most = min(*gains, 1), max(*gains, 1)
    room = 0.22 * (most - least or 1)
    return max(0.0, least - room), most + 0.7 * room


def _base(drawn: Sequence[_Curve]) -> str:
    """What a gain is over."""
    bare = all(curve.points[0].hit < _NO_HITS for curve in drawn)
    return "without hits" if bare else "at the curve's fewest hits"


def _mark(axes: Axes, drawn: Sequence[_Curve], shades: Mapping[str, str]) -> None:
    """Rings around the minima, and words at all that stands out, where there is room for them."""
    wanted: list[tuple[int, _Curve, int, str, bool]] = []
    for curve in drawn:
        for at in sorted({*curve.minima, curve.lowest}):
            point = curve.points[at]
            axes.plot(point.hit, curve.gains[at], "o", ms=11, mfc="none", mec=INK, mew=0.9)
            words = f"{curve.gains[at]:.2f}"
            if point.tail_tokens:
                words += f"\ntail {point.tail_tokens:,.0f}"
            wanted.append((at != curve.lowest, curve, at, words, False))
        wanted.append((0, curve, curve.highest, f"{curve.gains[curve.highest]:.2f}", True))
        if curve.sized:
            wanted += [(2, curve, at, words, True) for at, words in _sizes(curve)]
    bottom, top = axes.get_ylim()
    taken: list[tuple[float, float]] = []
    said: set[tuple[str, float]] = set()
    for _, curve, at, words, above in sorted(
        wanted, key=lambda each: (each[0], -each[1].gains[each[2]])
    ):
        spot = curve.points[at].hit, curve.gains[at]
        if (words, round(spot[0], 2)) in said:  # curves that meet there say it once
            continue
        said.add((words, round(spot[0], 2)))
        for side in (1, -1) if above else (-1, 1):
            x, y = spot[0], (spot[1] - bottom) / (top - bottom) + 0.06 * side
            if any(abs(x - a) < _APART[0] and abs(y - b) < _APART[1] for a, b in taken):
                continue
            taken.append((x, y))
            axes.annotate(
                words,
                spot,
                xytext=(0, 8 * side),
                textcoords="offset points",
                ha="center",
                va="bottom" if side > 0 else "top",
                fontsize=8,
                linespacing=1.1,
                color=shades[curve.label],
                path_effects=[withStroke(linewidth=2.5, foreground="white")],
            )
            break


def _sizes(curve: _Curve) -> list[tuple[int, str]]:
    """The points at which a larger cache begins to hit more, and its size."""
    rates = [round(point.hit, 3) for point in curve.points]
    return [
        (at, _size(point.cache_bytes))
        for at, point in enumerate(curve.points)
        if rates[at] not in rates[:at]
    ]


def _size(size_bytes: float | None) -> str:
    """`1.2 GB`, `20 TB`."""
    if size_bytes is None or math.isinf(size_bytes):
        return "unknown size" if size_bytes is None else "no limit"
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size_bytes >= one:
            return f"{size_bytes / one:.3g} {unit}"
    return f"{size_bytes:.3g} B"


def _caption(drawn: Sequence[_Curve]) -> list[str]:
    """What to see: of every curve its valley, its other minima and its top."""
    sheet = _samples(drawn)[0].run.prices
    promised = {each.run.slo.words.rpartition(" for ")[0] for each in _samples(drawn)}
    words = (
        "Each point: a run that is meant to be saturated, by the hit rate that it achieved; "
        "of several runs of one hit rate and cache size the median. Requests/s: whole answers that "
        "ended in the measured window, over its length. SLO: "
        f"{' or '.join(sorted(promised))}. Gain: revenue a second over that of the same curve at "
        f"its fewest hits. Paid for a million tokens: {sheet.input:g} computed, "
        f"{sheet.cached_input:g} cached, {sheet.output:g} answered ({sheet.currency}; "
        f"{sheet.name!r} of {sheet.as_of}). Ringed: the lowest point, and every one more than "
        f"{_DIP:.0%} below both its neighbours."
    )
    if any(point.tail_tokens is not None for curve in drawn for point in curve.points):
        words += " Tail: what a request there leaves for its last chunk, in tokens."
    lines = [words]
    for curve in drawn:
        first, lowest, highest = (curve.points[at] for at in (0, curve.lowest, curve.highest))
        over = "no hits" if first.hit < _NO_HITS else f"a hit rate of {percent(first.hit)}"
        said = (
            f"{curve.label}: over {over}, lowest {curve.gains[curve.lowest]:.2f} at "
            f"{percent(lowest.hit)}, highest {curve.gains[curve.highest]:.2f} at "
            f"{percent(highest.hit)}"
        )
        if curve.minima:
            said += f"; minima at {', '.join(_minimum(curve.points[at]) for at in curve.minima)}"
        lines.append(f"{said}.")
    return lines


def _minimum(point: _Point) -> str:
    if point.tail_tokens is None:
        return percent(point.hit)
    tail = f"{point.tail_tokens:,.0f} of {point.samples[0].chunk_tokens:,} tokens"
    return f"{percent(point.hit)} ({f'tail {tail}' if point.tail_tokens else 'no tail'})"


def _cautions(samples: Sequence[_Sample], drawn: Sequence[_Curve]) -> list[str]:
    """What the figure leaves out, and what in it should not be trusted."""
    names = dict(
        zip(
            [each.run.path for each in samples], labels([each.run for each in samples]), strict=True
        )
    )
    shown = _samples(drawn)
    said = {
        "Without a place, as some answers came without their hits or tokens, or none in the "
        "window": [each for each in samples if not each.placed],
        f"Left out, as their system has not {_FEWEST_HITS} hit rates of one load": [
            each for each in samples if each.placed and each not in shown
        ],
        "Drawn, but not valid": [
            each for each in shown if not each.run.manifest["validity"]["valid"]
        ],
        "Drawn, but interrupted": [each for each in shown if each.run.manifest["partial"]],
        "Not in a closed loop, so their requests/s may be what was offered": [
            each for each in shown if not each.run.manifest["pacing"]["_target_"].endswith("Closed")
        ],
        "Hardly queued, so perhaps not saturated": [each for each in shown if not each.queued],
        "Requests failed, and were not paid for, in": [each for each in shown if each.failed],
    }
    return [
        f"{words}: {_listed([names[each.run.path] for each in some])}."
        for words, some in said.items()
        if some
    ]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _numbers(drawn: Sequence[_Curve]) -> pa.Table:
    """A row a point."""
    rows = [
        {
            "curve": curve.label,
            "runs": len(point.samples),
            "ideal_hit_share": point.samples[0].ideal,
            "achieved_hit_share": point.hit,
            "cache_bytes": point.samples[0].cache_bytes,
            "measured_requests": sum(each.measured for each in point.samples),
            "failed_requests": sum(each.failed for each in point.samples),
            "requests_per_s": point.requests_per_s,
            "goodput_requests_per_s": point.goodput_per_s,
            "currency": point.samples[0].run.prices.currency,
            "revenue_per_request": point.revenue,
            "revenue_per_s": point.revenue_per_s,
            "gain": curve.gains[at],
            "tail_tokens": point.tail_tokens,
            "chunk_tokens": point.samples[0].chunk_tokens,
            "mark": _mark_of(curve, at),
        }
        for curve in drawn
        for at, point in enumerate(curve.points)
    ]
    return pa.Table.from_pylist(rows, schema=pa.schema(_COLUMNS))


def _mark_of(curve: _Curve, at: int) -> str | None:
    marks = {
        "valley": at == curve.lowest,
        "minimum": at in curve.minima,
        "highest": at == curve.highest,
    }
    return ", ".join(name for name, is_so in marks.items() if is_so) or None
