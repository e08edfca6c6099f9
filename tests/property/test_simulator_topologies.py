"""Whatever the topology: nothing is lost, comes before its cause or holds too much."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.simulator import (
    CacheAware,
    DecodePool,
    DecodeSite,
    Disaggregated,
    Fitted,
    Handoff,
    KvBytes,
    KvCache,
    LeastLoad,
    Link,
    OracleOutputs,
    Pdd,
    PrefillCluster,
    PrefillService,
    RecentOutputs,
    SingularFilter,
    Sticky,
)
from harness.backend import Answer, Request, Served
from harness.clock import VirtualTimeLoop
from tests.simulated import chip

Chunks = Sequence[tuple[int, int]]

KV = KvBytes(1000.0, 5000.0)
BLOCK = 50
TICK_S = 1e-9


class Asked(NamedTuple):
    """A request: when, of which session, how many blocks of the session's history, how long."""

    at_s: float
    session: int
    history: int
    own: int
    output: int
    patience_s: float | None


asked_lists = st.lists(
    st.builds(
        Asked,
        st.floats(0, 8),
        st.integers(0, 4),
        st.integers(0, 20),
        st.integers(1, 20),
        st.integers(1, 60),
        st.sampled_from([None, None, None, 0.3, 2.0]),
    ),
    min_size=1,
    max_size=20,
)


