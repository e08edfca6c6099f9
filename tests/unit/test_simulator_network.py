"""The link by hand: changing bandwidth, slow start, streams, what jitter and loss cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from adapters.simulator.network import Flow, Link, Stream
from harness.errors import ConfigError
from tests.simulated import play

IW = 14_600
"""Ten segments of 1460 bytes."""


def arrivals(link: Link, *sends: tuple[float, float]) -> list[float]:
    """When flows (start, bytes) arrive."""
    at: dict[int, float] = {}
    events: list[tuple[float, Callable[[], None]]] = []
    for number, (start_s, size) in enumerate(sends):

        def send(number: int = number, size: float = size) -> None:
            link.send(size, lambda: at.update({number: link._engine.now_s}))

        events.append((start_s, send))
    play([link], events)
    assert link.flows == 0
    return [at[number] for number in range(len(sends))]


# ---- bandwidth in steps


@pytest.mark.parametrize(
    ("start_s", "size", "end_s"),
    [
        (0.0, 5e6, 5.0),
        (0.0, 10e6, 10.0),
        (0.0, 30e6, 20.0),
        (8.0, 22e6, 20.0),
        (50.0, 2e6, 51.0),
    ],
)
def test_the_bandwidth_changes_under_a_flow(start_s: float, size: float, end_s: float) -> None:
    link = Link([[0, 8e6], [10, 16e6]])
    assert arrivals(link, (start_s, size)) == pytest.approx([end_s])


def test_a_cap_and_the_others_hold_at_every_step() -> None:
    """1, then 4 MB/s, nobody above 1.5 MB/s: two have 0.5 each, then 1.5 each."""
    link = Link([[0, 8e6], [10, 32e6]], flow_bps=12e6)
    assert arrivals(link, (0.0, 8e6), (0.0, 11e6)) == pytest.approx([12.0, 14.0])


def test_flows_wait_through_an_outage() -> None:
    link = Link([[0, 8e6], [10, 0], [60, 8e6]])
    # A quarter, three quarters and 1 MB are left at 60 s.
    ends = arrivals(link, (9.0, 1e6), (9.5, 1e6), (20.0, 1e6))
    assert ends == pytest.approx([60.75, 61.75, 62.0])


def test_who_ends_as_an_outage_begins_is_through() -> None:
    """What five send in 10 s does not add up to 10 MB to the last bit."""
    link = Link([[0, 8e6], [10, 0], [60, 8e6]])
    sends = [(0.1 * number, 2e6) for number in range(5)]
    assert max(arrivals(link, *sends)) == pytest.approx(10)


def test_steps_repeat_every_period() -> None:
    link = Link([[0, 8e6], [60, 0]], period_s=100)
    assert arrivals(link, (50.0, 20e6), (250.0, 20e6)) == pytest.approx([110.0, 310.0])


def test_periods_that_nobody_looked_at_are_counted() -> None:
    link = Link([[0, 8e6], [0.5, 16e6]], period_s=1)
    assert arrivals(link, (1e9 + 0.25, 1e6)) == pytest.approx([1e9 + 0.25 + 0.25 + 0.375], abs=1e-6)


def test_a_long_time_without_flows_costs_no_precision() -> None:
    link = Link(8e6)
    sends = [(0.0, 1e6), (1e10, 1e3)]
    assert arrivals(link, *sends) == pytest.approx([1, 1e10 + 1e-3], rel=0, abs=1e-5)


def test_the_clock_of_the_steps_starts_with_the_link() -> None:
    link, ends = Link([[0, 8e6], [10, 16e6]]), []
    engine = play([], [(1000.0, lambda: None)])
    assert engine.now_s == 1000
    link.attach(engine)
    link.send(12e6, lambda: ends.append(engine.now_s))
    while engine._events:
        engine._fire()
    assert ends == pytest.approx([1011.0])


def test_nothing_happens_on_a_link_without_bytes_to_send() -> None:
    """Or a virtual loop that waits for ever would not be found out."""
    link = Link([[0, 8e6], [1, 16e6]], period_s=2, rtt_s=0.1)
    streams: list[Stream] = []
    events: list[tuple[float, Callable[[], Any]]] = [
        (0.0, lambda: link.send(1e6, lambda: None)),
        (0.0, lambda: streams.append(link.stream(lambda: None))),
        (5.0, lambda: streams[0].add(1e6)),
    ]
    engine = play([link], events)  # which would go on for as long as there are events
    assert engine.now_s == pytest.approx(5.5)
    assert link.flows == 1


def test_an_estimate_is_of_the_bandwidth_of_the_moment() -> None:
    link = Link([[0, 8e6], [10, 0], [20, 16e6]], rtt_s=0.2, setup_s=0.3, jitter_s=0.1)
    estimates: list[float] = []
    play([link], [(at, lambda: estimates.append(link.estimate_s(1e6))) for at in (0.0, 10.0, 20.0)])
    assert estimates == pytest.approx([1.5, math.inf, 1.0])


# ---- slow start


@pytest.mark.parametrize(
    ("size", "rounds", "ahead"),
    [
        (0, 0, 0),
        (IW, 0, 0),  # all of it fits the first window
        (IW + 1, 1, IW),
        (3 * IW, 1, IW),
        (3 * IW + 1, 2, 3 * IW),
        (7 * IW, 2, 3 * IW),
        (1e8, 12, 4095 * IW),
        (1e12, 13, 8191 * IW),  # the window is the bandwidth-delay product, 100 MB
        (1e13, 13, 8191 * IW),
    ],
)
def test_what_slow_start_sends_is_not_sent_again(size: float, rounds: int, ahead: float) -> None:
    link = Link(8e9, rtt_s=0.1, setup_s=0.02, ramp=True)
    wanted = 0.02 + 0.1 * rounds + (size - ahead) / 1e9 + 0.05
    assert arrivals(link, (0.0, size)) == pytest.approx([wanted])
    assert link.estimate_s(size) == pytest.approx(wanted)
    assert link.sent_bytes == size


def test_slow_start_ends_at_the_share_that_it_can_count_on() -> None:
    """Alone that is 100 MB a round trip, beside another half of it, and a cap may be less."""
    others = Link(8e9, rtt_s=0.1, ramp=True)
    capped = Link(8e9, rtt_s=0.1, ramp=True, flow_bps=8e8)
    for link in (others, capped):
        link.attach(play([], []))
    assert others._opening(1e12) == pytest.approx((1.3, 8191 * IW))
    others.send(1e12, lambda: None)  # in slow start itself, and yet it counts
    assert others._opening(1e12) == pytest.approx((1.2, 4095 * IW))
    assert capped._opening(1e12) == pytest.approx((1.0, 1023 * IW))


# ---- streams


def streamed(
    link: Link, *steps: tuple[float, float | str], others: tuple[tuple[float, float], ...] = ()
) -> list[float]:
    """When a stream arrives to which `steps` add (s, bytes), which they close or cancel."""
    ends: list[float] = []
    streams: list[Stream] = []

    def step(what: float | str) -> None:
        if not streams:
            streams.append(link.stream(lambda: ends.append(link._engine.now_s)))
        if what == "close":
            streams[0].close()
        elif what == "cancel":
            streams[0].cancel()
        else:
            streams[0].add(float(what))

    events: list[tuple[float, Callable[[], Any]]] = [
        (at, partial(step, what)) for at, what in steps
    ]
    events += [(at, partial(link.send, size, lambda: None)) for at, size in others]
    play([link], events)
    assert link.flows == 0
    return ends


def test_parts_go_one_after_another() -> None:
    link = Link(8e6)
    assert streamed(link, (0, 1e6), (0.5, 1e6), (0.6, 1e6), (0.6, "close")) == pytest.approx([3.0])
    # Idle from 1 to 4.
    assert streamed(link, (0, 1e6), (4, 1e6), (4, "close")) == pytest.approx([5.0])


def test_set_up_and_slow_start_come_once() -> None:
    link = Link(8e6, setup_s=2.0)
    assert streamed(link, (0, 1e6), (4, 1e6), (4, "close")) == pytest.approx([5.0])
    # What comes during set-up is the next part.
    assert streamed(link, (0, 1e6), (1, 1e6), (1, "close")) == pytest.approx([4.0])
    link = Link(8e9, rtt_s=0.1, ramp=True)
    wanted = 0.1 * 13 + (1e12 - 8191 * IW) / 1e9 + 1e12 / 1e9 + 0.05
    assert streamed(link, (0, 1e12), (0, 1e12), (1, "close")) == pytest.approx([wanted])


def test_a_stream_has_one_share() -> None:
    """Beside it 4 MB, at half of 1 MB/s until 4 s, when the stream's 2 MB are through."""
    link = Link(8e6)
    parts = [(0.0, 5e5)] * 4
    assert streamed(link, *parts, (0, "close"), others=((0.0, 4e6),)) == pytest.approx([4.0])
    assert link._engine.now_s == pytest.approx(6)


