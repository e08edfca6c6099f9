"""A prefill cluster: instances that take chunks of prompts step by step, and their prefix caches.

A prompt waits in the cluster's one queue, from which every instance takes whenever it has room, so
that no routing can go wrong; or a policy sends it, as it comes, to the queue of one instance. A
queue is first come, first served. The cache is one store in host memory for the whole cluster, or
each instance has its own; reads are hidden behind compute. A hit is looked up when a prompt's first
chunk is scheduled, and its prompt is cached when its prefill ends.

An instance of several ranks (data-parallel attention) steps in lock-step: each rank works on
prompts of its own, and all wait for the busiest. So where prompts end in small tails and ranks are
out of phase, a tail costs as much as a whole chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from adapters.simulator.cache import KvCache
from adapters.simulator.costs import Chip, KvBytes, require
from adapters.simulator.engine import Engine
from adapters.simulator.routing import Policy
from harness.backend import Request
from harness.settings import number, whole


class Prompt:
    """One prompt on its way through a cluster.

    `finished(prompt)` is called when its KV cache is whole; `progressed(prompt, tokens)`, where it
    is wanted, after each step, with the tokens whose KV is there by then, the hit included.
    """

    __slots__ = (
        "_gone",
        "elsewhere_tokens",
        "evicted_tokens",
        "finished",
        "hit_tokens",
        "left_tokens",
        "progressed",
        "queue",
        "request",
        "started_s",
    )

    def __init__(
        self,
        request: Request,
        finished: Callable[[Prompt], None],
        progressed: Callable[[Prompt, int], None] | None = None,
    ) -> None:
        self.request = request
        self.finished = finished
        self.progressed = progressed
        self.started_s: float | None = None
        """When its first chunk was scheduled; as long as it waits, None."""
        self.hit_tokens = 0
        """What it did not have to compute: at least its last token it did."""
        self.evicted_tokens = 0
        """Missed, though its instance's cache held them once: it has lost them since."""
        self.elsewhere_tokens = 0
        """Missed, and not for that; the cache of another instance held them."""
        self.left_tokens = 0
        """Still to be computed; before it has started, as far as is known."""
        self.queue: _Queue | None = None
        self._gone = False

    @property
    def gone(self) -> bool:
        """Nobody waits for it any more: it is not computed beyond the step under way."""
        return self._gone

    @gone.setter
    def gone(self, gone: bool) -> None:
        if gone and not self._gone and self.queue is not None:
            self.queue.left_tokens -= self.left_tokens
        self._gone = gone


class _Queue:
    """Prompts for instances that have these caches."""

    __slots__ = ("caches", "idle", "left_tokens", "prompts")

    def __init__(self, caches: Sequence[KvCache]) -> None:
        self.caches = caches
        self.prompts: deque[Prompt] = deque()
        self.idle: deque[_Instance] = deque()
        """Instances that have nothing to do, the longest idle first."""
        self.left_tokens = 0
        """Still to be computed of all that came here."""


class _Instance:
    """`cards` cards that step together."""

    __slots__ = ("begun", "cache", "cards", "queue")

    def __init__(self, cards: int, cache: KvCache, queue: _Queue) -> None:
        self.cards = cards
        self.cache = cache
        self.queue = queue
        self.begun: list[tuple[int, Prompt]] = []
        """Between two steps: (rank, prompt) for each prompt to go on with."""

    @property
    def load(self) -> float:
        """Tokens still to be computed here, per card. For a policy: its queue is its own."""
        return self.queue.left_tokens / self.cards

    def held_tokens(self, request: Request) -> int:
        """Tokens of the prompt that its cache holds."""
        return self.cache.look_up(request)


