"""A backend of known timing for tests of the replay: a token every `gap_s` from `first_s` on."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from harness.backend import Answer, Description, Request, Sample, Served
from harness.errors import BackendError, ConnectFailed


class Echo:
    """Answers as asked; `fail` may return the error that a request ends with."""

    def __init__(
        self,
        first_s: float = 0.5,
        gap_s: float = 0.25,
        fail: Callable[[Request], BaseException | None] = lambda _: None,
    ) -> None:
        self.first_s = first_s
        self.gap_s = gap_s
        self.fail = fail
        self.seen: list[Request] = []
        self.in_flight = 0
        self.most_in_flight = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def describe(self) -> Description:
        return Description("echo", "unknown")

    async def reset(self) -> None:
        self.seen.clear()

    async def generate(self, request: Request, answer: Answer) -> None:
        self.seen.append(request)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        loop = asyncio.get_running_loop()
        times_s: list[float] = []
        answer.times_s = times_s
        try:
            await asyncio.sleep(self.first_s)
            times_s.append(loop.time())
            if (error := self.fail(request)) is not None:
                raise error
            for _ in range(request.output_tokens - 1):
                await asyncio.sleep(self.gap_s)
                times_s.append(loop.time())
                if answer.first_answer_s is None:
                    answer.first_answer_s = times_s[-1]
            answer.served = Served(request.input_tokens, request.output_tokens, 64, route="P-D")
        finally:
            self.in_flight -= 1

    async def scrape(self) -> Sequence[Sample]:
        return ()

    async def doubts(self) -> Sequence[str]:
        return ()


def broken(turn: int, error: type[BackendError]) -> Callable[[Request], BaseException | None]:
    """A `fail` for one row of the trace."""
    return lambda request: error("on purpose") if request.turn == turn else None


class Unusable(Echo):
    """Nobody is there."""

    async def __aenter__(self) -> Self:
        raise ConnectFailed("nobody listens")


class Dialling(Echo):
    """Opens a real connection, which a virtual clock must refuse."""

    async def __aenter__(self) -> Self:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        server.close()
        return self


class Keyed(Echo):
    """Is given a secret, and needs it."""

    def __init__(self, auth: Mapping[str, str], first_s: float, gap_s: float) -> None:
        super().__init__(first_s, gap_s)
        if auth["api_key"] != "sk-TOPSECRET":
            raise ConnectFailed("the secret did not arrive")


class Faulty(Echo):
    """Has a fault of its own, which is no server's failure."""

    async def generate(self, request: Request, answer: Answer) -> None:
        await super().generate(request, answer)
        _ = request.turn // 0


class OnlyHere(Echo):
    """Can be used by the process of the run, but by no Locust worker."""

    async def __aenter__(self) -> Self:
        if "locust" in sys.modules:
            raise ConnectFailed("nobody listens")
        return self
