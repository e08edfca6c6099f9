"""The servers behind one address: which plays which role, and what each says of itself.

A router answers requests; flushing caches, waiting until idle, and the counters that prove
disaggregation are each server's own, so every one that `servers` names is asked.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any, TypeVar

import httpx
import orjson

from adapters.completion import load, message_of
from adapters.prometheus import in_parts
from harness.backend import Sample
from harness.errors import (
    BackendError,
    BadStatus,
    BadStream,
    ConfigError,
    ConnectFailed,
    RequestTimeout,
)

DECODE = ("D", "RLD", "MD")
"""The roles that decode."""
ROLES = ("router", "P", *DECODE)
_WORKERS = ROLES[1:]
_IDLE_POLL_S = 0.1
_PAGE_S = 3.0
_GET_S = 30.0
_POST_S = 90.0
"""SGLang may wait a minute until it is idle enough to be flushed."""
_LONGEST_PAGE = 4 * 2**20
_LONGEST_ERROR = 64 * 1024
_GOOD = 300
_PLAIN = {"accept-encoding": "identity"}
"""Unpacking is where a small page becomes a large one."""
_LAST_PORT = 65535
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
        _once("servers", self.servers, {})
        _once("metrics", self.pages, self.servers)
        self.strike: Callable[[bytes], bytes] = bytes
        """Strikes a secret out of whatever a server says."""

    def start(self, client: httpx.AsyncClient) -> None:
        """Ask by this client from now on."""
        self._client = client

    @property
    def workers(self) -> list[tuple[str, str]]:
        """(role, URL) of every server that holds a cache."""
        return [
            (role, url) for role, urls in self.servers.items() if role != "router" for url in urls
        ]

    async def get(self, url: str) -> dict[str, Any]:
        """The JSON object at `url`. Raises `BackendError`."""
        body = await self._ask("GET", url, _GET_S)
        with suppress(BadStream, RecursionError):
            said = self._struck(load(body))
            if isinstance(said, dict):
                return said
        raise BadStream(f"{url} answered something that is no JSON object: {self._words(body)}")

    async def post(self, url: str, body: Any = None) -> None:
        """POST JSON. Raises `BackendError`."""
        await self._ask("POST", url, _POST_S, json=body)

    async def _ask(self, method: str, url: str, within_s: float, **more: Any) -> bytes:
        """The whole answer, of good status, plain and not too long."""
        try:
            async with (
                asyncio.timeout(within_s),
                self._client.stream(method, url, headers=_PLAIN, **more) as response,
            ):
                good = response.status_code < _GOOD
                packed = response.headers.get("content-encoding") or "identity"
                if packed.lower() != "identity":
                    words = f"{self._clean(packed)[:40]}, though it was asked for plain bytes"
                elif good:
                    body = await _read(response, _LONGEST_PAGE)
                    if len(body) <= _LONGEST_PAGE:
                        return body
                    words = f"more than {_LONGEST_PAGE:,} bytes"
                else:
                    words = self._words(await _read(response, _LONGEST_ERROR))
        except TimeoutError:
            raise RequestTimeout(f"{method} {url} had no whole answer in {within_s:g} s") from None
        except httpx.HTTPError as error:
            ours = as_ours(error)
            raise type(ours)(self._clean(str(ours))) from error
        if good:
            raise BadStream(self._clean(f"{url} answered {words}"))
        raise BadStatus(self._clean(f"{method} {url} answered {response.status_code}: {words}"))

    def _words(self, body: bytes) -> str:
        """What a body says. A secret may be written with escapes, and must not be cut in two."""
        try:
            body = orjson.dumps(orjson.loads(body))
        except orjson.JSONDecodeError:
            pass  # words without a form
        except orjson.JSONEncodeError:
            return "JSON of too many levels"
        return message_of(self.strike(body))

    def _clean(self, text: str) -> str:
        return self.strike(text.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")

    def _struck(self, said: Any) -> Any:
        """The same JSON, struck."""
        if isinstance(said, dict):
            return {self._clean(key): self._struck(value) for key, value in said.items()}
        if isinstance(said, list):
            return [self._struck(each) for each in said]
        return self._clean(said) if isinstance(said, str) else said

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
        samples = [Sample(source, "up", "", 1.0)]
        try:
            async with asyncio.timeout(_PAGE_S):
                page = await self._ask("GET", url, _GET_S)
                for part in in_parts(page, source):
                    samples += [
                        Sample(source, self._clean(name), self._clean(labels), value)
                        for _, name, labels, value in part
                        if labels or name != "up"
                    ]
                    await asyncio.sleep(0)
        except (BackendError, TimeoutError):
            return [Sample(source, "up", "", 0.0)]
        return samples

    async def until_idle(self, busy: Sequence[str], within_s: float) -> None:
        """Wait until these counters are 0. Raises `BackendError` if that takes too long.

        Of a server whose page cannot be read nobody knows.
        """
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + within_s
        while True:
            samples = await self.scrape()
            now = [
                f"{source} was not idle within {within_s:g} s: {name} is {value:g}. Does someone "
                "else use it?"
                for source, name, _, value in samples
                if name in busy and not value <= 0
            ]
            now += [
                f"{source} was not known to be idle within {within_s:g} s: its page of metrics "
                "cannot be read"
                for source in Counters(samples).unread
            ]
            if not now:
                return
            if loop.time() > give_up_s:
                raise BackendError(now[0])
            await asyncio.sleep(_IDLE_POLL_S)

    async def on_each(self, act: Callable[[str, str], Awaitable[T]]) -> list[T]:
        """`act(role, url)` on every server that holds a cache, at once."""
        return list(await asyncio.gather(*(act(role, url) for role, url in self.workers)))


class Counters:
    """Samples at one moment, to ask by role, name and labels."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples
        pages = [each for each in samples if each.name == "up" and not each.labels]
        self.read = {each.source for each in pages if each.value > 0}
        self.unread = [
            each.source for each in pages if each.value <= 0 and _role(each.source) in _WORKERS
        ]
        """Workers whose page could not be read."""

    def total(self, roles: str | Sequence[str], name: str, **labels: str) -> float | None:
        """The sum over all servers of these roles; None where none of them has such a counter."""
        roles = (roles,) if isinstance(roles, str) else roles
        wanted = [f',{key}="{value}",' for key, value in labels.items()]
        found = [
            sample.value
            for sample in self._samples
            if sample.name == name
            and _role(sample.source) in roles
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

    def flaws(self, before: Counters, names: Sequence[str]) -> list[str]:
        """Why growth of these counters since then proves nothing, in words.

        Server by server and series by series: in a sum, one that fell hides behind one that rose.
        """
        pages = {
            f"no page of {source} {when} the run": None
            for when, one, other in (("before", before, self), ("after", self, before))
            for source in (*one.unread, *sorted(other.read - one.read))
            if _role(source) in _WORKERS
        }
        then, now = before._series(names), self._series(names)
        restarted = {
            f"{source} restarted: {name} is lower than before the run": None
            for source, name, labels in then | now
            for was, value in [[of.get((source, name, labels), 0.0) for of in (then, now)]]
            if source in before.read & self.read and not was <= value < inf
        }
        return [f"nothing proves disaggregation: {words}" for words in pages | restarted]

    def _series(self, names: Sequence[str]) -> dict[tuple[str, str, str], float]:
        """Those of workers, each by itself."""
        return {
            (source, name, labels): value
            for source, name, labels, value in self._samples
            if name in names and _role(source) in _WORKERS
        }


async def _read(response: httpx.Response, most: int) -> bytes:
    """The body, or a little more than so many bytes of it."""
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > most:
            break
    return bytes(body)


def _role(source: str) -> str:
    return source.split(" ", 1)[0]


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


def _once(
    where: str, listed: Mapping[str, Sequence[str]], others: Mapping[str, Sequence[str]]
) -> None:
    """Raises `ConfigError` where one server stands twice: it would be its own proof.

    `others`: of other kind, where one may stand in the same role.
    """
    seen = {_place(url): role for role, urls in others.items() for url in urls}
    given = [(role, url) for role, urls in listed.items() for url in urls]
    places = Counter(_place(url) for _, url in given)
    for role, url in given:
        if places[_place(url)] > 1 or seen.get(_place(url), role) != role:
            raise ConfigError(f"{where}.{role}: {url} is named twice: each server has one role")


def _place(url: str) -> str:
    """The same for two ways to write it: http://H:80 and http://h/metrics."""
    return str(httpx.URL(url.removesuffix("/metrics"))).rstrip("/")


def base_url(where: str, url: Any) -> str:
    """`url` without a slash at its end. Raises `ConfigError` unless it can be asked."""
    if not _askable(url):
        shown = re.sub(r"(?s)^(\W*\w+://)?.*@", r"\1***@", repr(url))
        raise ConfigError(
            f"{where} is {shown}: give http://HOST:PORT or https://HOST, no user in it"
        )
    return str(url).rstrip("/")


def _askable(url: Any) -> bool:
    if not isinstance(url, str) or not re.fullmatch(r"https?://[^/\s?#@]+(/[^\s?#]*)?", url):
        return False
    try:
        read = httpx.URL(url)
        read.host.encode("idna")
    except (httpx.InvalidURL, UnicodeError):
        return False
    return bool(read.host) and (read.port is None or 0 < read.port <= _LAST_PORT)
