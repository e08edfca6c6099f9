"""Prefill as a service: what goes far and what stays, by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from adapters.simulator import LeastLoad, Link, PrefillService
from harness.backend import Request, Served
from harness.errors import ConfigError
from tests.by_hand import KV, STEP_S, answer, ask, cluster, one, pool, site, virtually


def service(threshold_tokens: float = 500, far: int = 1, **changes: Any) -> PrefillService:
    """At home 1 ms a token and a link without end; far away a tenth of that, and 2 MB/s home."""
    settings: dict[str, Any] = {
        "topology": "service",
        "prefill": {f"F{number}": cluster(0.1) for number in range(far)},
        "home": cluster(),
        "threshold_tokens": threshold_tokens,
        "home_link": Link(1e15),
        "link": Link(16e6, rtt_s=0.2),
        "decode": {"D": site(pool())},
        "prefill_routing": LeastLoad() if far > 1 else None,
    }
    return PrefillService(**(settings | changes))


def test_a_long_prompt_is_prefilled_far_away() -> None:
    times_s, served = one(service(), ask(inputs=1000))
    assert served.route == "F0-D"
    assert served.prefill_end_s == pytest.approx(0.1)
    assert times_s == pytest.approx(0.1 + 1.1 + STEP_S * np.arange(1, 31))


def test_a_short_prompt_stays_at_home() -> None:
    times_s, served = one(service(), ask(inputs=500))
    assert served.route == "P-D"
    assert times_s == pytest.approx(0.5 + STEP_S * np.arange(1, 31), abs=1e-6)


def test_what_counts_is_what_is_new_at_home() -> None:
    """What has come from far away is known there."""
    system, got = service(), list[Served]()

    async def main() -> None:
        async with system:
            got.append((await answer(system, ask(inputs=1000)))[1])
            longer = Request(1, 0, 1, 1400, 5, 100, [(0, 10), (500, 4)], "")
            got.append((await answer(system, longer))[1])

    virtually(main)
    assert [served.route for served in got] == ["F0-D", "P-D"]
    assert got[1].hit_tokens == 1000
    assert system.counters()["link_sent_bytes_total"] == KV.of(1000)
    assert system.counters()["home_sent_bytes_total"] == KV.of(1400)


def test_far_clusters_share_one_link_and_the_work() -> None:
    system, got = service(far=2), list[Served]()

    async def main() -> None:
        async with system, asyncio.TaskGroup() as group:
            for number in range(2):
                group.create_task(each(number))

    async def each(number: int) -> None:
        got.append((await answer(system, ask(number)))[1])

    virtually(main)
    assert sorted(str(served.route) for served in got) == ["F0-D", "F1-D"]
    # Both 2 MB are on it from 0.1 s on, at half of its rate each.
    assert [served.transfer_end_s for served in got] == pytest.approx([0.1 + 2 + 0.1] * 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"threshold_tokens": -1}, "threshold_tokens is -1"),
        ({"home": None}, "home is None"),
        ({"prefill": {"P": cluster()}}, "names other than P"),
        ({"home_link": 3}, "home_link is 3"),
    ],
)
def test_an_impossible_service_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        service(**changes)


def test_its_cards_are_those_at_home_and_those_far_away() -> None:
    assert service(far=2).cards() == {"P": 8, "F0": 8, "F1": 8, "D": 8}
