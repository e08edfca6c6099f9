"""The virtual clock: an asyncio loop that jumps to the next deadline instead of waiting for it.

The loop owns time. Code that sleeps, sets timers or reads `loop.time()` runs unchanged on either
clock; on this one an hour of waiting costs nothing and every run takes the same course. Time
starts at 0 and ticks in whole nanoseconds, so adding up delays does not drift from the deadlines.

Nothing outside the process may be waited for: a socket, a pipe or a subprocess is refused, and
when all tasks wait and no timer is set, nothing can happen any more: `DeadlockError`.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Mapping
from typing import Any

from harness.errors import DeadlockError

_TICKS_PER_S = 1_000_000_000


def early_s(now_s: float) -> float:
    """How much before its time a timer may fire: a tick, or what a float of this size can tell."""
    return max(1 / _TICKS_PER_S, 2 * math.ulp(now_s))


class _Jump(selectors.BaseSelector):
    """A selector in whose world nothing arrives: to wait is to move the clock."""

    def __init__(self) -> None:
        self.now_ticks = 0
        self._wakers: dict[Any, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Move the clock by `timeout`; None means that no timer is set."""
        if timeout is None:
            raise DeadlockError(
                "every task waits and no timer is set, so the virtual clock cannot move. "
                "Look for a future that nobody completes, or for real I/O or a thread on this loop"
            )
        if timeout > 0:
            self.now_ticks += max(1, round(timeout * _TICKS_PER_S))
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Only the loop's own wake-up pipe, the first to come, is let in."""
        if self._wakers:
            raise DeadlockError(
                f"{fileobj!r} is real I/O, which a virtual clock cannot wait for. "
                "Run this backend on a wall clock"
            )
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = selectors.SelectorKey(fileobj, number, events, data)
        self._wakers[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Let the loop's own pipe go, as it closes."""
        return self._wakers.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """The loop's own pipe."""
        return self._wakers


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop on the virtual clock."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jump.now_ticks / _TICKS_PER_S

    @property
    def _clock_resolution(self) -> float:
        """What asyncio allows for when it asks whether a timer is due.

        A constant would be lost in rounding after half a year, and the loop would spin.
        """
        return early_s(self.time())

    @_clock_resolution.setter
    def _clock_resolution(self, value: float) -> None:
        """Asyncio sets that of the system's clock, which is not ours."""

    def jump(self, when_s: float) -> bool:
        """Move the clock to `when_s` if nothing else would happen first; else leave it.

        For a simulator that holds its own events: it may go on to its next one without a turn
        of the loop, and everything still happens in the same order at the same time. Says False
        whenever it cannot tell, and then the caller sets a timer as anyone would.
        """
        ready = getattr(self, "_ready", True)
        timers = getattr(self, "_scheduled", None)
        if ready or timers is None or (timers and timers[0].when() <= when_s):
            return False
        self._jump.now_ticks = max(self._jump.now_ticks, round(when_s * _TICKS_PER_S))
        return True
