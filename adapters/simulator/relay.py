"""PDD: Prefill - RelayDecode - MainDecode across two data centres.

After prefill a KV cache takes two roads at once: over RDMA to the relay in the same data centre,
which starts decoding, and over the WAN to the main decode. When the WAN transfer is whole, the
relay hands over the ids of the tokens it has produced; the main decode recomputes their KV in one
extended step and goes on. Requests whose transfer is short go straight to the main decode.

Both pipelines end at the main decode (P-MD, P-RLD-MD): a request that the relay finishes first
still sends its KV cache, so that the cache there does not fall behind the prefill's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from adapters.simulator.costs import PrefillCost, require
from adapters.simulator.decode import DecodePool, Sequence
from adapters.simulator.decode_cache import DecodeCache
from adapters.simulator.disaggregated import Disaggregated
from adapters.simulator.network import Link
from adapters.simulator.prefill import PrefillCluster
from adapters.simulator.simulator import Job, numbers
from harness.settings import number


class Pdd(Disaggregated):
    """`link` is the WAN, `relay_link` the RDMA inside; one-shot handoff.

    A request is relayed when its transfer, at the flows of the moment, is expected to take longer
    than `relay_threshold_s` and the relay has room for it.
    """

    def __init__(
        self,
        topology: str,
        prefill: PrefillCluster,
        link: Link,
        decode_pool: DecodePool,
        cache: DecodeCache,
        relay_link: Link,
        relay_pool: DecodePool,
        relay_threshold_s: float,
        extend: PrefillCost,
    ) -> None:
        super().__init__(topology, prefill, link, decode_pool, cache)
        require(isinstance(extend, PrefillCost), "extend", extend, "a model's prefill cost")
        number("relay_threshold_s", relay_threshold_s, least=0)
        self.relay_link = relay_link
        self.relay_pool = relay_pool
        self.relay_threshold_s = relay_threshold_s
        self.extend = extend

    def attach(self) -> None:
        """Put every part on the engine, empty and cold."""
        super().attach()
        self.relay_link.attach(self.engine)
        self.relay_pool.attach(self.engine)

    def decode(self, job: Job) -> None:
        """Send to the main decode and, where that will take long, to the relay too."""
        request = job.request
        size_bytes = self.missing_bytes(job)
        slow = self.link.estimate_s(size_bytes) > self.relay_threshold_s
        self.send(job, size_bytes)
        if slow and self.relay_pool.reserve(request.input_tokens + request.output_tokens):
            job.served.route = "P-RLD-MD"
            whole = self.cache.kv.of(request.input_tokens)
            job.relay_flow = self.relay_link.send(whole, lambda: self._begin_relay(job))
        else:
            job.served.route = "P-MD"

    def _begin_relay(self, job: Job) -> None:
        self._unreserve(job)
        if job.answer.done() or job.served.transfer_end_s is not None:
            return
        request = job.request
        job.relay = Sequence(
            request.input_tokens,
            request.output_tokens,
            lambda times_s: self._end_relay(job, times_s),
            emitted=job.listener,
        )
        self.relay_pool.join(job.relay)

    def _unreserve(self, job: Job) -> None:
        """The KV cache is at the relay, or will never be: its reservation is over."""
        job.relay_flow = None
        self.relay_pool.give_up(job.request.input_tokens + job.request.output_tokens)

    def _cut_relay_flow(self, job: Job) -> None:
        if job.relay_flow is not None:
            self.relay_link.cancel(job.relay_flow)
            self._unreserve(job)

    def _end_relay(self, job: Job, times_s: NDArray[np.float64]) -> None:
        """The relay was done before the KV cache had crossed. The transfer goes on."""
        job.served.relay_tokens = len(times_s)
        self.finish(job, times_s)

    def received(self, job: Job) -> None:
        """The KV cache has crossed: take over from the relay, where it has begun."""
        if job.relay is None:
            self._take_whole(job)
        else:
            self.relay_pool.release(job.relay, lambda times_s: self._hand_over(job, times_s))

    def _take_whole(self, job: Job) -> None:
        """The relay had not begun: there is nothing to hand over."""
        job.served.route = "P-MD"
        self._cut_relay_flow(job)
        super().received(job)

    def _hand_over(self, job: Job, times_s: NDArray[np.float64]) -> None:
        """The relay has let go: the ids of its tokens cross, one way."""
        job.relay = None
        if job.answer.done():
            return
        if not len(times_s):
            self._take_whole(job)
            return
        job.emitted_s = times_s
        job.served.relay_tokens = len(times_s)
        self.engine.at(self.engine.now_s + self.link.rtt_s / 2, self._extend, job)

    def _extend(self, job: Job) -> None:
        """Recompute the KV of the eager tokens in one extended step, and go on."""
        if job.answer.done():
            return
        request, eager = job.request, len(job.emitted_s)

        def finished(times_s: NDArray[np.float64]) -> None:
            job.served.handoff_s = float(times_s[0])
            self.finish(job, np.concatenate((job.emitted_s, times_s)))

        job.sequence = Sequence(
            request.input_tokens + eager,
            request.output_tokens - eager,
            finished,
            self.extend.extend_s(eager, request.input_tokens),
            job.listener,
        )
        self.decode_pool.join(job.sequence)

    def so_far(self, job: Job) -> NDArray[np.float64]:
        """When its tokens were emitted, at the relay and at the main decode."""
        if job.relay is None:
            return super().so_far(job)
        return self.relay_pool.so_far(job.relay)

    def abandon(self, job: Job) -> None:
        """Free both flows and the places in both batches."""
        super().abandon(job)
        self._cut_relay_flow(job)
        if job.relay is not None:
            self.relay_pool.release(job.relay, lambda _: None)

    def load(self) -> dict[str, float]:
        """What is under way now."""
        return super().load() | {
            "relay_flows": self.relay_link.flows,
            "relay_running": self.relay_pool.batch,
            "relay_waiting": self.relay_pool.waiting,
        }

    def counters(self) -> dict[str, float]:
        """What was done since the last reset, and what the caches hold."""
        return super().counters() | {
            "relay_sent_bytes_total": self.relay_link.sent_bytes,
            "relay_tokens_total": self.relay_pool.emitted_tokens,
        }

    def cards(self) -> dict[str, float]:
        """Cards a role."""
        return {
            "P": self.prefill.cards,
            "RLD": self.relay_pool.cards,
            "MD": self.decode_pool.cards,
        }

    def details(self) -> dict[str, object]:
        """The numbers that decide what comes out."""
        return super().details() | {
            "relay": numbers(self.relay_pool),
            "relay_link": numbers(self.relay_link),
            "relay_threshold_s": self.relay_threshold_s,
            "extend": vars(self.extend),
        }