class PrefillCluster:
    """`cards` cards in instances of `chip.cards`.

    `ranks`: an instance has so many data-parallel ranks, each of `1 / ranks` of it and with a
    budget of `chunk_tokens` a step. `pack_tail`: the room that the tail of one prompt leaves in a
    rank's step goes to the next prompt; without it, it is lost. `routing`: the policy that sends
    a prompt to an instance; without it they have one queue. `shared_cache`: `cache_bytes` are one
    store for all instances, or else each has its share to itself.
    """

    def __init__(
        self,
        cards: int,
        chunk_tokens: int,
        cache_bytes: float,
        chip: Chip,
        kv: KvBytes,
        ranks: int = 1,
        pack_tail: bool = True,
        routing: Policy | None = None,
        shared_cache: bool = True,
    ) -> None:
        require(isinstance(chip, Chip), "prefill.chip", chip, "a chip")
        require(isinstance(kv, KvBytes), "prefill.kv", kv, "a model's KV bytes")
        whole("prefill.cards", cards, least=chip.cards, most=1_000_000)
        require(cards % chip.cards == 0, "prefill.cards", cards, f"a multiple of {chip.cards}")
        whole("prefill.chunk_tokens", chunk_tokens, least=1)
        number("prefill.cache_bytes", cache_bytes, least=0)
        whole("prefill.ranks", ranks, least=1)
        require(chip.cards % ranks == 0, "prefill.ranks", ranks, f"a divisor of {chip.cards}")
        for name, value in (("pack_tail", pack_tail), ("shared_cache", shared_cache)):
            require(isinstance(value, bool), f"prefill.{name}", value, "true or false")
        require(
            routing is None or hasattr(routing, "choose"),
            "prefill.routing", routing, "a routing policy, or null",
        )  # fmt: skip
        self.cards = cards
        self.chunk_tokens = chunk_tokens
        self.cache_bytes = cache_bytes
        self.chip = chip
        self.kv = kv
        self.ranks = ranks
        self.pack_tail = pack_tail
        self.routing = routing
        self.shared_cache = shared_cache

    def attach(self, engine: Engine) -> None:
        """Live on this engine, idle and with cold caches."""
        self._engine = engine
        cards = self.chip.cards
        count = self.cards // cards
        stores = 1 if self.shared_cache else count
        self._caches = [KvCache(self.kv, self.cache_bytes / stores) for _ in range(stores)]
        if self.routing is None:
            self._queues = [_Queue(self._caches)]
        else:
            self._queues = [_Queue([self._caches[at % stores]]) for at in range(count)]
        self._instances = [
            _Instance(cards, self._caches[at % stores], self._queues[at % len(self._queues)])
            for at in range(count)
        ]
        for instance in self._instances:
            instance.queue.idle.append(instance)
        self.steps = 0
        self.computed_tokens = 0
        self.missed_cold_tokens = 0
        """Tokens of prompts that no cache held when their prefill began, nor its own before."""
        self.missed_evicted_tokens = 0
        self.missed_elsewhere_tokens = 0

    @property
    def waiting(self) -> int:
        """Prompts of which no token has been computed."""
        return sum(len(queue.prompts) for queue in self._queues)

    @property
    def busy(self) -> int:
        """Instances in a step."""
        return len(self._instances) - sum(len(queue.idle) for queue in self._queues)

    @property
    def load(self) -> float:
        """Tokens still to be computed of all prompts here, per card. Hits do not count."""
        return sum(queue.left_tokens for queue in self._queues) / self.cards

    @property
    def cached_blocks(self) -> int:
        """Blocks that the caches hold."""
        return sum(cache.held for cache in self._caches)

    @property
    def evicted_blocks(self) -> int:
        """Blocks that the caches have pushed out."""
        return sum(cache.evicted for cache in self._caches)

    def held_tokens(self, request: Request) -> int:
        """Tokens of the prompt that a cache here holds: the one that holds most."""
        return _most_held(self._caches, request)

    def learn(self, request: Request) -> None:
        """The prompt's KV cache has come from outside: the cache that holds most of it keeps it."""
        max(self._caches, key=lambda cache: cache.look_up(request)).keep(request)

    def submit(self, prompt: Prompt) -> None:
        """Queue a prompt. An idle instance starts on it at once."""
        if self.routing is None:
            queue = self._queues[0]
        else:
            queue = self.routing.choose(prompt.request, self._instances).queue
        prompt.queue = queue
        queue.prompts.append(prompt)
        if queue.idle:
            self._step(queue.idle.popleft())
        else:
            held = _most_held(queue.caches, prompt.request)
            prompt.left_tokens = prompt.request.input_tokens - held
            queue.left_tokens += prompt.left_tokens

    def _step(self, instance: _Instance) -> None:
        """Its next step: what it has begun, then what waits, each for the rank with most room."""
        queue, begun = instance.queue, instance.begun
        rooms = [self.chunk_tokens] * self.ranks
        chunks: list[list[tuple[int, int]]] = [[] for _ in rooms]
        taken: list[tuple[int, Prompt, int]] = []
        while True:
            if begun:
                rank, prompt = begun.pop(0)
            elif queue.prompts and (room := max(rooms)):
                rank, prompt = rooms.index(room), queue.prompts.popleft()
            else:
                break
            if prompt.gone:
                continue
            if prompt.started_s is None:
                self._start(prompt, instance)
            tokens = min(rooms[rank], prompt.left_tokens)
            chunks[rank].append((tokens, prompt.request.input_tokens - prompt.left_tokens))
            taken.append((rank, prompt, tokens))
            self.computed_tokens += tokens
            rooms[rank] = rooms[rank] - tokens if self.pack_tail else 0
        if not taken:
            queue.idle.append(instance)
            return
        self.steps += 1
        step_s = max(self.chip.prefill_s(each * self.ranks) for each in chunks if each)
        self._engine.at(self._engine.now_s + step_s, self._stepped, instance, taken)

    def _start(self, prompt: Prompt, instance: _Instance) -> None:
        """Look up what of it is cached, and why the rest is not.

        Of a prompt that is held whole the last token is computed, and missed for no reason.
        """
        request, cache = prompt.request, instance.cache
        prompt.started_s = self._engine.now_s
        known = held = cache.look_up(request)
        if held < request.input_tokens:
            if cache.evicted:
                known = cache.once_held(request)
                prompt.evicted_tokens = known - held
                self.missed_evicted_tokens += known - held
            if len(self._caches) > 1:
                elsewhere = max(0, self.held_tokens(request) - known)
                prompt.elsewhere_tokens = elsewhere
                self.missed_elsewhere_tokens += elsewhere
                known += elsewhere
            self.missed_cold_tokens += request.input_tokens - known
        prompt.hit_tokens = min(held, request.input_tokens - 1)
        left = request.input_tokens - prompt.hit_tokens
        instance.queue.left_tokens += left - prompt.left_tokens
        prompt.left_tokens = left

    def _stepped(self, instance: _Instance, taken: list[tuple[int, Prompt, int]]) -> None:
        """A step has ended: pass on what is whole, and begin the next."""
        for rank, prompt, tokens in taken:
            if prompt.gone:
                continue
            prompt.left_tokens -= tokens
            instance.queue.left_tokens -= tokens
            if prompt.progressed is not None:
                prompt.progressed(prompt, prompt.request.input_tokens - prompt.left_tokens)
            if prompt.left_tokens:
                instance.begun.append((rank, prompt))
            else:
                instance.cache.keep(prompt.request)
                prompt.finished(prompt)
        self._step(instance)


def _most_held(caches: Sequence[KvCache], request: Request) -> int:
    """Tokens of the prompt that the best of these caches holds."""
    return max(cache.look_up(request) for cache in caches)
