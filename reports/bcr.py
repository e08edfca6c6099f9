"""Benefit-cost ratio: goodput over what cards and lines cost, each relative to the first system.

Goodput is that of the run with the most of it among those that keep the promise, so a sweep over
the load finds each system's own limit. BCR = (goodput / goodput of the base) / (cost / cost of the
base), as the public 2026 coverage of the technical report on PDD has it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from harness.errors import ConfigError
from harness.metrics import column, measured
from harness.prices import Prices
from harness.report import Figure
from harness.result import Run
from harness.settings import number as check
from reports.bootstrap import SESSION_FLOOR, interval, sums
from reports.canvas import FAINT, INK, canvas
from reports.palette import colours, curves, labels
from reports.units import number

_DRAWS = 1000
_HOUR_S = 3600.0
_MILLION = 1e6
_NAN = (math.nan, math.nan)
_RELAYED, _IN_ONE = "pdd", "in_dc"
"""The topologies whose goodput the published ratio compares."""
_MEASURED = "measured"
_PUT_IN = "published goodput put in, not measured"
_SIGNS = {"at least": "≥ {}", "at most": "≤ {}", "either side": "{}, open"}

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

_NUMBERS = [
    ("system", pa.string()),
    ("run", pa.string()),
    ("valid_runs", pa.int64()),
    ("limit_reached", pa.bool_()),
    ("next_load_ratio", pa.float64()),
    ("slo_share", pa.float64()),
    ("sessions", pa.int64()),
    ("goodput_requests_per_s", pa.float64()),
    ("goodput_requests_per_s_low", pa.float64()),
    ("goodput_requests_per_s_high", pa.float64()),
    ("goodput_sessions_per_s", pa.float64()),
    ("currency", pa.string()),
    ("cost_per_hour", pa.float64()),
    ("cost_per_million_output_tokens", pa.float64()),
    ("cost_per_million_output_tokens_within_slo", pa.float64()),
    ("cost_per_request_within_slo", pa.float64()),
    ("cost_per_session_within_slo", pa.float64()),
    ("requests_within_slo_per_cost", pa.float64()),
]
"""Costs are in the currency."""
_RATIOS = [
    ("goodput_ratio", pa.float64()),
    ("cost_change_share", pa.float64()),
    ("bcr", pa.float64()),
    ("bcr_low", pa.float64()),
    ("bcr_high", pa.float64()),
]
_BOUND = [("bcr_is", pa.string())]
_PRICES = [
    ("system", pa.string()),
    ("md_over_p", pa.float64()),
    ("goodput", pa.string()),
    ("currency", pa.string()),
    ("cost_per_hour", pa.float64()),
]


@dataclass(frozen=True)
class _Best:
    """The run of a system that counts, and its rates. NaN: not known."""

    run: Run
    row: dict[str, Any]
    """Its whole-run row of `harness.metrics.SUMMARY`."""
    draws: NDArray[np.float64]
    """Resampled goodput, requests/s: (draws,)."""
    sessions: int
    good_output_tokens_per_s: float
    next_load: float
    """The next heavier load tried, over this run's; NaN: there was none."""

    @property
    def open(self) -> bool:
        """Whether no heavier load was tried, so that the system's limit may lie above."""
        return math.isnan(self.next_load)

    @property
    def limits(self) -> tuple[float, float]:
        """Of the goodput's interval, requests/s; NaN where sessions, all alike, say nothing."""
        return interval(self.draws) if np.ptp(self.draws) else _NAN


@dataclass(frozen=True)
class _System:
    label: str
    cards: Mapping[str, float]
    name: str
    """The backend's, under which its lines are priced."""
    topology: str
    cost: float
    """An hour."""
    tried: int
    """Runs that are valid and whole."""
    left_out: int
    """Runs that are not."""
    best: _Best | None
    """None: the promise is kept by none of its runs."""

    @property
    def goodput(self) -> float:
        """Requests within the SLO a second; NaN where the promise is not kept."""
        return math.nan if self.best is None else float(self.best.row["goodput_requests_per_s"])


