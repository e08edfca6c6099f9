"""Intervals by the bootstrap over sessions: what other sessions of the same kind might have given.

Whole sessions are drawn with replacement, as many as there are, since the turns of one are alike.
Their records are not measured again: a resample is a weight a session, how often it was drawn. All
draws are seeded, so the same runs give the same intervals. Efron and Tibshirani, An Introduction to
the Bootstrap (1993), chapters 8 and 13.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from harness.metrics import nearest_rank
from harness.seed import stream

SESSION_FLOOR = 30
"""Fewest sessions for an interval to be trusted: with fewer it is too narrow. A rule of thumb."""

LIMITS = (0.025, 0.975)
"""Of the draws: an interval of 95%."""

_SEED = 1
_SPREADS = 6.0
"""How many standard deviations of its rank a resampled percentile is looked for, at first."""


def interval(draws: NDArray[np.float64]) -> tuple[float, float]:
    """(low, high) of 95% of the draws that are not NaN, both draws themselves; NaN of none."""
    known = draws[~np.isnan(draws)]
    low, high = (nearest_rank(known, q) for q in LIMITS)
    return low, high


def sums(counts: NDArray[np.float64], draws: int, name: str) -> NDArray[np.float64]:
    """Resampled sums of a count a session: `counts` (sessions,) gives (draws,).

    Sessions of the same count are drawn together, by one multinomial: the same distribution as of
    sessions drawn one by one, for the cost of the distinct counts. `name` names the random numbers.
    """
    distinct, sessions = np.unique(counts, return_counts=True)
    shares = sessions / len(counts)
    drawn = stream(_SEED, f"bootstrap {name}").multinomial(len(counts), shares, size=draws)
    summed: NDArray[np.float64] = drawn @ distinct
    return summed


def resamples(sessions: int, draws: int, name: str) -> Iterator[NDArray[np.float64]]:
    """How often each session is drawn: (sessions,), `draws` times. `name` names the numbers."""
    random = stream(_SEED, f"bootstrap {name}")
    for _ in range(draws):
        drawn = random.integers(0, sessions, sessions)
        yield np.bincount(drawn, minlength=sessions).astype(np.float64)


class Ranked:
    """Values sorted once, whose exact nearest-rank percentiles are read under any weights.

    A percentile is looked for among the values whose rank is within six standard deviations of
    where it lies in the data, as its sessions spread: of a million records some ten thousand. The
    weight of all below them is one product a resample. A percentile outside is looked for among
    all, so every one is exact.
    """

    def __init__(
        self,
        values: NDArray[np.float64],
        session: NDArray[np.int64],
        sessions: int,
        quantiles: Sequence[float],
    ) -> None:
        """Of `values` (rows,), NaN left out, +inf a value, each of `session` (rows,)."""
        known = ~np.isnan(values)
        order = np.argsort(values[known], kind="stable")
        self._values = values[known][order]
        self._session = session[known][order]
        self._quantiles = tuple(quantiles)
        self._whole = np.bincount(self._session, minlength=sessions).astype(np.float64)
        self._spans = [self._span(q) for q in self._quantiles]
        below = [np.bincount(self._session[:low], minlength=sessions) for low, _ in self._spans]
        self._below = np.column_stack([self._whole, *below]).astype(np.float64)

    def _span(self, q: float) -> tuple[int, int]:
        """(first, end) of the sorted values among which the percentile is looked for first."""
        rank = q * len(self._values)
        at_most = np.bincount(self._session[: math.ceil(rank)], minlength=len(self._whole))
        reach = _SPREADS * float(np.linalg.norm(at_most - q * self._whole)) + 2
        return max(0, math.floor(rank - reach)), min(len(self._values), math.ceil(rank + reach))

    def percentiles(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of the values, each as often as its session's weight (sessions,): (quantiles,).

        NaN where no session that has a value was drawn.
        """
        total, *below = weights @ self._below
        found = np.full(len(self._quantiles), np.nan)
        if total:
            for at, q in enumerate(self._quantiles):
                rank = max(1, math.ceil(q * total - 1e-9))
                found[at] = self._look(weights, rank, below[at], *self._spans[at])
        return found

    def _look(
        self, weights: NDArray[np.float64], rank: int, below: float, first: int, end: int
    ) -> float:
        """The value of this rank, of those from `first` to `end`, or else of all."""
        upto = below + np.cumsum(weights[self._session[first:end]])
        if below >= rank or upto[-1] < rank:
            return self._look(weights, rank, 0.0, 0, len(self._values))
        return float(self._values[first + np.searchsorted(upto, rank)])


def ratios(values: NDArray[np.float64], bases: NDArray[np.float64]) -> NDArray[np.float64]:
    """`values` / `bases`, alike in shape; 1 where they are equal, be it 0 or +inf."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(values == bases, 1.0, values / bases)
