"""A link shared by flows: fluid processor sharing, re-rated whenever one comes or goes.

All flows have one weight and one cap, so each moves at `min(cap, bandwidth / flows)` and one
number, the bytes that a flow present from the beginning would have moved, times them all: a flow
of S bytes that starts when it reads V ends when it reads V + S. One heap, O(log flows) a change;
a change of bandwidth is an event only while a flow is there to feel it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from math import ceil, inf, log2

import numpy as np

from adapters.simulator.costs import require
from adapters.simulator.engine import Engine
from harness.settings import number, whole

_SEGMENT_BYTES = 1460
_INITIAL_WINDOW_BYTES = 10 * _SEGMENT_BYTES
"""TCP's initial window: ten segments (RFC 6928)."""
_TAIL_SEGMENTS = 3
"""Behind the last ones come too few for the three duplicate ACKs of a fast retransmit."""
_TIMEOUT_S = 0.2
"""TCP's first retransmission time-out: Linux's minimum (RFC 6298 asks for 1 s)."""
_ROUNDING = 1e-12
"""A reading that falls short of an end by no more than this part of it is there."""

_OPENING, _SHARING, _IDLE, _SENT, _GONE = range(5)
"""Stages of a flow: in set-up or slow start; sharing the link; a stream without bytes to send;
its last byte on the road; arrived or cut off."""


class Flow:
    """One transfer under way. `size_bytes` is 0 or more."""

    __slots__ = ("arrived", "end", "size_bytes", "stage")

    after = _SENT
    """Its stage when its bytes are sent."""

    def __init__(self, size_bytes: float, arrived: Callable[[], None]) -> None:
        self.size_bytes = size_bytes
        self.arrived = arrived
        self.stage = _OPENING
        self.end = 0.0
        """The link's reading at which it ends, once it shares the link."""


class Stream(Flow):
    """A transfer whose bytes become known part by part: sent in order, over one connection.

    What is added while a part is under way is the next part. Set-up and slow start come before the
    first part only. The end is told by the last byte or, if that has gone by then, by itself.
    """

    __slots__ = ("_link", "added_bytes", "begun", "closed", "queued_bytes")

    after = _IDLE

    def __init__(self, link: Link, arrived: Callable[[], None]) -> None:
        super().__init__(0.0, arrived)
        self.stage = _IDLE
        self.added_bytes = 0.0
        """All that was added."""
        self.queued_bytes = 0.0
        """Added, and not in a part yet."""
        self.begun = False
        self.closed = False
        self._link = link

    @property
    def sent_bytes(self) -> float:
        """What of it has been sent; that which slow start sends counts when slow start is over."""
        return self.added_bytes - self._link.unsent_bytes(self)

    def add(self, size_bytes: float) -> None:
        """Send so many bytes more."""
        self.added_bytes += size_bytes
        self.queued_bytes += size_bytes
        self._link.push(self)

    def close(self) -> None:
        """Say that nothing more will be added: `arrived()` is called when all of it is there."""
        self.closed = True
        self._link.push(self)

    def cancel(self) -> None:
        """Cut it off."""
        self._link.cancel(self)


