"""The backend: requests in, answers out, whatever the topology between."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from math import inf
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from adapters.simulator.costs import require
from adapters.simulator.decode import DecodePool, Sequence
from adapters.simulator.engine import Engine
from adapters.simulator.network import Flow, Stream
from adapters.simulator.prefill import PrefillCluster, Prompt
from adapters.simulator.routing import C, Policy
from adapters.simulator.site import DecodeSite
from harness.backend import Answer, Description, Request, Sample, Served
from harness.errors import BackendError


class Job:
    """One request on its way through the system, and what it holds there now.

    A handle is dropped when it is over, so that no job and handle keep each other alive.
    """

    __slots__ = (
        "answer",
        "catching_up",
        "cluster",
        "emitted",
        "emitted_s",
        "flow",
        "handed_over",
        "lost_bytes",
        "prompt",
        "relay",
        "relay_flow",
        "request",
        "sequence",
        "served",
        "site",
    )

    def __init__(
        self,
        request: Request,
        answer: asyncio.Future[None],
        served: Served,
        emitted: Callable[[float], None] | None = None,
    ) -> None:
        self.request = request
        self.answer = answer
        """Done when the last token is out, or when nobody waits for it any more."""
        self.served = served
        self.emitted = emitted
        """To be told of each token as it is emitted."""
        self.emitted_s: NDArray[np.float64] = np.empty(0)
        """Times of the tokens from where it has been; those of where it is are to be added."""
        self.cluster = ""
        """Where it is prefilled."""
        self.prompt: Prompt | None = None
        """There."""
        self.site = ""
        """Where it is (mainly) decoded; empty until that is decided."""
        self.flow: Flow | Stream | None = None
        """To there."""
        self.sequence: Sequence | None = None
        """There."""
        self.lost_bytes = 0.0
        """Sent there ahead, and cut off."""
        self.relay_flow: Flow | None = None
        self.relay: Sequence | None = None
        self.catching_up: Sequence | None = None
        """At the main decode: a batch of what the relay has emitted, being computed there."""
        self.handed_over = 0
        """How many of the relay's tokens the main decode has computed, or is computing."""

    @property
    def listener(self) -> Callable[[float], None] | None:
        """For a sequence that decodes it: passes on each token while someone listens."""
        return None if self.emitted is None else self._tell

    def _tell(self, time_s: float) -> None:
        if self.emitted is not None:
            self.emitted(time_s)


