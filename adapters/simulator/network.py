"""A link shared by flows: fluid processor sharing, re-rated whenever one comes or goes.

All flows have one weight and one cap, so each moves at `min(cap, bandwidth / flows)` and one
number, the bytes that a flow present from the beginning would have moved, times them all: a flow
of S bytes that starts when it reads V ends when it reads V + S. One heap, O(log flows) a change.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from math import ceil, inf, log2

from adapters.simulator.engine import Engine
from harness.settings import number

_INITIAL_WINDOW_BYTES = 10 * 1460
"""TCP's initial window: ten segments (RFC 6928)."""


class Flow:
    """One transfer under way."""

    __slots__ = ("arrived", "gone", "joined", "size_bytes")

    def __init__(self, size_bytes: float, arrived: Callable[[], None]) -> None:
        self.size_bytes = size_bytes
        self.arrived = arrived
        self.joined = False
        self.gone = False


class Link:
    """A link of `bandwidth_bps`, on which no flow exceeds `flow_bps`.

    A flow waits `setup_s`, and where `ramp` is set as many round trips as TCP's slow start takes to
    open a window of its size, or of the link's bandwidth-delay product where that is less:
    ceil(log2(S / IW10 + 1)). Its last byte arrives half a round trip after it was sent.
    """

    def __init__(
        self,
        bandwidth_bps: float,
        rtt_s: float = 0.0,
        setup_s: float = 0.0,
        flow_bps: float | None = None,
        ramp: bool = False,
    ) -> None:
        number("bandwidth_bps", bandwidth_bps, above=0, most=1e18)
        number("rtt_s", rtt_s, least=0, most=1e6)
        number("setup_s", setup_s, least=0, most=1e6)
        if flow_bps is not None:
            number("flow_bps", flow_bps, above=0)
        self.bandwidth_bps = bandwidth_bps
        self.rtt_s = rtt_s
        self.setup_s = setup_s
        self.flow_bps = flow_bps
        self.ramp = ramp

    def attach(self, engine: Engine) -> None:
        """Live on this engine, empty."""
        self._engine = engine
        self._bandwidth = self.bandwidth_bps / 8
        self._cap = inf if self.flow_bps is None else self.flow_bps / 8
        self._window = min(self._cap, self._bandwidth) * self.rtt_s
        self._read = 0.0
        self._read_at_s = engine.now_s
        self._flows: list[tuple[float, int, Flow]] = []
        self._active = 0
        self._under_way = 0
        self._numbers = count()
        self._plan = 0
        self._sent_bytes = 0.0

    @property
    def sent_bytes(self) -> float:
        """Bytes of all flows that have sent their last."""
        return self._sent_bytes

    @property
    def flows(self) -> int:
        """Flows under way: those in set-up or with their last bytes on the road, too."""
        return self._under_way

    def latency_s(self, size_bytes: float) -> float:
        """What a transfer takes beyond its bytes: set-up, slow start and half a round trip."""
        waits_s = self.setup_s + self.rtt_s / 2
        if self.ramp and size_bytes > 0:
            opened = min(size_bytes, max(self._window, _INITIAL_WINDOW_BYTES))
            waits_s += self.rtt_s * ceil(log2(opened / _INITIAL_WINDOW_BYTES + 1))
        return waits_s

    def estimate_s(self, size_bytes: float) -> float:
        """How long a transfer started now would take if flows neither came nor went."""
        rate = min(self._cap, self._bandwidth / (self._active + 1))
        return self.latency_s(size_bytes) + size_bytes / rate

    def send(self, size_bytes: float, arrived: Callable[[], None]) -> Flow:
        """Start a flow; `arrived()` is called when its last byte is there."""
        flow = Flow(size_bytes, arrived)
        self._under_way += 1
        before_s = self.latency_s(size_bytes) - self.rtt_s / 2
        if before_s > 0:
            self._engine.at(self._engine.now_s + before_s, self._join, flow)
        else:
            self._join(flow)
        return flow

    def cancel(self, flow: Flow) -> None:
        """Cut a flow off: from now on the others share its part."""
        if flow.gone:
            return
        flow.gone = True
        self._under_way -= 1
        if flow.joined:
            self._settle()
            self._active -= 1
            self._replan()

    def _rate(self) -> float:
        return min(self._cap, self._bandwidth / self._active)

    def _settle(self) -> None:
        """Bring the reading up to now."""
        now_s = self._engine.now_s
        if self._active:
            self._read += (now_s - self._read_at_s) * self._rate()
        self._read_at_s = now_s

    def _join(self, flow: Flow) -> None:
        if flow.gone:
            return
        self._settle()
        heapq.heappush(self._flows, (self._read + flow.size_bytes, next(self._numbers), flow))
        flow.joined = True
        self._active += 1
        self._replan()

    def _replan(self) -> None:
        """Expect the next end at the present rate; an older expectation is void."""
        self._plan += 1
        flows = self._flows
        while flows and flows[0][2].gone:
            heapq.heappop(flows)
        if flows:
            left = max(0.0, flows[0][0] - self._read)
            self._engine.at(self._engine.now_s + left / self._rate(), self._end, self._plan)

    def _end(self, plan: int) -> None:
        """The flow expected to end has sent its last byte, and so has any that ends with it."""
        if plan != self._plan:
            return
        self._settle()
        flows = self._flows
        self._read = max(self._read, flows[0][0])
        ended: list[Flow] = []
        while flows and (flows[0][0] <= self._read or flows[0][2].gone):
            _, _, flow = heapq.heappop(flows)
            if flow.gone:
                continue
            flow.gone = True
            self._active -= 1
            self._sent_bytes += flow.size_bytes
            ended.append(flow)
        if not flows:
            self._read = 0.0
        self._replan()
        for flow in ended:
            if self.rtt_s:
                self._engine.at(self._engine.now_s + self.rtt_s / 2, self._arrive, flow)
            else:
                self._arrive(flow)

    def _arrive(self, flow: Flow) -> None:
        self._under_way -= 1
        flow.arrived()
