"""The JSON of answers, whole and in events, in the fields that engines have in common."""

from __future__ import annotations

import secrets
import time
from typing import Any

import orjson

from adapters.server.ask import Ask
from adapters.server.tokens import word
from harness.backend import Answer

DONE = b"data: [DONE]\n\n"


def event(payload: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


class Shape:
    """Writes the answer to one request.

    `reasoning`: the first so many tokens of a chat answer are reasoning.
    """

    def __init__(
        self, ask: Ask, model: str, tokens: list[int], answer: Answer, reasoning: int
    ) -> None:
        self._ask = ask
        self._tokens = tokens
        self._answer = answer
        self._reasoning = reasoning if ask.chat else 0
        kind, name = ("chatcmpl", "chat.completion") if ask.chat else ("cmpl", "text_completion")
        self._head = {
            "id": f"{kind}-{secrets.token_hex(8)}",
            "object": f"{name}.chunk" if ask.chat and ask.stream else name,
            "created": int(time.time()),
            "model": model,
        }

    def __len__(self) -> int:
        """Tokens of the answer."""
        return len(self._tokens)

    def token(self, at: int) -> bytes:
        """Token number `at`, from 0, as an event; a chat's first comes behind that of the role."""
        ask, token = self._ask, self._tokens[at]
        first, last = at == 0, at == len(self._tokens) - 1
        choice: dict[str, Any] = {"index": 0}
        if ask.chat:
            field = "reasoning" if at < self._reasoning else "content"
            choice["delta"] = {field: word(token)}
        else:
            choice["text"] = word(token)
        choice |= {"logprobs": None, "finish_reason": "length" if last else None}
        if ask.token_ids:
            choice["token_ids"] = [token]
            if first and not ask.chat:
                choice["prompt_token_ids"] = ask.prompt.tolist()
        data = event(self._chunk(choice, at + 1))
        return self._role() + data if first and ask.chat else data

    def _role(self) -> bytes:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        chunk = self._chunk(choice, 0)
        if self._ask.token_ids:
            chunk["prompt_token_ids"] = self._ask.prompt.tolist()
        return event(chunk)

    def _chunk(self, choice: dict[str, Any], done: int) -> dict[str, Any]:
        chunk = self._head | {"choices": [choice]}
        if self._ask.continuous_usage:
            chunk["usage"] = self._usage(done)
        if self._ask.stamps:
            chunk["relaybench"] = {"sent_s": time.monotonic()}
        return chunk

    def end(self) -> bytes:
        """What follows the last token."""
        if not self._ask.usage:
            return DONE
        last = self._head | {"choices": [], "usage": self._whole_usage()} | self._timing()
        return event(last) + DONE

    def whole(self) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        ask, tokens = self._ask, self._tokens
        choice: dict[str, Any] = {"index": 0}
        if ask.chat:
            choice["message"] = {
                "role": "assistant",
                "content": "".join(map(word, tokens[self._reasoning :])),
                "reasoning": "".join(map(word, tokens[: self._reasoning])) or None,
            }
        else:
            choice["text"] = "".join(map(word, tokens))
        choice |= {"logprobs": None, "finish_reason": "length"}
        if ask.token_ids:
            choice |= {"token_ids": tokens, "prompt_token_ids": ask.prompt.tolist()}
        return self._head | {"choices": [choice], "usage": self._whole_usage()} | self._timing()

    def _usage(self, done: int) -> dict[str, Any]:
        prompt = len(self._ask.prompt)
        return {"prompt_tokens": prompt, "total_tokens": prompt + done, "completion_tokens": done}

    def _whole_usage(self) -> dict[str, Any]:
        cached = {"cached_tokens": self._answer.served.hit_tokens}
        return self._usage(len(self._tokens)) | {"prompt_tokens_details": cached}

    def _timing(self) -> dict[str, Any]:
        """What was simulated, in s on this machine's monotonic clock."""
        answer, served = self._answer, self._answer.served
        return {
            "relaybench": {
                "route": served.route,
                "asked_s": answer.sent_s,
                "prefill_start_s": served.prefill_start_s,
                "prefill_end_s": served.prefill_end_s,
                "first_token_s": float(answer.times_s[0]),
                "last_token_s": float(answer.times_s[-1]),
            }
        }
