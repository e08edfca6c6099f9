"""Any server with OpenAI's completions API, on the wall clock.

What engines add to it is in `vllm`, `sglang` and `dynamo`: the differences only.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

import httpx
import numpy as np
import orjson
from numpy.typing import NDArray

from adapters.completion import Completion, is_error, load, message_of
from adapters.fleet import Counters, Fleet, as_ours, base_url
from adapters.prompts import Histories, Tokens, Words
from adapters.transport import StampedBody, StampedTransport
from harness.backend import Answer, Description, Request, Sample
from harness.errors import BackendError, BadStatus, BadStream, ConfigError
from harness.manifest import without_secrets
from harness.settings import number

_ERROR_BYTES = 64 * 1024
_ERROR_S = 5.0
_PROBE_TOKENS = 256
_PROBE_WORDS = (16, 48)
Endpoint = Literal["completions", "chat", "generate"]
_OK = 200
_IDLE_S = 60.0


class OpenAI:
    """One address that answers; `servers` are those behind it, by role, and may be empty.

    `model`: None takes the only one that the server lists. `prompts`: `Tokens`, or `Words` for a
    server that takes text only. `history`: what earlier turns' answers are in later prompts, as
    `recorded` in the trace or as they came (`live`, where the server gives token ids).
    `ignore_eos`: ask for exactly the recorded length. `api_key`: by the environment only.
    `extra`: more fields of the body.
    """

    engine = "openai"
    empty_is_token = False
    flush_path: ClassVar[str] = ""
    """Where a POST empties a server's cache; none is known where this is empty."""
    flush_help: ClassVar[str] = ""
    """What to do where it is refused."""
    busy: ClassVar[Sequence[str]] = ()
    """The counters that are 0 when a server is idle."""
    paths: ClassVar[dict[Endpoint, str]] = {
        "completions": "/v1/completions",
        "chat": "/v1/chat/completions",
    }

    def __init__(
        self,
        url: str,
        salt: str,
        prompts: Tokens | Words,
        model: str | None = None,
        endpoint: Endpoint = "completions",
        topology: str = "unknown",
        servers: Mapping[str, str | Sequence[str]] | None = None,
        metrics: Mapping[str, str | Sequence[str]] | None = None,
        cards: Mapping[str, float] | None = None,
        history: Literal["recorded", "live"] = "recorded",
        ignore_eos: bool = True,
        api_key: str | None = None,
        extra: Mapping[str, Any] | None = None,
        connect_s: float = 10.0,
        stall_s: float = 300.0,
        keepalive_s: float = 4.0,
        ca_file: str | None = None,
    ) -> None:
        self.url = base_url("url", url).removesuffix("/v1")
        if endpoint not in self.paths:
            raise ConfigError(f"endpoint is {endpoint!r}: choose {' or '.join(self.paths)}")
        if history not in ("recorded", "live"):
            raise ConfigError(f"history is {history!r}: choose recorded or live")
        if endpoint == "chat" and not isinstance(prompts, Words):
            raise ConfigError("endpoint=chat takes text: choose prompts=words")
        times_s = {"connect_s": connect_s, "stall_s": stall_s, "keepalive_s": keepalive_s}
        for name, value in times_s.items():
            number(name, value, above=0, most=1e6)
        if not re.fullmatch(r"[\x21-\x7e]+", salt):
            raise ConfigError(f"salt is {salt!r}: give one word of printable ASCII")
        api_key = api_key.strip() if api_key else None
        if api_key and not re.fullmatch(r"[\x21-\x7e]+", api_key):
            raise ConfigError("api_key holds what no header may hold: check the environment")
        self.endpoint = endpoint
        self.model = model
        self.prompts = prompts
        self.salt = salt
        self.topology = topology
        self.fleet = Fleet(servers, metrics)
        self.cards = dict(cards or {})
        self.history = history
        self.ignore_eos = ignore_eos
        self.extra = dict(extra or {})
        self.context_tokens: int | None = None
        self.facts: dict[str, Any] = {}
        """What was found out about the server, for `describe`."""
        self._overhead = 0
        self._histories = Histories() if history == "live" else None
        self._keepalive_s = keepalive_s
        self._secret = api_key
        self._authorization = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._headers = self._authorization | {
            "content-type": "application/json",
            "accept": "text/event-stream",
        }
        self.fleet.strike = self._strike
        self._timeout = {"connect": connect_s, "read": stall_s, "write": stall_s, "pool": None}
        self._tls = _tls(ca_file)
        prompts.salted(self.salt)

    # ---- life

    async def __aenter__(self) -> Self:
        """Connect, and find out what is there. Raises `BackendError`."""
        self._transport = StampedTransport(verify=self._tls, keepalive_s=self._keepalive_s)
        self._target = httpx.URL(self.url + self.paths[self.endpoint])
        self._client = httpx.AsyncClient(
            transport=self._transport,
            timeout=httpx.Timeout(self._timeout["read"], connect=self._timeout["connect"]),
            headers=self._authorization,
        )
        self.fleet.start(self._client)
        try:
            await self.look()
        except BaseException:
            await self._client.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def look(self) -> None:
        """Which model, which context; what the endpoint adds to a text prompt."""
        answered = (await self.fleet.get(f"{self.url}/v1/models")).get("data")
        if not isinstance(answered, list):
            raise BadStream(f"{self.url}/v1/models lists no models: this is no OpenAI API")
        listed = [each for each in answered if isinstance(each, dict)]
        names = [str(each.get("id")) for each in listed]
        if self.model is None:
            if len(names) != 1:
                raise ConfigError(
                    f"{self.url} serves {names or 'no model'}: choose one with model="
                )
            self.model = names[0]
        entry: dict[str, Any] = next((each for each in listed if each.get("id") == self.model), {})
        if names and not entry:
            raise ConfigError(f"{self.url} does not serve {self.model!r}, but {', '.join(names)}")
        said = entry.get("max_model_len") or entry.get("context_window")
        self.context_tokens = said if isinstance(said, int) else None
        if isinstance(self.prompts, Words):
            self._overhead = await self._measure_overhead()
            self.facts["template_tokens"] = self._overhead

    async def _measure_overhead(self) -> int:
        """Tokens that the server adds to our words. Raises `BackendError` if a word is not one."""
        few, many = [await self._counted(words) for words in _PROBE_WORDS]
        if many - few != _PROBE_WORDS[1] - _PROBE_WORDS[0]:
            raise BackendError(
                f"{_PROBE_WORDS[1] - _PROBE_WORDS[0]} words more are {many - few} tokens more to "
                f"{self.model}: set prompts.words to words that are one token each"
            )
        return few - _PROBE_WORDS[0]

    async def _counted(self, words: int) -> int:
        """How many tokens the server makes of so many words."""
        answer = Answer()
        await self._stream(self._probe(words), words, answer)
        if answer.served.input_tokens is None:
            raise BackendError(
                f"{self.url} reports no usage, so the tokens of a text prompt cannot be counted"
            )
        return answer.served.input_tokens

    # ---- the contract

    def describe(self) -> Description:
        """The server, and how it is asked."""
        return Description(
            name=self.engine,
            topology=self.topology,
            cards=self.cards,
            context_tokens=self.context_tokens,
            warnings=self.cautions(),
            details={
                "url": self.url,
                "endpoint": self.endpoint,
                "model": self.model,
                "servers": self.fleet.servers,
                "prompts": self.prompts.kind,
                "history": self.history,
                "ignore_eos": self.ignore_eos,
                "salt": self.salt,
                "extra": without_secrets(json.dumps(self.extra)),
                "proxy": "none: requests go straight to the server",
                **self.facts,
            },
        )

    async def reset(self) -> None:
        """Empty every cache that can be, and say how cold the start is; the salt does the rest."""
        self.facts["cold_start"] = await self.cold()
        self.before = Counters(await self.fleet.scrape())

    async def scrape(self) -> Sequence[Sample]:
        """Every page of metrics that `servers` or `metrics` names."""
        return await self.fleet.scrape()

    def cautions(self) -> list[str]:
        """What was not looked at, and a reader might think was."""
        if self.engine == "openai" or "P" in self.fleet.pages:
            return []
        return ["whether disaggregation was on was not looked at: no P is named in servers"]

    async def doubts(self) -> Sequence[str]:
        """None: a server of unknown make proves nothing."""
        return ()

    async def generate(self, request: Request, answer: Answer) -> None:
        """Ask, and read the stream to its end."""
        await self._stream(request, request.input_tokens, answer)

    # ---- one request

    async def _stream(self, request: Request, tokens: int, answer: Answer) -> None:
        prompt, answer.sent_input_tokens = self._prompt(request, tokens)
        reading = self.reading(answer)
        message = httpx.Request(
            "POST",
            self._target,
            content=orjson.dumps(self.body(prompt, request), option=orjson.OPT_SERIALIZE_NUMPY),
            headers=self._headers | {"x-request-id": f"{self.salt}-{request.turn}"},
            extensions={"timeout": self._timeout, "sent": partial(setattr, answer, "sent_s")},
        )
        try:
            # By the transport itself: cookies, redirects and hooks would be half of what it costs.
            response = await self._transport.handle_async_request(message)
            try:
                await self._read(response, reading, answer)
            finally:
                await response.aclose()
                answer.clock = response.extensions["stamped"].clock
                reading.settle()
        except httpx.HTTPError as error:
            raise self._without_secret(as_ours(error)) from error
        except BackendError as error:
            raise self._without_secret(error) from error
        if self._histories is not None:
            self._remember(request, prompt, reading)

    async def _read(self, response: httpx.Response, reading: Completion, answer: Answer) -> None:
        body: StampedBody = response.extensions["stamped"]
        answer.first_byte_s = body.first_byte_s
        reading.whole = body.enough
        reading.strike = self._strike
        if response.status_code == _OK and _streams(response):
            await body.drain(reading.sink)
            reading.finish()
            return
        head = self._strike(await _first_bytes(response))
        if response.status_code == _OK:
            raise BadStream(_not_a_stream(head))
        retry = response.headers.get("retry-after")
        after = f" (retry after {retry})" if retry else ""
        raise BadStatus(f"{response.status_code}{after}: {message_of(head)}")

    def reading(self, answer: Answer) -> Completion:
        """What understands the stream."""
        empty = self.empty_is_token and self.endpoint == "completions"
        return Completion(answer, empty_is_token=empty)

    def body(self, prompt: NDArray[np.int64] | str, request: Request) -> dict[str, Any]:
        """The request's JSON."""
        tokens = request.output_tokens
        asked: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": tokens,
        }
        if self.endpoint == "chat":
            asked["messages"] = [{"role": "user", "content": prompt}]
        else:
            asked["prompt"] = prompt
        if self.ignore_eos:
            asked |= {"ignore_eos": True, "min_tokens": tokens}
        return asked | self.extra

    def _prompt(self, request: Request, tokens: int) -> tuple[NDArray[np.int64] | str, int]:
        """(the prompt, its tokens as the server will count them)."""
        if isinstance(self.prompts, Words):
            words = max(1, tokens - self._overhead)
            return self.prompts.text(request, words), words + self._overhead
        ids = self.prompts.token_ids(request)
        if self._histories is not None:
            ids = self._histories.apply(request, ids)
        return ids, len(ids)

    def _remember(
        self, request: Request, prompt: NDArray[np.int64] | str, reading: Completion
    ) -> None:
        if isinstance(prompt, str) or min(reading.token_ids, default=-1) < 0:
            raise BackendError(
                "history=live needs the answers as token ids, and this server does not give them"
            )
        assert self._histories is not None  # noqa: S101 - asked by the caller
        self._histories.keep(request, prompt, reading.token_ids)

    def _without_secret(self, error: BackendError) -> BackendError:
        """The same, without the key in its words: a server may repeat what it was sent."""
        words = str(error)
        struck = self._strike(words.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")
        return error if self._secret is None or struck == words else type(error)(struck)

    def _strike(self, data: bytes) -> bytes:
        """Without the key."""
        return data.replace(self._secret.encode(), b"***") if self._secret else data

    # ---- probes

    @staticmethod
    def _probe(tokens: int, turn: int = -1) -> Request:
        """A request of the harness itself: its prompt is no turn's of the trace."""
        return Request(2**32 + turn, -1, 0, tokens, 1, 1, [], "probe")

    async def probe_hits(self, turn: int = -1) -> int | None:
        """Cached tokens of a prompt of our own; None where the server does not say."""
        answer = Answer()
        try:
            await self._stream(self._probe(_PROBE_TOKENS, turn), _PROBE_TOKENS, answer)
        except BackendError as error:
            raise type(error)(f"POST {self._target}: {error}") from error
        return answer.served.hit_tokens

    async def cold(self) -> str:
        """Warm up, see a hit reported, flush, and see none: what is then known, in words.

        Where the server reports no hits at all, it cannot be seen either way.
        """
        await self.probe_hits()
        seen = await self.probe_hits()
        cannot = await self.flush()
        left = await self.probe_hits()
        await self.flush()
        if cannot:
            return f"by salt only: {cannot}"
        if not seen:
            return "flushed, and by salt; not proven, since the server reports no cached tokens"
        if left:
            return (
                f"by salt only: after a flush {left} of {_PROBE_TOKENS} tokens of a prompt were "
                "still cached, so another tier holds them"
            )
        return f"flushed and proven: a prompt with {seen} tokens cached had none after"

    async def flush(self) -> str | None:
        """Wait until idle, then empty P, D and RLD; by way of the router where none is named.

        Returns why that cannot be done, where it cannot.
        """
        if not self.flush_path:
            return "this server has no known call to empty its cache"
        await self.fleet.until_idle(self.busy, _IDLE_S)
        try:
            for url in [url for _, url in self.fleet.workers] or [self.url]:
                await self.fleet.post(url + self.flush_path, {})
        except BadStatus as error:
            return f"{error}{self.flush_help}"
        return None


def _streams(response: httpx.Response) -> bool:
    return "event-stream" in response.headers.get("content-type", "").lower()


async def _first_bytes(response: httpx.Response) -> bytes:
    """As much of a body as an error may have, and as comes: its status matters more."""
    head = b""
    with suppress(httpx.HTTPError, TimeoutError):
        async with asyncio.timeout(_ERROR_S):
            async for piece in response.aiter_raw():
                head += piece
                if len(head) > _ERROR_BYTES:
                    break
    return head


def _not_a_stream(body: bytes) -> str:
    """200 with JSON: an error, or a server that does not stream."""
    try:
        payload = load(body)
    except BadStream:
        return f"the server answered 200 with something that is no stream: {message_of(body)}"
    if is_error(payload):
        return f"the server answered 200 with an error: {message_of(body)}"
    return "the server answered as a whole though it was asked to stream"


def _tls(ca_file: str | None) -> ssl.SSLContext | None:
    if ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ca_file {ca_file} cannot be used: {error}") from error
