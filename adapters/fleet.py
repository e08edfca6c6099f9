"""The servers behind one address: which plays which role, and what each says of itself.

A router answers requests; flushing caches, waiting until idle, and the counters that prove
disaggregation are each server's own, so every one that `servers` names is asked.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import httpx

from adapters.completion import load, message_of
from adapters.prometheus import parse
from harness.backend import Sample
from harness.errors import (
    BackendError,
    BadStatus,
    BadStream,
    ConfigError,
    ConnectFailed,
    RequestTimeout,
)

ROLES = ("router", "P", "D", "RLD", "MD")
_IDLE_POLL_S = 0.1
_PAGE_S = 3.0
_LONGEST_PAGE = 32 * 2**20
_GOOD = 300
T = TypeVar("T")


def as_ours(error: httpx.HTTPError) -> BackendError:
    """What httpx says, in the classes of the harness."""
    words = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return ConnectFailed(words)
    if isinstance(error, httpx.TimeoutException):
        return RequestTimeout(words)
    return BadStream(words)


class Fleet:
    """Every server by role: `{"P": ["http://..."], "D": [...]}`; any of `ROLES`.

    `metrics` names pages that are elsewhere than at `/metrics` of those servers, by role again.
    """

    def __init__(
        self,
        servers: Mapping[str, str | Sequence[str]] | None,
        metrics: Mapping[str, str | Sequence[str]] | None = None,
    ) -> None:
        self.servers = _listed("servers", servers)
        pages = {
            role: [f"{url}/metrics" for url in urls]
            for role, urls in self.servers.items()
            if role != "router"
        }
        self.pages = pages | _listed("metrics", metrics)

    def start(self, client: httpx.AsyncClient) -> None:
        """Ask by this client from now on."""
        self._client = client

    @property
    def workers(self) -> list[tuple[str, str]]:
        """(role, URL) of every server that holds a cache."""
        return [
            (role, url) for role, urls in self.servers.items() if role != "router" for url in urls
        ]

    async def get(self, url: str) -> Any:
        """The JSON at `url`. Raises `BackendError`."""
        return load(await self._ask("GET", url))

    async def post(self, url: str, body: Any = None) -> bytes:
        """What a POST of JSON answers. Raises `BackendError`."""
        return await self._ask("POST", url, json=body)

    async def _ask(self, method: str, url: str, **more: Any) -> bytes:
        try:
            response = await self._client.request(method, url, **more)
        except httpx.HTTPError as error:
            raise as_ours(error) from error
        if response.status_code >= _GOOD:
            words = message_of(response.content)
            raise BadStatus(f"{method} {url} answered {response.status_code}: {words}")
        if len(response.content) > _LONGEST_PAGE:
            raise BadStream(f"{url} answered {len(response.content):,} bytes")
        return response.content

    async def scrape(self) -> list[Sample]:
        """All pages at once; `up` says of each whether it could be read."""
        sources = [
            (f"{role} {url.removesuffix('/metrics')}", url)
            for role, urls in self.pages.items()
            for url in urls
        ]
        pages = await asyncio.gather(*(self._page(source, url) for source, url in sources))
        return [sample for page in pages for sample in page]

    async def _page(self, source: str, url: str) -> list[Sample]:
        try:
            async with asyncio.timeout(_PAGE_S):
                page = await self._ask("GET", url)
            samples = await asyncio.to_thread(parse, page, source)
        except (BackendError, TimeoutError):
            return [Sample(source, "up", "", 0.0)]
        return [Sample(source, "up", "", 1.0), *samples]

    async def until_idle(self, busy: Sequence[str], within_s: float) -> None:
        """Wait until these counters are 0. Raises `BackendError` if that takes too long."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + within_s
        while True:
            now = [each for each in await self.scrape() if each.name in busy and each.value > 0]
            if not now:
                return
            if loop.time() > give_up_s:
                first = now[0]
                raise BackendError(
                    f"{first.source} was not idle within {within_s:g} s: {first.name} is "
                    f"{first.value:g}. Does someone else use it?"
                )
            await asyncio.sleep(_IDLE_POLL_S)

    async def on_each(self, act: Callable[[str, str], Awaitable[T]]) -> list[T]:
        """`act(role, url)` on every server that holds a cache, at once."""
        return list(await asyncio.gather(*(act(role, url) for role, url in self.workers)))


class Counters:
    """Samples at one moment, to ask by role, name and labels."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def total(self, roles: str | Sequence[str], name: str, **labels: str) -> float | None:
        """The sum over all servers of these roles; None where none of them has such a counter."""
        roles = (roles,) if isinstance(roles, str) else roles
        wanted = [f',{key}="{value}",' for key, value in labels.items()]
        found = [
            sample.value
            for sample in self._samples
            if sample.name == name
            and sample.source.split(" ", 1)[0] in roles
            and all(each in f",{sample.labels}," for each in wanted)
        ]
        return sum(found) if found else None

    def grown(
        self, before: Counters, roles: str | Sequence[str], name: str, **labels: str
    ) -> float | None:
        """By how much that sum has grown since; None where there is no such counter now.

        One that was not there before has grown from 0: servers show some from their first use on.
        """
        now = self.total(roles, name, **labels)
        return None if now is None else now - (before.total(roles, name, **labels) or 0.0)


def _listed(where: str, given: Mapping[str, str | Sequence[str]] | None) -> dict[str, list[str]]:
    """URLs by role. Raises `ConfigError`."""
    listed: dict[str, list[str]] = {}
    for role, urls in (given or {}).items():
        if role not in ROLES:
            raise ConfigError(f"{where}.{role}: no such role. Choose from {', '.join(ROLES)}")
        each = [urls] if isinstance(urls, str) else list(urls or ())
        if each:
            listed[role] = [base_url(f"{where}.{role}", url) for url in each]
    return listed


def base_url(where: str, url: Any) -> str:
    """`url` without a slash at its end. Raises `ConfigError` unless it can be asked."""
    if not isinstance(url, str) or not re.fullmatch(r"https?://[^/\s?#@]+(/[^\s?#]*)?", url):
        raise ConfigError(
            f"{where} is {url!r}: give http://HOST:PORT or https://HOST, no user in it"
        )
    return url.rstrip("/")
