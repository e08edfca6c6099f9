"""An httpx transport that stamps each read where it arrives.

httpx stays the API (authentication, URLs, errors, TLS settings); only the wire is ours, because a
stock client says when Python got round to a chunk and not when it came, and costs ten times the
CPU. On Linux, over plain TCP, the kernel stamps each read on receipt (`SO_TIMESTAMPNS`) and the
stamp is mapped to the loop's clock; with TLS, or elsewhere, this process stamps it on reading.

A response's extension `stamped` is its body as `StampedBody`: `drain` hands every piece over in
the very callback that read it, so nothing waits for a task to be scheduled.

HTTP/1.1 with keep-alive. As many connections as there are requests under way: waiting for a free
one would be the client's own queue. Requests always go straight to the server: no proxy.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, Protocol, cast

import httptools
import httpx

Sink = Callable[[float, int, bytes], None]
"""Given (when it arrived, s on the loop's clock; number of the read it came in; bytes)."""

Told = Callable[[float], None]
"""A request's extension `sent`: told when its first byte was given to the kernel, s on the loop."""


def _nobody(_: float) -> None:
    """Nobody asked."""


_READ_BYTES = 256 * 1024
_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("@qq")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_TIMESPEC.size)
_NS = 1_000_000_000
_STALE_NS = 10 * _NS
_LONGEST_HEAD = 64 * 1024
_GRACE_S = 1.0
_DOUBT_S = 0.02
_KERNEL = sys.platform == "linux"
_HOP_FAILED = (errno.ECONNRESET, errno.EPIPE)


