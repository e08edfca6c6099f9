"""A server that answers byte by byte as a test says: for what no well-behaved server does."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

Script = Callable[[asyncio.StreamWriter], Awaitable[None]]
"""Writes a whole response, or what stands in for one."""


def head(status: str = "200 OK", kind: str = "text/event-stream", *more: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", *more]
    return "\r\n".join([*lines, "\r\n"]).encode()


def whole(status: str, body: bytes, *more: str, kind: str = "application/json") -> bytes:
    return head(status, kind, f"Content-Length: {len(body)}", *more) + body


LISTING = whole("200 OK", b'{"object":"list","data":[{"id":"tiny","max_model_len":4096}]}')
"""What `GET /v1/models` answers."""


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(data: bytes) -> bytes:
    return chunk(b"data: " + data + b"\n\n")


def token(text: str = " w1", reason: str | None = None) -> bytes:
    return event(json.dumps({"choices": [{"text": text, "finish_reason": reason}]}).encode())


def usage(prompt: int, completion: int, cached: int = 0) -> bytes:
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return event(
        json.dumps({"choices": [], "usage": counts | {"prompt_tokens_details": details}}).encode()
    )


DONE = event(b"[DONE]")
END = b"0\r\n\r\n"
CHUNKED = head("200 OK", "text/event-stream", "Transfer-Encoding: chunked")


async def good(writer: asyncio.StreamWriter) -> None:
    """Three tokens."""
    writer.write(CHUNKED)
    for at in range(3):
        writer.write(token(reason="length" if at == 2 else None))
        await writer.drain()
        await asyncio.sleep(0.002)
    writer.write(usage(64, 3) + DONE + END)


def writes(*pieces: bytes, pause_s: float = 0.002, then: str = "keep") -> Script:
    """These pieces, one after the other; `then` keep the connection, `close` or `reset` it."""

    async def script(writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        if then == "reset":
            sock: socket.socket = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if then != "keep":
            writer.close()

    return script


async def silent(_: asyncio.StreamWriter) -> None:
    """Nothing, for ever."""
    await asyncio.sleep(3600)


def then_silent(*pieces: bytes) -> Script:
    """These, and nothing more."""

    async def script(writer: asyncio.StreamWriter) -> None:
        await writes(*pieces)(writer)
        await asyncio.sleep(3600)

    return script


@asynccontextmanager
async def serving(
    scripts: dict[str, Script], tls: ssl.SSLContext | None = None, listing: bytes = LISTING
) -> AsyncIterator[int]:
    """A port. `scripts` by the end of a request's id (`-1`: turn 1); others get "", or `good`."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while not writer.is_closing():
                await _one(reader, writer, scripts, listing)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _one(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    scripts: dict[str, Script],
    listing: bytes,
) -> None:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
    await reader.readexactly(int(headers.get("content-length", "0")))
    if lines[0].startswith("GET"):
        writer.write(listing)
        return
    name = headers.get("x-request-id", "")
    await scripts.get(name[name.rfind("-") :], scripts.get("", good))(writer)
    if not writer.is_closing():
        await writer.drain()


@contextmanager
def in_thread(answer: Script) -> Iterator[str]:
    """The URL of a server in a thread beside this one; every request gets `answer`."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    ports: list[int] = []
    stop = asyncio.Event()

    async def main() -> None:
        async with serving({"": answer}) as port:
            ports.append(port)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    ready.wait(10)
    yield f"http://127.0.0.1:{ports[0]}"
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()
