"""Tokens before the end, and what a clock that is late does to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from adapters.simulator import (
    Disaggregated,
    Link,
)
from adapters.simulator.engine import Engine
from harness.backend import Answer, Request, Served
from harness.clock import VirtualTimeLoop, WallLoop
from harness.errors import ConfigError
from tests.by_hand import answer, ask, cluster, one, pdd, pool, site, virtually

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