def test_an_end_that_comes_late_is_told_by_itself() -> None:
    link = Link(8e6, rtt_s=0.4)
    assert streamed(link, (0, 1e6), (9, "close")) == pytest.approx([9.2])
    assert streamed(link, (0, 1e6), (1.1, "close")) == pytest.approx([1.3])
    assert streamed(link, (0, 1e6), (1, "close")) == pytest.approx([1.2])


def test_an_empty_stream_is_an_empty_transfer() -> None:
    link = Link(8e6, rtt_s=0.4, setup_s=1.0)
    assert streamed(link, (5, 0.0), (5, "close")) == arrivals(link, (5.0, 0.0)) == [6.2]


@pytest.mark.parametrize("cut_s", [0.5, 1.5, 3.0, 4.1])
def test_a_stream_that_is_cut_off_does_not_arrive(cut_s: float) -> None:
    """In set-up, in its first part, between two, with its last byte on the road."""
    link = Link(8e6, rtt_s=0.4, setup_s=1.0)
    ends = streamed(
        link, (0, 1e6), (3, 1e6), (3.5, "close"), (cut_s, "cancel"), (5, 1e6), (5, "close")
    )
    assert ends == []
    assert link.started_bytes == link.sent_bytes + link.cancelled_bytes
    assert link.sent_bytes == {0.5: 0, 1.5: 0, 3.0: 1e6, 4.1: 2e6}[cut_s]


