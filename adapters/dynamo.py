"""NVIDIA Dynamo's frontend: which workers took a request, and the hits that its router counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapters.completion import Completion
from adapters.fleet import DECODE, Counters
from adapters.openai import OpenAI
from harness.backend import Answer, Request
from harness.settings import whole

_REQUESTS = "dynamo_component_requests_total"


class Dynamo(OpenAI):
    """Name the workers' own ports in `metrics`: they have /metrics and nothing else.

    `block_tokens`: of the blocks that its router counts hits in. `more`: as `OpenAI` takes it.
    """

    engine = "dynamo"

    def __init__(self, block_tokens: int = 16, **more: Any) -> None:
        whole("block_tokens", block_tokens, least=1)
        self.block_tokens = block_tokens
        super().__init__(**more)

    async def doubts(self) -> Sequence[str]:
        """Every request that decode took must have been at prefill too."""
        if "P" not in self.fleet.pages:
            return ()
        after = Counters(await self.fleet.scrape())
        prefilled = after.grown(self.before, "P", _REQUESTS)
        decoded = after.grown(self.before, DECODE, _REQUESTS)
        self.facts["pd_counters"] = {"P requests": prefilled, "D requests": decoded}
        if flaws := after.flaws(self.before, (_REQUESTS,)):
            return flaws
        if prefilled is None or decoded is None:
            return [f"nothing proves disaggregation: P or D has no counter {_REQUESTS}"]
        if decoded <= 0:
            return ["D took no request"]
        if prefilled < decoded:
            return [f"P took {prefilled:,.0f} requests, and D {decoded:,.0f}: some skipped prefill"]
        return ()

    def reading(self, answer: Answer) -> Completion:
        """With `nvext`."""
        return Extended(answer, self.block_tokens)

    def body(self, prompt: NDArray[np.int64] | str, request: Request) -> dict[str, Any]:
        """Asks for `nvext`."""
        fields = {"extra_fields": ["worker_id", "timing"]}
        return {"nvext": fields} | super().body(prompt, request)


class Extended(Completion):
    """Reads `nvext`. `cached_tokens` is 0 in a disaggregated answer, whatever was cached."""

    def __init__(self, answer: Answer, block_tokens: int = 16) -> None:
        super().__init__(answer)
        self._block_tokens = block_tokens
        self._rate: float | None = None
        """Blocks that hit, as a share of the prompt's blocks: a last part of one counts as one."""

    def understand(self, payload: Mapping[str, Any], time_s: float, read: int) -> None:
        """One event that is no error."""
        super().understand(payload, time_s, read)
        more = payload.get("nvext") or {}
        workers = more.get("worker_id") or {}
        served = self.answer.served
        if workers.get("prefill_worker_id") is not None:
            served.route = (
                "P-D" if workers["prefill_worker_id"] != workers.get("decode_worker_id") else "PD"
            )
        rate = (more.get("timing") or {}).get("kv_hit_rate")
        if rate is not None:
            if not isfinite(rate):
                raise ValueError(f"{rate} is no hit rate")
            self._rate = min(max(float(rate), 0.0), 1.0)

    def settle(self) -> None:
        """The router's hit rate, of its blocks, in tokens."""
        super().settle()
        served, size = self.answer.served, self._block_tokens
        if served.route == "P-D":
            served.hit_tokens = None
        if self._rate is not None and served.input_tokens is not None:
            blocks = round(self._rate * ceil(served.input_tokens / size))
            served.hit_tokens = min(blocks * size, served.input_tokens)
