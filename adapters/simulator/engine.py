"""Simulated events: a heap of its own behind one timer of the loop.

An asyncio timer costs three times what an entry of a heap costs, so the simulator keeps its events
to itself and asks the loop only for the earliest; and where the loop's clock can jump, and nothing
else is to happen first, it goes on to its next event without a turn of the loop. Event times are
exact: `now_s` is the time of the event at hand, never a reading of the loop's clock, so results do
not depend on how the loop rounds. It works alike on virtual and on wall time.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from math import inf
from typing import Any, cast

from harness.clock import Alarm, Loop, early_s


class Engine:
    """Runs `action(*arguments)` at its time. All times are s on the loop's clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        """Time of the event at hand."""
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.scheduled = 0
        """Events so far, since `start`."""
        self._alarm: Alarm | None = None
        self._armed_s = inf
        self._firing = False
        self.broke: Callable[[Exception], None] | None = None
        """Told of an error in an action: whoever waits for an answer must not wait for ever."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Live on this loop from now on, without events."""
        self._loop = loop
        self._alarm = cast("Loop", loop).alarm(self._fire)  # `harness.run` lets no other in
        self._jump: Callable[[float], bool] = getattr(loop, "jump", _cannot_jump)
        self.now_s = loop.time()
        self.scheduled = 0

    def stop(self) -> None:
        """Forget all events; `start` begins anew."""
        self._events.clear()
        if self._alarm is not None:
            self._alarm.close()
        self._alarm, self._armed_s = None, inf

    def enter(self) -> None:
        """Called by whoever comes from outside an event, before it acts: brings `now_s` up.

        A loop on wall time may be late with the timer: what is due by now happens first.
        """
        now_s = self._loop.time()
        if self._events and self._events[0][0] <= now_s:
            self._run_until(now_s, _cannot_jump)
        self.now_s = max(self.now_s, now_s)

    def at(self, time_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule. Events of one time run in the order they were scheduled in."""
        self.scheduled = number = self.scheduled + 1
        heapq.heappush(self._events, (time_s, number, action, arguments))
        if time_s < self._armed_s and not self._firing:
            self._arm()

    def _arm(self) -> None:
        if self._alarm is not None:
            self._armed_s = self._events[0][0]
            self._alarm.set(self._armed_s)

    def _fire(self) -> None:
        self._armed_s = inf
        now_s = self._loop.time()
        try:
            self._run_until(now_s + early_s(now_s), self._jump)
        finally:
            if self._events:
                self._arm()

    def _run_until(self, limit_s: float, jump: Callable[[float], bool]) -> None:
        """Do all that is due by `limit_s`, and what the clock can jump to."""
        events = self._events
        self._firing = True
        try:
            while events and (events[0][0] <= limit_s or jump(events[0][0])):
                self.now_s, _, action, arguments = heapq.heappop(events)
                action(*arguments)
        except Exception as error:
            if self.broke is None:
                raise
            self.broke(error)
        finally:
            self._firing = False


def _cannot_jump(_: float) -> bool:
    """For a loop on wall time."""
    return False