def test_what_a_stream_has_sent() -> None:
    link = Link(8e6, setup_s=1.0)
    seen: list[float] = []
    streams: list[Stream] = []
    events: list[tuple[float, Callable[[], Any]]] = [
        (0.0, lambda: streams.append(link.stream(lambda: None))),
        (0.0, lambda: streams[0].add(1e6)),
        (0.5, lambda: streams[0].add(2e6)),
        *[(at, lambda: seen.append(streams[0].sent_bytes)) for at in (0.6, 1.5, 2.5, 9.0)],
    ]
    play([link], events)
    assert seen == pytest.approx([0, 0.5e6, 1.5e6, 3e6])
    assert streams[0].added_bytes == 3e6


# ---- cut off


def test_whoever_is_cut_off_took_its_share_until_then() -> None:
    link, ends = Link(8e6), []
    flows: list[Flow] = []
    events: list[tuple[float, Callable[[], Any]]] = [
        (0.0, lambda: flows.append(link.send(2e6, lambda: ends.append(link._engine.now_s)))),
        (0.0, lambda: flows.append(link.send(2e6, lambda: None))),
        (2.0, lambda: link.cancel(flows[1])),
    ]
    play([link], events)
    assert ends == pytest.approx([3.0])
    assert (link.sent_bytes, link.cancelled_bytes) == (2e6, 2e6)


def test_a_flow_that_is_cut_off_on_the_road_does_not_arrive() -> None:
    link, ends = Link(8e6, rtt_s=0.4), []
    flows: list[Flow] = []
    events: list[tuple[float, Callable[[], Any]]] = [
        (0.0, lambda: flows.append(link.send(1e6, lambda: ends.append(1)))),
        (1.1, lambda: link.cancel(flows[0])),
        (1.1, lambda: link.cancel(flows[0])),
    ]
    play([link], events)
    assert ends == []
    assert link.flows == 0
    assert (link.sent_bytes, link.cancelled_bytes) == (1e6, 0)