class Bounded(Fitted):
    """A chip that takes no step of more tokens than its budget."""

    def __init__(self, chunk_tokens: int, ranks: int) -> None:
        super().__init__(chip((0.01, 2e-4, 1e-8)).numbers)
        self.chunk_tokens = chunk_tokens
        self.ranks = ranks

    def prefill_s(self, chunks: Chunks) -> float:
        """As ever: the chunks of one rank, as if all had the same."""
        rank = chunks[: len(chunks) // self.ranks]
        assert all(tokens > 0 for tokens, _ in rank)
        assert 0 < sum(tokens for tokens, _ in rank) <= self.chunk_tokens
        return super().prefill_s(chunks)


def cluster(draw: Any) -> PrefillCluster:
    chunk_tokens, ranks = draw(st.sampled_from([200, 5000])), draw(st.sampled_from([1, 2, 8]))
    return PrefillCluster(
        cards=8 * draw(st.integers(1, 2)),
        chunk_tokens=chunk_tokens,
        cache_bytes=draw(st.sampled_from([0.0, 1.5e6, 1e12])),
        chip=Bounded(chunk_tokens, ranks),
        kv=KV,
        ranks=ranks,
        pack_tail=draw(st.booleans()),
        routing=draw(st.sampled_from([None, LeastLoad(), CacheAware(), Sticky()])),
        shared_cache=draw(st.booleans()),
    )


def decode_site(draw: Any) -> DecodeSite:
    pool = DecodePool(
        cards=draw(st.sampled_from([3, 8, 16])),
        kv_bytes=draw(st.sampled_from([1e6, 4e6, 1e12])),
        chip=chip((0.0, 1e-4, 1e-9), (0.02, 1e-4, 1e-8, 1e-3)),
        kv=KV,
        block_tokens=BLOCK,
        when_full=draw(st.sampled_from(["preempt", "reserve"])),
    )
    cache = KvCache(KV, draw(st.sampled_from([0.0, 1.5e6, 1e12])), draw(st.booleans()))
    return DecodeSite(pool, cache)


def link(draw: Any, bandwidth_bps: float) -> Link:
    return Link(
        bandwidth_bps,
        rtt_s=draw(st.sampled_from([0.0, 0.02])),
        ramp=draw(st.booleans()),
        jitter_s=draw(st.sampled_from([0.0, 0.05])),
    )


@st.composite
def systems(draw: Any) -> Disaggregated:
    """Any topology, with everything that can be chosen in it."""
    kind = draw(st.sampled_from([Disaggregated, Pdd, Pdd, PrefillService]))
    many = draw(st.booleans())
    common: dict[str, Any] = {
        "topology": "any",
        "prefill": {f"P{n}": cluster(draw) for n in range(1 + many)},
        "link": link(draw, draw(st.sampled_from([4e6, 4e7]))),
        "decode": {f"MD{n}": decode_site(draw) for n in range(1 + many)},
        "prefill_routing": LeastLoad(),
        "decode_routing": draw(st.sampled_from([LeastLoad(), Sticky()])) if many else None,
        "overlap": draw(st.booleans()),
    }
    if kind is Pdd:
        predictor = draw(st.sampled_from([RecentOutputs, OracleOutputs]))()
        filters = [None, SingularFilter(predictor, share=draw(st.sampled_from([0.3, 2.0])))]
        return Pdd(
            **common,
            relay=decode_site(draw),
            relay_link=link(draw, draw(st.sampled_from([4e7, 4e9]))),
            relay_threshold_s=draw(st.sampled_from([0.0, 0.3])),
            handoff=Handoff(
                draw(st.sampled_from(["auto", "one-shot", "catch-up", "kv"])),
                batch_tokens=draw(st.sampled_from([3, 64])), high=0.5, low=0.2,
            ),
            singular=draw(st.sampled_from(filters)),
            overflow=draw(st.sampled_from(["direct", "wait"])),
            finish_locally=draw(st.booleans()),
        )  # fmt: skip
    if kind is PrefillService:
        return PrefillService(
            **common, home=cluster(draw), threshold_tokens=400, home_link=link(draw, 4e9)
        )
    return Disaggregated(**common)


def request(number: int, asked: Asked) -> Request:
    history = [(asked.session * 1000, asked.history)] if asked.history else []
    runs = [*history, (10_000 + 100 * number, asked.own)]
    tokens = BLOCK * (asked.history + asked.own) + number % BLOCK
    return Request(number, asked.session, 0, tokens, asked.output, BLOCK, runs, "main")


class Done(NamedTuple):
    """A request, when it was sent, what came, and whether it was waited for to the end."""

    request: Request
    sent_s: float
    answer: Answer
    whole: bool


def drive(system: Disaggregated, asked: list[Asked]) -> list[Done]:
    done: list[Done] = []

    async def one(number: int, each: Asked) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(each.at_s)
        sent_s, answer, whole = loop.time(), Answer(), True
        wanted = request(number, each)
        try:
            async with asyncio.timeout(each.patience_s):
                await system.generate(wanted, answer)
        except TimeoutError:
            whole = False
        done.append(Done(wanted, sent_s, answer, whole))

    async def main() -> None:
        async with system:
            await system.reset()
            watcher = asyncio.create_task(watch(system))
            async with asyncio.TaskGroup() as group:
                for number, each in enumerate(asked):
                    group.create_task(one(number, each))
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher
            await asyncio.sleep(600)  # transfers that nobody waits for go on
            under_way = {name: value for name, value in system.load().items() if value}
            assert not under_way
            assert not any(each.pool.load for each in sites(system)), "memory is still promised"

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())
    return done


def sites(system: Disaggregated) -> list[DecodeSite]:
    return [*system.decode.values(), *([system.relay] if isinstance(system, Pdd) else [])]


async def watch(system: Disaggregated) -> None:
    """Look often, whether anything holds more than it can."""
    caches = [site.cache for site in sites(system)]
    while True:
        for site in sites(system):
            assert site.pool.filled <= 1 or site.pool.batch == 1
        for cache in caches:
            assert cache.held <= KV.blocks(cache.cache_bytes, BLOCK)
        for cluster in system.prefill.values():
            assert cluster.cached_blocks <= KV.blocks(cluster.cache_bytes, BLOCK)
        await asyncio.sleep(0.03)


def in_order(*moments_s: float | None) -> None:
    known = [each for each in moments_s if each is not None]
    assert all(b >= a - TICK_S for a, b in pairwise(known)), moments_s


