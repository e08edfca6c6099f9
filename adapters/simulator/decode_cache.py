"""DRC, the decode-side prefix cache: what it holds need not be sent."""

from __future__ import annotations

from adapters.simulator.costs import KvBytes, require
from harness.backend import Request
from harness.prefix import PrefixCache
from harness.settings import number


class DecodeCache:
    """Past prompts kept where decoding happens; with `drc` off every prompt is sent whole."""

    def __init__(self, kv: KvBytes, drc: bool, cache_bytes: float) -> None:
        require(isinstance(kv, KvBytes), "cache.kv", kv, "a model's KV bytes")
        number("cache.cache_bytes", cache_bytes, least=0)
        self.kv = kv
        self.drc = drc
        self.cache_bytes = cache_bytes
        self.clear()

    def clear(self) -> None:
        """Cold."""
        self.blocks = PrefixCache(0)
        self._block_tokens = 0

    def hit_tokens(self, request: Request) -> int:
        """Tokens of the prompt that are here already."""
        if not self.drc:
            return 0
        if self._block_tokens != request.block_tokens:
            self._block_tokens = request.block_tokens
            self.blocks = PrefixCache(self.kv.blocks(self.cache_bytes, request.block_tokens))
        return min(self.blocks.match(request.runs) * request.block_tokens, request.input_tokens)

    def keep(self, request: Request) -> None:
        """The prompt's cache has arrived."""
        if self.drc:
            self.blocks.insert(request.runs)