class StampedTransport(httpx.AsyncBaseTransport):
    """`keepalive_s`: how long an idle connection is kept; servers commonly drop theirs after 5 s.

    Lives on the loop it is first used on. `aclose` closes all connections.
    """

    def __init__(self, *, verify: ssl.SSLContext | None = None, keepalive_s: float = 4.0) -> None:
        self._tls = verify
        self._keepalive_s = keepalive_s
        self._idle: dict[_Origin, list[_Connection]] = {}
        self._open: set[_Connection] = set()
        self._addresses: dict[_Origin, list[Any]] = {}
        self._clock = _KernelClock()
        # The kernel begins to stamp some time after the first socket asks for it, and ends with
        # the last: this one asks from beginning to end.
        self._keeper = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        if _KERNEL:
            self._keeper.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._buffer = memoryview(bytearray(_READ_BYTES))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send, and return as soon as the response's head is whole. Raises httpx's errors."""
        body = request.stream
        content = request.content if isinstance(body, httpx.ByteStream) else await request.aread()
        timeout = request.extensions.get("timeout", {})
        url = request.url
        if url.scheme not in ("http", "https"):
            raise httpx.UnsupportedProtocol(f"{url.scheme}://: use http:// or https://")
        origin = (url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80))
        connection = self._take(origin)
        if connection is None:
            connection = await self._connect(origin, timeout.get("connect"))
        sent: Told = request.extensions.get("sent", _nobody)
        data = _head(request, len(content)) + content
        return await connection.send(data, timeout.get("read"), sent)

    async def aclose(self) -> None:
        """Close every connection."""
        for connection in list(self._open):
            connection.close()
        self._idle.clear()
        self._keeper.close()

    def _take(self, origin: _Origin) -> _Connection | None:
        """An idle connection, the one used last."""
        idle = self._idle.get(origin, [])
        oldest_s = asyncio.get_running_loop().time() - self._keepalive_s
        while idle:
            connection = idle.pop()
            fresh = connection.idle_since_s >= oldest_s
            if connection.usable and fresh and connection.wire.quiet():
                return connection
            connection.close()
        return None

    def _keep(self, connection: _Connection) -> None:
        self._idle.setdefault(connection.origin, []).append(connection)

    def _forget(self, connection: _Connection) -> None:
        self._open.discard(connection)

    async def _connect(self, origin: _Origin, timeout_s: float | None) -> _Connection:
        scheme, host, port = origin
        loop = asyncio.get_running_loop()
        connection = _Connection(origin, loop, self._keep, self._forget)
        try:
            async with asyncio.timeout(timeout_s):
                if scheme == "https":
                    if self._tls is None:  # once: it takes 30 ms
                        self._tls = ssl.create_default_context()
                    make = lambda: _StreamWire(connection, loop)  # noqa: E731 - asyncio's way
                    _, connection.wire = await loop.create_connection(
                        make, host, port, ssl=self._tls, server_hostname=host
                    )
                else:
                    connection.wire = await self._plain(connection, origin, loop)
        except TimeoutError as error:
            within = "" if error.errno or timeout_s is None else f" within {timeout_s:g} s"
            raise httpx.ConnectTimeout(f"no connection to {host}:{port}{within}") from None
        except ssl.SSLError as error:
            raise httpx.ConnectError(f"TLS with {host}:{port} failed: {error}") from error
        except socket.gaierror as error:
            raise httpx.ConnectError(f"{host} cannot be resolved: {error.strerror}") from error
        except OSError as error:
            raise httpx.ConnectError(f"{host}:{port}: {_said(error)}") from error
        self._open.add(connection)
        return connection

    async def _plain(
        self, connection: _Connection, origin: _Origin, loop: asyncio.AbstractEventLoop
    ) -> _Wire:
        _, host, port = origin
        if origin not in self._addresses:
            self._addresses[origin] = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        failed: OSError | None = None
        for family, kind, protocol, _, address in self._addresses[origin]:
            sock = socket.socket(family, kind, protocol)
            sock.setblocking(False)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if _KERNEL:
                    sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
                await loop.sock_connect(sock, address)
            except OSError as error:
                sock.close()
                failed = error
            except BaseException:
                sock.close()
                raise
            else:
                return _SocketWire(sock, connection, loop, self._buffer, self._clock)
        self._addresses.pop(origin, None)  # perhaps it moved
        raise failed or OSError(f"{host} has no address")


_Origin = tuple[str, str, int]


class StampedBody(httpx.AsyncByteStream):
    """A response's body, and when each piece of it came."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._pieces: list[tuple[float, int, bytes]] = []
        self._sink: Sink | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._enough = False
        self._error: Exception | None = None
        self.first_byte_s = 0.0
        """When the first byte of the response came."""
        self.clock: Literal["kernel", "user"] = "user"
        """Who stamps."""

    async def drain(self, sink: Sink) -> None:
        """Hand over all pieces, what has come already and what comes; return at the body's end.

        Raises httpx's errors for a body that breaks off, and whatever `sink` raises.
        """
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            sink(*piece)
        self._sink = sink
        await self._until(lambda: self._ended)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """The pieces as they come, for whoever needs no stamps."""
        while True:
            while self._pieces:
                yield self._pieces.pop(0)[2]
            if self._ended:
                return
            await self._until(lambda: bool(self._pieces) or self._ended)

    async def _until(self, enough: Callable[[], bool]) -> None:
        while not enough():
            if self._error is not None:
                break
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error

    def enough(self) -> None:
        """Nothing more is needed: what does not end within a second counts as ended."""
        self._enough = True
        asyncio.get_running_loop().call_later(_GRACE_S, self._end)

    def _end(self) -> None:
        if not self._ended and self._error is None:
            self.ended()
            self._connection.close()

    async def aclose(self) -> None:
        """The connection is used again if the body is whole, and else closed."""
        if not self._ended:
            self._connection.close()

    # ---- by the connection

    def arrived(self, time_s: float, read: int, data: bytes) -> None:
        """One more piece."""
        if self._sink is None:
            self._pieces.append((time_s, read, data))
            self._wake()
            return
        try:
            self._sink(time_s, read, data)
        except Exception as error:  # noqa: BLE001 - whoever drains must hear of it
            self.failed(error)

    def ended(self) -> None:
        """The body is whole."""
        self._ended = True
        self._wake()

    def failed(self, error: Exception) -> None:
        """It never will be."""
        if self._enough:
            self.ended()
        elif self._error is None and not self._ended:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Wire(Protocol):
    @property
    def idle(self) -> bool: ...

    def quiet(self) -> bool: ...

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class _Connection:
    """One HTTP/1.1 connection: one request at a time. Parses what its wire reads."""

    wire: _Wire

    def __init__(
        self,
        origin: _Origin,
        loop: asyncio.AbstractEventLoop,
        keep: Callable[[_Connection], None],
        forget: Callable[[_Connection], None],
    ) -> None:
        self.origin = origin
        self.usable = True
        self.idle_since_s = 0.0
        self._loop = loop
        self._keep = keep
        self._forget = forget
        self._parser = httptools.HttpResponseParser(self)
        self._reused = False
        self._read = 0
        self._now_s = 0.0
        self._last_s = 0.0
        self._head: asyncio.Future[httpx.Response] | None = None
        self._body: StampedBody | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._watchdog: asyncio.TimerHandle | None = None
        self._stall_s: float | None = None

    async def send(self, data: bytes, stall_s: float | None, sent: Told) -> httpx.Response:
        """Send a request; return the response as soon as its head is whole."""
        self._body = body = StampedBody(self)
        head: asyncio.Future[httpx.Response] = self._loop.create_future()
        self._head = head
        self._headers, self._head_bytes, self._read = [], 0, 0
        self._stall_s = stall_s
        self._last_s = self._loop.time()
        sent(self._last_s)
        if stall_s is not None:
            self._watchdog = self._loop.call_later(stall_s, self._watch)
        self.wire.write(data)
        try:
            return await head
        except BaseException:
            if self._body is body:  # else it is someone else's by now
                self.close()
            raise

    def close(self, error: httpx.TransportError | None = None) -> None:
        """For good. Whoever waits for its answer gets the error. May be called twice."""
        if not self.usable:
            return
        self.usable = False
        self._unwatch()
        self.wire.close()
        self._forget(self)
        head, body, self._body = self._head, self._body, None
        error = error or httpx.ReadError("the connection was closed here")
        if head is not None and not head.done():
            head.set_exception(error)
            head.exception()  # whoever was cancelled does not ask
        elif body is not None:
            body.failed(error)

    # ---- by the wire

    def feed(self, time_s: float, data: bytes, clock: Literal["kernel", "user"]) -> None:
        """Bytes came at `time_s`, by the stamp of `clock`."""
        body = self._body
        if body is None:  # nothing was asked: whatever it is, this connection is out of step
            self.close()
            return
        time_s = max(time_s, self._last_s)  # a stepped wall clock turns no time round
        if not self._read:
            body.first_byte_s = time_s
        self._read += 1
        self._now_s = self._last_s = time_s
        if clock == "user" or self._read == 1:
            body.clock = clock
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.close(httpx.RemoteProtocolError(f"the response is not HTTP/1.1: {error}"))
            return
        if self._head is not None and not self._head.done():
            self._head_bytes += len(data)
            if self._head_bytes > _LONGEST_HEAD:
                words = f"the response's head is longer than {_LONGEST_HEAD:,} bytes"
                self.close(httpx.RemoteProtocolError(words))

    def lost(self, error: OSError | None) -> None:
        """The server closed the connection, or it broke."""
        if self._body is None or not self.usable:
            self.close()
            return
        if error is None and self._read and self._until_eof:
            self.usable = False
            self.on_message_complete()
            self.usable = True
            self.close()
            return
        if error is not None:
            self.close(httpx.ReadError(f"the connection broke: {_said(error)}"))
        elif not self._read and self._reused:
            self.close(
                httpx.RemoteProtocolError(
                    "the server closed a kept connection just as it was used again: set "
                    "keepalive_s below the server's own"
                )
            )
        else:
            where = "in the middle of its response" if self._read else "without a response"
            self.close(httpx.RemoteProtocolError(f"the server closed the connection {where}"))

    def _watch(self, seen: int = -1) -> None:
        """The one timer of a request, set again for as long as something came meanwhile.

        A stall is not believed at once: a loop that is late finds its timers due before it has
        read what came.
        """
        self._watchdog = None
        if self._stall_s is None or self._body is None:
            return
        left_s = self._last_s + self._stall_s - self._loop.time()
        if left_s > 0:
            self._watchdog = self._loop.call_later(left_s, self._watch)
        elif seen != self._read:
            self._watchdog = self._loop.call_later(_DOUBT_S, self._watch, self._read)
        else:
            what = "nothing more" if self._read else "no response"
            self.close(httpx.ReadTimeout(f"{what} came for {self._stall_s:g} s"))

    def _unwatch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    # ---- by the parser

    def on_message_begin(self) -> None:
        if self._body is None:  # nothing was asked: it is out of step
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if self._interim:  # the real response follows
            self._headers = []
            return
        names = {name.lower() for name, _ in self._headers}
        self._until_eof = not names & {b"content-length", b"transfer-encoding"}
        if self._body is not None and self._head is not None and not self._head.done():
            # Made here: by the time whoever waits runs, the connection may be someone else's.
            response = httpx.Response(
                self._status,
                headers=self._headers,
                stream=self._body,
                extensions={"http_version": b"HTTP/1.1", "stamped": self._body},
            )
            self._head.set_result(response)

    def on_body(self, data: bytes) -> None:
        if self._body is not None:
            self._body.arrived(self._now_s, self._read, data)

    def on_message_complete(self) -> None:
        if self._interim or self._body is None:
            return
        body, self._body = self._body, None
        self._unwatch()
        if self.usable and self._parser.should_keep_alive() and self.wire.idle:
            self._reused = True
            self.idle_since_s = self._loop.time()
            self._keep(self)
        else:
            self.close()
        body.ended()

    @property
    def _interim(self) -> bool:
        return 100 <= self._status < 200  # noqa: PLR2004 - 1xx of HTTP

    _status = 0
    _until_eof = False