class Link:
    """A link on which no flow exceeds `flow_bps`. Clusters that share it are given the same one.

    `bandwidth_bps`: a number, or steps [[from_s, bps], ...] on a clock that starts with the link.
    The last one lasts, or all begin again every `period_s`. At 0, an outage, flows wait.

    A flow waits `setup_s`, and its last byte arrives half of `rtt_s` after it was sent. Where
    `ramp` is set, TCP's slow start comes between (Cardwell et al., Modeling TCP Latency, INFOCOM
    2000): round trip i sends IW 2^i bytes, IW ten segments, until the window holds what is left of
    the flow, or the bandwidth-delay product of the share that it could count on when it was sent.
    With what is left it joins the sharing. The approximation: what was sent before took nothing
    from the others' share, so with many short flows somewhat more crosses than the bandwidth.

    `jitter_s`: mean of what a flow's last byte is late by, exponential. `loss`: share of segments
    lost. Losses within a flow are taken to be repaired by fast retransmit at no cost. Those among
    its last three segments wait for a time-out, 200 ms at first, twice as long each time that the
    same segment is lost again (RFC 6298; no tail loss probes). Flows may overtake each other.
    """

    def __init__(
        self,
        bandwidth_bps: float | Sequence[Sequence[float]],
        rtt_s: float = 0.0,
        setup_s: float = 0.0,
        flow_bps: float | None = None,
        ramp: bool = False,
        period_s: float | None = None,
        jitter_s: float = 0.0,
        loss: float = 0.0,
        seed: int = 0,
    ) -> None:
        _check_bandwidth(bandwidth_bps, period_s)
        number("rtt_s", rtt_s, least=0, most=1e6)
        number("setup_s", setup_s, least=0, most=1e6)
        if flow_bps is not None:
            number("flow_bps", flow_bps, above=0)
        require(isinstance(ramp, bool), "ramp", ramp, "true or false")
        number("jitter_s", jitter_s, least=0, most=1e6)
        number("loss", loss, least=0, most=0.1)  # above, TCP hardly moves
        whole("seed", seed, least=0)
        self.bandwidth_bps = bandwidth_bps
        self.rtt_s = rtt_s
        self.setup_s = setup_s
        self.flow_bps = flow_bps
        self.ramp = ramp
        self.period_s = period_s
        self.jitter_s = jitter_s
        self.loss = loss
        self.seed = seed

    def attach(self, engine: Engine) -> None:
        """Live on this engine, empty."""
        self._engine = engine
        self._cap = inf if self.flow_bps is None else self.flow_bps / 8
        self._half_s = self.rtt_s / 2
        self._uneven = self.jitter_s > 0 or self.loss > 0
        self._random = np.random.default_rng(self.seed)
        self._read = 0.0
        self._read_at_s = engine.now_s
        self._rate = 0.0
        """Of each flow that shares the link, bytes/s."""
        self._flows: list[tuple[float, int, Flow]] = []
        self._plan = 0
        """Number of the expectation that holds; a new one with each flow that joins."""
        self._sharing = 0
        self._sending = 0
        """Those that share the link, and those that will: they are in set-up or slow start."""
        self._under_way = 0
        self._started_bytes = self._sent_bytes = self._cancelled_bytes = 0.0
        self._begin_bandwidth()

    # ---- what is known of it

    @property
    def flows(self) -> int:
        """Flows under way: those in set-up or with their last bytes on the road, too."""
        return self._under_way

    @property
    def started_bytes(self) -> float:
        """Bytes of all flows so far: they are sent, cancelled or under way."""
        return self._started_bytes

    @property
    def sent_bytes(self) -> float:
        """Bytes of all flows that have sent their last."""
        return self._sent_bytes

    @property
    def cancelled_bytes(self) -> float:
        """Bytes of all flows that were cut off before they had sent their last."""
        return self._cancelled_bytes

    def unsent_bytes(self, flow: Flow) -> float:
        """What a flow has still to send: all of it until it shares the link."""
        queued = flow.queued_bytes if isinstance(flow, Stream) else 0.0
        if flow.stage == _OPENING:
            return queued + flow.size_bytes
        if flow.stage == _SHARING:
            self._settle()
            return queued + max(0.0, flow.end - self._read)
        return queued

    def estimate_s(self, size_bytes: float) -> float:
        """How long a transfer started now takes if no flow comes or goes, nor the bandwidth.

        Jitter is taken at its mean, losses are not foreseen; in an outage it is infinite.
        """
        wait_s, ahead = self._opening(size_bytes)
        return wait_s + self._last_s(size_bytes - ahead, self._sending + 1)

    def estimate_rest_s(self, stream: Stream, size_bytes: float) -> float:
        """How long a stream takes from now on to send so many bytes, those added included."""
        if not stream.begun:
            return self.estimate_s(size_bytes)
        sends = stream.stage in (_OPENING, _SHARING)
        return self._last_s(size_bytes, self._sending + (not sends))

    def _last_s(self, size_bytes: float, sending: int) -> float:
        """Until the last byte is there, of a flow that is one of so many."""
        share = self._share(sending)
        return (size_bytes / share if share else inf) + self._half_s + self.jitter_s

    # ---- flows come and go

    def send(self, size_bytes: float, arrived: Callable[[], None]) -> Flow:
        """Start a flow; `arrived()` is called when its last byte is there."""
        flow = Flow(size_bytes, arrived)
        self._under_way += 1
        self._start(flow, *self._opening(size_bytes))
        return flow

    def stream(self, arrived: Callable[[], None]) -> Stream:
        """Start a stream; `arrived()` is called when it is closed and its last byte is there."""
        self._under_way += 1
        return Stream(self, arrived)

    def push(self, stream: Stream) -> None:
        """For the stream: send its next part, or what tells its end, unless it is sending."""
        if stream.stage != _IDLE:
            return
        if stream.queued_bytes or (stream.closed and not stream.begun):
            size_bytes, stream.queued_bytes = stream.queued_bytes, 0.0
            opening = (0.0, 0.0) if stream.begun else self._opening(size_bytes)
            stream.begun = True
            stream.size_bytes, stream.stage = size_bytes, _OPENING
            self._start(stream, *opening)
        elif stream.closed:
            stream.stage = _SENT
            self._deliver(stream)

    def cancel(self, flow: Flow) -> None:
        """Cut a flow off: it does not arrive, and from now on the others share its part."""
        stage, flow.stage = flow.stage, _GONE
        if stage == _GONE:
            return
        self._under_way -= 1
        if stage in (_OPENING, _SHARING):
            self._cancelled_bytes += flow.size_bytes
            self._sending -= 1
        if stage == _SHARING:
            self._settle()
            self._sharing -= 1
            self._replan()

    # ---- before and after the sharing

    def _start(self, flow: Flow, wait_s: float, ahead: float) -> None:
        """Let it share the link after its opening."""
        self._started_bytes += flow.size_bytes
        self._sending += 1
        if wait_s > 0:
            self._engine.at(self._engine.now_s + wait_s, self._join, flow, ahead)
        else:
            self._join(flow, ahead)

    def _opening(self, size_bytes: float) -> tuple[float, float]:
        """How long a flow waits before it shares the link, and the bytes it sends meanwhile."""
        if not self.ramp:
            return self.setup_s, 0.0
        # After r rounds (2^r - 1) IW are sent and the window is 2^r IW.
        windows = min(
            self._share(self._sending + 1) * self.rtt_s / _INITIAL_WINDOW_BYTES,
            (size_bytes / _INITIAL_WINDOW_BYTES + 1) / 2,
        )
        rounds = ceil(log2(windows)) if windows > 1 else 0
        return self.setup_s + rounds * self.rtt_s, (2**rounds - 1) * _INITIAL_WINDOW_BYTES

    def _share(self, sending: int) -> float:
        """The bytes/s of one of so many flows."""
        if self._engine.now_s >= self._until_s:
            self._turn_bandwidth()
        return min(self._cap, self._bandwidth / sending)

    def _deliver(self, flow: Flow) -> None:
        """The last byte is on the road."""
        road_s = self._half_s + self._late_s(flow.size_bytes) if self._uneven else self._half_s
        if road_s:
            self._engine.at(self._engine.now_s + road_s, self._arrive, flow)
        else:
            self._arrive(flow)

    def _late_s(self, size_bytes: float) -> float:
        """Jitter, and the time-outs of the unluckiest of the last segments."""
        late_s = self._random.exponential(self.jitter_s)
        if self.loss:
            segments = min(max(1, ceil(size_bytes / _SEGMENT_BYTES)), _TAIL_SEGMENTS)
            losses = int(self._random.geometric(1 - self.loss, segments).max()) - 1
            late_s += _TIMEOUT_S * (2**losses - 1)
        return late_s

    def _arrive(self, flow: Flow) -> None:
        if flow.stage != _GONE:
            flow.stage = _GONE
            self._under_way -= 1
            flow.arrived()

    # ---- the sharing

    def _join(self, flow: Flow, ahead: float) -> None:
        """Share the link from now on; `ahead` bytes have been sent before."""
        if flow.stage == _GONE:
            return
        self._settle()
        flow.stage = _SHARING
        flow.end = end = self._read + flow.size_bytes - ahead
        heappush(self._flows, (end, self._plan, flow))
        self._sharing += 1
        self._replan()

    def _settle(self) -> None:
        """Bring the reading up to now."""
        now_s = self._engine.now_s
        self._read += (now_s - self._read_at_s) * self._rate
        self._read_at_s = now_s
        if now_s >= self._until_s:
            self._turn_bandwidth()

    def _replan(self) -> None:
        """Expect the next end, or change of bandwidth; an older expectation is void."""
        self._plan += 1
        flows = self._flows
        while flows and flows[0][2].stage == _GONE:
            heappop(flows)
        if not flows:
            self._read = self._rate = 0.0
            return
        self._rate = rate = min(self._cap, self._bandwidth / self._sharing)
        end, end_s = flows[0][0], self._engine.now_s
        if end - self._read > _ROUNDING * end:
            end_s += (end - self._read) / rate if rate else inf
        if end_s <= self._until_s:
            self._engine.at(end_s, self._end, self._plan)
        else:
            self._engine.at(self._until_s, self._rerate, self._plan)

    def _rerate(self, plan: int) -> None:
        """The bandwidth changes under the flows."""
        if plan == self._plan:
            self._settle()
            self._replan()

    def _end(self, plan: int) -> None:
        """The flow expected to end has sent its last byte, and so has any that ends with it."""
        if plan != self._plan:
            return
        self._settle()
        flows = self._flows
        self._read = max(self._read, flows[0][0])
        ended: list[Flow] = []
        while flows and (flows[0][0] <= self._read or flows[0][2].stage == _GONE):
            flow = heappop(flows)[2]
            if flow.stage == _GONE:
                continue
            flow.stage = flow.after
            self._sharing -= 1
            self._sending -= 1
            self._sent_bytes += flow.size_bytes
            ended.append(flow)
        self._replan()
        for flow in ended:
            if flow.stage == _SENT:
                self._deliver(flow)
            elif isinstance(flow, Stream):
                self.push(flow)

    # ---- the bandwidth

    def _begin_bandwidth(self) -> None:
        """Start the clock of its steps."""
        given = self.bandwidth_bps
        steps = [(0.0, given)] if isinstance(given, int | float) else given
        self._starts_s = [from_s for from_s, _ in steps]
        self._bandwidths = [bps / 8 for _, bps in steps]
        self._period_s = inf if self.period_s is None else self.period_s
        self._start_s = self._engine.now_s
        self._step = 0
        self._turn_bandwidth()

    def _turn_bandwidth(self) -> None:
        """Bring the bandwidth, bytes/s, and the time until which it lasts up to now."""
        now_s, steps = self._engine.now_s, len(self._bandwidths)
        periods = int((now_s - self._start_s) / self._period_s)
        self._step = max(self._step, steps * (periods - 1))  # nobody looked at those before
        while now_s >= self._step_s(self._step + 1):
            self._step += 1
        self._bandwidth = self._bandwidths[self._step % steps]
        self._until_s = self._step_s(self._step + 1)

    def _step_s(self, step: int) -> float:
        """When a step begins, counted through all periods."""
        periods, at = divmod(step, len(self._starts_s))
        return self._start_s + self._starts_s[at] + (periods * self._period_s if periods else 0.0)


