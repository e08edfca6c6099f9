"""The shared link against a count over all flows, and against what queueing theory says of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.simulator.network import _OPENING, _SHARING, Flow, Link, Stream
from tests.simulated import play


def shared_by_hand(
    flows: list[tuple[float, float]],
    steps: list[tuple[float, float]],
    cap: float,
    period_s: float,
) -> list[float]:
    """End times of flows (start, bytes), by going from one event to the next over all flows."""

    def begins(number: int) -> float:
        """When a step of the bandwidth does, counted through all periods."""
        periods, at = divmod(number, len(steps))
        return steps[at][0] + (periods * period_s if periods else 0.0)

    left = [size for _, size in flows]
    ends = [math.inf] * len(flows)
    now, number = 0.0, 0
    while any(math.isinf(end) for end in ends):
        while begins(number + 1) <= now:
            number += 1
        rate = steps[number % len(steps)][1]
        coming = [start for start, _ in flows if start > now] + [begins(number + 1)]
        active = [
            at for at, (start, _) in enumerate(flows) if start <= now and math.isinf(ends[at])
        ]
        each = min(cap, rate / max(1, len(active)))
        until = min(coming + [now + left[at] / each for at in active if each])
        for at in active:
            left[at] -= each * (until - now)
            if left[at] <= 1e-3:
                ends[at] = until
        now = until
    return ends


STEPS = st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0.0, 1e7, 3e7, 1e8])), max_size=4)
"""(how long, bytes/s), before a last one of 1e8."""


@settings(deadline=None)
@given(
    flows=st.lists(
        st.tuples(st.integers(0, 10_000), st.integers(1000, 10**9), st.integers(1, 3)),
        min_size=1,
        max_size=20,
    ),
    capped=st.booleans(),
    changes=STEPS,
    period=st.none() | st.integers(1, 9),
)
def test_shared_flows_end_when_a_hand_count_says(
    flows: list[tuple[int, int, int]],
    capped: bool,
    changes: list[tuple[int, float]],
    period: int | None,
) -> None:
    """As plain flows, or as streams of two or three parts."""
    starts_s = np.cumsum([0] + [lasts_s for lasts_s, _ in changes]).tolist()
    rates = [rate for _, rate in changes] + [1e8]
    steps = list(zip(starts_s, rates, strict=True))
    link = Link(
        [[from_s, rate * 8] for from_s, rate in steps],
        flow_bps=2e8 if capped else None,
        period_s=None if period is None else starts_s[-1] + period,
    )
    ends: dict[int, float] = {}
    events: list[tuple[float, Callable[[], None]]] = []
    for at, (start_ms, size, parts) in enumerate(flows):

        def send(at: int = at, size: float = size, parts: int = parts) -> None:
            def arrived() -> None:
                ends[at] = link._engine.now_s

            if parts == 1:
                link.send(size, arrived)
                return
            stream = link.stream(arrived)
            for _ in range(parts):
                stream.add(size / parts)
            stream.close()

        events.append((start_ms / 1000, send))
    play([link], events)
    wanted = shared_by_hand(
        [(start_ms / 1000, size) for start_ms, size, _ in flows],
        steps,
        2.5e7 if capped else math.inf,
        math.inf if period is None else starts_s[-1] + period,
    )
    assert [ends[at] for at in range(len(flows))] == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    assert link.sent_bytes == pytest.approx(sum(size for _, size, _ in flows))
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


@settings(deadline=None)
@given(
    adds=st.lists(st.tuples(st.floats(0, 3), st.floats(1, 1e8)), min_size=1, max_size=20),
    setup_s=st.sampled_from([0.0, 1.0]),
)
def test_a_stream_alone_is_a_queue(adds: list[tuple[float, float]], setup_s: float) -> None:
    """Each part begins when it is there and the one before it is sent."""
    link = Link(8e8, setup_s=setup_s, rtt_s=0.2)
    ends: list[float] = []
    streams: list[Stream] = []

    def begin() -> None:
        streams.append(link.stream(lambda: ends.append(link._engine.now_s)))

    def add(size: float) -> None:
        streams[0].add(size)

    def close() -> None:
        streams[0].close()

    events: list[tuple[float, Callable[[], None]]] = [(0.0, begin)]
    now, sent = 0.0, setup_s
    for number, (pause_s, size) in enumerate(adds):
        now += pause_s
        sent = max(sent, now + (0 if number else setup_s)) + size / 1e8
        events.append((now, partial(add, size)))
    events.append((now, close))
    play([link], events)
    assert ends == pytest.approx([sent + 0.1], rel=1e-9)


OPERATIONS = st.lists(
    st.tuples(
        st.integers(0, 3000),
        st.sampled_from(["send", "stream", "add", "add", "close", "cancel"]),
        st.integers(0, 30),
        st.integers(0, 10**8),
    ),
    max_size=40,
)
"""(ms, what, to which, bytes)."""


class Traffic:
    """Does these operations on a link, and keeps books of its own."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.flows: list[Flow] = []
        self.came: list[int] = []
        self.cut: set[int] = set()
        self.closed: set[int] = set()

    def do(self, what: str, which: int, size: int) -> None:
        number = len(self.flows)
        if what == "send":
            self.flows.append(self.link.send(size, partial(self.came.append, number)))
        elif what == "stream":
            self.flows.append(self.link.stream(partial(self.came.append, number)))
        elif self.flows:
            getattr(self, what)(which % number, size)
        self.balance()

    def add(self, number: int, size: int) -> None:
        flow = self.flows[number]
        if isinstance(flow, Stream) and number not in self.closed:
            flow.add(size)

    def close(self, number: int, _: int = 0) -> None:
        flow = self.flows[number]
        if isinstance(flow, Stream):
            flow.close()
            self.closed.add(number)

    def cancel(self, number: int, _: int) -> None:
        if number not in self.came:
            self.cut.add(number)
        self.link.cancel(self.flows[number])

    def balance(self) -> None:
        link = self.link
        sending = [flow for flow in self.flows if flow.stage in (_OPENING, _SHARING)]
        under_way = sum(flow.size_bytes for flow in sending)
        assert link.started_bytes == pytest.approx(
            link.sent_bytes + link.cancelled_bytes + under_way
        )
        assert link._sending == len(sending)
        for flow in sending:
            queued = flow.queued_bytes if isinstance(flow, Stream) else 0
            assert 0 <= link.unsent_bytes(flow) - queued <= flow.size_bytes + 1e-3
        assert link.flows == len(self.flows) - len(self.came) - len(self.cut)

    def end(self) -> None:
        for number in range(len(self.flows)):
            self.close(number)


