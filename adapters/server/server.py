"""Listening: the settings of `relaybench serve`, and its life from the port to the signal."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import threading
from collections.abc import Callable, Generator
from typing import Any

import uvicorn

from adapters.server.app import Service, application
from adapters.server.ask import Limits
from adapters.server.outlet import Protocol
from adapters.server.tokens import Blocks, Vocabulary
from adapters.simulator.simulator import Simulator
from harness.clock import WallLoop
from harness.errors import BackendError, ConfigError
from harness.settings import whole

_MAX_PORT = 65_535
_BACKLOG = 2048
_KEEP_ALIVE_S = 65
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Server:
    """How a simulator is served. `run` once.

    `port` 0 takes a free one. `known_blocks`: how many of its clients' blocks it remembers, some 50
    bytes each. `reasoning_tokens`: of each chat answer, its first. `faults`: whether clients may
    ask for them.
    """

    def __init__(
        self,
        host: str,
        port: int,
        model: str,
        block_tokens: int,
        context_tokens: int,
        vocabulary_tokens: int,
        known_blocks: int,
        reasoning_tokens: int = 0,
        faults: bool = False,
    ) -> None:
        whole("server.port", port, least=0)
        if port > _MAX_PORT:
            raise ConfigError(f"server.port is {port}: give a number from 0 to {_MAX_PORT}")
        whole("server.block_tokens", block_tokens, least=1)
        whole("server.context_tokens", context_tokens, least=2)
        whole("server.vocabulary_tokens", vocabulary_tokens, least=2)
        whole("server.known_blocks", known_blocks, least=1)
        whole("server.reasoning_tokens", reasoning_tokens, least=0)
        if not isinstance(faults, bool):
            raise ConfigError(f"server.faults is {faults!r}: give true or false")
        for name, value in {"host": host, "model": model}.items():
            if not value or value != str(value):
                raise ConfigError(f"server.{name} is {value!r}: give a name")
        self.host = host
        self.port = port
        self.limits = Limits(model, context_tokens)
        self.block_tokens = block_tokens
        self.vocabulary_tokens = vocabulary_tokens
        self.known_blocks = known_blocks
        self.reasoning_tokens = reasoning_tokens
        self.faults = faults
        self._listening: _Listening | None = None

    def run(self, name: str, backend: Any, say: Callable[[str], None]) -> None:
        """Serve until interrupted (SIGINT, SIGTERM). `say` is given one line once it listens.

        Raises `ConfigError` for a backend that is no simulator, `BackendError` where it cannot
        listen.
        """
        if not isinstance(backend, Simulator):
            raise ConfigError(f"backend.{name} is no simulator: only those are served here")
        service = Service(
            name,
            backend,
            self.limits,
            Vocabulary(self.vocabulary_tokens),
            Blocks(self.block_tokens, self.known_blocks),
            self.reasoning_tokens,
            self.faults,
        )
        with self._listen() as listener, asyncio.Runner(loop_factory=WallLoop) as runner:
            runner.run(self._serve(service, listener, say))

    def stop(self) -> None:
        """End `run`, from any thread; answers under way are cut off."""
        if self._listening is not None:
            self._listening.should_exit = True

    def _listen(self) -> socket.socket:
        try:
            kind = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            return socket.create_server((self.host, self.port), family=kind, backlog=_BACKLOG)
        except OSError as error:
            raise BackendError(
                f"cannot listen on {self.host} port {self.port}: {error.strerror}. "
                "Give another server.port, 0 for a free one"
            ) from error

    async def _serve(
        self, service: Service, listener: socket.socket, say: Callable[[str], None]
    ) -> None:
        host = f"[{self.host}]" if ":" in self.host else self.host
        line = (
            f"Serving {service.name} on http://{host}:{listener.getsockname()[1]} "
            f"(model {self.limits.model}, block {self.block_tokens} tokens)"
        )
        config = uvicorn.Config(
            application(service),
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            headers=[("server", "relaybench")],
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._listening = _Listening(config, lambda: say(line))
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                asyncio.get_running_loop().add_signal_handler(number, self.stop)
        gc.freeze()  # its passes over what will live on would show as late tokens
        try:
            async with service.simulator:
                await self._listening.serve(sockets=[listener])
        finally:
            gc.unfreeze()


class _Listening(uvicorn.Server):
    """Uvicorn, which would wait for every answer under way, and die of the signal in the end."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for connection in self.server_state.connections:
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.close()  # its requests see their client leave
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # `Server` has its own way to end
