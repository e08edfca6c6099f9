"""PDD: Prefill - RelayDecode - MainDecode across two data centres.

After prefill a KV cache takes two roads at once: over RDMA to the relay in the same data centre,
which starts decoding, and over the WAN to the main decode. When the WAN transfer is whole, the
relay hands over the ids of the tokens it has produced; the main decode recomputes their KV in
extended steps and goes on. Requests whose transfer is short go straight to the main decode.

    P-MD      a short transfer, or a relay without room
    P-RLD-MD  both roads; a request that the relay finishes first still sends its KV cache, so
              that the cache there does not fall behind the prefill's
    P-RLD     nothing crosses: singular traffic; or, as a negative control, all that is relayed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isinf
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from adapters.simulator.costs import require
from adapters.simulator.decode import DecodePool, Sequence
from adapters.simulator.disaggregated import Disaggregated
from adapters.simulator.handoff import Handoff
from adapters.simulator.network import Link, Stream
from adapters.simulator.prefill import PrefillCluster, Prompt
from adapters.simulator.routing import Policy
from adapters.simulator.simulator import Job
from adapters.simulator.singular import SingularFilter
from adapters.simulator.site import DecodeSite
from harness.settings import number


class Pdd(Disaggregated):
    """`link` is the WAN, `relay_link` the RDMA inside.

    A request is relayed when its transfer, at the flows of the moment, is expected to take longer
    than `relay_threshold_s`. Where the relay has no room for it, it goes to the main decode
    (`overflow: direct`) or waits for the relay (`wait`). `finish_locally` is the negative control:
    what is relayed is finished there, and nothing of it is sent.
    """

    def __init__(
        self,
        topology: str,
        prefill: Mapping[str, PrefillCluster],
        link: Link,
        decode: Mapping[str, DecodeSite],
        relay: DecodeSite,
        relay_link: Link,
        relay_threshold_s: float,
        handoff: Handoff,
        singular: SingularFilter | None = None,
        overflow: Literal["direct", "wait"] = "direct",
        finish_locally: bool = False,
        prefill_routing: Policy | None = None,
        decode_routing: Policy | None = None,
        overlap: bool = False,
    ) -> None:
        super().__init__(topology, prefill, link, decode, prefill_routing, decode_routing, overlap)
        require(isinstance(relay, DecodeSite), "relay", relay, "a DecodeSite")
        require("RLD" not in self.decode, "decode", list(self.decode), "names other than RLD")
        require(isinstance(relay_link, Link), "relay_link", relay_link, "a Link")
        require(isinstance(handoff, Handoff), "handoff", handoff, "a Handoff")
        require(
            singular is None or isinstance(singular, SingularFilter),
            "singular", singular, "a SingularFilter, or null",
        )  # fmt: skip
        number("relay_threshold_s", relay_threshold_s, least=0)
        require(overflow in ("direct", "wait"), "overflow", overflow, "direct or wait")
        require(isinstance(finish_locally, bool), "finish_locally", finish_locally, "true or false")
        self.relay = relay
        self.relay_link = relay_link
        self.relay_threshold_s = relay_threshold_s
        self.handoff = handoff
        self.singular = singular
        self.overflow = overflow
        self.finish_locally = finish_locally

    def attach(self) -> None:
        """Put every part on the engine, empty and cold."""
        super().attach()
        self.relay_link.attach(self.engine)
        self.relay.attach(self.engine)
        self.handoff.clear()
        if self.singular is not None:
            self.singular.predictor.clear()
        self._relayed = self._overflowed = self._singular = self._sent_late = 0

    # ---- which way

    def progress_of(self, job: Job) -> Callable[[Prompt, int], None] | None:
        """As ever; but the negative control sends nothing ahead."""
        return None if self.finish_locally else super().progress_of(job)

    def prefilled(self, job: Job) -> None:
        """Send to the main decode and, where that will take long, to the relay too."""
        site = self.choose_decode(job)
        transfer_s = self._transfer_s(job)
        job.served.route = f"{job.cluster}-{site}"
        if transfer_s <= self.relay_threshold_s:
            self.send(job)
            return
        if not self._room(job):
            self._overflowed += 1
            self.send(job)
            return
        self._relayed += 1
        if self._stays(job, transfer_s):
            job.served.route = f"{job.cluster}-RLD"
            self._stop_sending(job)
        else:
            job.served.route = f"{job.cluster}-RLD-{site}"
            self.send(job)
        self._send_to_relay(job)

    def _transfer_s(self, job: Job) -> float:
        """How long its KV cache will be on the WAN from now on, at the flows of the moment."""
        size_bytes = self.missing_bytes(job)
        if isinstance(job.flow, Stream):
            return self.link.estimate_rest_s(job.flow, size_bytes - job.flow.sent_bytes)
        return self.link.estimate_s(size_bytes)

    def _room(self, job: Job) -> bool:
        """Take a place for its prompt, if the relay has one or whoever comes may wait for it."""
        return self.overflow == "wait" or self.relay.pool.reserve(job.request.input_tokens)

    def _stays(self, job: Job, transfer_s: float) -> bool:
        """Whether it is to be finished at the relay, with nothing sent."""
        if self.finish_locally:
            return True
        if self.singular is None:
            return False
        token_s = self.relay.pool.step_s
        if isinf(transfer_s) or not self.singular.is_singular(job.request, token_s, transfer_s):
            return False  # in an outage nobody knows how long the transfer would take
        self._singular += 1
        later_s = self.engine.now_s + self.singular.patience * transfer_s
        self.engine.at(later_s, self._send_late, job)
        return True

    def _stop_sending(self, job: Job) -> None:
        """What of its KV cache has been sent ahead is lost, and stands in its record."""
        if isinstance(job.flow, Stream):
            job.lost_bytes = job.flow.sent_bytes
            job.served.transfer_bytes = job.lost_bytes
        self.cut_flow(job)

    def _send_late(self, job: Job) -> None:
        """It was taken for singular, and its answer is still not whole."""
        if job.answer.done():
            return
        self._sent_late += 1
        job.served.route = f"{job.cluster}-RLD-{job.site}"
        self.send(job)
        assert job.served.transfer_bytes is not None  # noqa: S101 - `send` has set it
        job.served.transfer_bytes += job.lost_bytes

    # ---- the relay

    def _send_to_relay(self, job: Job) -> None:
        held = self.relay.cache.look_up(job.request)
        job.served.relay_bytes = self._kv.of(job.request.input_tokens - held)
        job.relay_flow = self.relay_link.send(
            job.served.relay_bytes, lambda: self._begin_relay(job)
        )

    def _begin_relay(self, job: Job) -> None:
        self._unreserve(job)
        self.relay.cache.keep(job.request)
        if job.answer.done() or job.served.transfer_end_s is not None:
            return
        request = job.request
        job.relay = Sequence(
            request.input_tokens,
            request.output_tokens,
            lambda times_s: self._end_relay(job, times_s),
            emitted=job.listener,
        )
        self.relay.pool.join(job.relay)

    def _unreserve(self, job: Job) -> None:
        """The KV cache is at the relay, or will never be: its reservation is over."""
        job.relay_flow = None
        if self.overflow == "direct":
            self.relay.pool.give_up(job.request.input_tokens)

    def _cut_relay_flow(self, job: Job) -> None:
        if job.relay_flow is not None:
            self.relay_link.cancel(job.relay_flow)
            self._unreserve(job)

    def _end_relay(self, job: Job, times_s: NDArray[np.float64]) -> None:
        """The relay was done before the main decode could take over. A transfer goes on."""
        self._left_relay(job, times_s)
        self.relay.cache.keep_answer(job.request, len(times_s))
        if job.catching_up is not None:
            self.pool_of(job).release(job.catching_up, lambda _: None)
            job.catching_up = None
        self.finish(job, times_s)

    def _left_relay(self, job: Job, times_s: NDArray[np.float64]) -> None:
        """Note what the relay has done for it."""
        if job.relay is not None:
            job.served.preemptions = job.relay.preemptions
        job.relay = None
        job.served.relay_tokens = len(times_s)

    # ---- the handoff

    def received(self, job: Job) -> None:
        """The KV cache has crossed: take over from the relay, where it has begun."""
        if job.relay is None:
            self._take_whole(job)
            return
        way = self.handoff.choose(self.relay.pool.filled)
        if way == "catch-up" and self._backlog(job) > self.handoff.rest_tokens:
            job.served.handoff = way
            job.served.handoff_start_s = self.engine.now_s
            self._catch_up(job)
        else:
            job.served.handoff = "one-shot" if way == "catch-up" else way
            self._stop_relay(job)

    def _take_whole(self, job: Job) -> None:
        """The relay had not begun: there is nothing to hand over."""
        job.served.route = f"{job.cluster}-{job.site}"
        self._cut_relay_flow(job)
        self.begin(job, 0)

    def _backlog(self, job: Job) -> int:
        """Tokens that the relay has emitted and the main decode has not computed."""
        assert job.relay is not None  # noqa: S101 - asked only while it decodes there
        return len(self.relay.pool.so_far(job.relay)) - job.handed_over

    def _catch_up(self, job: Job) -> None:
        """Give the main decode the next batch, while the relay goes on."""
        batch = min(self._backlog(job), self.handoff.batch_tokens)
        job.handed_over += batch
        self.engine.at(self.engine.now_s + self.link.rtt_s / 2, self._take_batch, job, batch)

    def _take_batch(self, job: Job, batch: int) -> None:
        if job.answer.done():
            return
        context = job.request.input_tokens + job.handed_over
        job.catching_up = Sequence(
            context, 1, lambda _: self._caught_up(job), extend=batch, silent=True
        )
        self.pool_of(job).join(job.catching_up)

    def _caught_up(self, job: Job) -> None:
        """A batch is computed: another, or the rest."""
        job.catching_up = None
        if job.answer.done():
            return
        if self._backlog(job) > self.handoff.rest_tokens:
            self._catch_up(job)
        else:
            self._stop_relay(job)

    def _stop_relay(self, job: Job) -> None:
        """Let the relay stop at the end of its step, and hand over what is left."""
        assert job.relay is not None  # noqa: S101 - asked only while it decodes there
        self.relay.pool.release(job.relay, lambda times_s: self._hand_over(job, times_s))

    def _hand_over(self, job: Job, times_s: NDArray[np.float64]) -> None:
        """The relay has let go: its tokens, or what is left of them, cross."""
        if job.answer.done():
            job.relay = None
            return
        self._left_relay(job, times_s)
        served, handoff = job.served, self.handoff
        if not len(times_s):
            served.relay_tokens = served.handoff = None
            self._take_whole(job)
            return
        job.emitted_s = times_s
        if served.handoff_start_s is None:
            served.handoff_start_s = self.engine.now_s
        if served.handoff == "kv":
            served.handoff_bytes = self._kv.per_token * len(times_s)
            job.flow = self.link.send(served.handoff_bytes, lambda: self._copied(job))
            return
        served.handoff_bytes = handoff.id_bytes * len(times_s)
        self.engine.at(
            self.engine.now_s + self.link.rtt_s / 2,
            self._go_on, job, len(times_s) - job.handed_over,
        )  # fmt: skip

    def _copied(self, job: Job) -> None:
        """The KV cache of the relay's tokens has crossed: copy it to the device."""
        job.flow = None
        self.engine.at(self.engine.now_s + self.handoff.copy_s, self._go_on, job, 0)

    def _go_on(self, job: Job, extend: int) -> None:
        """Take in what was handed over, and decode the rest."""
        if not job.answer.done():
            self.begin(job, extend)

    # ---- from outside

    def finish(self, job: Job, times_s: NDArray[np.float64]) -> None:
        """The answer is whole."""
        if self.singular is not None:
            self.singular.predictor.learn(job.request, len(times_s))
        super().finish(job, times_s)

    def so_far(self, job: Job) -> NDArray[np.float64]:
        """When its tokens were emitted, at the relay and at the main decode."""
        if job.relay is None:
            return super().so_far(job)
        return self.relay.pool.so_far(job.relay)

    def abandon(self, job: Job) -> None:
        """Free both flows and the places in both batches."""
        super().abandon(job)
        self._cut_relay_flow(job)
        if job.relay is not None:
            self.relay.pool.release(job.relay, lambda _: None)
        if job.catching_up is not None:
            self.pool_of(job).release(job.catching_up, lambda _: None)

    def load(self) -> dict[str, float]:
        """What is under way now."""
        return super().load() | {
            "relay_flows": self.relay_link.flows,
            "relay_running": self.relay.pool.batch,
            "relay_waiting": self.relay.pool.waiting,
        }

    def counters(self) -> dict[str, float]:
        """What was done since the last reset, and what the caches hold."""
        return super().counters() | {
            "relay_sent_bytes_total": self.relay_link.sent_bytes,
            "relay_tokens_total": self.relay.pool.emitted_tokens,
            "relay_preemptions_total": self.relay.pool.preemptions,
            "relayed_total": self._relayed,
            "relay_overflowed_total": self._overflowed,
            "singular_total": self._singular,
            "singular_sent_late_total": self._sent_late,
            "handoff_switches_total": self.handoff.switches,
        }

    def pools(self) -> dict[str, DecodePool]:
        """Every pool by its role."""
        return super().pools() | {"RLD": self.relay.pool}
