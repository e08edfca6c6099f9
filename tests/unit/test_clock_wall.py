"""The real clock: an alarm that is never early, and a loop that notes when it is late."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from harness.clock import Alarm, VirtualTimeLoop, WallLoop

SOON_S = 0.25
"""Generous: this machine may be busy."""


def on_wall(main: Callable[[WallLoop], Coroutine[Any, Any, Any]]) -> Any:
    async def entered() -> Any:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, WallLoop)
        return await main(loop)

    with asyncio.Runner(loop_factory=WallLoop) as runner:
        return runner.run(entered())


def block(lasts_s: float) -> None:
    """As a long computation would."""
    time.sleep(lasts_s)


def test_time_is_monotonic_and_finer_than_a_millisecond() -> None:
    async def main(loop: WallLoop) -> list[float]:
        return [time.monotonic(), loop.time(), loop.time(), time.monotonic()]

    times = on_wall(main)
    assert times == sorted(times)
    assert times[2] - times[1] < 0.001
    assert len(set(times)) == 4


def test_an_alarm_is_never_early_and_soon_enough() -> None:
    """300 of them, at times that are no whole milliseconds."""

    async def main(loop: WallLoop) -> list[float]:
        rang = asyncio.Event()
        alarm = loop.alarm(rang.set)
        late = []
        for at in range(300):
            due_s = loop.time() + at * 13.7e-6
            alarm.set(due_s)
            await rang.wait()
            late.append(loop.time() - due_s)
            rang.clear()
        alarm.close()
        return late

    late = on_wall(main)
    assert min(late) >= 0
    assert max(late) < SOON_S
    assert sorted(late)[150] < 0.005


@pytest.mark.parametrize("due_s", [-1e6, -1.0, 0.0])
def test_an_alarm_for_a_time_that_is_over_rings_at_once(due_s: float) -> None:
    async def main(loop: WallLoop) -> float:
        rang = asyncio.Event()
        alarm = loop.alarm(rang.set)
        began_s = loop.time()
        alarm.set(max(0.0, began_s + due_s))
        async with asyncio.timeout(SOON_S):
            await rang.wait()
        alarm.close()
        return loop.time() - began_s

    assert on_wall(main) < SOON_S


def rings(change: Callable[[WallLoop, Alarm, float], None]) -> list[float]:
    """When an alarm for 20 ms rang, from its setting on, if it is changed at once."""

    async def main(loop: WallLoop) -> list[float]:
        times: list[float] = []
        began_s = loop.time()
        alarm = loop.alarm(lambda: times.append(loop.time() - began_s))
        alarm.set(began_s + 0.02)
        change(loop, alarm, began_s)
        await asyncio.sleep(0.15)
        alarm.close()
        alarm.close()
        return times

    times: list[float] = on_wall(main)
    return times


def test_an_alarm_rings_once() -> None:
    (at_s,) = rings(lambda _loop, _alarm, _began_s: None)
    assert 0.02 <= at_s < 0.15


def test_an_alarm_that_is_set_anew_rings_at_its_last_time_only() -> None:
    (later_s,) = rings(lambda _, alarm, began_s: alarm.set(began_s + 0.06))
    assert later_s >= 0.06
    (sooner_s,) = rings(lambda _, alarm, began_s: alarm.set(began_s + 0.005))
    assert sooner_s >= 0.005


def test_an_alarm_that_is_set_anew_after_its_time_does_not_ring_for_the_first() -> None:
    """The kernel has seen it pass, and the loop has not yet."""

    def blocked(_: WallLoop, alarm: Alarm, began_s: float) -> None:
        block(0.04)
        alarm.set(began_s + 0.08)

    (at_s,) = rings(blocked)
    assert at_s >= 0.08


def test_an_alarm_that_is_closed_does_not_ring() -> None:
    assert rings(lambda _loop, alarm, _began_s: alarm.close()) == []


def test_an_alarm_may_be_closed_or_set_by_its_own_ringing() -> None:
    async def main(loop: WallLoop) -> int:
        count = 0

        def ring() -> None:
            nonlocal count
            count += 1
            if count < 5:
                alarm.set(loop.time() + 0.001)
            else:
                alarm.close()

        alarm = loop.alarm(ring)
        alarm.set(loop.time())
        await asyncio.sleep(0.1)
        return count

    assert on_wall(main) == 5


def test_alarms_leave_no_descriptor_open() -> None:
    async def main(loop: WallLoop) -> tuple[int, int]:
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the names only
        for _ in range(50):
            alarm = loop.alarm(lambda: None)
            alarm.set(loop.time() + 10)
            alarm.close()
            loop.watch().stop()
        return before, len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the names only

    if not os.path.isdir("/proc/self/fd"):  # noqa: PTH112 - as above
        pytest.skip("this system has no /proc")
    before, after = on_wall(main)
    assert after == before


def test_a_watch_reports_a_loop_that_was_blocked() -> None:
    """For 50 ms; whoever was under way then is told, and whoever was not is not."""

    async def main(loop: WallLoop) -> dict[str, float | None]:
        watch = loop.watch()
        await asyncio.sleep(0.1)
        before_s = loop.time()
        block(0.05)
        at_once = watch.worst_s(before_s, loop.time())
        await asyncio.sleep(0.1)
        after_s = loop.time()
        found = {
            "at once": at_once,
            "across": watch.worst_s(before_s - 0.02, after_s),
            "from its middle on": watch.worst_s(before_s + 0.02, after_s),
            "until its middle": watch.worst_s(before_s - 0.02, before_s + 0.02),
            "before": watch.worst_s(0.0, before_s - 0.03),
        }
        await asyncio.sleep(0.05)
        found["after"] = watch.worst_s(after_s, loop.time())
        watch.stop()
        return found

    found = on_wall(main)
    for when in ("at once", "across", "from its middle on", "until its middle"):
        assert 0.035 <= found[when] < 0.05 + SOON_S, when
    calm = [found["before"], found["after"]]
    assert min(calm) < 0.03


def test_a_watch_that_has_just_begun_has_seen_nothing() -> None:
    async def main(loop: WallLoop) -> float | None:
        watch = loop.watch()
        worst_s = watch.worst_s(loop.time(), loop.time())
        watch.stop()
        watch.stop()
        return worst_s

    assert on_wall(main) < 0.03


def test_a_virtual_clock_is_never_late_and_its_alarm_is_exact() -> None:
    async def main() -> tuple[list[float], float | None]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        times: list[float] = []
        alarm = loop.alarm(lambda: times.append(loop.time()))
        watch = loop.watch()
        alarm.set(5.0)
        alarm.set(2.5)
        await asyncio.sleep(3)
        alarm.set(4.0)
        alarm.close()
        alarm.close()
        await asyncio.sleep(3)
        watch.stop()
        return times, watch.worst_s(0.0, 6.0)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(main()) == ([2.5], None)
