"""What a trace is like, in the figures that the literature gives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from harness import metrics
from harness.trace import Trace
from traces import sketch
from traces.capacity import CapacityCurve, Reuse, capacity_curve, working_set
from traces.starts import session_starts

PARTS = 100
"""Equal parts of a trace in which session starts are counted."""

_SHORT_TOKENS = 500


@dataclass(frozen=True)
class Profile:
    """Shares are 0 to 1; triples are P50, P90, P99, nearest rank."""

    prefix_data: str
    """`Header.prefix_data`: where that is `absent`, nothing here of hits was measured."""
    requests: int
    sessions: int
    ideal_hit_mean: float
    """Over requests."""
    ideal_hit_token_weighted: float
    above_95: float
    """Share of requests with an ideal hit rate above 95%."""
    bins: tuple[float, ...]
    """Share of requests in each of `metrics.HIT_LABELS`."""
    decoded_hit_mean: float
    """As `ideal_hit_mean`, the tokens of answers counted as cached: see `decoded_hit_tokens`."""
    decoded_hit_token_weighted: float
    decoded_above_95: float
    decoded_bins: tuple[float, ...]
    input_tokens: tuple[float, ...]
    output_tokens: tuple[float, ...]
    outputs_under_500: float
    turns: tuple[float, ...]
    """Of a session."""
    delay_s: tuple[float, ...]
    """Between a turn and the end of its parents; NaN where no turn has one."""
    starts_variation: float
    """Standard deviation over mean of the times between session starts: 1 for a Poisson process."""
    starts_per_s: float
    """Session starts a second in the mean; NaN, as those around it, where they are not known."""
    starts_dispersion: float
    """Variance over mean of the starts in `PARTS` equal parts of the trace: 1 for Poisson."""
    starts_peak: float
    """Those in the busiest part over their mean."""
    enough_tokens: int
    """The smallest cache that hits as much as an endless one."""
    within_session_share: float
    """Of an endless cache's hits, those on what the same session had used; NaN without hits."""


@dataclass(frozen=True)
class Measured:
    """All that is measured of a trace."""

    profile: Profile
    capacity: pa.Table
    """Hits against capacity: `CapacityCurve.table`."""
    working_set: pa.Table
    """`capacity.working_set`, and `mean_tokens`, `max_tokens`: its blocks in tokens."""
    distributions: pa.Table
    """`of` (a name of `sketch.samples`), `share`, `value`: quantiles."""
    load: pa.Table
    """`start_s`, `sessions`: session starts in each part of the trace; empty where not known."""
    sketch: dict[str, Any]
    """What a twin is drawn from: JSON-able."""


def profile(trace: Trace) -> Profile:
    """The figures of one trace."""
    return _figures(trace, capacity_curve(trace))


def measure(trace: Trace) -> Measured:
    """All of one trace."""
    reuse = Reuse.of(trace)
    curve = capacity_curve(trace, reuse=reuse)
    drawn = sketch.fit(trace)
    points = [
        (name, share, value)
        for name, spread in drawn.like.items()
        for share, value in zip(spread.shares, spread.values, strict=True)
    ]
    names, shares, values = zip(*points, strict=True)
    return Measured(
        _figures(trace, curve),
        curve.table,
        _in_tokens(working_set(trace, reuse=reuse), trace.header.block_tokens),
        pa.table({"of": names, "share": shares, "value": values}),
        _load(session_starts(trace)),
        sketch.to_json(drawn),
    )


def _in_tokens(table: pa.Table, block_tokens: int) -> pa.Table:
    for name in ("mean", "max"):
        tokens = pc.multiply(table.column(f"{name}_blocks"), block_tokens)
        table = table.append_column(f"{name}_tokens", tokens)
    return table


