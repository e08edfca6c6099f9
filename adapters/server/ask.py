"""A request's body into what is asked. Whatever cannot be served is a `Refusal` that says why."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from adapters.server.refusal import Refusal
from adapters.server.tokens import Vocabulary

DEFAULT_TOKENS = 16
"""Of an answer, where the request does not say: nothing generated here ends by itself."""
_ONE = ("n", "best_of")
_NOT_SERVED = ("echo", "logprobs", "suffix", "tools")


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be asked."""

    model: str
    context_tokens: int
    """The longest prompt and answer together."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, understood."""

    chat: bool
    prompt: array[int]
    output_tokens: int
    stream: bool
    usage: bool
    """A last event with the usage."""
    continuous_usage: bool
    """Usage in every event."""
    token_ids: bool
    stamps: bool
    """In every event when it was written, for clients to compare."""


def read(data: bytes, vocabulary: Vocabulary, limits: Limits, *, chat: bool) -> Ask:
    """Understand the body of a (chat) completion. Raises `Refusal`."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise Refusal(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refusal("the body is not a JSON object")
    model = body.get("model")
    if model is not None and model != limits.model:
        raise Refusal(
            f"The model `{model}` does not exist. There is: {limits.model}.", "model", status=404
        )
    for name in _ONE:
        if body.get(name) not in (None, 1):
            raise Refusal(f"{name} must be 1: one answer a request", name)
    for name in _NOT_SERVED:
        if body.get(name):
            raise Refusal(f"{name} is not served here", name)
    prompt = _messages(body, vocabulary) if chat else _prompt(body, vocabulary)
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise Refusal("stream_options must be an object", "stream_options")
    return Ask(
        chat,
        prompt,
        _output_tokens(body, len(prompt), limits.context_tokens),
        _flag(body, "stream"),
        _flag(options, "include_usage"),
        _flag(options, "include_usage") and _flag(options, "continuous_usage_stats"),
        _flag(body, "return_token_ids"),
        _flag(body, "relaybench_stamps"),
    )


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise Refusal(f"{name} must be true or false, not {_shown(value)}", name)
    return bool(value)


def _count(body: Mapping[str, Any], name: str, least: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise Refusal(f"{name} must be a whole number, {least} or more, not {_shown(value)}", name)
    return value


def _output_tokens(body: Mapping[str, Any], prompt_tokens: int, context_tokens: int) -> int:
    most = _count(body, "max_completion_tokens", 1) or _count(body, "max_tokens", 1)
    wanted = most or DEFAULT_TOKENS
    least = _count(body, "min_tokens", 0) or 0
    if least > wanted:
        raise Refusal(f"min_tokens is {least}, more than max_tokens, {wanted}", "min_tokens")
    if prompt_tokens + wanted > context_tokens:
        raise Refusal(
            f"This model's maximum context length is {context_tokens} tokens, and this is a prompt "
            f"of {prompt_tokens} tokens with an answer of {wanted}",
            "max_tokens" if prompt_tokens < context_tokens else "prompt",
        )
    return wanted


def _prompt(body: Mapping[str, Any], vocabulary: Vocabulary) -> array[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        tokens = vocabulary.tokens(prompt)
    elif isinstance(prompt, list) and not any(isinstance(each, str | list) for each in prompt[:1]):
        tokens = _ids(prompt, vocabulary.size)
    elif isinstance(prompt, list):
        raise Refusal("one prompt a request: a string or a list of token ids", "prompt")
    else:
        raise Refusal("prompt must be a string or a list of token ids", "prompt")
    if not tokens:
        raise Refusal("prompt is empty", "prompt")
    return tokens


def _ids(prompt: list[Any], size: int) -> array[int]:
    try:
        tokens = array("I", prompt)
    except (TypeError, OverflowError) as error:
        raise Refusal(f"a token id is a whole number from 0 to {size - 1}", "prompt") from error
    largest = int(np.frombuffer(tokens, np.uintc).max(initial=0))
    if largest >= size:
        raise Refusal(f"token id {largest} is not in the vocabulary of {size}", "prompt")
    return tokens


def _messages(body: Mapping[str, Any], vocabulary: Vocabulary) -> array[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refusal("messages must be a list of one or more", "messages")
    tokens = array("I")
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise Refusal("a message must be an object with a role", "messages")
        tokens += vocabulary.message(role, _text(message.get("content")))
    return tokens


def _text(content: Any) -> str:
    """Of a message: a string, or parts of text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise Refusal("content must be a string or a list of parts with a text", "messages")
    return " ".join(map(str, texts))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."  # noqa: PLR2004 - fits a line
