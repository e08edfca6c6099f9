"""The two clocks: loops that own time. Code that sleeps or sets timers runs unchanged on either.

On `VirtualTimeLoop` an hour of waiting costs nothing and every run takes the same course: it jumps
to the next deadline. Time starts at 0 and ticks in whole nanoseconds, so adding up delays does not
drift from the deadlines. Nothing outside the process may be waited for: a socket, a pipe or a
subprocess is refused, and when all tasks wait and no timer is set, nothing can happen any more:
`DeadlockError`.

`WallLoop` is uvloop with a clock and an alarm that are finer than its millisecond, and a watch on
its own lateness.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import selectors
import sys
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import uvloop

from harness.errors import DeadlockError

_TICKS_PER_S = 1_000_000_000


def early_s(now_s: float) -> float:
    """How much before its time a timer may fire: a tick, or what a float of this size can tell."""
    return max(1 / _TICKS_PER_S, 2 * math.ulp(now_s))


class Alarm(Protocol):
    """Calls back once at the time it was last set to."""

    def set(self, when_s: float) -> None:
        """At `when_s` on the loop's clock, and not at what was set before."""
        ...

    def close(self) -> None:
        """Never again. May be called twice."""
        ...


class Watch(Protocol):
    """What the loop notes about itself while it runs."""

    def worst_s(self, since_s: float, until_s: float) -> float | None:
        """The most that the loop was late between these times; None where it cannot be late."""
        ...

    def stop(self) -> None:
        """Watch no longer."""
        ...


class Loop(Protocol):
    """What the replay asks of a loop beyond asyncio's own."""

    def alarm(self, callback: Callable[[], None]) -> Alarm:
        """The most exact timer this loop has."""
        ...

    def watch(self) -> Watch:
        """Begin to watch the loop's lateness."""
        ...


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

    def alarm(self, callback: Callable[[], None]) -> Alarm:
        """A timer of the loop: on this clock all are exact."""
        return _TimerAlarm(self, callback)

    def watch(self) -> Watch:
        """Virtual time waits for everyone."""
        return _NeverLate()


class _TimerAlarm:
    """Behind `call_at`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._timer: asyncio.TimerHandle | None = None

    def set(self, when_s: float) -> None:
        self.close()
        self._timer = self._loop.call_at(when_s, self._callback)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _NeverLate:
    def worst_s(self, since_s: float, until_s: float) -> float | None:  # noqa: ARG002 - never is
        return None

    def stop(self) -> None:
        """Nothing goes on."""


class WallLoop(uvloop.Loop):
    """uvloop on `time.monotonic`, which it would otherwise read in whole milliseconds."""

    def time(self) -> float:
        """Seconds of `time.monotonic`, now and not when this turn of the loop began."""
        return time.monotonic()

    def alarm(self, callback: Callable[[], None]) -> Alarm:
        """A timer of the kernel's where there is one: uvloop's own fire up to 0.5 ms early."""
        return _KernelAlarm(self, callback) if _LINUX else _TimerAlarm(self, callback)

    def watch(self) -> Watch:
        """A heartbeat: how late it comes is how late everything else on the loop is."""
        return _Heartbeat(self)


_LINUX = sys.platform == "linux"
_TFD_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1
_BEAT_S = 0.01


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class _KernelAlarm:
    """A timerfd, which wakes the loop within some 60 us. CPython has it from 3.13 on."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.timerfd_create(time.CLOCK_MONOTONIC, _TFD_FLAGS)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "no timer of the kernel")
        self._spec = _Itimerspec()
        self._closed = False
        loop.add_reader(self._descriptor, self._ring)

    def set(self, when_s: float) -> None:
        value = self._spec.value
        ticks = max(1, math.ceil(when_s * _TICKS_PER_S))
        value.seconds, value.nanoseconds = divmod(ticks, _TICKS_PER_S)
        self._libc.timerfd_settime(
            self._descriptor, _TFD_TIMER_ABSTIME, ctypes.byref(self._spec), None
        )

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)

    def _ring(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            return  # it was set anew meanwhile
        self._callback()


class _Heartbeat:
    """Every 10 ms, by the kernel's timer; each beat's lateness is kept."""

    def __init__(self, loop: WallLoop) -> None:
        self._loop = loop
        self._times = array("d")
        self._lags = array("d")
        self._due_s = loop.time() + _BEAT_S
        self._alarm = loop.alarm(self._beat)
        self._alarm.set(self._due_s)

    def worst_s(self, since_s: float, until_s: float) -> float | None:
        now_s = self._loop.time()
        low = bisect_left(self._times, since_s)
        high = bisect_left(self._times, until_s) + 1  # the beat after shows what held it up
        worst = float(np.frombuffer(self._lags)[low:high].max(initial=0.0)) if self._lags else 0.0
        return max(worst, now_s - self._due_s)  # the beat that is due and cannot come

    def stop(self) -> None:
        self._alarm.close()

    def _beat(self) -> None:
        now_s = self._loop.time()
        self._times.append(now_s)
        self._lags.append(max(0.0, now_s - self._due_s))
        self._due_s = now_s + _BEAT_S
        self._alarm.set(self._due_s)
