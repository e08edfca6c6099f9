"""Faults on request: what real servers get wrong, for tests of clients.

A server started with `server.faults=true` heeds a request's header `x-relaybench-fault`:

    status=503  status=429;retry-after=2   an error status, with a header where it is given
    headers-delay=3                        so many seconds before the head
    error-200                              status 200, and an error for a body
    stall-after=5                          five tokens, then silence until the client leaves
    eof-after=5                            five tokens, then the end of the body without [DONE]
    close-after=5                          five tokens, then the connection ends in mid-body
    reset-after=5                          five tokens, then TCP's RST
    error-after=5                          five tokens, then an error event and [DONE]
    huge-event                             two MB of text in the first token's event
    bad-utf8                               bytes that are not UTF-8 in the first token's event
    slow-chunks                            every event in four pieces, 5 ms apart

All but the first three need `stream: true`.
"""

from __future__ import annotations

import asyncio
import sys
from typing import ClassVar

from starlette.responses import Response

from adapters.server.outlet import Outlet
from adapters.server.refusal import Refusal, error_body, json_response
from adapters.server.wire import DONE, event

HEADER = b"x-relaybench-fault"
_WORDS = "a fault that was asked for"
_HUGE = b"x" * 2_000_000
_PIECES = 4
_PAUSE_S = 0.005
_LARGEST = 1_000_000


class Fault:
    """The places where something may go wrong; in this one nothing does."""

    least: ClassVar[int | None] = None
    """The smallest value after `=`; None where there is none."""
    streams: ClassVar[bool] = True
    """Whether it is a fault of streams alone."""

    def __init__(self, value: float, options: dict[str, str]) -> None:
        self.value = value
        self.options = options

    @property
    def after(self) -> int:
        """How many tokens come before `strike`."""
        return sys.maxsize

    async def instead(self) -> Response | None:
        """What to answer without asking the simulator."""
        return None

    async def write(self, out: Outlet, data: bytes) -> None:
        """A token's event, or several."""
        await out.write(data)

    async def strike(self, out: Outlet) -> None:
        """End the response."""


class _Status(Fault):
    least = 400
    streams = False

    async def instead(self) -> Response:
        wait = self.options.get("retry-after")
        headers = None if wait is None else {"retry-after": wait}
        status = int(self.value)
        return json_response(error_body(_WORDS, status), status, headers)


class _HeadersDelay(Fault):
    least = 0
    streams = False

    async def instead(self) -> None:
        await asyncio.sleep(self.value)


class _Error200(Fault):
    streams = False

    async def instead(self) -> Response:
        return json_response(error_body(_WORDS, 500))


class _After(Fault):
    least = 0

    @property
    def after(self) -> int:
        return int(self.value)


class _StallAfter(_After):
    async def strike(self, out: Outlet) -> None:
        await out.gone


class _EofAfter(_After):
    async def strike(self, out: Outlet) -> None:
        await out.end()


class _CloseAfter(_After):
    async def strike(self, out: Outlet) -> None:
        await out.close()


class _ResetAfter(_After):
    async def strike(self, out: Outlet) -> None:
        await out.close(reset=True)


class _ErrorAfter(_After):
    async def strike(self, out: Outlet) -> None:
        await out.write(event(error_body(_WORDS, 500)) + DONE)
        await out.end()


class _Text(Fault):
    """Puts something into the first token's text."""

    put: ClassVar[bytes]
    done = False

    async def write(self, out: Outlet, data: bytes) -> None:
        if not self.done:
            front, sep, rest = data.partition(b'" w')
            data = front + b'" w' + self.put + rest if sep else data
            self.done = bool(sep)
        await out.write(data)


class _HugeEvent(_Text):
    put = _HUGE


class _BadUtf8(_Text):
    put = b"\xff\xfe\xc3"


class _SlowChunks(Fault):
    async def write(self, out: Outlet, data: bytes) -> None:
        size = -(-len(data) // _PIECES)
        for at in range(0, len(data), size):
            await out.write(data[at : at + size])
            await asyncio.sleep(_PAUSE_S)


FAULTS: dict[str, type[Fault]] = {
    "status": _Status,
    "headers-delay": _HeadersDelay,
    "error-200": _Error200,
    "stall-after": _StallAfter,
    "eof-after": _EofAfter,
    "close-after": _CloseAfter,
    "reset-after": _ResetAfter,
    "error-after": _ErrorAfter,
    "huge-event": _HugeEvent,
    "bad-utf8": _BadUtf8,
    "slow-chunks": _SlowChunks,
}
NONE = Fault(0, {})


def wanted(header: str, *, stream: bool) -> Fault:
    """The fault that a header asks for. Raises `Refusal`."""
    first, *more = header.split(";")
    name, _, value = first.strip().partition("=")
    kind = FAULTS.get(name)
    if kind is None:
        raise Refusal(f"no fault is called {name!r}; there are {', '.join(FAULTS)}")
    if kind.streams and not stream:
        raise Refusal(f"the fault {name} needs stream: true")
    options = dict(part.strip().partition("=")[::2] for part in more)
    return kind(_number(name, value, kind.least), options)


def _number(name: str, value: str, least: int | None) -> float:
    if least is None:
        return 0.0
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not least <= number <= _LARGEST or (name == "status" and number >= 600):  # noqa: PLR2004 - statuses end there
        raise Refusal(f"the fault {name} wants a number of {least} or more, as in {name}={least}")
    return number