@settings(deadline=None)
@given(operations=OPERATIONS, changing=st.booleans(), ramp=st.booleans(), setup=st.booleans())
def test_every_byte_is_sent_or_cancelled_or_under_way(
    operations: list[tuple[int, str, int, int]], changing: bool, ramp: bool, setup: bool
) -> None:
    """And every flow arrives once, or is cut off and does not."""
    bandwidth: Any = [[0, 8e8], [1, 0], [2, 1.6e9]] if changing else 8e8
    period_s = 4 if changing else None
    setup_s = 0.1 if setup else 0.0
    link = Link(bandwidth, 0.05, setup_s, None, ramp, period_s, jitter_s=0.01, loss=0.01)
    traffic = Traffic(link)
    events: list[tuple[float, Callable[[], None]]] = [
        (time_ms / 1000, partial(traffic.do, what, which, size))
        for time_ms, what, which, size in operations
    ]
    play([link], [*events, (100.0, traffic.end)])
    traffic.balance()
    assert link.flows == 0
    assert sorted(traffic.came) == sorted(set(range(len(traffic.flows))) - traffic.cut)
    whole = [traffic.flows[number] for number in traffic.came]
    sent = sum(f.added_bytes if isinstance(f, Stream) else f.size_bytes for f in whole)
    assert sent <= link.sent_bytes * (1 + 1e-9)
    assert link.started_bytes == pytest.approx(link.sent_bytes + link.cancelled_bytes)


# ---- queueing theory

SERVICE_S = 0.01
"""Mean time that a flow's bytes take on the empty link."""


def exponential(random: np.random.Generator, flows: int) -> np.ndarray:
    return random.exponential(SERVICE_S, flows)


def deterministic(_: np.random.Generator, flows: int) -> np.ndarray:
    return np.full(flows, SERVICE_S)


def hyperexponential(random: np.random.Generator, flows: int) -> np.ndarray:
    """Balanced means: squared coefficient of variation 4."""
    few = 0.5 * (1 - math.sqrt(3 / 5))
    means = np.where(random.random(flows) < few, SERVICE_S / (2 * few), SERVICE_S / (2 - 2 * few))
    return random.exponential(means)


def mean_sojourn_s(starts_s: np.ndarray, sizes_s: np.ndarray, warm: int) -> float:
    """Of all flows but the first `warm`."""
    link = Link(8e9)
    took_s = np.zeros(len(starts_s))

    def send(number: int) -> None:
        start_s = link._engine.now_s

        def arrived() -> None:
            took_s[number] = link._engine.now_s - start_s

        link.send(float(sizes_s[number]) * 1e9, arrived)
        if number + 1 < len(starts_s):
            link._engine.at(float(starts_s[number + 1]), send, number + 1)

    play([link], [(float(starts_s[0]), lambda: send(0))])
    return float(took_s[warm:].mean())


@pytest.mark.parametrize(("load", "flows"), [(0.5, 8000), (0.8, 20_000)])
@pytest.mark.parametrize("sizes", [exponential, deterministic, hyperexponential])
def test_processor_sharing_takes_what_theory_says(
    load: float, flows: int, sizes: Callable[[np.random.Generator, int], np.ndarray]
) -> None:
    """M/G/1-PS: mean sojourn s / (1 - load) for all sizes (Kleinrock, Queueing Systems, vol. 2).

    20 independent replications; Student's t for 99% with 19 degrees of freedom is 2.861.
    """
    random = np.random.default_rng(7)
    means = []
    for _ in range(20):
        starts_s = random.exponential(SERVICE_S / load, flows).cumsum()
        means.append(mean_sojourn_s(starts_s, sizes(random, flows), warm=1000))
    half_width = 2.861 * float(np.std(means, ddof=1)) / math.sqrt(len(means))
    wanted = SERVICE_S / (1 - load)
    assert half_width < 0.07 * wanted
    assert np.mean(means) == pytest.approx(wanted, abs=half_width)
