"""Whole answers of a system small enough to compute by hand, on both clocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from adapters.simulator import (
    DecodePool,
    DecodeSite,
    Disaggregated,
    Handoff,
    KvBytes,
    KvCache,
    Link,
    Pdd,
    PrefillCluster,
)
from adapters.simulator.decode import Sequence
from adapters.simulator.engine import Engine
from harness.backend import Answer, Request, Served
from harness.clock import VirtualTimeLoop, WallLoop
from harness.errors import BackendError, ConfigError
from tests.simulated import chip, play

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


def pdd(threshold_s: float = 0.5, relay_bytes: float = 1e12, way: Any = "one-shot") -> Pdd:
    """A prompt of 1,000 tokens takes 1 s to prefill and, 2 MB, 1.1 s over the WAN."""
    return Pdd(
        topology="pdd",
        prefill={"P": cluster()},
        link=Link(16e6, rtt_s=0.2),
        decode={"MD": site(pool(), 1e12)},
        relay=site(pool(kv_bytes=relay_bytes)),
        relay_link=Link(1e15, setup_s=0.02),
        relay_threshold_s=threshold_s,
        handoff=Handoff(way),
    )


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


def test_a_relayed_answer_by_hand() -> None:
    times_s, served = one(pdd(), ask())
    assert served.route == "P-RLD-MD"
    assert served.prefill_start_s == 0.0
    assert served.prefill_end_s == pytest.approx(1.0)
    assert served.transfer_end_s == pytest.approx(1.0 + 1.0 + 0.1)
    # The relay begins at 1.02 s; the step under way at 2.1 s is its eleventh, and ends at 2.12 s.
    assert served.relay_tokens == 11
    assert times_s[:11] == pytest.approx(1.02 + STEP_S * np.arange(1, 12), abs=1e-6)
    # Ids take 0.1 s one way; eleven at once are ten more than a step takes in anyway.
    assert served.handoff_s == times_s[11] == pytest.approx(2.12 + 0.1 + STEP_S + 10e-3, abs=1e-6)
    assert np.diff(times_s[11:]) == pytest.approx(STEP_S)
    assert len(times_s) == 30


def test_a_short_transfer_goes_straight_to_the_main_decode() -> None:
    times_s, served = one(pdd(threshold_s=1.2), ask())
    assert (served.route, served.relay_tokens, served.handoff_s) == ("P-MD", None, None)
    assert times_s == pytest.approx(2.1 + STEP_S * np.arange(1, 31))


def test_a_relay_without_room_leaves_it_to_the_main_decode() -> None:
    assert one(pdd(relay_bytes=1.99e6), ask())[1].route == "P-MD"
    # 1,000 tokens are 1 MB and their window state another; the answer's length is not known yet.
    assert one(pdd(relay_bytes=2e6), ask())[1].route == "P-RLD-MD"


def test_a_short_answer_ends_at_the_relay_and_its_cache_still_crosses() -> None:
    system = pdd()
    second: list[Served] = []

    async def main() -> None:
        async with system:
            times_s, served = await answer(system, ask(outputs=5))
            assert times_s == pytest.approx(1.02 + STEP_S * np.arange(1, 6), abs=1e-6)
            assert (served.relay_tokens, served.handoff_s) == (5, None)
            assert system.load()["requests"] == 0
            assert system.load()["link_flows"] == 1
            await asyncio.sleep(1.0)
            assert not any(system.load().values())
            second.append((await answer(system, ask(outputs=5)))[1])

    virtually(main)
    assert second[0].hit_tokens == 999
    assert second[0].decode_hit_tokens == 1000
    assert second[0].transfer_bytes == KV.fixed


def test_what_is_done_is_counted() -> None:
    system = pdd()
    counters: dict[str, float] = {}

    async def main() -> None:
        async with system:
            await answer(system, ask())
            counters.update({each.name: each.value for each in await system.scrape()})
            await system.reset()
            assert not any(system.counters().values())

    virtually(main)
    assert counters["requests_total"] == 1
    assert counters["prefill_computed_tokens_total"] == 1000
    assert counters["link_sent_bytes_total"] == counters["relay_sent_bytes_total"] == 2e6
    assert (counters["relay_tokens_total"], counters["decode_tokens_total"]) == (11, 19)
    assert counters["prefill_cached_blocks"] == counters["decode_cached_blocks"] == 10


@pytest.mark.parametrize("at_s", [0.5, 1.01, 1.5, 2.05, 2.15, 2.5])
def test_a_system_is_busy_wherever_its_only_request_is(at_s: float) -> None:
    """In a step, in set-up, on the road, or between the relay and the main decode."""
    system = pdd()

    async def main() -> None:
        async with system:
            task = asyncio.ensure_future(answer(system, ask()))
            await asyncio.sleep(at_s)
            with pytest.raises(BackendError, match="under way"):
                await system.reset()
            times_s, _ = await task
            assert len(times_s) == 30
            await system.reset()

    virtually(main)


def test_a_faster_chip_takes_in_the_handed_over_faster_too() -> None:
    ends: list[np.ndarray] = []
    for speed in (1.0, 2.0):
        decode = pool(speed=speed)
        eager = Sequence(500, 4, ends.append, extend=21)
        play([decode], [(0.0, partial(decode.join, eager))])
    assert ends[0] == pytest.approx([0.12, 0.22, 0.32, 0.42])
    assert ends[1] == pytest.approx(ends[0] / 2)


def test_memory_holds_the_window_state_of_each_request() -> None:
    """Two of 0.1 MB and 1 MB of state: 2.1 MB are too few for both at once."""
    for kv_bytes, together in ((2.1e6, False), (2.2e6, True)):
        decode = pool(kv_bytes=kv_bytes)
        ends: list[np.ndarray] = []
        both = [Sequence(90, 10, ends.append) for _ in range(2)]
        play([decode], [(0.0, partial(decode.join, each)) for each in both])
        assert ends[1][0] == pytest.approx(STEP_S if together else 11 * STEP_S)


# ---- tokens before the end


@pytest.mark.parametrize("at_s", [0.5, 1.005, 1.125, 1.12, 2.11, 2.13, 2.25, 2.32, 2.33, 3.65, 4.2])
def test_whoever_is_cut_off_keeps_the_tokens_it_had(at_s: float) -> None:
    """In prefill, at the relay, being handed over, in the extended step, at the main decode."""
    whole_s, _ = one(pdd(), ask())
    system, got = pdd(), Answer()

    async def main() -> None:
        async with system:
            with suppress(TimeoutError):
                async with asyncio.timeout(at_s):
                    await system.generate(ask(), got)
            assert system.load()["requests"] == 0

    virtually(main)
    wanted_s = whole_s[whole_s <= at_s]
    assert np.asarray(got.times_s).tolist() == wanted_s.tolist()
    assert got.first_answer_s == (wanted_s[0] if len(wanted_s) else None)
    assert got.finish_reason == ("length" if len(wanted_s) == len(whole_s) else None)


def test_many_in_one_batch_keep_what_they_had() -> None:
    """Steps that others' coming and going cut short count as any."""

    def requests() -> list[Request]:
        return [ask(number, inputs=200 + 37 * number, outputs=40) for number in range(12)]

    async def drive(timeout_s: float | None) -> list[Answer]:
        answers = [Answer() for _ in requests()]

        async def each(request: Request, answer: Answer) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await system.generate(request, answer)

        async with pdd() as system, asyncio.TaskGroup() as group:
            for request, answer in zip(requests(), answers, strict=True):
                group.create_task(each(request, answer))
        return answers

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        whole = runner.run(drive(None))
    for timeout_s in (1.33, 2.6, 3.5):
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            cut = runner.run(drive(timeout_s))
        for before, after in zip(whole, cut, strict=True):
            times_s = np.asarray(before.times_s)
            assert np.asarray(after.times_s) == pytest.approx(times_s[times_s <= timeout_s])