def _check_bandwidth(bandwidth_bps: object, period_s: float | None) -> None:
    """A number, or steps that begin at 0, ascend and are not 0 for ever."""
    if not isinstance(bandwidth_bps, list | tuple):
        number("bandwidth_bps", bandwidth_bps, above=0, most=1e18)
        require(period_s is None, "period_s", period_s, "it with steps of bandwidth_bps only")
        return
    for at, step in enumerate(bandwidth_bps):
        name = f"bandwidth_bps[{at}]"
        pair = isinstance(step, list | tuple) and len(step) == 2  # noqa: PLR2004 - a pair
        require(pair, name, step, "[from_s, bps]")
        number(f"{name}[0]", step[0], least=0, most=1e12)
        number(f"{name}[1]", step[1], least=0, most=1e18)
    starts_s = [from_s for from_s, _ in bandwidth_bps]
    good = starts_s[:1] == [0] and all(before < after for before, after in pairwise(starts_s))
    require(good, "bandwidth_bps", bandwidth_bps, "steps of which the first is from 0, ascending")
    if period_s is not None:
        number("period_s", period_s, least=1, above=starts_s[-1], most=1e12)
    lasting = bandwidth_bps if period_s is not None else bandwidth_bps[-1:]
    require(any(bps for _, bps in lasting), "bandwidth_bps", bandwidth_bps, "a last step above 0")