@dataclass(frozen=True)
class _Bar:
    """A value, NaN where there is none, the interval around it, and how its number is written."""

    value: float
    limits: tuple[float, float] = _NAN
    words: str = "{}"

    def __str__(self) -> str:
        return self.words.format(number(self.value))

    @property
    def end(self) -> float:
        """How far right it is drawn."""
        known = [each for each in (self.value, *self.limits) if math.isfinite(each)]
        return max(known, default=0.0)


class Bcr:
    """Bars of goodput, cost and BCR; then cost and BCR at other prices of an MD card.

    `md_over_p`: what a card of role MD costs, in cards of role P. `published_goodput`: of PDD over
    that of one data centre, put in beside what was measured where those two are compared; None:
    not.
    """

    def __init__(self, md_over_p: Sequence[float], published_goodput: float | None) -> None:
        for factor in md_over_p:
            check("bcr.md_over_p", factor, above=0, most=1e6)
        if published_goodput is not None:
            check("bcr.published_goodput", published_goodput, above=0, most=1e6)
        self.md_over_p = tuple(md_over_p)
        self.published_goodput = published_goodput

    def render(self, runs: Sequence[Run], out: Path) -> list[Figure]:
        """One figure, and a second where a system has MD cards and the sheet prices role P.

        None where no run says its cards, or none was sent a request. Raises `ConfigError` where
        runs have different prices or promises, a card has no price, or a system costs nothing.
        """
        grouped = curves(runs)
        known = {label: some for label, some in grouped.items() if _cards(some[0])}
        priced = [run for some in known.values() for run in some]
        if not any(run.summary().column("measured")[0].as_py() for run in priced):
            return []
        _refuse_mixed(priced)
        systems = [_system(label, some) for label, some in known.items()]
        prices = priced[0].prices
        path = out / "bcr.png"
        with canvas(path, 8.5, 1.3 + 0.5 * len(systems)) as figure:
            _draw(figure, systems, prices.currency)
        left_out = [label for label in grouped if label not in known]
        words = _caption(systems, priced[0], left_out)
        numbers = _numbers(systems, prices.currency, runs)
        title = "Goodput and cost" if len(systems) == 1 else "Goodput, cost and benefit-cost ratio"
        return [Figure(path, title, words, numbers), *self._sensitivity(systems, prices, out)]

    def _sensitivity(self, systems: list[_System], prices: Prices, out: Path) -> list[Figure]:
        base = systems[0]
        others = [each for each in systems[1:] if "MD" in each.cards or "MD" in base.cards]
        if not (others and self.md_over_p and "P" in prices.cards):
            return []
        rows = [row for each in others for row in self._priced_anew(each, base, prices)]
        path = out / "bcr-prices.png"
        with canvas(path, 8.0, 3.4) as figure:
            _draw_prices(figure, rows, colours([each.label for each in systems]))
        title = "Cost and BCR by the price of an MD card"
        return [Figure(path, title, _prices_caption(base, rows), _table(rows, _PRICES + _RATIOS))]

    def _priced_anew(self, system: _System, base: _System, prices: Prices) -> list[dict[str, Any]]:
        """A row a factor with the goodput measured, and one with the published put in."""
        goodputs = {_MEASURED: (system.goodput / base.goodput, _ratio_limits(system, base))}
        compared = (system.topology, base.topology) == (_RELAYED, _IN_ONE)
        if self.published_goodput is not None and compared:
            goodputs[_PUT_IN] = (self.published_goodput, _NAN)
        rows = []
        for factor in self.md_over_p:
            sheet = replace(prices, cards={**prices.cards, "MD": factor * prices.cards["P"]})
            cost, base_cost = (sheet.hour(each.name, each.cards) for each in (system, base))
            rows += [
                {
                    "system": system.label,
                    "md_over_p": float(factor),
                    "goodput": how,
                    "currency": prices.currency,
                    "cost_per_hour": cost,
                }
                | _ratios(ratio, limits, cost / base_cost)
                for how, (ratio, limits) in goodputs.items()
            ]
        return rows


def _cards(run: Run) -> Mapping[str, float]:
    cards: Mapping[str, float] = run.manifest["backend"]["cards"]
    return cards


