"""The transport by itself, through httpx's own API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import httpx
import pytest

from adapters.transport import StampedTransport
from harness.clock import WallLoop

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def over(handler: Handler, act: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    """`act` with a client of a server that does as `handler` does with each connection."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await handler(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        base = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with (
            server,
            httpx.AsyncClient(transport=StampedTransport(), base_url=base, timeout=10) as client,
        ):
            await act(client)
        await asyncio.gather(*tasks)

    with asyncio.Runner(loop_factory=WallLoop) as runner:
        runner.run(main())


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Each path back in a header, a status and a body, in one piece."""
    while True:
        path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
        status = 200 + int(path[1:]) % 3
        head = f"HTTP/1.1 {status} Fine\r\nX-Path: {path.decode()}\r\nContent-Length: "
        writer.write(f"{head}{len(path)}\r\n\r\n".encode() + path)


def test_answers_are_never_mixed_up_on_a_connection_that_is_used_again() -> None:
    """A whole response in one read frees its connection before whoever waits for it runs."""
    seen: list[int] = []

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        for step in range(40):
            path = f"/{number * 1000 + step}"
            response = await client.get(path)
            assert response.headers["x-path"] == path
            assert response.status_code == 200 + (number * 1000 + step) % 3
            assert response.text == path
            seen.append(step)

    async def act(client: httpx.AsyncClient) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(ask(client, number))

    over(_echo, act)
    assert len(seen) == 800


def test_a_continue_is_not_the_response() -> None:
    async def continued(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\nA: b\r\n\r\n")

    async def act(client: httpx.AsyncClient) -> None:
        response = await client.get("/")
        assert (response.status_code, response.headers["a"], response.text) == (204, "b", "")

    over(continued, act)


def test_an_idle_connection_that_the_server_closed_is_not_used() -> None:
    opened = 0

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await asyncio.sleep(0.01)

    async def act(client: httpx.AsyncClient) -> None:
        for _ in range(3):
            assert (await client.get("/")).status_code == 200
            await asyncio.sleep(0.1)

    over(once, act)
    assert opened == 3


def test_a_body_until_the_connection_ends_is_whole() -> None:
    async def until_eof(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhello")
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(b" world")

    async def act(client: httpx.AsyncClient) -> None:
        assert (await client.get("/")).text == "hello world"

    over(until_eof, act)


def test_an_answer_nobody_reads_to_its_end_closes_its_connection() -> None:
    """Else the server would go on for ever, and `over` wait for it."""

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"1\r\nx\r\n")
            await writer.drain()
            await asyncio.sleep(0.001)

    async def act(client: httpx.AsyncClient) -> None:
        async with client.stream("GET", "/") as response:
            async for piece in response.aiter_raw():
                assert piece.startswith(b"x")
                break

    over(endless, act)


def test_a_scheme_without_a_wire_is_refused() -> None:
    async def act(client: httpx.AsyncClient) -> None:
        with pytest.raises(httpx.UnsupportedProtocol, match="use http:// or https://"):
            await client.get("ftp://127.0.0.1/")

    over(_echo, act)