class Simulator(ABC):
    """Any topology that begins with prefill and ends with decode. Subclasses say what is between.

    `prefill` and `decode` are clusters by name: a route is made of these names, `P-MD`. Where there
    are several, the routings choose one for each request; they are needed there, and only there.
    """

    def __init__(
        self,
        topology: str,
        prefill: Mapping[str, PrefillCluster],
        decode: Mapping[str, DecodeSite],
        prefill_routing: Policy | None = None,
        decode_routing: Policy | None = None,
    ) -> None:
        _clusters("prefill", prefill, PrefillCluster, prefill_routing)
        _clusters("decode", decode, DecodeSite, decode_routing)
        named = isinstance(topology, str)
        require(named, "topology", topology, "a word")
        both = sorted(set(prefill) & set(decode))
        require(not both, "decode", both, "names that no prefill cluster has")
        self.topology = topology
        self.prefill = dict(prefill)
        self.decode = dict(decode)
        self.prefill_routing = prefill_routing
        self.decode_routing = decode_routing
        self.engine = Engine()
        self.engine.broke = self._break
        self._asked: dict[int, Job] = {}
        """Those not yet answered."""
        self._requests = 0

    async def __aenter__(self) -> Self:
        """Live on the running loop, cold."""
        self.engine.start(asyncio.get_running_loop())
        self.attach()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop: nothing that is under way goes on."""
        self.engine.stop()

    async def reset(self) -> None:
        """Empty all caches and links. Raises `BackendError` while requests are under way."""
        if busy := {name: value for name, value in self.load().items() if value}:
            raise BackendError(f"requests are under way: {busy}")
        self.engine.stop()
        self.engine.start(asyncio.get_running_loop())
        self.attach()

    async def generate(
        self, request: Request, answer: Answer, emitted: Callable[[float], None] | None = None
    ) -> None:
        """The whole answer at once, when its last token is out; each token has its time.

        `emitted(time_s)` is called with each token as it is emitted, and not once this has ended.
        """
        engine = self.engine
        engine.enter()
        answer.sent_input_tokens = request.input_tokens
        served = answer.served = Served(request.input_tokens)
        job = Job(request, asyncio.get_running_loop().create_future(), served, emitted)
        self._asked[id(job)] = job
        self._requests += 1
        job.cluster = self.choose_prefill(request)
        job.prompt = Prompt(
            request, lambda prompt: self._prefilled(job, prompt), self.progress_of(job)
        )
        self.prefill[job.cluster].submit(job.prompt)
        try:
            await job.answer
            answer.finish_reason = "length"
            served.output_tokens = len(job.emitted_s)
        finally:
            del self._asked[id(job)]
            job.emitted = None
            if not job.answer.done() or job.answer.cancelled():
                engine.enter()
                job.emitted_s = self.so_far(job)
                if job.prompt is not None:
                    job.prompt.gone = True
                self.abandon(job)
            answer.times_s = job.emitted_s
            if len(job.emitted_s):
                answer.first_answer_s = float(job.emitted_s[0])

    def _break(self, error: Exception) -> None:
        """The model itself failed: no answer can be trusted any more."""
        for job in self._asked.values():
            if not job.answer.done():
                job.answer.set_exception(error)

    def _prefilled(self, job: Job, prompt: Prompt) -> None:
        job.prompt = None
        served = job.served
        served.hit_tokens = prompt.hit_tokens
        served.evicted_tokens = prompt.evicted_tokens
        served.elsewhere_tokens = prompt.elsewhere_tokens
        served.prefill_start_s = prompt.started_s
        served.prefill_end_s = self.engine.now_s
        self.prefilled(job)

    def attach(self) -> None:
        """Put every part on the engine, empty and cold."""
        self._requests = 0
        for cluster in self.prefill.values():
            cluster.attach(self.engine)
        for site in self.decode.values():
            site.attach(self.engine)

    def choose_prefill(self, request: Request) -> str:
        """The name of the cluster that prefills it."""
        return chosen(request, self.prefill, self.prefill_routing)

    def choose_decode(self, job: Job) -> str:
        """The name of the site that (mainly) decodes it, from now on `job.site`."""
        if not job.site:
            job.site = chosen(job.request, self.decode, self.decode_routing)
        return job.site

    def progress_of(self, job: Job) -> Callable[[Prompt, int], None] | None:
        """Who is to be told of each step of its prefill: nobody, unless a subclass wants to."""
        del job
        return None

    @abstractmethod
    def prefilled(self, job: Job) -> None:
        """The prompt's KV cache is whole: see that the answer comes, then call `finish`."""

    @abstractmethod
    def so_far(self, job: Job) -> NDArray[np.float64]:
        """When its tokens were emitted, as many as there are by now."""

    @abstractmethod
    def abandon(self, job: Job) -> None:
        """The request was cancelled: free what it holds beyond the prefill."""

    def load(self) -> dict[str, float]:
        """What is under way now, by name, over all clusters of a kind; all 0 when idle."""
        prefill, pools = self.prefill.values(), [site.pool for site in self.decode.values()]
        return {
            "requests": len(self._asked),
            "prefill_waiting": sum(each.waiting for each in prefill),
            "prefill_busy_instances": sum(each.busy for each in prefill),
            "decode_running": sum(pool.batch for pool in pools),
            "decode_waiting": sum(pool.waiting for pool in pools),
        }

    def counters(self) -> dict[str, float]:
        """What was done since the last reset, and what the caches hold."""
        prefill, sites = self.prefill.values(), self.decode.values()
        return {
            "requests_total": self._requests,
            "events_total": self.engine.scheduled,
            "prefill_steps_total": sum(each.steps for each in prefill),
            "prefill_computed_tokens_total": sum(each.computed_tokens for each in prefill),
            "prefill_missed_cold_tokens_total": sum(each.missed_cold_tokens for each in prefill),
            "prefill_missed_evicted_tokens_total": sum(
                each.missed_evicted_tokens for each in prefill
            ),
            "prefill_missed_elsewhere_tokens_total": sum(
                each.missed_elsewhere_tokens for each in prefill
            ),
            "prefill_cached_blocks": sum(each.cached_blocks for each in prefill),
            "prefill_evicted_blocks_total": sum(each.evicted_blocks for each in prefill),
            "decode_tokens_total": sum(site.pool.emitted_tokens for site in sites),
            "decode_preemptions_total": sum(site.pool.preemptions for site in sites),
            "decode_cached_blocks": sum(site.cache.held for site in sites),
            "decode_evicted_blocks_total": sum(site.cache.evicted for site in sites),
        }

    def describe(self) -> Description:
        """What is simulated, down to the coefficients."""
        return Description(
            name="simulator",
            topology=self.topology,
            cards=self.cards(),
            details=settings(self),
            warnings=self.crowded(),
        )

    def crowded(self) -> list[str]:
        """Where memory, of chips that say how much they have, is less than what is to be in it."""
        said = []
        for name, cluster in self.prefill.items():
            if (room := getattr(cluster.chip, "room_bytes", 0.0)) < 0:
                said.append(
                    f"{name}: the model's weights are {-room / 1e9:,.0f} GB more than an instance "
                    f"of {cluster.chip.cards} cards has memory"
                )
        for name, pool in self.pools().items():
            room = getattr(pool.chip, "room_bytes", inf)
            wanted = pool.kv_bytes * pool.chip.cards / pool.cards
            if wanted > room:
                said.append(
                    f"{name}: {wanted / 1e9:,.0f} GB of KV caches beside the model's weights are "
                    f"{(wanted - room) / 1e9:,.0f} GB more than an instance of {pool.chip.cards} "
                    "cards has memory"
                )
        return said

    def pools(self) -> dict[str, DecodePool]:
        """Every pool by its role."""
        return {name: site.pool for name, site in self.decode.items()}

    def cards(self) -> dict[str, float]:
        """Cards a role."""
        return {name: each.cards for name, each in self.prefill.items()} | {
            name: pool.cards for name, pool in self.pools().items()
        }

    def finish(self, job: Job, times_s: NDArray[np.float64]) -> None:
        """The answer is whole."""
        job.sequence = job.relay = None
        job.emitted_s = times_s
        if not job.answer.done():
            job.answer.set_result(None)

    async def scrape(self) -> Many[Sample]:
        """What is under way, and the counters."""
        now = self.load() | self.counters()
        return [Sample("simulator", name, "", float(value)) for name, value in now.items()]

    async def doubts(self) -> Many[str]:
        """None: it is what it says."""
        return ()


