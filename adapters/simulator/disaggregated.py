"""Prefill here, decode there, one link between: inside a data centre or across two."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from adapters.simulator.decode import DecodePool, Sequence
from adapters.simulator.decode_cache import DecodeCache
from adapters.simulator.network import Link
from adapters.simulator.prefill import PrefillCluster
from adapters.simulator.simulator import Job, Simulator, numbers
from harness.backend import Description


class Disaggregated(Simulator):
    """P -> link -> D. The first token that a client sees is the first that D decodes.

    As in vLLM's disaggregated prefill, in series: TTFT = wait + prefill + transfer + one step.
    """

    def __init__(
        self,
        topology: str,
        prefill: PrefillCluster,
        link: Link,
        decode_pool: DecodePool,
        cache: DecodeCache,
    ) -> None:
        super().__init__(prefill)
        self.topology = topology
        self.link = link
        self.decode_pool = decode_pool
        self.cache = cache

    def attach(self) -> None:
        """Put every part on the engine, empty and cold."""
        super().attach()
        self.link.attach(self.engine)
        self.decode_pool.attach(self.engine)
        self.cache.clear()

    def decode(self, job: Job) -> None:
        """Prefilled: off to D."""
        job.served.route = "P-D"
        self.send(job, self.missing_bytes(job))

    def missing_bytes(self, job: Job) -> float:
        """The part of the prompt's KV cache that the decoding side lacks."""
        job.served.decode_hit_tokens = self.cache.hit_tokens(job.request)
        return self.cache.kv.of(job.request.input_tokens - job.served.decode_hit_tokens)

    def send(self, job: Job, size_bytes: float) -> None:
        """Send it over the link."""
        job.served.transfer_bytes = size_bytes
        job.served.transfer_start_s = self.engine.now_s
        job.flow = self.link.send(size_bytes, lambda: self._arrived(job))

    def _arrived(self, job: Job) -> None:
        job.flow = None
        job.served.transfer_end_s = self.engine.now_s
        self.cache.keep(job.request)
        if not job.answer.done():
            self.received(job)

    def received(self, job: Job) -> None:
        """The whole prompt's KV cache is at the decoding side."""
        request = job.request
        job.sequence = Sequence(
            request.input_tokens,
            request.output_tokens,
            lambda times_s: self.finish(job, times_s),
            emitted=job.listener,
        )
        self.decode_pool.join(job.sequence)

    def so_far(self, job: Job) -> NDArray[np.float64]:
        """When its tokens were emitted, as many as there are by now."""
        if job.sequence is None:
            return job.emitted_s
        return np.concatenate((job.emitted_s, self.decode_pool.so_far(job.sequence)))

    def abandon(self, job: Job) -> None:
        """Free the flow and the place in the batch."""
        if job.flow is not None:
            self.link.cancel(job.flow)
        if job.sequence is not None:
            self.decode_pool.release(job.sequence, lambda _: None)

    def load(self) -> dict[str, float]:
        """What is under way now."""
        return super().load() | {
            "link_flows": self.link.flows,
            "decode_running": self.decode_pool.batch,
            "decode_waiting": self.decode_pool.waiting,
        }

    def counters(self) -> dict[str, float]:
        """What was done since the last reset, and what the caches hold."""
        return super().counters() | {
            "link_sent_bytes_total": self.link.sent_bytes,
            "decode_tokens_total": self.decode_pool.emitted_tokens,
            "decode_cached_blocks": self.cache.blocks.held,
            "decode_evicted_blocks_total": self.cache.blocks.evicted,
        }

    def cards(self) -> dict[str, float]:
        """Cards a role."""
        return {"P": self.prefill.cards, "D": self.decode_pool.cards}

    def describe(self) -> Description:
        """What is simulated, down to the coefficients."""
        return Description(
            name="simulator",
            topology=self.topology,
            cards=self.cards(),
            details=self.details(),
        )

    def details(self) -> dict[str, object]:
        """The numbers that decide what comes out."""
        return {
            "prefill": numbers(self.prefill),
            "decode": numbers(self.decode_pool),
            "link": numbers(self.link),
            "cache": numbers(self.cache),
        }
