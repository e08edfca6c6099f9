"""Numbers from records: pure functions of Arrow tables and numpy arrays.

Percentiles are exact and nearest rank: the smallest value such that at least the share `q` of all
values is not above it. Requests that failed, or were cancelled, count as +inf, so a system
cannot look faster by failing its slow requests. Nothing is interpolated and nothing is averaged
over percentiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from harness.errors import ConfigError
from harness.record import CANCELLED, FAILED, OK, UNSENT
from harness.settings import number

HIT_EDGES = (0.0, 0.90, 0.95, 0.97, 0.98, 0.99, 0.995, 1.0)
"""Seven bins of the prefix-hit rate: each holds its lower edge, the last holds 1 too. The outer
edges are the published ones, the inner ones ours."""

HIT_LABELS = ("0-90%", "90-95%", "95-97%", "97-98%", "98-99%", "99-99.5%", "99.5-100%")
_SUM_WITHIN = 1e-6
"""How far from 1 shares may add up."""

QUANTILES = (0.50, 0.90, 0.99)

SAMPLE_FLOOR = {0.90: 64, 0.99: 662}
"""Fewest samples for a percentile to mean something: the smallest n for which, with 99% confidence,
at least two samples lie above the true percentile (Wilks: 1 - q^n - n (1 - q) q^(n-1) >= 0.99).
Below the floor the figure is given and said to be unsupported."""

_LATENCIES = ("ttft", "ttft_sent", "e2e", "tpot", "longest_gap")

PARTS = ("queue", "prefill", "transfer", "decode_wait", "first_step", "decode", "handoff", "stall")
"""What `breakdown` gives."""

SUMMARY = pa.schema(
    [
        pa.field("backend", pa.string(), nullable=False),
        pa.field("stratum", pa.string(), nullable=False),
        *(
            pa.field(name, pa.int64(), nullable=False)
            for name in ("scheduled", "sent", "unsent", "ok", "failed", "cancelled", "measured")
        ),
        *(
            pa.field(f"{name}_p{round(100 * q)}_s", pa.float64())
            for name in _LATENCIES
            for q in QUANTILES
        ),
        pa.field("send_lag_p50_s", pa.float64()),
        pa.field("send_lag_p99_s", pa.float64()),
        pa.field("p90_supported", pa.bool_(), nullable=False),
        pa.field("p99_supported", pa.bool_(), nullable=False),
        *(
            pa.field(name, pa.float64())
            for name in (
                "requests_per_s",
                "slo_share",
                "goodput_requests_per_s",
                "goodput_sessions_per_s",
                "input_tokens_per_s",
                "output_tokens_per_s",
                "ideal_hit_mean",
                "served_hit_mean",
                "window_start_s",
                "window_end_s",
            )
        ),
    ]
)

COLUMNS = [
    "session",
    "turn_index",
    "agent",
    "input_tokens",
    "output_tokens",
    "ideal_hit_tokens",
    "scheduled_s",
    "sent_s",
    "first_token_s",
    "last_token_s",
    "longest_gap_s",
    "served_input_tokens",
    "served_output_tokens",
    "served_hit_tokens",
    "status",
]
"""What `summarise` reads of a record."""


@dataclass(frozen=True)
class Window:
    """What is left out at both ends: turns scheduled in the first and the last seconds.

    `steady`, two shares: what is left is between the times at which these shares of the sessions
    had started. Sessions ramp up and drain away for as long as one takes; between 0.3 and 0.9, say,
    of many sessions the load is what was asked for.
    """

    warmup_s: float = 0.0
    cooldown_s: float = 0.0
    steady: Sequence[float] | None = None

    def __post_init__(self) -> None:
        for name in ("warmup_s", "cooldown_s"):
            number(f"window.{name}", getattr(self, name), least=0)
        if self.steady is not None:
            if not isinstance(self.steady, list | tuple) or len(self.steady) != 2:  # noqa: PLR2004
                raise ConfigError(f"window.steady is {self.steady!r}: give two shares, [0.3, 0.9]")
            number("window.steady[0]", self.steady[0], least=0, most=1)
            number("window.steady[1]", self.steady[1], above=self.steady[0], most=1)

    def bounds(self, records: pa.Table) -> tuple[float, float]:
        """(first, last) scheduled time that is measured, s. NaN where nothing was sent.

        What was never sent does not count: of an interrupted run the window is what happened.
        """
        sent = ~np.isnan(column(records, "sent_s"))
        known = column(records, "scheduled_s")[sent]
        if self.steady is not None:
            known = known[(column(records, "turn_index") == 0)[sent]]
            quantiles = [nearest_rank(known, max(q, 1e-12)) for q in self.steady if len(known)]
            known = np.array(quantiles)
        if not len(known):
            return math.nan, math.nan
        return float(known.min()) + self.warmup_s, float(known.max()) - self.cooldown_s


@dataclass(frozen=True)
class Slo:
    """What a service promises. A request is good if it was answered within every limit given.

    Latencies count from the scheduled time, so waiting to be sent is part of them. The promise is
    kept if the share `share` of all requests is good. None: no limit.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    share: float = 0.99

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            if getattr(self, name) is not None:
                number(f"slo.{name}", getattr(self, name), above=0, most=1e9)
        number("slo.share", self.share, above=0, most=1)

    @property
    def words(self) -> str:
        """`TTFT within 30 s for 99% of requests`."""
        limits = {"TTFT": self.ttft_s, "TPOT": self.tpot_s, "E2E": self.e2e_s}
        said = [f"{name} within {limit:g} s" for name, limit in limits.items() if limit is not None]
        return f"{' and '.join(said) or 'an answer'} for {100 * self.share:g}% of requests"

    def met(self, records: pa.Table) -> NDArray[np.bool_]:
        """Which requests are good: (rows,). One that failed is not; one token has no TPOT."""
        e2e_s = honest(records, "scheduled_s", "last_token_s")
        good: NDArray[np.bool_] = np.isfinite(e2e_s)
        if self.e2e_s is not None:
            good &= e2e_s <= self.e2e_s
        if self.ttft_s is not None:
            good &= honest(records, "scheduled_s", "first_token_s") <= self.ttft_s
        if self.tpot_s is not None:
            each_s = tpot(records)
            good &= np.isnan(each_s) | (each_s <= self.tpot_s)
        return good


