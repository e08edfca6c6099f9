"""Drives parts of the simulator without a loop: an engine whose clock jumps to every event."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

from adapters.simulator import Fitted
from adapters.simulator.engine import Engine


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
    """Attach the parts to an engine, run the events at their times and all that follows."""
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