def _refuse_mixed(runs: Sequence[Run]) -> None:
    """Raise `ConfigError` unless all runs have one currency, one sheet of prices and one SLO."""
    checks: dict[str, Callable[[Run], str]] = {
        "currencies": lambda run: run.prices.currency,
        "sheets of prices": lambda run: f"{run.prices.name} of {run.prices.as_of}",
        "prices under one name": lambda run: json.dumps(run.manifest["prices"], sort_keys=True),
        "promises (slo)": lambda run: run.slo.words,
    }
    for what, tell in checks.items():
        if len(said := dict.fromkeys(map(tell, runs))) > 1:
            raise ConfigError(
                f"bcr cannot compare runs of different {what}: {'; '.join(said)}. Give it runs "
                "that share one, or leave it out: report=[ttft]"
            )


def _system(label: str, runs: list[Run]) -> _System:
    first = runs[0]
    backend = first.manifest["backend"]
    cost = first.prices.hour(first.name, backend["cards"])
    if not cost:
        raise ConfigError(
            f"{label} costs nothing by prices {first.prices.name!r}: give its cards a price "
            "(prices.cards), to have a ratio to its cost"
        )
    whole = [
        run for run in runs if run.manifest["validity"]["valid"] and not run.manifest["partial"]
    ]
    return _System(
        label=label,
        cards=backend["cards"],
        name=first.name,
        topology=str(backend["topology"]),
        cost=cost,
        tried=len(whole),
        left_out=len(runs) - len(whole),
        best=_best(label, whole),
    )


def _best(label: str, runs: list[Run]) -> _Best | None:
    rows = [run.summary().to_pylist()[0] for run in runs]
    goodputs = [
        _known(row["goodput_requests_per_s"]) if _keeps(row, run) else math.nan
        for run, row in zip(runs, rows, strict=True)
    ]
    if not np.isfinite(goodputs).any():
        return None
    at = int(np.nanargmax(goodputs))
    loads = _loads(runs)
    heavier = [load for load in loads if load > loads[at]]
    run, row = runs[at], rows[at]
    records = run.records(_READ)
    records = records.filter(pa.array(measured(records, run.window)))
    met = run.slo.met(records)
    lasted_s = row["window_end_s"] - row["window_start_s"]
    _, session = np.unique(records.column("session").to_numpy(), return_inverse=True)
    good = np.bincount(session, weights=met).astype(np.float64)
    return _Best(
        run=run,
        row=row,
        draws=sums(good, _DRAWS, f"bcr {label}") / lasted_s,
        sessions=len(good),
        good_output_tokens_per_s=float(column(records, "served_output_tokens")[met].sum())
        / lasted_s,
        next_load=min(heavier) / loads[at] if heavier else math.nan,
    )


def _keeps(row: dict[str, Any], run: Run) -> bool:
    return row["slo_share"] is not None and row["slo_share"] >= run.slo.share


def _loads(runs: list[Run]) -> list[float]:
    """How heavy each run's load is, to be compared among them only.

    By the number their pacing was given, as it alone decides when sessions of one trace start;
    else by the sessions that came due a second.
    """
    given = [_pacing(run) for run in runs]
    traces = {run.manifest["trace"]["digest"] for run in runs}
    ways = {str(run.manifest.get("pacing", {}).get("_target_")) for run in runs}
    if len(traces) == len(ways) == 1 and not np.isnan(given).any():
        return given
    return [_sessions_per_s(run) for run in runs]


def _pacing(run: Run) -> float:
    """The only number of the run's pacing; 1 where it has no setting, NaN where it has others."""
    values = [v for key, v in run.manifest.get("pacing", {}).items() if key != "_target_"]
    if not values:
        return 1.0
    alone = values[0] if len(values) == 1 else None
    return float(alone) if isinstance(alone, int | float) else math.nan


