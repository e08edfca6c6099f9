"""A streamed completion, event by event, into an `Answer`. Pure: no socket, no clock.

The first token is the first content or reasoning, or the first token ids: never a role, an empty
prelude or a finish reason alone. How many tokens an event carries is known from token ids or from
continuous usage; else it is not, unless there are as many events as the usage says there are
tokens. What the server does not say stays None.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import orjson

from adapters.sse import Event, EventParser
from harness.backend import Answer
from harness.errors import BadStream

_DONE = b"[DONE]"
_BROKEN_OFF = ("abort", "error")
_SHOWN = 300
_MOST = 10_000_000
"""More tokens than any answer or prompt has: a count beyond is nonsense, and would cost memory."""
_LARGEST_ID = 2**31


class Completion:
    """`/v1/completions` and `/v1/chat/completions` of any server. `sink` takes the body's bytes.

    `empty_is_token`: the server sends a `text` that is empty for a token only, never before one
    (vLLM, for half a character).
    """

    def __init__(
        self,
        answer: Answer,
        *,
        empty_is_token: bool = False,
    ) -> None:
        self.answer = answer
        self.whole: Callable[[], None] = lambda: None
        """Called when nothing more is needed: [DONE] has come."""
        self.strike: Callable[[bytes], bytes] = lambda data: data
        """Takes out of an event what must not be kept."""
        self._empty_is_token = empty_is_token
        self.token_ids: list[int] = []
        """The answer's tokens, where the server gives them."""
        self.done = False
        self.error: str | None = None
        self._parser = EventParser()
        self._times: list[float] = []
        self._counts: list[int | None] = []
        self._counted = 0
        self._last_read = -1
        answer.times_s = self._times

    def sink(self, time_s: float, read: int, data: bytes) -> None:
        """A piece of the body. Raises `BadStream`."""
        for event in self._parser.feed(data):
            self._take(time_s, read, event)

    def finish(self) -> None:
        """The body has ended. Raises `BadStream` unless the answer is whole."""
        self.settle()
        if self.error is not None:
            raise BadStream(self.error)
        if not self.done:
            where = ", in the middle of an event" if self._parser.incomplete else ""
            raise BadStream(f"the stream ended without [DONE]{where}")

    def _take(self, time_s: float, read: int, event: Event) -> None:
        if self.done:
            return  # whatever it is, the answer was whole before
        if event.data.strip() == _DONE:
            self.done = True
            self.whole()
            return
        data = self.strike(event.data)
        payload = load(data)
        if event.name == b"error" or is_error(payload):
            self.error = self.error or message(payload)
            return
        if isinstance(payload, dict):
            try:
                self.understand(payload, time_s, read)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise BadStream(f"an event of the stream makes no sense: {_shown(data)}") from error

    def understand(self, payload: Mapping[str, Any], time_s: float, read: int) -> None:
        """One event that is no error."""
        usage = payload.get("usage")
        if usage:
            self._usage(usage)
        choices = payload.get("choices")
        if not choices:
            return
        choice = choices[0]
        delta = choice.get("delta") or choice
        answered = bool(delta.get("text") or delta.get("content") or delta.get("tool_calls"))
        thought = bool(delta.get("reasoning") or delta.get("reasoning_content"))
        ids = choice.get("token_ids") or ()
        if self._empty_is_token and choice.get("text") == "":
            answered = choice.get("finish_reason") not in _BROKEN_OFF
        if answered or thought or ids:
            self.token_ids += token_ids(ids)
            count = len(ids) or self._newly_counted(usage)
            self.token(time_s, read, count, answer=answered or not thought)
        self.ended(choice.get("finish_reason"))

    def token(self, time_s: float, read: int, count: int | None, *, answer: bool) -> None:
        """An event that carries tokens: `count` of them, or nobody says how many."""
        if read == self._last_read:
            self.answer.shared_reads += 1
        self._last_read = read
        self._times.append(time_s)
        self._counts.append(count)
        if answer and self.answer.first_answer_s is None:
            self.answer.first_answer_s = time_s

    def ended(self, reason: str | None) -> None:
        """A finish reason, or None."""
        if reason is not None:
            self.answer.finish_reason = str(reason)
            if reason in _BROKEN_OFF:
                self.error = self.error or f"the server broke the answer off: {reason}"

    def _newly_counted(self, usage: Mapping[str, Any] | None) -> int | None:
        """Tokens of this event by continuous usage."""
        total = counted(usage.get("completion_tokens"), None) if usage else None
        if total is None:
            return None
        new, self._counted = total - self._counted, total
        return new if new > 0 else None

    def _usage(self, usage: Mapping[str, Any]) -> None:
        served = self.answer.served
        served.input_tokens = counted(usage.get("prompt_tokens"), served.input_tokens)
        served.output_tokens = counted(usage.get("completion_tokens"), served.output_tokens)
        details = usage.get("prompt_tokens_details") or {}
        served.hit_tokens = counted(details.get("cached_tokens"), served.hit_tokens)

    def settle(self) -> None:
        """Whatever has come: times by token where that is known, else by event."""
        served, counts = self.answer.served, self._counts
        if served.output_tokens is None and self.token_ids:
            served.output_tokens = len(self.token_ids)
        known = [count for count in counts if count is not None]
        if counts and len(known) == len(counts) and sum(known) == served.output_tokens:
            self.answer.times_s = np.repeat(self._times, known)
            self.answer.timed_by = "token"
        elif len(counts) != served.output_tokens:
            self.answer.timed_by = "event"


def load(data: bytes) -> Any:
    """JSON. Bytes that are not UTF-8 are replaced: a token is a token. Raises `BadStream`."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            return json.loads(data.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            raise BadStream(f"an event of the stream is not JSON: {_shown(data)}") from None


def counted(value: Any, otherwise: int | None) -> int | None:
    """A count of tokens, where there is one. Raises ValueError for what cannot be one."""
    if value is None:
        return otherwise
    if not isinstance(value, int) or not 0 <= value < _MOST:
        raise ValueError(f"{value!r} is no count of tokens")
    return value


def token_ids(values: Iterable[Any]) -> list[int]:
    """Ids as whole numbers. Raises ValueError for what is no token id."""
    ids = [int(value) for value in values]
    if ids and not 0 <= min(ids) <= max(ids) < _LARGEST_ID:
        raise ValueError(f"{min(ids)} to {max(ids)} are no token ids")
    return ids


def _shown(data: bytes) -> str:
    return data[:_SHOWN].decode("utf-8", "backslashreplace")


def is_error(payload: Any) -> bool:
    """Whether a server means it as an error: nested, flat, or of FastAPI."""
    if not isinstance(payload, dict):
        return False
    flat = "message" in payload and ("code" in payload or payload.get("object") == "error")
    return bool(payload.get("error")) or flat or payload.keys() == {"detail"}


def message(payload: Any) -> str:
    """What an error says, whatever its form."""
    try:
        while isinstance(payload, dict):
            payload = next(
                (payload[key] for key in ("error", "message", "detail") if payload.get(key)),
                json.dumps(payload),
            )
        words = str(payload)
    except RecursionError:
        return "an error nested too deeply to be read"
    return " ".join(words.split())[:_SHOWN]


def message_of(body: bytes) -> str:
    """What an error response says: JSON of any form, or plain text, valid or not."""
    try:
        return message(orjson.loads(body))
    except orjson.JSONDecodeError:
        return message(body.decode("utf-8", "replace"))