def nearest_rank(values: NDArray[np.float64], q: float) -> float:
    """The exact percentile, `q` in (0, 1]: the value of rank ceil(q n). NaN of nothing.

    +inf is a value like any other; NaN is refused with a ValueError.
    """
    if not 0 < q <= 1:
        raise ValueError(f"q is {q}: give a share above 0, up to 1")
    if not len(values):
        return math.nan
    if np.isnan(values).any():
        raise ValueError("a NaN has no rank: leave out what was not measured, +inf for a failure")
    rank = max(1, math.ceil(q * len(values) - 1e-9))
    return float(np.partition(values, rank - 1)[rank - 1])


def hit_shares(name: str, given: Any) -> NDArray[np.float64]:
    """Shares of requests in each of `HIT_LABELS`, as somebody gave them for the setting `name`.

    They sum to 1, to the last digits. Raises `ConfigError` unless seven numbers are given that do.
    """
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != len(HIT_LABELS):
        raise ConfigError(
            f"{name} is {given!r}: give {len(HIT_LABELS)} shares, of {', '.join(HIT_LABELS)}"
        )
    for label, share in zip(HIT_LABELS, given, strict=True):
        number(f"{name}, of {label},", share, least=0, most=1)
    shares: NDArray[np.float64] = np.array(given, np.float64)
    if abs(shares.sum() - 1) > _SUM_WITHIN:
        raise ConfigError(f"{name} is {given!r}, which sum to {shares.sum():g}: make it 1")
    return shares


def hit_bin(rates: NDArray[np.float64]) -> NDArray[np.int64]:
    """Which of the seven bins each hit rate falls in: 0 to 6."""
    return np.searchsorted(np.array(HIT_EDGES[1:-1]), rates, side="right").astype(np.int64)


def column(records: pa.Table, name: str) -> NDArray[np.float64]:
    """A column of numbers as float64, nulls as NaN: (rows,)."""
    values: NDArray[np.float64] = (
        records.column(name).cast(pa.float64()).to_numpy(zero_copy_only=False)
    )
    return values


def ideal_hit_rates(records: pa.Table) -> NDArray[np.float64]:
    """What share of each prompt an infinite cache would have held: (rows,)."""
    return column(records, "ideal_hit_tokens") / column(records, "input_tokens")


def served_hit_rates(records: pa.Table) -> NDArray[np.float64]:
    """What share of each prompt the server says it had cached: (rows,). NaN: it does not say."""
    return column(records, "served_hit_tokens") / column(records, "served_input_tokens")


def status_is(records: pa.Table, status: str) -> NDArray[np.bool_]:
    """Which records ended so: (rows,)."""
    mask: NDArray[np.bool_] = (
        pc.equal(records.column("status"), status).combine_chunks().to_numpy(zero_copy_only=False)
    )
    return mask


def measured(records: pa.Table, window: Window) -> NDArray[np.bool_]:
    """Which records count: sent, and scheduled within the window: (rows,)."""
    scheduled_s = column(records, "scheduled_s")
    first_s, last_s = window.bounds(records)
    return (scheduled_s >= first_s) & (scheduled_s <= last_s) & ~np.isnan(column(records, "sent_s"))


