"""The way out for one response: what ASGI sends, and what a server that fails does instead."""

from __future__ import annotations

import asyncio
import socket
import struct
from types import TracebackType
from typing import Self

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_TRANSPORT = "relaybench.transport"
_LINGER_NOT = struct.pack("ii", 1, 0)
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Protocol(HttpToolsProtocol):
    """Lets a response reach its connection, to cut it off."""

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope["extensions"] = {_TRANSPORT: {"transport": self.transport}}


class Outlet:
    """An async context in which a response is written; `gone` is done when nobody listens."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send

    async def __aenter__(self) -> Self:
        """Begin to watch for the client's leaving; the request's body has been read."""
        self.gone = asyncio.get_running_loop().create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Watch no longer."""
        self.gone.cancel()

    async def _watch(self) -> None:
        message: Message = {}
        while message.get("type") != "http.disconnect":
            message = await self._receive()

    async def start(self) -> None:
        """The head of a stream of events."""
        await self._send({"type": "http.response.start", "status": 200, "headers": _EVENTS})

    async def write(self, data: bytes) -> None:
        """A piece of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """The body is whole."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def close(self, *, reset: bool = False) -> None:
        """Cut the connection off in the middle of the body: FIN after what was written, or RST."""
        transport: asyncio.Transport = self._scope["extensions"][_TRANSPORT]["transport"]
        if reset:
            raw: socket.socket = transport.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
            transport.abort()
        else:
            transport.close()
        await self.gone