def _sessions_per_s(run: Run) -> float:
    records = run.records(["session", "scheduled_s"])
    due_s = column(records, "scheduled_s")
    known = ~np.isnan(due_s)
    _, session = np.unique(records.column("session").to_numpy()[known], return_inverse=True)
    starts_s = np.full(session.max(initial=-1) + 1, np.inf)
    np.minimum.at(starts_s, session, due_s[known])
    lasted_s = float(np.ptp(starts_s))
    return len(starts_s) / lasted_s if lasted_s else math.inf


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _ratio_limits(system: _System, base: _System) -> tuple[float, float]:
    """Of the ratio of goodputs: 95%, NaN where either has no interval, or both are one."""
    mine, theirs = system.best, base.best
    if (
        system is base
        or not mine
        or not theirs
        or not (np.ptp(mine.draws) and np.ptp(theirs.draws))
    ):
        return _NAN
    with np.errstate(divide="ignore", invalid="ignore"):
        return interval(mine.draws / theirs.draws)


def _ratios(goodput: float, limits: tuple[float, float], cost: float) -> dict[str, float]:
    """What follows from the ratio of goodputs, its interval, and the ratio of costs."""
    low, high = limits
    return {
        "goodput_ratio": goodput,
        "cost_change_share": cost - 1,
        "bcr": goodput / cost,
        "bcr_low": low / cost,
        "bcr_high": high / cost,
    }


def _relative(system: _System, base: _System) -> dict[str, Any]:
    limits = _ratio_limits(system, base)
    ratios = _ratios(system.goodput / base.goodput, limits, system.cost / base.cost)
    return ratios | {"bcr_is": _bound(system, base)}


def _bound(system: _System, base: _System) -> str | None:
    """Which side of its value the BCR lies on where a limit was not reached; None: no BCR."""
    if not system.best or not base.best:
        return None
    if system is base or not (system.best.open or base.best.open):
        return "the value"
    if system.best.open and base.best.open:
        return "either side"
    return "at least" if system.best.open else "at most"


def _numbers(systems: list[_System], currency: str, runs: Sequence[Run]) -> pa.Table:
    """A row a system; ratios to the first where there are others."""
    names = dict(zip([run.path for run in runs], labels(runs), strict=True))
    several = len(systems) > 1
    rows = [
        {"system": each.label, "valid_runs": each.tried, "currency": currency}
        | {"cost_per_hour": each.cost}
        | (_rates(each, each.best, names) if each.best else {})
        | (_relative(each, systems[0]) if several else {})
        for each in systems
    ]
    return _table(rows, _NUMBERS + (_RATIOS + _BOUND if several else []))


def _table(rows: list[dict[str, Any]], columns: list[tuple[str, pa.DataType]]) -> pa.Table:
    """Rows to columns, NaN and what is missing as null."""
    return pa.table(
        {
            name: pa.array([row.get(name) for row in rows], kind, from_pandas=True)
            for name, kind in columns
        }
    )


def _rates(system: _System, best: _Best, names: Mapping[Path, str]) -> dict[str, Any]:
    row = best.row
    low, high = best.limits
    cost_per_s = system.cost / _HOUR_S

    def each(per_s: float | None) -> float:
        """What one costs of which there are so many a second; NaN of none."""
        return cost_per_s / per_s if per_s else math.nan

    return {
        "run": names[best.run.path],
        "limit_reached": not best.open,
        "next_load_ratio": best.next_load,
        "slo_share": row["slo_share"],
        "sessions": best.sessions,
        "goodput_requests_per_s": system.goodput,
        "goodput_requests_per_s_low": low,
        "goodput_requests_per_s_high": high,
        "goodput_sessions_per_s": row["goodput_sessions_per_s"],
        "cost_per_million_output_tokens": _MILLION * each(row["output_tokens_per_s"]),
        "cost_per_million_output_tokens_within_slo": _MILLION * each(best.good_output_tokens_per_s),
        "cost_per_request_within_slo": each(system.goodput),
        "cost_per_session_within_slo": each(row["goodput_sessions_per_s"]),
        "requests_within_slo_per_cost": system.goodput / cost_per_s,
    }


