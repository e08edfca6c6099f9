"""What the server answers: an ASGI application over one simulator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from adapters.server import faults
from adapters.server.ask import Ask, Limits, read
from adapters.server.faults import Fault, wanted
from adapters.server.outlet import Outlet
from adapters.server.refusal import Refusal, error_body, json_response
from adapters.server.tokens import Blocks, Vocabulary
from adapters.server.wire import DONE, Shape, event
from adapters.simulator.simulator import Simulator
from harness import __version__
from harness.backend import Answer, Request, Sample
from harness.errors import BackendError

MAX_BODY_BYTES = 64 * 2**20


@dataclass
class Service:
    """One simulator and what its clients see of it."""

    name: str
    """The backend's, as in the configuration."""
    simulator: Simulator
    limits: Limits
    vocabulary: Vocabulary
    blocks: Blocks
    reasoning_tokens: int
    faults: bool
    """Whether they may be asked for."""
    requests: int = 0
    tokens: int = 0
    """Tokens written."""
    late_s: float = 0.0
    """How long after their simulated time they were written, in sum and at the most."""
    latest_s: float = 0.0
    started: int = field(default_factory=lambda: int(time.time()))

    def request(self, ask: Ask) -> Request:
        """As the simulator wants it."""
        number = self.requests
        self.requests += 1
        runs = self.blocks.runs(ask.prompt)
        size = self.blocks.block_tokens
        return Request(number, number, 0, len(ask.prompt), ask.output_tokens, size, runs, "")

    def note(self, times_s: Iterable[float]) -> None:
        """Tokens with these simulated times are being written."""
        now_s = asyncio.get_running_loop().time()
        for time_s in times_s:
            late_s = now_s - time_s
            self.tokens += 1
            self.late_s += late_s
            self.latest_s = max(self.latest_s, late_s)

    def samples(self) -> list[Sample]:
        """Its own counters."""
        values = {
            "written_tokens_total": self.tokens,
            "written_late_seconds_total": self.late_s,
            "written_late_seconds_max": self.latest_s,
        }
        return [Sample("server", name, "", float(value)) for name, value in values.items()]


class _Work:
    """One request in the simulator; its tokens as they come, for the one task that waits for them.

    Wakes that task for a token, for the end, and when the client has gone.
    """

    def __init__(self, simulator: Simulator, request: Request, out: Outlet) -> None:
        self._loop = asyncio.get_running_loop()
        self.answer = Answer(sent_s=self._loop.time())
        self.times_s: list[float] = []
        """When each was emitted, so far."""
        self._more: asyncio.Future[None] | None = None
        asked = simulator.generate(request, self.answer, self._emitted)
        self.task = self._loop.create_task(asked)
        self.task.add_done_callback(self._wake)
        out.gone.add_done_callback(self._wake)

    async def more(self) -> None:
        """Wait until something has happened."""
        self._more = self._loop.create_future()
        await self._more

    def _emitted(self, time_s: float) -> None:
        self.times_s.append(time_s)
        self._wake()

    def _wake(self, _: object = None) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)