@settings(deadline=None, max_examples=250)
@given(system=systems(), asked=asked_lists)
def test_every_topology_conserves_and_keeps_to_causes(
    system: Disaggregated, asked: list[Asked]
) -> None:
    done = drive(system, asked)
    assert len(done) == len(asked)
    for each in done:
        times_s, served = np.asarray(each.answer.times_s), each.answer.served
        assert (np.diff(times_s) > 0).all()
        if each.whole:
            assert len(times_s) == each.request.output_tokens
        causes(each, times_s, served, overlap=system.overlap)
    for site in sites(system):
        assert site.pool.when_full == "preempt" or not site.pool.preemptions
    links_carry_what_was_sent(system, done)
    equals_keep_their_order(system, done)
    counters = system.counters()
    assert all(value >= 0 for value in counters.values()), counters
    if all(each.whole for each in done):
        emitted = counters["decode_tokens_total"] + counters.get("relay_tokens_total", 0)
        assert emitted == sum(each.output for each in asked)


def causes(done: Done, times_s: np.ndarray, served: Served, *, overlap: bool) -> None:
    """Prefill, transfer, first token; a relay's first; a handoff before what follows it."""
    in_order(done.sent_s, served.prefill_start_s, served.prefill_end_s)
    if not overlap:
        in_order(served.prefill_end_s, served.transfer_start_s)
    in_order(served.transfer_start_s, served.transfer_end_s)
    in_order(served.prefill_end_s, served.transfer_end_s)
    if not len(times_s):
        return
    in_order(served.prefill_end_s, times_s[0])
    relayed = served.relay_tokens or 0
    if done.whole and relayed < len(times_s):
        in_order(served.transfer_end_s, served.decode_start_s, times_s[relayed])
    if served.handoff_s is not None:
        in_order(served.transfer_end_s, served.handoff_start_s, served.handoff_s)
        assert served.handoff_s == times_s[relayed]
        assert 0 < relayed < len(times_s)
    if served.route is not None and served.route.endswith("-RLD"):
        assert served.transfer_bytes is None or overlap


def links_carry_what_was_sent(system: Disaggregated, done: list[Done]) -> None:
    """Bytes started are sent or cut off; those sent are those of the records."""
    for each in (system.link, getattr(system, "relay_link", None)):
        if each is not None:
            total = each.sent_bytes + each.cancelled_bytes
            assert abs(each.started_bytes - total) <= 1e-6 * max(1.0, total)
    if (
        all(each.whole for each in done)
        and not system.overlap
        and type(system) is not PrefillService
    ):
        served = [each.answer.served for each in done]
        sent = sum(each.transfer_bytes or 0 for each in served)
        sent += sum(each.handoff_bytes or 0 for each in served if each.handoff == "kv")
        assert abs(system.link.sent_bytes - sent) <= 1e-6 * max(1.0, sent)


def equals_keep_their_order(system: Disaggregated, done: list[Done]) -> None:
    """One queue is first come, first served; at prefill, and where the KV cache arrives."""
    for name, cluster in system.prefill.items():
        if cluster.routing is None:
            prompts = [each for each in done if each.answer.served.route is not None]
            first_come_first_served(
                (each.sent_s, each.answer.served.prefill_start_s)
                for each in prompts
                if str(each.answer.served.route).split("-")[0] == name
            )
    if not isinstance(system, Pdd):
        for name in system.decode:
            first_come_first_served(
                (each.answer.served.transfer_end_s, each.answer.served.decode_start_s)
                for each in done
                if str(each.answer.served.route).split("-")[-1] == name
            )


def first_come_first_served(pairs: Iterable[tuple[float | None, float | None]]) -> None:
    """(came, began) of each; of two that came together either may be the first."""
    known = [(came, began) for came, began in pairs if came is not None and began is not None]
    for (came, began), (later, later_began) in pairwise(sorted(known)):
        assert came == later or began <= later_began