def _draw(figure: Canvas, systems: list[_System], currency: str) -> None:
    """Bars from zero, a row a system and a panel a measure."""
    several = len(systems) > 1
    panels = figure.subplots(1, 3 if several else 2, sharey=True)
    goodputs = [
        _Bar(each.goodput, each.best.limits, _SIGNS["at least"] if each.best.open else "{}")
        if each.best
        else _Bar(math.nan, words="promise not kept" if each.tried else "no valid run")
        for each in systems
    ]
    costs = [_Bar(each.cost) for each in systems]
    palette = colours([each.label for each in systems])
    _bars(panels[0], goodputs, list(palette.values()), "requests within the SLO/s")
    _bars(panels[1], costs, list(palette.values()), f"{currency} an hour")
    panels[0].set_title("Goodput")
    panels[1].set_title("Cost")
    if several:
        rows = [_relative(each, systems[0]) for each in systems]
        bars = [
            _Bar(row["bcr"], (row["bcr_low"], row["bcr_high"]), _SIGNS.get(row["bcr_is"], "{}"))
            for row in rows
        ]
        _bars(panels[2], bars, list(palette.values()), f"relative to {systems[0].label}")
        panels[2].axvline(1, color=INK, lw=1, ls=":")
        panels[2].set_title("BCR")
    panels[0].set_yticks(range(len(systems)), [each.label for each in systems])
    panels[0].set_ylim(len(systems) - 0.4, -0.6)


def _bars(axes: Axes, bars: list[_Bar], shades: list[str], measure: str) -> None:
    """Each with its interval, and its value right of both."""
    reach = max((bar.end for bar in bars), default=0.0) or 1.0
    for at, (bar, shade) in enumerate(zip(bars, shades, strict=True)):
        missing = math.isnan(bar.value)
        axes.barh(at, 0 if missing else bar.value, 0.62, color=shade)
        if math.isfinite(bar.limits[1]):
            axes.plot(bar.limits, [at, at], color=INK, lw=1.3, marker="|", ms=7)
        axes.annotate(
            str(bar),
            (bar.end, at),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=FAINT if missing else INK,
        )
    axes.set_xlim(0, 1.5 * reach)
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(measure)


def _draw_prices(figure: Canvas, rows: list[dict[str, Any]], palette: Mapping[str, str]) -> None:
    """Cost change on the left, BCR on the right; a group a price, systems side by side in it."""
    costs, bcrs = figure.subplots(1, 2)
    systems = list(dict.fromkeys(row["system"] for row in rows))
    factors = list(dict.fromkeys(row["md_over_p"] for row in rows))
    for row in rows:
        place = (systems.index(row["system"]) + 0.5) / len(systems) - 0.5
        at, shade = factors.index(row["md_over_p"]) + 0.7 * place, palette[row["system"]]
        was_measured = row["goodput"] == _MEASURED
        if was_measured:
            change = 100 * row["cost_change_share"]
            _dot(costs, (at, change), f"{change:+.1f}%", shade)
            bcrs.plot([at, at], [row["bcr_low"], row["bcr_high"]], color=shade, marker="_", ms=8)
        beside = at if was_measured else at - 0.5 / (len(systems) + 3)
        _dot(bcrs, (beside, row["bcr"]), number(row["bcr"]), shade, hollow=not was_measured)
    for axes, title, even in ((costs, "Cost change, %", 0), (bcrs, "BCR", 1)):
        axes.axhline(even, color=INK, lw=1, ls=":")
        axes.set_xticks(range(len(factors)), [f"{factor:g}" for factor in factors])
        axes.set_xlim(-0.5, len(factors) - 0.3)
        axes.margins(y=0.15)
        axes.set(title=title, xlabel="price of an MD card over that of a P card")
    keys = [Line2D([], [], color=palette[name], marker="o", ls="", label=name) for name in systems]
    if any(row["goodput"] == _PUT_IN for row in rows):
        keys.append(Line2D([], [], color=INK, marker="D", mfc="white", ls="", label=_PUT_IN))
    figure.legend(handles=keys, loc="outside upper left", ncols=3, fontsize=9)