def chosen(request: Request, clusters: Mapping[str, C], routing: Policy | None) -> str:
    """The name of the cluster that a request goes to."""
    if routing is None:
        return next(iter(clusters))
    one = routing.choose(request, list(clusters.values()))
    return next(name for name, each in clusters.items() if each is one)


def _clusters(name: str, clusters: Mapping[str, Any], kind: type, routing: Policy | None) -> None:
    """Raise `ConfigError` unless these are clusters of this kind, with a routing if many."""
    require(bool(clusters), name, clusters, "one cluster or more by name")
    for key, cluster in clusters.items():
        require(isinstance(cluster, kind), f"{name}.{key}", cluster, f"a {kind.__name__}")
    require(
        routing is None or hasattr(routing, "choose"),
        f"{name}_routing", routing, "null, or {_target_: adapters.simulator.LeastLoad} or another",
    )  # fmt: skip
    if len(clusters) > 1:
        require(routing is not None, f"{name}_routing", routing, "a policy to choose among many")


def settings(part: object) -> dict[str, object]:
    """The settings of a part, JSON-able: what it was made with, and so for the parts in it.

    A part may say it itself, as `numbers`: a chip does, of its coefficients.
    """
    said = getattr(part, "numbers", None)
    if said is not None:
        return dict(said)
    made_with = inspect.signature(type(part)).parameters
    return {name: _plain(getattr(part, name)) for name in made_with if hasattr(part, name)}


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return {"kind": type(value).__name__} | settings(value)