def honest(records: pa.Table, start: str, end: str) -> NDArray[np.float64]:
    """`end` - `start` in seconds, +inf for whatever did not end well: (rows,)."""
    lasted = column(records, end) - column(records, start)
    return np.where(status_is(records, OK), lasted, np.inf)


def tpot(records: pa.Table) -> NDArray[np.float64]:
    """Time per output token after the first, s: (rows,). By the tokens that came.

    +inf where the answer is not whole, NaN where it has one token only.
    """
    after_first = column(records, "served_output_tokens") - 1
    lasted = column(records, "last_token_s") - column(records, "first_token_s")
    with np.errstate(divide="ignore", invalid="ignore"):
        each = np.where(after_first > 0, lasted / after_first, np.nan)
    return np.where(status_is(records, OK), each, np.inf)


def longest_gap(records: pa.Table) -> NDArray[np.float64]:
    """The longest time from one token to the next, s: what a reader of the stream waits: (rows,).

    +inf where the answer is not whole, NaN where it has one token (or one event) only.
    """
    return np.where(status_is(records, OK), column(records, "longest_gap_s"), np.inf)


def breakdown(records: pa.Table) -> dict[str, NDArray[np.float64]]:
    """Where each request's time went, s, by `PARTS`: (rows,) each.

    NaN where a part does not apply, or the server does not say.
    queue, prefill, transfer, decode_wait and first_step follow each other, and for a request that
    is not relayed sum up to TTFT from the send; but where the KV cache crosses while it is computed
    (`overlap`), transfer begins in prefill. A relayed one has its first token while its transfer
    goes on. handoff: from the first of the relay's tokens sent to the first that the main
    decode emits; the relay may go on meanwhile. stall: the longest gap. decode: first token to
    last.
    """
    at = {
        name: column(records, f"{name}_s")
        for name in (
            "sent", "prefill_start", "prefill_end", "transfer_start", "transfer_end",
            "decode_start", "first_token", "last_token", "handoff_start", "handoff",
        )
    }  # fmt: skip
    relayed = ~np.isnan(column(records, "relay_tokens"))
    return {
        "queue": at["prefill_start"] - at["sent"],
        "prefill": at["prefill_end"] - at["prefill_start"],
        "transfer": at["transfer_end"] - at["transfer_start"],
        "decode_wait": np.where(relayed, np.nan, at["decode_start"] - at["transfer_end"]),
        "first_step": np.where(relayed, np.nan, at["first_token"] - at["decode_start"]),
        "decode": at["last_token"] - at["first_token"],
        "handoff": at["handoff"] - at["handoff_start"],
        "stall": column(records, "longest_gap_s"),
    }


def summarise(records: pa.Table, window: Window, backend: str, slo: Slo | None = None) -> pa.Table:
    """One row for all records, one for each bin of the ideal hit rate, one for each agent type.

    Throughput is by what was answered well to the requests scheduled in the window, from its first
    scheduled time to the last token of its answers (or its end, if later), so that a backlog
    drained after the schedule's end is not free. In a steady window it is by what *ended* in it,
    over its length: one long answer to a request of the window does not stretch it.

    Goodput is what of the requests scheduled in the window met the SLO (without one, was answered),
    over the same time: requests, and sessions of which every request in the window did.
    """
    inside = measured(records, window)
    bounds = window.bounds(records)
    ended = None if window.steady is None else _ended(records, bounds)
    bins = hit_bin(ideal_hit_rates(records))
    strata = {"all": np.ones(len(inside), bool)}
    strata |= {f"hit {label}": bins == at for at, label in enumerate(HIT_LABELS)}
    agents = np.array(records.column("agent").to_pylist())
    strata |= {f"agent {name}": agents == name for name in sorted(set(agents.tolist()))}
    rows = [
        {"backend": backend, "stratum": name}
        | _stratum(records, (inside, ended), members, bounds, slo or Slo())
        for name, members in strata.items()
    ]
    return pa.Table.from_pylist(rows, schema=SUMMARY)


