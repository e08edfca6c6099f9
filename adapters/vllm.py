"""vLLM, alone or disaggregated behind any router: what it adds to OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence

from adapters.fleet import DECODE, Counters
from adapters.openai import OpenAI

_SOURCES = "vllm:prompt_tokens_by_source_total"
_PREFILLED = "vllm:prompt_tokens_total"
_REQUESTS = "vllm:request_prompt_tokens_count"
_PROMPTS = "vllm:request_prompt_tokens_sum"
_FAILED = "vllm:nixl_num_failed_transfers_total"
_LOCAL_TOKENS = 64
_LOCAL_OF_PROMPT = 0.25
_LOCAL_SHARE = 0.02
"""A decode node computes the prompt's last tokens by itself: connectors move whole blocks.

No more than so many tokens of a request, nor than so much of a prompt, on average.
"""
_SHORT = 0.9


class Vllm(OpenAI):
    """Flushing needs `VLLM_SERVER_DEV_MODE=1`; the proof of disaggregation needs `servers`."""

    engine = "vllm"
    flush_path = "/reset_prefix_cache"
    flush_help = "; start vLLM with VLLM_SERVER_DEV_MODE=1"
    busy = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    empty_is_token = True

    async def look(self) -> None:
        """And each server's version."""
        await super().look()
        self.facts["versions"] = dict(await self.fleet.on_each(self._version))

    async def _version(self, role: str, url: str) -> tuple[str, str]:
        return f"{role} {url}", str((await self.fleet.get(f"{url}/version")).get("version"))

    async def doubts(self) -> Sequence[str]:
        """A decode node that got no KV cache prefills by itself, answers 200, and says nothing."""
        if "P" not in self.fleet.servers:
            return ()
        after = Counters(await self.fleet.scrape())
        grown = {
            source: after.grown(self.before, DECODE, _SOURCES, source=source)
            for source in ("external_kv_transfer", "local_compute", "local_cache_hit")
        }
        prefilled = after.grown(self.before, "P", _PREFILLED)
        requests = after.grown(self.before, DECODE, _REQUESTS)
        prompts = after.grown(self.before, DECODE, _PROMPTS)
        failed = after.grown(self.before, DECODE, _FAILED)
        self.facts["pd_counters"] = {"P prompt_tokens": prefilled, "D requests": requests} | {
            f"D {source}": value for source, value in grown.items()
        }
        names = (_SOURCES, _PREFILLED, _REQUESTS, _PROMPTS, _FAILED)
        if flaws := after.flaws(self.before, names):
            return flaws
        moved, local = grown["external_kv_transfer"], grown["local_compute"]
        if moved is None or local is None or prefilled is None or requests is None:
            return ["nothing proves disaggregation: P or D has no counters of prompt tokens"]
        if prompts is None:
            prompts = sum(value or 0.0 for value in grown.values())
        allowed = min(requests * _LOCAL_TOKENS, prompts * _LOCAL_OF_PROMPT)
        allowed += _LOCAL_SHARE * (moved + local)
        return [
            words
            for words, doubtful in {
                "decode answered no request": requests <= 0,
                "prefill computed no prompt: P was not used": prefilled <= 0,
                "no KV cache was transferred to decode": moved <= 0,
                f"decode was sent {moved:,.0f} prompt tokens and P computed {prefilled:,.0f}: they "
                "came from elsewhere": prefilled < _SHORT * moved,
                f"decode computed {local:,.0f} prompt tokens by itself and was sent {moved:,.0f}: "
                "it fell back to local prefill": local > allowed,
                f"{failed or 0:,.0f} KV transfers failed": bool(failed),
            }.items()
            if doubtful
        ]