def decoded_hit_tokens(trace: Trace) -> NDArray[np.int64]:
    """As `Trace.ideal_hit_tokens`, of a cache that has the answers too: (turns,).

    A prompt whose hit reaches the last whole block of a parent's is taken to go on with that
    parent's answer, so of it the parent's input and output are cached. An upper bound: traces have
    no tokens, and a client may have dropped the thinking or laid the answer out anew.
    """
    block = trace.header.block_tokens
    hits = trace.ideal_hit_tokens.astype(np.int64)
    inputs, outputs = trace.input_tokens.astype(np.int64), trace.output_tokens.astype(np.int64)
    offsets, parents = trace.parents()
    child = np.repeat(np.arange(len(trace)), np.diff(offsets))
    goes_on = hits[child] >= inputs[parents] // block * block
    child, parents = child[goes_on], parents[goes_on]
    cached = np.minimum(inputs[parents] + outputs[parents], inputs[child])
    np.maximum.at(hits, child, cached)
    return hits


def _figures(trace: Trace, curve: CapacityCurve) -> Profile:
    rates = trace.ideal_hit_rates
    decoded = decoded_hit_tokens(trace)
    decoded_rates = decoded / trace.input_tokens
    delays = trace.column("delay_s")
    hits = curve.unbounded_hit_tokens
    starts = session_starts(trace)
    load = _load(starts).column("sessions").to_numpy()
    return Profile(
        prefix_data=trace.header.prefix_data,
        requests=len(trace),
        sessions=trace.sessions,
        ideal_hit_mean=float(rates.mean()),
        ideal_hit_token_weighted=trace.ideal_hit_token_weighted,
        above_95=_above_95(rates),
        bins=_bins(rates),
        decoded_hit_mean=float(decoded_rates.mean()),
        decoded_hit_token_weighted=float(decoded.sum() / trace.input_tokens.sum(dtype=np.int64)),
        decoded_above_95=_above_95(decoded_rates),
        decoded_bins=_bins(decoded_rates),
        input_tokens=_ranks(trace.input_tokens),
        output_tokens=_ranks(trace.output_tokens),
        outputs_under_500=float((trace.output_tokens < _SHORT_TOKENS).mean()),
        turns=_ranks(np.bincount(trace.session)),
        delay_s=_ranks(delays[~np.isnan(delays)]),
        starts_variation=_variation(starts),
        starts_per_s=_rate(starts),
        starts_dispersion=float(load.var() / load.mean()) if len(load) else math.nan,
        starts_peak=float(load.max() / load.mean()) if len(load) else math.nan,
        enough_tokens=curve.enough_blocks * trace.header.block_tokens,
        within_session_share=curve.within_session_hit_tokens / hits if hits else np.nan,
    )


def _above_95(rates: NDArray[np.float64]) -> float:
    return float((rates > metrics.HIT_EDGES[2]).mean())


def _bins(rates: NDArray[np.float64]) -> tuple[float, ...]:
    counts = np.bincount(metrics.hit_bin(rates), minlength=len(metrics.HIT_LABELS))
    return tuple((counts / len(rates)).tolist())


def _variation(starts: NDArray[np.float64]) -> float:
    gaps = np.diff(starts)
    return float(gaps.std() / gaps.mean()) if len(gaps) else math.nan


def _rate(starts: NDArray[np.float64]) -> float:
    return float((len(starts) - 1) / starts[-1]) if len(starts) else math.nan


def _load(starts: NDArray[np.float64]) -> pa.Table:
    parts = PARTS if len(starts) else 0
    length_s = float(starts[-1]) if parts else 1.0
    counts = np.histogram(starts, max(parts, 1), (0.0, length_s))[0][:parts]
    return pa.table(
        {
            "start_s": pa.array(np.arange(parts) * (length_s / PARTS), pa.float64()),
            "sessions": pa.array(counts, pa.int64()),
        }
    )


def _ranks(
    values: NDArray[np.int32] | NDArray[np.int64] | NDArray[np.float64],
) -> tuple[float, ...]:
    if not len(values):
        return (math.nan,) * len(metrics.QUANTILES)
    return tuple(metrics.nearest_rank(values.astype(np.float64), q) for q in metrics.QUANTILES)