def _dot(
    axes: Axes, place: tuple[float, float], words: str, shade: str, *, hollow: bool = False
) -> None:
    """A dot, its value on the right; hollow, with it on the left, if not measured; none of NaN."""
    if math.isnan(place[1]):
        return
    x, y = [place[0]], [place[1]]
    mark, face = ("D", "white") if hollow else ("o", shade)
    axes.plot(x, y, mark, color=shade, mfc=face, ms=7, zorder=3)
    axes.annotate(
        words,
        place,
        xytext=(-8 if hollow else 8, 0),
        textcoords="offset points",
        ha="right" if hollow else "left",
        va="center",
        fontsize=8.5,
    )


def _caption(systems: list[_System], run: Run, left_out: list[str]) -> str:
    limits = run.slo.words.rpartition(" for ")[0]
    words = (
        f"Goodput: requests a second that have {limits}, of each system's run with the most of "
        f"them among those where {100 * run.slo.share:g}% do. Cost: cards and lines, by prices "
        f"{run.prices.name!r} of {run.prices.as_of}."
    )
    sentences = [_limit_words(each) for each in systems]
    if len(systems) > 1:
        words += f" BCR: goodput over cost, each relative to {systems[0].label}."
        sentences.append(_open_words(systems))
    sentences += [_interval_words(systems), _traces_words(systems)]
    if left_out:
        sentences.append(f"Left out, as their cards are not known: {', '.join(left_out)}.")
    return " ".join([words, *filter(None, sentences)])


def _limit_words(system: _System) -> str:
    """Which of its runs count, and whether its limit was found."""
    dropped = f" ({system.left_out} partial or not valid left out)" if system.left_out else ""
    tried = f"{system.label}: of {system.tried} run{'' if system.tried == 1 else 's'}{dropped}"
    if not system.best:
        return f"{tried} none keeps the promise, so there is no goodput."
    if system.best.open:
        return (
            f"{tried} the best has the heaviest load, so the limit was not reached and the goodput "
            "is a lower bound."
        )
    return (
        f"{tried} the best is followed by a load {system.best.next_load:.3g} times as heavy, and "
        "the limit lies in between."
    )


def _open_words(systems: list[_System]) -> str:
    base, *others = systems
    if not base.best:
        return "Without a goodput of the base there is no BCR."
    if not base.best.open:
        return ""
    if any(each.best and each.best.open for each in others):
        return (
            "'open': where neither limit was reached the BCR compares loads that were chosen, and "
            "may lie on either side."
        )
    return "As the base's limit was not reached, each BCR is an upper bound."


def _interval_words(systems: list[_System]) -> str:
    counts = {each.label: each.best.sessions for each in systems if each.best}
    if not counts:
        return ""
    words = (
        f"Lines on the bars: 95% of {_DRAWS:,} resamples of the sessions of the run that counts, "
        "each system by itself, over the time the run took. Sessions of one run share its queues "
        "and arrivals, and the step from load to load is not in it: repeats may differ by more."
    )
    if few := [f"{label} {n}" for label, n in counts.items() if n < SESSION_FLOOR]:
        words += f" From fewer than {SESSION_FLOOR} sessions they are too narrow: {', '.join(few)}."
    if any(each.best and math.isnan(each.best.limits[0]) for each in systems):
        words += " No line: all sessions have as many good requests, which tells nothing of noise."
    return words


def _traces_words(systems: list[_System]) -> str:
    traces = {each.best.run.manifest["trace"]["digest"] for each in systems if each.best}
    if len(traces) <= 1:
        return ""
    return "BEWARE: the runs that count replayed different traces, so they do not compare systems."


def _prices_caption(base: _System, rows: list[dict[str, Any]]) -> str:
    words = (
        "What changes if a card of role MD costs so many times one of role P, relative to "
        f"{base.label}; all other prices as in the runs. Filled: the goodput measured, as above, "
        "with its interval and its limits."
    )
    put_in = [row["goodput_ratio"] for row in rows if row["goodput"] == _PUT_IN]
    if put_in:
        words += (
            f" Hollow: {_PUT_IN}; {put_in[0]:g} times that of one data centre, over the cost of "
            "the cards in these runs."
        )
    if any(row["goodput"] == _MEASURED and math.isnan(row["bcr"]) for row in rows):
        words += " No filled dot: a system or the base has no goodput."
    return words
