"""A system small enough to compute by hand: 1 ms a prompt token, 0.1 s a step, 2 MB/s of WAN."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from adapters.simulator import (
    DecodePool,
    DecodeSite,
    Handoff,
    KvBytes,
    KvCache,
    Link,
    Pdd,
    PrefillCluster,
)
from harness.backend import Answer, Request, Served
from harness.clock import VirtualTimeLoop
from tests.simulated import chip

KV = KvBytes(per_token=1000.0, fixed=1e6)
STEP_S = 0.1


def cluster(scale: float = 1.0) -> PrefillCluster:
    """1 ms a token."""
    return PrefillCluster(8, 10_000, 1e12, chip((0.0, 1e-3 * scale, 0.0)), KV)


def pool(scale: float = 1.0, kv_bytes: float = 1e12, speed: float = 1.0) -> DecodePool:
    """0.1 s a step, whatever the batch; 1 ms for each token taken in beyond the first."""
    timed = chip((0.0, 1e-3, 0.0), (STEP_S * scale, 0.0, 0.0, 0.0), speed)
    return DecodePool(8, kv_bytes, timed, KV, block_tokens=1, when_full="reserve")


def site(pool: DecodePool, cache_bytes: float = 0.0) -> DecodeSite:
    return DecodeSite(pool, KvCache(KV, cache_bytes))


def pdd(
    threshold_s: float = 0.5, relay_bytes: float = 1e12, way: Any = "one-shot", **changes: Any
) -> Pdd:
    """A prompt of 1,000 tokens takes 1 s to prefill and, 2 MB, 1.1 s over the WAN."""
    settings: dict[str, Any] = {
        "topology": "pdd",
        "prefill": {"P": cluster()},
        "link": Link(16e6, rtt_s=0.2),
        "decode": {"MD": site(pool(), 1e12)},
        "relay": site(pool(kv_bytes=relay_bytes)),
        "relay_link": Link(1e15, setup_s=0.02),
        "relay_threshold_s": threshold_s,
        "handoff": Handoff(way),
    }
    return Pdd(**(settings | changes))


def ask(number: int = 0, inputs: int = 1000, outputs: int = 30) -> Request:
    return Request(number, number, 0, inputs, outputs, 100, [(number * 1000, inputs // 100)], "")


async def answer(system: Any, request: Request) -> tuple[np.ndarray, Served]:
    answer = Answer()
    await system.generate(request, answer)
    return np.asarray(answer.times_s), answer.served


def virtually(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


def one(system: Any, request: Request) -> tuple[np.ndarray, Served]:
    got: list[tuple[np.ndarray, Served]] = []

    async def main() -> None:
        async with system:
            got.append(await answer(system, request))

    virtually(main)
    return got[0]
