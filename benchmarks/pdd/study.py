"""One simulated run in steady state, in memory, and what it came to."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from harness import metrics
from harness.clock import VirtualTimeLoop
from harness.pacing import Recorded
from harness.plugins import build
from harness.record import Record, to_batch
from harness.replay import Replay
from harness.run import load_trace
from harness.seed import stream
from harness.trace import Trace

TOPOLOGIES = ("in_dc", "cross_dc", "cross_dc_drc", "pdd")
BACKENDS = (*TOPOLOGIES, "prefill_service")
DELAY_CAP_S = 60
"""No session pauses longer, so that a run of minutes is in steady state."""
WARM, COOL = 0.3, 0.1
"""Shares of the time over which sessions start that are left out at both ends."""

Item = TypeVar("Item")
Done = TypeVar("Done")


@dataclass(frozen=True)
class Case:
    """One run: a topology under a load. `shape` and `system` are overrides."""

    topology: str
    sessions_per_s: float
    system: tuple[str, ...] = ()
    shape: tuple[str, ...] = ()
    sessions: int = 1500
    seed: int = 1


@dataclass(frozen=True)
class Outcome:
    """Of the requests due while the system was in steady state. Times in s."""

    requests: int
    offered_per_s: float
    ttft_s: tuple[float, float, float]
    """P50, P90, P99, from the scheduled time."""
    transfer_s: tuple[float, float, float]
    e2e_s: tuple[float, float, float]
    longest_gap_s: tuple[float, float, float]
    low_hits: float
    """Share of requests with an ideal hit under 90%."""
    wan_bps: float
    relayed: float
    """Share of requests by P-RLD-MD or P-RLD."""
    singular: float
    """Share of requests by P-RLD."""
    relay_tokens: float
    """Share of output tokens."""
    routes: dict[str, float]
    """Share of requests, by route."""


def run(case: Case) -> Outcome:
    """Simulate it."""
    trace = _trace(case.sessions_per_s, case.sessions, case.seed, case.shape)
    return outcome(replay(trace, case.topology, case.system, case.seed))


def replay(trace: Trace, topology: str, system: Sequence[str], seed: int = 1) -> pa.Table:
    """Every record of a trace through a simulated backend."""
    backend = build(config(*system), f"backend.{topology}", without=("loop", "scrape_s"))
    records: list[Record] = []

    async def main() -> None:
        async with backend:
            await backend.reset()
            plan = Recorded().plan(trace, stream(seed, "pacing"))
            await Replay(trace, plan, backend, records.append).run()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())
    return pa.Table.from_batches([to_batch(records)])


def outcome(records: pa.Table) -> Outcome:
    """What the requests in steady state came to."""
    scheduled_s = metrics.column(records, "scheduled_s")
    starts_s = scheduled_s[metrics.column(records, "turn_index") == 0]
    first_s, last_s = np.quantile(starts_s, [WARM, 1 - COOL])
    kept = records.filter(pa.array((scheduled_s >= first_s) & (scheduled_s <= last_s)))
    routes = np.array(kept.column("route").to_pylist())
    relay_tokens = np.nan_to_num(metrics.column(kept, "relay_tokens"))
    sent_bytes = np.nan_to_num(metrics.column(kept, "transfer_bytes"))
    return Outcome(
        requests=kept.num_rows,
        offered_per_s=kept.num_rows / (last_s - first_s),
        ttft_s=_percentiles(metrics.honest(kept, "scheduled_s", "first_token_s")),
        transfer_s=_percentiles(metrics.breakdown(kept)["transfer"]),
        e2e_s=_percentiles(metrics.honest(kept, "scheduled_s", "last_token_s")),
        longest_gap_s=_percentiles(metrics.longest_gap(kept)),
        low_hits=float((metrics.ideal_hit_rates(kept) < metrics.HIT_EDGES[1]).mean()),
        wan_bps=8 * float(sent_bytes.sum()) / (last_s - first_s),
        relayed=float(np.mean(["RLD" in route for route in routes])),
        singular=float(np.mean([route.endswith("RLD") for route in routes])),
        relay_tokens=float(relay_tokens.sum() / metrics.column(kept, "output_tokens").sum()),
        routes={name: float(np.mean(routes == name)) for name in sorted(set(routes.tolist()))},
    )


@cache
def _trace(rate_per_s: float, sessions: int, seed: int, shape: tuple[str, ...]) -> Trace:
    return load_trace(
        config(
            "transform=[cap_delays]", f"transform.cap_delays.max_s={DELAY_CAP_S}",
            f"trace.session_rate_per_s={rate_per_s}", f"trace.sessions={sessions}",
            f"seed={seed}", *shape,
        )
    )  # fmt: skip


def config(*overrides: str) -> DictConfig:
    """The configuration of `relaybench run`, with every simulated backend."""
    with initialize_config_module("conf", version_base="1.3"):
        return compose("run", [f"backend=[{','.join(BACKENDS)}]", *overrides])


def everywhere(setting: str, value: Any, topologies: Iterable[str] = TOPOLOGIES) -> tuple[str, ...]:
    """The same setting of every backend, as overrides."""
    return tuple(f"backend.{name}.{setting}={value}" for name in topologies)


def solve(wanted: float, low: float, high: float, found: Callable[[float], float]) -> float:
    """Where an increasing function comes to `wanted`, within 0.5%, by halving the logarithm."""
    while high / low > 1.005:  # noqa: PLR2004 - see above
        middle = math.sqrt(low * high)
        low, high = (middle, high) if found(middle) < wanted else (low, middle)
    return math.sqrt(low * high)


def each(work: Callable[[Item], Done], items: Sequence[Item]) -> list[Done]:
    """`work` on every item, on all cores."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(work, items))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def triple(values: Sequence[float], shown: str = ".1f") -> str:
    """P50 / P90 / P99."""
    return " / ".join(f"{value:{shown}}" for value in values)


def _percentiles(values: np.ndarray) -> tuple[float, float, float]:
    known = values[~np.isnan(values)]
    p50, p90, p99 = (metrics.nearest_rank(known, q) for q in metrics.QUANTILES)
    return p50, p90, p99