# ---- jitter and loss


def delays(size: float, flows: int = 20_000, **settings: Any) -> np.ndarray:
    """What flows take beyond half a round trip, on a link so fast that their bytes take nothing."""
    link = Link(1e18, rtt_s=0.1, **settings)
    return np.array(arrivals(link, *[(0.0, size)] * flows)) - 0.05


def assert_mean(values: np.ndarray, wanted: float) -> None:
    """Within 2.58 standard errors, 99%, which are small enough to tell something."""
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    assert error < 0.04 * wanted
    assert abs(values.mean() - wanted) < 2.58 * error


def test_jitter_is_exponential() -> None:
    late = delays(1e4, jitter_s=0.03)
    assert_mean(late, 0.03)
    assert_mean((late > 0.09).astype(float), math.exp(-3))


@pytest.mark.parametrize(("size", "segments"), [(0, 1), (1460, 1), (1461, 2), (4380, 3), (1e6, 3)])
def test_loss_of_the_last_segments_waits_for_time_outs(size: float, segments: int) -> None:
    """2^R - 1 is the sum of 2^(r - 1) over r up to R, the most losses that one of them has."""
    loss = 0.05
    late = delays(size, loss=loss)
    assert set(np.round(late / 0.2).astype(int)) <= {0, 1, 3, 7, 15, 31}
    some = [1 - (1 - loss**r) ** segments for r in range(1, 60)]
    assert_mean(late, 0.2 * sum(2**r * chance for r, chance in enumerate(some)))


def test_chance_is_that_of_the_seed() -> None:
    first, again, other = (
        delays(1e4, flows=200, jitter_s=0.03, loss=0.01, seed=seed) for seed in (1, 1, 2)
    )
    assert (first == again).all()
    assert (first != other).all()


def test_a_link_begins_anew_with_its_seed() -> None:
    link = Link(8e6, jitter_s=0.1)
    sends = [(0.0, 1e6)] * 20
    assert arrivals(link, *sends) == arrivals(link, *sends)


# ---- settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bandwidth_bps": 0}, "bandwidth_bps is 0: give a number, above 0"),
        ({"bandwidth_bps": []}, r"bandwidth_bps is \[\]: give steps of which the first is from 0"),
        ({"bandwidth_bps": [[1, 5]]}, "give steps of which the first is from 0"),
        ({"bandwidth_bps": [[0, 5], [2, 6], [2, 7]]}, "from 0, ascending"),
        ({"bandwidth_bps": [[0, 5], 7]}, r"bandwidth_bps\[1\] is 7: give \[from_s, bps\]"),
        (
            {"bandwidth_bps": [[0, 5, 6]]},
            r"bandwidth_bps\[0\] is \[0, 5, 6\]: give \[from_s, bps\]",
        ),
        ({"bandwidth_bps": [[0, -5]]}, r"bandwidth_bps\[0\]\[1\] is -5"),
        ({"bandwidth_bps": [["noon", 5]]}, r"bandwidth_bps\[0\]\[0\] is 'noon'"),
        ({"bandwidth_bps": [[0, 5], [9, 0]]}, "a last step above 0"),
        ({"bandwidth_bps": [[0, 0], [9, 0]], "period_s": 10}, "above 0"),
        ({"bandwidth_bps": [[0, 5], [9, 0]], "period_s": 9}, "period_s is 9: give a number, above"),
        ({"bandwidth_bps": [[0, 5]], "period_s": 1e-9}, "period_s is 1e-09"),
        ({"period_s": 10}, "period_s is 10: give it with steps of bandwidth_bps only"),
        ({"flow_bps": 0}, "flow_bps is 0"),
        ({"setup_s": math.inf}, "setup_s is inf"),
        ({"ramp": "yes"}, "ramp is yes: give true or false"),
        ({"jitter_s": -1}, "jitter_s is -1"),
        ({"loss": 1}, "loss is 1: give a number, 0 to 0.1"),
        ({"loss": -0.1}, "loss is -0.1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_an_impossible_link_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Link(**({"bandwidth_bps": 1e9} | settings))
