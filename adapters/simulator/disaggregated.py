"""Prefill here, decode there, one link between: inside a data centre or across two."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from adapters.simulator.costs import require
from adapters.simulator.decode import DecodePool, Sequence
from adapters.simulator.network import Link, Stream
from adapters.simulator.prefill import PrefillCluster, Prompt
from adapters.simulator.routing import Policy
from adapters.simulator.simulator import Job, Simulator
from adapters.simulator.site import DecodeSite


class Disaggregated(Simulator):
    """P -> link -> D. The first token that a client sees is the first that D decodes.

    As in vLLM's disaggregated prefill, in series: TTFT = wait + prefill + transfer + one step.
    With `overlap` the KV cache of each prefill step crosses while the next is computed.
    """

    def __init__(
        self,
        topology: str,
        prefill: Mapping[str, PrefillCluster],
        link: Link,
        decode: Mapping[str, DecodeSite],
        prefill_routing: Policy | None = None,
        decode_routing: Policy | None = None,
        overlap: bool = False,
    ) -> None:
        super().__init__(topology, prefill, decode, prefill_routing, decode_routing)
        require(isinstance(link, Link), "link", link, "a Link")
        require(isinstance(overlap, bool), "overlap", overlap, "true or false")
        self.link = link
        self._kv = next(iter(self.decode.values())).pool.kv
        self.overlap = overlap

    def attach(self) -> None:
        """Put every part on the engine, empty and cold."""
        super().attach()
        self.link.attach(self.engine)

    def link_of(self, job: Job) -> Link:
        """The link that its KV cache takes to where it is (mainly) decoded."""
        del job
        return self.link

    def pool_of(self, job: Job) -> DecodePool:
        """The pool that (mainly) decodes it."""
        return self.decode[job.site].pool

    # ---- from prefill to decode

    def progress_of(self, job: Job) -> Callable[[Prompt, int], None] | None:
        """With overlap, each step of the prefill sends what it has computed."""
        return (lambda _, done: self._send_part(job, done)) if self.overlap else None

    def prefilled(self, job: Job) -> None:
        """Off to D."""
        self.choose_decode(job)
        job.served.route = f"{job.cluster}-{job.site}"
        self.send(job)

    def missing_tokens(self, job: Job) -> int:
        """The part of the prompt that the decoding site lacks, in tokens. Looked up once."""
        served = job.served
        if served.decode_hit_tokens is None:
            served.decode_hit_tokens = self.decode[job.site].cache.look_up(job.request)
        return job.request.input_tokens - served.decode_hit_tokens

    def missing_bytes(self, job: Job) -> float:
        """The KV bytes of that part, the window state included."""
        return self._kv.of(self.missing_tokens(job))

    def send(self, job: Job) -> None:
        """Send what is missing, or what is left of it to be sent."""
        served = job.served
        size_bytes = self.missing_bytes(job)
        if isinstance(job.flow, Stream):
            job.flow.add(size_bytes - job.flow.added_bytes)
            job.flow.close()
        else:
            served.transfer_start_s = self.engine.now_s
            job.flow = self.link_of(job).send(size_bytes, lambda: self._arrived(job))
        served.transfer_bytes = size_bytes

    def _send_part(self, job: Job, done: int) -> None:
        """The KV cache of the first `done` tokens is computed, and not yet of all."""
        if done >= job.request.input_tokens:
            return
        if job.flow is None:
            self.choose_decode(job)
            job.served.transfer_start_s = self.engine.now_s
            job.flow = self.link_of(job).stream(lambda: self._arrived(job))
        assert isinstance(job.flow, Stream)  # noqa: S101 - nothing else is sent before the end
        missing = self.missing_tokens(job)
        there = job.request.input_tokens - missing
        size_bytes = self._kv.per_token * max(0, done - there)
        if size_bytes > job.flow.added_bytes:
            job.flow.add(size_bytes - job.flow.added_bytes)

    def cut_flow(self, job: Job) -> None:
        """Send no more of it."""
        if isinstance(job.flow, Stream):
            job.flow.cancel()
        elif job.flow is not None:
            self.link_of(job).cancel(job.flow)
        job.flow = None

    def _arrived(self, job: Job) -> None:
        job.flow = None
        job.served.transfer_end_s = self.engine.now_s
        self.decode[job.site].cache.keep(job.request)
        if not job.answer.done():
            self.received(job)

    def received(self, job: Job) -> None:
        """The whole prompt's KV cache is at the decoding site."""
        self.begin(job, 0)

    def begin(self, job: Job, extend: int) -> None:
        """Decode what is left of the answer, after the `extend` tokens that are to be taken in."""
        request, emitted = job.request, len(job.emitted_s)

        def finished(times_s: NDArray[np.float64]) -> None:
            sequence, served = job.sequence, job.served
            assert sequence is not None  # noqa: S101 - it is what has finished
            served.decode_start_s = sequence.started_s
            served.preemptions = (served.preemptions or 0) + sequence.preemptions
            if emitted:
                served.handoff_s = float(times_s[0])
                times_s = np.concatenate((job.emitted_s, times_s))
            self.decode[job.site].cache.keep_answer(request, len(times_s))
            self.finish(job, times_s)

        job.sequence = Sequence(
            request.input_tokens + emitted,
            request.output_tokens - emitted,
            finished,
            extend,
            job.listener,
        )
        self.pool_of(job).join(job.sequence)

    def so_far(self, job: Job) -> NDArray[np.float64]:
        """When its tokens were emitted, as many as there are by now."""
        if job.sequence is None:
            return job.emitted_s
        return np.concatenate((job.emitted_s, self.pool_of(job).so_far(job.sequence)))

    def abandon(self, job: Job) -> None:
        """Free the flow and the place in the batch."""
        self.cut_flow(job)
        if job.sequence is not None:
            self.pool_of(job).release(job.sequence, lambda _: None)

    def load(self) -> dict[str, float]:
        """What is under way now."""
        return super().load() | {"link_flows": self.link.flows}

    def counters(self) -> dict[str, float]:
        """What was done since the last reset, and what the caches hold."""
        return super().counters() | {"link_sent_bytes_total": self.link.sent_bytes}