class _SocketWire:
    """Plain TCP; reads carry the kernel's stamp where it gives one."""

    def __init__(
        self,
        sock: socket.socket,
        connection: _Connection,
        loop: asyncio.AbstractEventLoop,
        buffer: memoryview,
        clock: _KernelClock,
    ) -> None:
        self._sock = sock
        self._connection = connection
        self._loop = loop
        self._buffer = buffer
        self._clock = clock
        self._unsent = memoryview(b"")
        loop.add_reader(sock.fileno(), self._readable)

    @property
    def idle(self) -> bool:
        """Whether all was sent: a server may answer before it has read a request to its end."""
        return not self._unsent

    def quiet(self) -> bool:
        """Whether nothing has come, an end least of all, that the loop has not got round to."""
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def write(self, data: bytes) -> None:
        self._unsent = memoryview(data)
        self._writable()

    def _writable(self) -> None:
        writing = bool(self._unsent)
        try:
            while self._unsent:
                sent = self._sock.send(self._unsent)
                self._unsent = self._unsent[sent:]
        except (BlockingIOError, InterruptedError):
            self._loop.add_writer(self._sock.fileno(), self._writable)
            return
        except OSError as error:
            # A server that answers early and hangs up has an answer for us to read.
            self._loop.remove_writer(self._sock.fileno())
            self._unsent = memoryview(b"")
            if error.errno not in _HOP_FAILED:
                self._connection.lost(error)
            return
        if writing:
            self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        try:
            size, ancillary, _, _ = self._sock.recvmsg_into([self._buffer], _ANCILLARY_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._connection.lost(error)
            return
        if not size:
            self._connection.lost(None)
            return
        time_s = now_s = self._loop.time()
        if ancillary:
            time_s = self._clock.loop_s(ancillary[0][2], now_s)
        clock: Literal["kernel", "user"] = "user" if time_s is now_s else "kernel"
        self._connection.feed(time_s, bytes(self._buffer[:size]), clock)

    def close(self) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()


class _StreamWire(asyncio.Protocol):
    """TLS, by the loop's own transport; reads are stamped as they are handed over."""

    def __init__(self, connection: _Connection, loop: asyncio.AbstractEventLoop) -> None:
        self._connection = connection
        self._loop = loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._connection.feed(self._loop.time(), data, "user")

    def eof_received(self) -> None:
        self._connection.lost(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._connection.usable:
            self._connection.lost(error if isinstance(error, OSError) else None)

    @property
    def idle(self) -> bool:
        return not self._transport.get_write_buffer_size()

    def quiet(self) -> bool:
        return not self._transport.is_closing()

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def close(self) -> None:
        self._transport.abort()


class _KernelClock:
    """Maps the kernel's stamps (wall time) to the loop's clock (monotonic).

    The offset is that of the tightest of 50 readings of one clock between two of the other, found
    again each second: wall time is slewed and stepped.
    """

    def __init__(self) -> None:
        self._offset_ns = 0
        self._next_ns = 0

    def loop_s(self, stamp: bytes, now_s: float) -> float:
        """The stamp on the loop's clock; `now_s` where it cannot be right."""
        now_ns = round(now_s * _NS)
        if now_ns >= self._next_ns:
            self._measure()
            self._next_ns = now_ns + _NS
        seconds, nanoseconds = _TIMESPEC.unpack_from(stamp)
        at_ns = seconds * _NS + nanoseconds - self._offset_ns
        if not now_ns - _STALE_NS < at_ns <= now_ns:
            return now_s
        return float(at_ns / _NS)

    def _measure(self) -> None:
        tightest = None
        for _ in range(50):
            before = time.monotonic_ns()
            wall = time.time_ns()
            after = time.monotonic_ns()
            if tightest is None or after - before < tightest:
                tightest = after - before
                self._offset_ns = wall - (before + after) // 2


def _said(error: OSError) -> str:
    """The system's words: loops have their own for some."""
    return os.strerror(error.errno) if error.errno else str(error)


def _head(request: httpx.Request, length: int) -> bytes:
    """The request's head, as HTTP/1.1 writes it."""
    lines = [b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    named = set()
    for name, value in request.headers.raw:
        named.add(name.lower())
        if name.lower() != b"transfer-encoding":
            lines.append(b"%s: %s" % (name, value))
    if b"content-length" not in named and (length or request.method in ("POST", "PUT", "PATCH")):
        lines.append(b"Content-Length: %d" % length)
    return b"\r\n".join(lines) + b"\r\n\r\n"
