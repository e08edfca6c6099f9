"""The prefill cluster: one queue, first come first served, chunked steps, one prefix cache.

Assumptions, in the open: the cache is the cluster's (a store that every instance reads, in host
memory, its reads hidden behind compute), and an instance takes from the common queue whenever it
has room in a step, so no routing policy can go wrong. A hit is looked up when a request's first
chunk is scheduled, and its prompt becomes cached when its prefill ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from adapters.simulator.costs import KvBytes, PrefillCost, require
from adapters.simulator.engine import Engine
from harness.backend import Request
from harness.prefix import PrefixCache
from harness.settings import number, whole


class Prompt:
    """One prompt on its way through the cluster."""

    __slots__ = ("done", "finished", "gone", "hit_tokens", "request", "started_s")

    def __init__(self, request: Request, finished: Callable[[Prompt], None]) -> None:
        self.request = request
        self.finished = finished
        self.gone = False
        self.started_s: float | None = None
        self.hit_tokens = 0
        self.done = 0
        """Tokens whose KV is there: the hit and what has been computed."""


class PrefillCluster:
    """`cards` cards in instances of 8, each with a budget of `chunk_tokens` a step.

    `pack_tail`: the room that the tail of one prompt leaves in a step goes to the next prompt;
    without it (lock-step data-parallel attention) it is lost.
    """

    CARDS = 8
    """Cards an instance: what the cost fits are for."""

    def __init__(
        self,
        cards: int,
        chunk_tokens: int,
        cache_bytes: float,
        cost: PrefillCost,
        kv: KvBytes,
        pack_tail: bool = True,
    ) -> None:
        require(isinstance(cost, PrefillCost), "prefill.cost", cost, "a model's prefill cost")
        require(isinstance(kv, KvBytes), "prefill.kv", kv, "a model's KV bytes")
        number("prefill.cards", cards, least=self.CARDS, most=1e9)
        require(
            cards >= self.CARDS and cards % self.CARDS == 0,
            "prefill.cards",
            cards,
            "a multiple of 8",
        )
        whole("prefill.chunk_tokens", chunk_tokens, least=1)
        number("prefill.cache_bytes", cache_bytes, least=0)
        self.cards = cards
        self.chunk_tokens = chunk_tokens
        self.cache_bytes = cache_bytes
        self.cost = cost
        self.kv = kv
        self.pack_tail = pack_tail

    def attach(self, engine: Engine) -> None:
        """Live on this engine, idle and with a cold cache."""
        self._engine = engine
        self._queue: deque[Prompt] = deque()
        self._idle = self.cards // self.CARDS
        self.cache = PrefixCache(0)
        self._cache_block_tokens = 0
        self.steps = 0
        self.computed_tokens = 0

    @property
    def waiting(self) -> int:
        """Prompts of which no token has been computed."""
        return len(self._queue)

    @property
    def busy(self) -> int:
        """Instances in a step."""
        return self.cards // self.CARDS - self._idle

    def submit(self, prompt: Prompt) -> None:
        """Queue a prompt; `prompt.finished(prompt)` is called when its KV cache is whole."""
        if self._cache_block_tokens != prompt.request.block_tokens:
            self._cache_block_tokens = prompt.request.block_tokens
            self.cache = PrefixCache(self.kv.blocks(self.cache_bytes, self._cache_block_tokens))
        self._queue.append(prompt)
        if self._idle:
            self._idle -= 1
            self._step([])

    def _step(self, begun: list[Prompt]) -> None:
        """One instance's next step: what it has begun, then what waits, up to the budget."""
        budget = self.chunk_tokens
        cost_s = self.cost.t0_s
        taken: list[tuple[Prompt, int]] = []
        queue = self._queue
        while budget > 0 and (begun or queue):
            prompt = begun.pop() if begun else queue.popleft()
            if prompt.gone:
                continue
            if prompt.started_s is None:
                self._look_up(prompt)
            tokens = min(budget, prompt.request.input_tokens - prompt.done)
            cost_s += self.cost.chunk_s(tokens, prompt.done)
            budget -= tokens
            taken.append((prompt, tokens))
            if not self.pack_tail:
                break
        if not taken:
            self._idle += 1
            return
        self.steps += 1
        self.computed_tokens += self.chunk_tokens - budget
        self._engine.at(self._engine.now_s + cost_s, self._stepped, taken)

    def _look_up(self, prompt: Prompt) -> None:
        """Start on a prompt. At least its last token is always computed."""
        request = prompt.request
        prompt.started_s = self._engine.now_s
        hit = self.cache.match(request.runs) * request.block_tokens
        prompt.hit_tokens = prompt.done = min(hit, request.input_tokens - 1)

    def _stepped(self, taken: list[tuple[Prompt, int]]) -> None:
        begun: list[Prompt] = []
        for prompt, tokens in taken:
            prompt.done += tokens
            if prompt.gone:
                continue
            if prompt.done < prompt.request.input_tokens:
                begun.append(prompt)
            else:
                self.cache.insert(prompt.request.runs)
                prompt.finished(prompt)
        self._step(begun)