class Completions:
    """`POST /v1/completions` or `/v1/chat/completions`: speaks ASGI itself, for its timing."""

    def __init__(self, service: Service, *, chat: bool) -> None:
        self._service = service
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            ask = read(
                await _body(scope, receive),
                self._service.vocabulary,
                self._service.limits,
                chat=self._chat,
            )
            fault = self._fault(scope, ask)
        except ClientDisconnect:
            return
        except Refusal as refusal:
            await refusal.response()(scope, receive, send)
            return
        response = await fault.instead()
        if response is None:
            async with Outlet(scope, receive, send) as out:
                response = await self._answer(ask, fault, out)
        if response is not None:
            await response(scope, receive, send)

    def _fault(self, scope: Scope, ask: Ask) -> Fault:
        header = dict(scope["headers"]).get(faults.HEADER) if self._service.faults else None
        return faults.NONE if header is None else wanted(header.decode(), stream=ask.stream)

    async def _answer(self, ask: Ask, fault: Fault, out: Outlet) -> Response | None:
        """Stream the answer, or return it whole. None too where nobody waits for it any more."""
        service = self._service
        work = _Work(service.simulator, service.request(ask), out)
        tokens = service.vocabulary.answer(ask.prompt, ask.output_tokens)
        shape = Shape(ask, service.limits.model, tokens, work.answer, service.reasoning_tokens)
        try:
            if ask.stream:
                await self._stream(shape, work, fault, out)
                return None
            while not work.task.done():
                if out.gone.done():
                    return None
                await work.more()
            await work.task
            return json_response(shape.whole())
        finally:
            work.task.cancel()

    async def _stream(self, shape: Shape, work: _Work, fault: Fault, out: Outlet) -> None:
        await out.start()
        try:
            if await self._tokens(shape, work, fault, out):
                await work.task
                await out.write(shape.end())
                await out.end()
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            await out.write(event(error_body(words, 500)) + DONE)
            await out.end()
            raise

    async def _tokens(self, shape: Shape, work: _Work, fault: Fault, out: Outlet) -> bool:
        """Write each token when it is emitted. False: the response is over before its end."""
        written = 0
        until = min(len(shape), fault.after)
        while written < until:
            ready = min(len(work.times_s), until)
            if ready > written:
                self._service.note(work.times_s[written:ready])
                await fault.write(out, b"".join(map(shape.token, range(written, ready))))
                written = ready
            elif out.gone.done():
                return False
            elif work.task.done():
                return True  # with its error
            else:
                await work.more()
        if fault.after <= len(shape):
            await fault.strike(out)
            return False
        return True


async def _body(scope: Scope, receive: Receive) -> bytes:
    """The request's body. Raises `Refusal` for one that is too large."""
    size = 0
    parts: list[bytes] = []
    async for part in HttpRequest(scope, receive).stream():
        parts.append(part)
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise Refusal(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413)
    return b"".join(parts)


class Plain:
    """The endpoints beside completions."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, _: HttpRequest) -> Response:
        """`GET /v1/models`: the one there is."""
        service = self._service
        model = {
            "id": service.limits.model,
            "object": "model",
            "created": service.started,
            "owned_by": "relaybench",
            "max_model_len": service.limits.context_tokens,
        }
        return json_response({"object": "list", "data": [model]})

    async def health(self, _: HttpRequest) -> Response:
        """`GET /health`: it answers, so it is well."""
        return Response()

    async def version(self, _: HttpRequest) -> Response:
        """`GET /version`: ours."""
        return json_response({"version": __version__})

    async def reset(self, _: HttpRequest) -> Response:
        """`POST /reset_prefix_cache`: all caches empty; 400 while requests are under way."""
        try:
            await self._service.simulator.reset()
        except BackendError as error:
            return Refusal(str(error)).response()
        self._service.blocks.clear()
        return json_response({"success": True})

    async def metrics(self, _: HttpRequest) -> Response:
        """`GET /metrics`: the simulator's counters and how late tokens were, for Prometheus."""
        samples = [*await self._service.simulator.scrape(), *self._service.samples()]
        lines = [line for sample in samples for line in _exposed(sample, self._service.name)]
        return PlainTextResponse(
            "\n".join(lines) + "\n", media_type="text/plain; version=0.0.4; charset=utf-8"
        )


def _exposed(sample: Sample, backend: str) -> list[str]:
    """A sample in Prometheus' text form."""
    name = f"relaybench_{sample.name}"
    kind = "counter" if name.endswith("_total") else "gauge"
    words = sample.name.removesuffix("_total").replace("_", " ")
    return [
        f"# HELP {name} {words} ({sample.source})",
        f"# TYPE {name} {kind}",
        f'{name}{{backend="{backend}"}} {sample.value!r}',
    ]


async def _not_there(_: HttpRequest, error: Exception) -> Response:
    """No such path, or not with this method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    return json_response(error_body(str(getattr(error, "detail", error)), status), status)


def application(service: Service) -> Starlette:
    """The whole of it."""
    plain = Plain(service)
    return Starlette(
        routes=[
            Route("/v1/completions", Completions(service, chat=False), methods=["POST"]),
            Route("/v1/chat/completions", Completions(service, chat=True), methods=["POST"]),
            Route("/v1/models", plain.models),
            Route("/health", plain.health),
            Route("/version", plain.version),
            Route("/metrics", plain.metrics),
            Route("/reset_prefix_cache", plain.reset, methods=["POST"]),
        ],
        exception_handlers={HTTPException: _not_there},
    )
