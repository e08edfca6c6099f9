"""Time that jumps: exact, without waiting, and never silently stuck."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from harness.clock import VirtualTimeLoop
from harness.errors import DeadlockError


def on_virtual_time(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def test_a_day_passes_at_once_and_exactly() -> None:
    async def main() -> float:
        await asyncio.sleep(3 * 86_400 + 0.25)
        return asyncio.get_running_loop().time()

    began = time.perf_counter()
    assert on_virtual_time(main()) == 259_200.25
    assert time.perf_counter() - began < 5


def test_delays_add_up_without_drift() -> None:
    async def main() -> list[float]:
        stamps = []
        for _ in range(1000):
            await asyncio.sleep(0.1)
            stamps.append(asyncio.get_running_loop().time())
        return stamps

    assert on_virtual_time(main()) == [round(0.1 * k, 9) for k in range(1, 1001)]


def test_sleepers_wake_in_the_order_of_their_deadlines() -> None:
    async def main() -> list[tuple[str, float]]:
        woken: list[tuple[str, float]] = []

        async def sleeper(name: str, delay: float) -> None:
            await asyncio.sleep(delay)
            woken.append((name, asyncio.get_running_loop().time()))

        await asyncio.gather(sleeper("c", 3), sleeper("a", 1), sleeper("b", 2))
        return woken

    assert on_virtual_time(main()) == [("a", 1.0), ("b", 2.0), ("c", 3.0)]


def test_a_timeout_fires_at_its_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.get_running_loop().create_future()
        return asyncio.get_running_loop().time()

    assert on_virtual_time(main()) == 5.0


def test_waiting_for_nothing_is_an_error_that_says_so() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(DeadlockError, match="no timer is set"):
        on_virtual_time(main())


def test_a_socket_is_refused() -> None:
    async def main() -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            listener.setblocking(False)
            await asyncio.get_running_loop().sock_accept(listener)

    with pytest.raises(DeadlockError, match="wall clock"):
        on_virtual_time(main())


@pytest.mark.parametrize("years", [0.4, 1, 10, 100])
def test_the_clock_moves_however_late_it_is(years: float) -> None:
    """Past half a year a nanosecond is lost in a float's rounding."""

    async def main() -> float:
        await asyncio.sleep(years * 365 * 86_400)
        before_s = asyncio.get_running_loop().time()
        await asyncio.sleep(0.25)
        return asyncio.get_running_loop().time() - before_s

    assert on_virtual_time(main()) == pytest.approx(0.25, abs=1e-5)
