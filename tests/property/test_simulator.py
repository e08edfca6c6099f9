"""The simulator's closed forms against the slow and obvious way to compute the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.simulator import DecodeCost, DecodePool, KvBytes, Link
from adapters.simulator.decode import Sequence
from tests.simulated import play

COST = DecodeCost(d0_s=0.012, d1_s=0.0002, d2_s=1e-8, d3_s=0.003)
KV = KvBytes(per_token=1000)


def step_by_step(
    arrivals: list[tuple[float, int, int, float]], groups: float, capacity: float
) -> list[list[float]]:
    """Token times of requests (arrival, context, tokens, extra), one step of the pool at a time."""
    now = 0.0
    waiting: list[int] = []
    running: list[int] = []
    times: list[list[float]] = [[] for _ in arrivals]
    held = 0
    order = sorted(range(len(arrivals)), key=lambda at: arrivals[at][0])
    while order or waiting or running:
        if not running and not waiting:
            now = max(now, arrivals[order[0]][0])
        while order and arrivals[order[0]][0] <= now:
            waiting.append(order.pop(0))
        extras: list[float] = [0.0]
        while waiting:
            _, context, tokens, more = arrivals[waiting[0]]
            if held and held + context + tokens > capacity:
                break
            held += context + tokens
            extras.append(more)
            running.append(waiting.pop(0))
        batch = len(running)
        context = sum(arrivals[at][1] + len(times[at]) for at in running)
        share = max(1.0, batch / groups)
        now += COST.batch_s(share) + COST.d2_s * context * share / batch
        now += max(*extras, sum(extras) / groups)
        for at in list(running):
            times[at].append(now)
            if len(times[at]) == arrivals[at][2]:
                running.remove(at)
                held -= arrivals[at][1] + arrivals[at][2]
    return times


requests = st.lists(
    st.tuples(
        st.floats(0, 3, allow_nan=False),
        st.integers(1, 50_000),
        st.integers(1, 120),
        st.sampled_from([0.0, 0.0, 0.05]),
    ),
    min_size=1,
    max_size=25,
)


@settings(deadline=None)
@given(arrivals=requests, cards=st.sampled_from([3.0, 8.0, 48.0]), room=st.integers(30_000, 10**6))
def test_jumping_gives_the_tokens_of_stepping(
    arrivals: list[tuple[float, int, int, float]], cards: float, room: int
) -> None:
    pool = DecodePool(cards, kv_bytes=1000.0 * room, cost=COST, kv=KV)
    got: dict[int, np.ndarray] = {}
    events: list[tuple[float, Callable[[], None]]] = []
    for at, (time_s, context, tokens, extra_s) in enumerate(arrivals):
        sequence = Sequence(context, tokens, partial(got.__setitem__, at), extra_s)
        events.append((time_s, partial(pool.join, sequence)))
    play([pool], events)
    wanted = step_by_step(arrivals, cards / 8, room)
    assert len(got) == len(arrivals)
    for at, times_s in enumerate(wanted):
        np.testing.assert_allclose(got[at], times_s, rtol=1e-9)
    assert pool.batch == pool.waiting == 0
    assert pool.emitted_tokens == sum(tokens for _, _, tokens, _ in arrivals)


@settings(deadline=None)
@given(arrivals=requests, leave=st.lists(st.floats(0, 4), min_size=25, max_size=25))
def test_whoever_is_released_keeps_what_it_emitted(
    arrivals: list[tuple[float, int, int, float]], leave: list[float]
) -> None:
    pool = DecodePool(8, kv_bytes=1e12, cost=COST, kv=KV)
    ended: dict[int, np.ndarray] = {}
    events: list[tuple[float, Callable[[], None]]] = []
    for at, (time_s, context, tokens, _) in enumerate(arrivals):
        sequence = Sequence(context, tokens, partial(ended.__setitem__, at))

        def release(sequence: Sequence = sequence, at: int = at) -> None:
            if at not in ended:
                pool.release(sequence, partial(ended.__setitem__, at))

        events.append((time_s, partial(pool.join, sequence)))
        events.append((time_s + leave[at], release))
    play([pool], events)
    assert sorted(ended) == list(range(len(arrivals)))
    for at, (time_s, _, tokens, _) in enumerate(arrivals):
        assert len(ended[at]) <= tokens
        assert (np.diff(ended[at], prepend=time_s) > 0).all()
        # It may stay for the step in progress when it was released, and no longer.
        late = ended[at][ended[at] > time_s + leave[at]]
        assert len(late) <= 1
    assert pool.batch == 0


def shared_by_hand(flows: list[tuple[float, float]], rate: float, cap: float) -> list[float]:
    """End times of flows (start, bytes), by going from one event to the next over all flows."""
    left = [size for _, size in flows]
    ends = [math.inf] * len(flows)
    now = 0.0
    while any(math.isinf(end) for end in ends):
        active = [
            at for at, (start, _) in enumerate(flows) if start <= now and math.isinf(ends[at])
        ]
        coming = [start for start, _ in flows if start > now]
        if not active:
            now = min(coming)
            continue
        each = min(cap, rate / len(active))
        step = min(left[at] / each for at in active)
        if coming and now + step > min(coming):
            step = min(coming) - now
            now = min(coming)
        else:
            now += step
        for at in active:
            left[at] -= each * step
            if left[at] <= 1e-6:
                ends[at] = now
    return ends


@settings(deadline=None)
@given(
    flows=st.lists(st.tuples(st.floats(0, 10), st.floats(1e3, 1e9)), min_size=1, max_size=20),
    capped=st.booleans(),
)
def test_shared_flows_end_when_a_hand_count_says(
    flows: list[tuple[float, float]], capped: bool
) -> None:
    link = Link(8e8, flow_bps=2e8 if capped else None)
    ends: dict[int, float] = {}
    events: list[tuple[float, Callable[[], None]]] = []
    for at, (start_s, size) in enumerate(flows):

        def send(at: int = at, size: float = size) -> None:
            link.send(size, lambda: ends.update({at: link._engine.now_s}))

        events.append((start_s, send))
    play([link], events)
    wanted = shared_by_hand(flows, 1e8, 2.5e7 if capped else math.inf)
    assert [ends[at] for at in range(len(flows))] == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    assert link.sent_bytes == pytest.approx(sum(size for _, size in flows))
    assert link.flows == 0


@settings(deadline=None)
@given(
    flows=st.lists(
        st.tuples(st.floats(0, 10), st.floats(1e3, 1e9), st.booleans()), min_size=2, max_size=20
    )
)
def test_a_flow_that_is_cut_off_leaves_its_share_to_the_others(
    flows: list[tuple[float, float, bool]],
) -> None:
    """Cut off as it starts, a flow must change nothing for the rest."""
    ends: list[dict[int, float]] = [{}, {}]
    for cut, seen in zip((True, False), ends, strict=True):
        link = Link(8e8)
        events: list[tuple[float, Callable[[], None]]] = []
        for at, (start_s, size, doomed) in enumerate(flows):
            if doomed and not cut:
                continue

            def send(
                at: int = at, size: float = size, doomed: bool = doomed,
                link: Link = link, seen: dict[int, float] = seen,
            ) -> None:  # fmt: skip
                flow = link.send(size, lambda: seen.update({at: link._engine.now_s}))
                if doomed:
                    link.cancel(flow)

            events.append((start_s, send))
        play([link], events)
        assert link.flows == 0
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)
