"""What a trace is like, in the figures that the literature gives."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness import metrics
from harness.pacing import first_arrivals
from harness.trace import Trace
from traces.capacity import CapacityCurve, capacity_curve

_SHORT_TOKENS = 500


@dataclass(frozen=True)
class Profile:
    """Shares are 0 to 1; triples are P50, P90, P99, nearest rank."""

    requests: int
    sessions: int
    ideal_hit_mean: float
    """Over requests."""
    ideal_hit_token_weighted: float
    above_95: float
    """Share of requests with an ideal hit rate above 95%."""
    bins: tuple[float, ...]
    """Share of requests in each of `metrics.HIT_LABELS`."""
    input_tokens: tuple[float, ...]
    output_tokens: tuple[float, ...]
    outputs_under_500: float
    turns: tuple[float, ...]
    """Of a session."""
    delay_s: tuple[float, ...]
    """Between a turn and the end of its parents; NaN where no turn has one."""
    starts_variation: float
    """Standard deviation over mean of the times between session starts: 1 for a Poisson process."""
    enough_tokens: int
    """The smallest cache that hits as much as an endless one."""
    within_session_share: float
    """Of an endless cache's hits, those on what the same session had used; NaN without hits."""


def profile(trace: Trace) -> Profile:
    """The figures of one trace."""
    return _figures(trace, capacity_curve(trace))


def measure(trace: Trace) -> tuple[dict[str, Any], pa.Table]:
    """The same by name, JSON-able but for NaN, and hits against capacity, a row a capacity."""
    curve = capacity_curve(trace)
    return asdict(_figures(trace, curve)), curve.table


def _figures(trace: Trace, curve: CapacityCurve) -> Profile:
    rates = trace.ideal_hit_rates
    counts = np.bincount(metrics.hit_bin(rates), minlength=len(metrics.HIT_LABELS))
    delays = trace.column("delay_s")
    hits = curve.unbounded_hit_tokens
    return Profile(
        requests=len(trace),
        sessions=trace.sessions,
        ideal_hit_mean=float(rates.mean()),
        ideal_hit_token_weighted=trace.ideal_hit_token_weighted,
        above_95=float((rates > metrics.HIT_EDGES[2]).mean()),
        bins=tuple((counts / len(trace)).tolist()),
        input_tokens=_ranks(trace.input_tokens),
        output_tokens=_ranks(trace.output_tokens),
        outputs_under_500=float((trace.output_tokens < _SHORT_TOKENS).mean()),
        turns=_ranks(np.bincount(trace.session)),
        delay_s=_ranks(delays[~np.isnan(delays)]),
        starts_variation=_variation(trace),
        enough_tokens=curve.enough_blocks * trace.header.block_tokens,
        within_session_share=curve.within_session_hit_tokens / hits if hits else np.nan,
    )


def _variation(trace: Trace) -> float:
    gaps = np.diff(np.sort(first_arrivals(trace)))
    return float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() else math.nan


def _ranks(
    values: NDArray[np.int32] | NDArray[np.int64] | NDArray[np.float64],
) -> tuple[float, ...]:
    if not len(values):
        return (math.nan,) * len(metrics.QUANTILES)
    return tuple(metrics.nearest_rank(values.astype(np.float64), q) for q in metrics.QUANTILES)
