"""Drives the simulator: parts of it without a loop, and whole systems as they are configured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, cast

from hydra import compose, initialize_config_module

from adapters.simulator import Fitted
from adapters.simulator.engine import Engine
from harness.clock import VirtualTimeLoop
from harness.pacing import Recorded
from harness.plugins import build
from harness.record import Record
from harness.replay import Replay
from harness.seed import stream
from harness.trace import Trace


def chip(
    prefill: tuple[float, float, float] = (0.0, 0.0, 0.0),
    decode: tuple[float, float, float, float] = (0.1, 0.0, 0.0, 0.0),
    decode_speed: float = 1.0,
) -> Fitted:
    """Eight cards with these coefficients: t0, a, b and d0, d1, d2, d3, in s."""
    names = (("t0_s", "a_s", "b_s"), ("d0_s", "d1_s", "d2_s", "d3_s"))
    parts = {
        part: dict(zip(keys, values, strict=True))
        for part, keys, values in zip(("prefill", "decode"), names, (prefill, decode), strict=True)
    }
    return Fitted({"cards": 8} | parts, decode_speed=decode_speed)


class _Loop:
    """The part of a loop that an engine needs, with nothing else to do."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timer: Callable[[], None] | None = None

    def time(self) -> float:
        return self.now_s

    def jump(self, when_s: float) -> bool:
        self.now_s = max(self.now_s, when_s)
        return True

    def alarm(self, callback: Callable[[], None]) -> _Loop:
        self.callback = callback
        return self

    def set(self, when_s: float) -> None:
        self.now_s = max(self.now_s, when_s)
        self.timer = self.callback

    def close(self) -> None:
        self.timer = None


def play(parts: Iterable[Any], events: Iterable[tuple[float, Callable[[], None]]]) -> Engine:
    """Attach the parts to an engine whose clock jumps, and run the events and all that follows."""
    engine, loop = Engine(), _Loop()
    engine.start(cast("Any", loop))
    for part in parts:
        part.attach(engine)
    for time_s, action in sorted(events, key=lambda event: event[0]):
        engine.at(time_s, action)
    while loop.timer is not None:
        timer, loop.timer = loop.timer, None
        timer()
    return engine


def configured(*overrides: str) -> Any:
    """The configuration of `relaybench run`, with every topology."""
    with initialize_config_module("conf", version_base="1.3"):
        return compose("run", ["backend=[in_dc,cross_dc,cross_dc_drc,pdd]", *overrides])


def backend(name: str, *overrides: str) -> Any:
    """One of them."""
    return build(configured(*overrides), f"backend.{name}", without=("loop", "scrape_s"))


def drive(system: Any, trace: Trace) -> dict[int, Record]:
    """The record of each turn of a trace, once nothing is under way any more."""
    records: list[Record] = []

    async def main() -> None:
        async with system:
            await system.reset()
            plan = Recorded().plan(trace, stream(1, "pacing"))
            await Replay(trace, plan, system, records.append).run()
            assert not any(system.load().values()), system.load()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())
    return {record.turn: record for record in records}