def test_tokens_are_told_as_they_are_emitted() -> None:
    whole_s, _ = one(pdd(), ask())
    told: list[tuple[float, float]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with pdd() as system:
            got = Answer()
            await system.generate(ask(), got, lambda time_s: told.append((time_s, loop.time())))
            assert [time_s for time_s, _ in told] == np.asarray(got.times_s).tolist()

    virtually(main)
    assert [time_s for time_s, _ in told] == pytest.approx(whole_s.tolist())
    assert [now_s for _, now_s in told] == pytest.approx(whole_s.tolist())


def test_one_who_listens_changes_nothing_for_the_others() -> None:
    """Beyond the last bits of a float: a stretch is cut into single steps."""

    async def drive(listening: set[int]) -> list[NDArray[np.float64]]:
        answers = [Answer() for _ in range(8)]
        heard: dict[int, list[float]] = {number: [] for number in listening}
        async with pdd(relay_bytes=5e6) as system, asyncio.TaskGroup() as group:
            for number, got in enumerate(answers):
                request = ask(number, inputs=300 + 50 * number)
                emitted = heard[number].append if number in listening else None
                group.create_task(system.generate(request, got, emitted))
        for number, times_s in heard.items():
            assert times_s == np.asarray(answers[number].times_s).tolist()
        return [np.asarray(got.times_s) for got in answers]

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        alone = runner.run(drive(set()))
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        heard = runner.run(drive({1, 4, 5}))
    for a, b in zip(alone, heard, strict=True):
        assert a == pytest.approx(b, abs=1e-9)


def test_nobody_is_told_after_the_end() -> None:
    told: list[float] = []

    async def main() -> None:
        async with pdd() as system:
            with suppress(TimeoutError):
                async with asyncio.timeout(1.35):
                    await system.generate(ask(), Answer(), told.append)
            before = len(told)
            await asyncio.sleep(5)
            assert len(told) == before == 3
            assert not any(system.load().values())

    virtually(main)


# ---- the clock


class _LateLoop:
    """A wall-clock loop that was busy: its timers have not fired when it should have."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def alarm(self, callback: Callable[[], None]) -> _LateLoop:
        return self

    def set(self, when_s: float) -> None:
        return None

    def close(self) -> None:
        return None


def test_time_never_runs_backwards_where_a_timer_is_late() -> None:
    loop: Any = _LateLoop()
    engine = Engine()
    engine.start(loop)
    seen: list[float] = []
    for time_s in (0.3, 0.1, 0.2, 0.9):
        engine.at(time_s, lambda: seen.append(engine.now_s))
    loop.now_s = 0.5
    engine.enter()
    assert seen == [0.1, 0.2, 0.3]
    assert engine.now_s == 0.5


def test_flows_are_shared_right_though_the_timer_is_late() -> None:
    """8 Mbit/s: 1 MB from 0 ends at 1 s, before another, sent at 1.5 s, can slow it down."""
    loop: Any = _LateLoop()
    engine, link = Engine(), Link(8e6)
    engine.start(loop)
    link.attach(engine)
    ends: list[float] = []
    link.send(1e6, lambda: ends.append(engine.now_s))
    for now_s in (1.5, 9.0):
        loop.now_s = now_s
        engine.enter()
        link.send(1e6, lambda: ends.append(engine.now_s))
    assert ends == pytest.approx([1.0, 2.5])


def test_an_answer_takes_as_long_on_wall_time() -> None:
    """A thousandth of the system above, so that the test is short."""

    def small() -> Disaggregated:
        link = Link(1e12, setup_s=1e-3)
        return Disaggregated("in_dc", {"P": cluster(1e-3)}, link, {"D": site(pool(1e-3))})

    virtual_s, _ = one(small(), ask())
    wall: list[tuple[np.ndarray, Served]] = []

    async def main() -> None:
        async with small() as system:
            wall.append(await answer(system, ask()))

    with asyncio.Runner(loop_factory=WallLoop) as runner:
        runner.run(main())
    wall_s, served = wall[0]
    assert served.prefill_start_s is not None
    assert wall_s - served.prefill_start_s == pytest.approx(virtual_s, abs=1e-6)


def test_a_link_is_finite() -> None:
    with pytest.raises(ConfigError, match="bandwidth_bps is inf"):
        Link(float("inf"))
