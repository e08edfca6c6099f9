"""What a trace is like, in the figures that the literature gives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness import metrics
from harness.trace import Trace

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
    """Between a turn and the end of its parents."""


def profile(trace: Trace) -> Profile:
    """The figures of one trace."""
    rates = trace.ideal_hit_rates
    counts = np.bincount(metrics.hit_bin(rates), minlength=len(metrics.HIT_LABELS))
    delays = trace.column("delay_s")
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
    )


def _ranks(
    values: NDArray[np.int32] | NDArray[np.int64] | NDArray[np.float64],
) -> tuple[float, ...]:
    return tuple(metrics.nearest_rank(values.astype(np.float64), q) for q in metrics.QUANTILES)