def _stratum(
    records: pa.Table,
    counts: tuple[NDArray[np.bool_], NDArray[np.bool_] | None],
    members: NDArray[np.bool_],
    bounds: tuple[float, float],
    slo: Slo,
) -> dict[str, float | int | bool | None]:
    """`counts`: which records are measured, and which are throughput (None: the same)."""
    inside, finished = counts
    everything = records.filter(pa.array(members))
    counted = records.filter(pa.array(members & inside))
    done = counted if finished is None else records.filter(pa.array(members & finished))
    ended = {status: int(status_is(everything, status).sum()) for status in (OK, FAILED)}
    cancelled, unsent = (int(status_is(everything, s).sum()) for s in (CANCELLED, UNSENT))
    n = counted.num_rows
    row: dict[str, float | int | bool | None] = {
        "scheduled": everything.num_rows,
        "sent": everything.num_rows - unsent,
        "unsent": unsent,
        **ended,
        "cancelled": cancelled,
        "measured": n,
        "p90_supported": n >= SAMPLE_FLOOR[0.90],
        "p99_supported": n >= SAMPLE_FLOOR[0.99],
    }
    row |= _latencies(counted)
    row |= _rates(counted, done, bounds, slo)
    return {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in row.items()}


def _latencies(records: pa.Table) -> dict[str, float]:
    values = {
        "ttft": honest(records, "scheduled_s", "first_token_s"),
        "ttft_sent": honest(records, "sent_s", "first_token_s"),
        "e2e": honest(records, "scheduled_s", "last_token_s"),
        "tpot": tpot(records),
        "longest_gap": longest_gap(records),
    }
    figures = {
        f"{name}_p{round(100 * q)}_s": nearest_rank(lasted[~np.isnan(lasted)], q)
        for name, lasted in values.items()
        for q in QUANTILES
    }
    lag_s = column(records, "sent_s") - column(records, "scheduled_s")
    figures["send_lag_p50_s"] = nearest_rank(lag_s, 0.50)
    figures["send_lag_p99_s"] = nearest_rank(lag_s, 0.99)
    return figures


def _ended(records: pa.Table, bounds: tuple[float, float]) -> NDArray[np.bool_]:
    """Which records had their last token in the window."""
    ends = column(records, "last_token_s")
    return (ends > bounds[0]) & (ends <= bounds[1])


def _rates(
    records: pa.Table, done: pa.Table, bounds: tuple[float, float], slo: Slo
) -> dict[str, float]:
    """`records`: those measured; `done`: those that count as throughput.

    Where these are the same, the window goes on to the last token of their answers.
    """
    good = done.filter(pa.array(status_is(done, OK)))
    first_s, end_s = bounds
    ends = column(good, "last_token_s")
    if done is records and len(ends):
        end_s = max(end_s, float(ends.max()))
    lasted_s = end_s - first_s
    per_s = 1 / lasted_s if lasted_s > 0 else math.nan
    served = served_hit_rates(records.filter(pa.array(status_is(records, OK))))
    served = served[~np.isnan(served)]
    ideal = ideal_hit_rates(records)
    met = slo.met(records)
    sessions = records.column("session").to_numpy()
    good_sessions = len(np.unique(sessions)) - len(np.unique(sessions[~met]))
    return {
        "requests_per_s": good.num_rows * per_s,
        "slo_share": float(met.mean()) if len(met) else math.nan,
        "goodput_requests_per_s": int(met.sum()) * per_s,
        "goodput_sessions_per_s": good_sessions * per_s,
        # NaN, and so null, where any answer came without its count: a sum would be too low.
        "input_tokens_per_s": float(column(good, "served_input_tokens").sum()) * per_s,
        "output_tokens_per_s": float(column(good, "served_output_tokens").sum()) * per_s,
        "ideal_hit_mean": float(ideal.mean()) if len(ideal) else math.nan,
        "served_hit_mean": float(served.mean()) if len(served) else math.nan,
        "window_start_s": first_s,
        "window_end_s": end_s,
    }


@dataclass(frozen=True)
class Counts:
    """How many turns ended how. `broken` lists the conservation laws that do not hold."""

    scheduled: int
    sent: int
    unsent: int
    ok: int
    failed: int
    cancelled: int
    broken: tuple[str, ...]


def conserve(records: pa.Table, turns: int) -> Counts:
    """Count the records of a trace of `turns`: each turn must have exactly one.

    scheduled = sent + unsent; sent = ok + failed + cancelled. `records` needs the columns `turn`
    and `status`.
    """
    ok, failed, cancelled, unsent = (
        int(status_is(records, status).sum()) for status in (OK, FAILED, CANCELLED, UNSENT)
    )
    sent = ok + failed + cancelled
    seen = np.bincount(records.column("turn").to_numpy(), minlength=turns)
    broken = []
    if lost := int((seen[:turns] == 0).sum()):
        broken.append(f"{lost} of {turns} turns have no record")
    if twice := int((seen > 1).sum()):
        broken.append(f"{twice} turns have more than one record")
    if len(seen) > turns:
        broken.append(f"records of turns that the trace of {turns} does not have")
    if records.num_rows != sent + unsent:
        broken.append(f"{records.num_rows - sent - unsent} records of an unknown status")
    return Counts(turns, sent, unsent, ok, failed, cancelled, tuple(broken))
