"""SGLang, alone or disaggregated behind its router: `/generate` and what else it adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from adapters.completion import Completion, counted, token_ids
from adapters.fleet import DECODE, Counters
from adapters.openai import Endpoint, OpenAI
from harness.backend import Answer, Request
from harness.errors import BackendError

_MODES = {"P": "prefill", "D": "decode", "MD": "decode", "RLD": "decode"}
_SENT = "sglang:kv_transfer_latency_ms_count"
_PREFILLED = "sglang:prompt_tokens_total"
_ANSWERED = "sglang:num_requests_total"
_SHORT = 0.9


class Sglang(OpenAI):
    """`endpoint=generate` sends token ids, which its router takes nowhere else."""

    engine = "sglang"
    flush_path = "/flush_cache?timeout=60"
    busy = ("sglang:num_running_reqs", "sglang:num_queue_reqs")
    paths: ClassVar[dict[Endpoint, str]] = OpenAI.paths | {"generate": "/generate"}

    async def look(self) -> None:
        """And each server's version and mode. Raises `BackendError` for a role it does not play."""
        await super().look()
        self.facts["versions"] = dict(await self.fleet.on_each(self._version))

    async def _version(self, role: str, url: str) -> tuple[str, str]:
        said = await self.fleet.get(f"{url}/server_info")
        mode = said.get("disaggregation_mode")
        if "P" in self.fleet.servers and mode != _MODES[role]:
            raise BackendError(f"{url} is named as {role}, but its disaggregation_mode is {mode!r}")
        limit = said.get("context_length")
        self.context_tokens = limit if isinstance(limit, int) else self.context_tokens
        return f"{role} {url}", str(said.get("version"))

    async def doubts(self) -> Sequence[str]:
        """Every request that decode answered must have been sent to it by prefill."""
        if "P" not in self.fleet.servers:
            return ()
        after = Counters(await self.fleet.scrape())
        sent = after.grown(self.before, "P", _SENT)
        prefilled = after.grown(self.before, "P", _PREFILLED)
        answered = after.grown(self.before, DECODE, _ANSWERED)
        self.facts["pd_counters"] = {
            "P prompt_tokens": prefilled,
            "P kv_transfers": sent,
            "D requests": answered,
        }
        if flaws := after.flaws(self.before, (_SENT, _PREFILLED, _ANSWERED)):
            return flaws
        if sent is None or prefilled is None or answered is None:
            return ["nothing proves disaggregation: P or D has no counters: use --enable-metrics"]
        return [
            words
            for words, doubtful in {
                "D answered no request": answered <= 0,
                "P computed no prompt": prefilled <= 0,
                f"P sent {sent:,.0f} KV caches for {answered:,.0f} requests that D answered": (
                    sent < _SHORT * answered
                ),
            }.items()
            if doubtful
        ]

    def reading(self, answer: Answer) -> Completion:
        """`/generate` has a form of its own."""
        return Generated(answer) if self.endpoint == "generate" else super().reading(answer)

    def body(self, prompt: NDArray[np.int64] | str, request: Request) -> dict[str, Any]:
        """`/generate` has a form of its own."""
        if self.endpoint != "generate":
            return super().body(prompt, request)
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": request.output_tokens}
        if self.ignore_eos:
            sampling["ignore_eos"] = True
        key = "text" if isinstance(prompt, str) else "input_ids"
        return {key: prompt, "sampling_params": sampling, "stream": True} | self.extra


class Generated(Completion):
    """The stream of `/generate`: ids and text so far, or new with `--incremental-streaming-output`.

    How many tokens there are is in `meta_info`, always.
    """

    def understand(self, payload: Mapping[str, Any], time_s: float, read: int) -> None:
        """One event that is no error."""
        meta = payload.get("meta_info") or {}
        served = self.answer.served
        served.input_tokens = counted(meta.get("prompt_tokens"), served.input_tokens)
        served.hit_tokens = counted(meta.get("cached_tokens"), served.hit_tokens)
        total = counted(meta.get("completion_tokens"), None)
        ids = payload.get("output_ids") or []
        so_far = len(self.token_ids)
        if total is not None and total > so_far:
            served.output_tokens = total
            new = ids[so_far - total :] if len(ids) >= total - so_far else ids
            self.token_ids += token_ids(new)
            self.token_ids += [-1] * (total - len(self.token_ids))  # not told, but there
            self.token(time_s, read, total - so_far, answer=True)
        reason = meta.get("finish_reason")
        if isinstance(reason, Mapping):
            if reason.get("type") == "abort":
                self.error = self.error or f"aborted: {reason.get('message')}"
            reason = reason.get("type")
        self.ended(reason)
