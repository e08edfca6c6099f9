"""Prefill as a service: long prompts are prefilled in another data centre, all else at home.

The home cluster prefills and decodes; a far cluster of stronger chips prefills what would take it
longest, and sends the KV cache over the WAN. As in arXiv 2604.15039 a prompt goes far if more than
`threshold_tokens` of it are new to the home cluster's cache.

    P-D    prefilled at home
    F-D    prefilled far away, in a cluster named F
"""

from __future__ import annotations

from collections.abc import Mapping

from adapters.simulator.costs import require
from adapters.simulator.disaggregated import Disaggregated
from adapters.simulator.network import Link
from adapters.simulator.prefill import PrefillCluster
from adapters.simulator.routing import Policy
from adapters.simulator.simulator import Job, chosen
from adapters.simulator.site import DecodeSite
from harness.backend import Request
from harness.settings import number

_HOME = "P"


class PrefillService(Disaggregated):
    """`prefill` are the far clusters, from which `link` leads home; `home` prefills there, as P.

    What has come over the link is in the home cluster's cache, too: prefill and decode share one
    store there. `prefill_routing` chooses among the far clusters where there are several.
    """

    def __init__(
        self,
        topology: str,
        prefill: Mapping[str, PrefillCluster],
        home: PrefillCluster,
        threshold_tokens: float,
        home_link: Link,
        link: Link,
        decode: Mapping[str, DecodeSite],
        prefill_routing: Policy | None = None,
        decode_routing: Policy | None = None,
        overlap: bool = False,
    ) -> None:
        super().__init__(topology, prefill, link, decode, prefill_routing, decode_routing, overlap)
        require(isinstance(home, PrefillCluster), "home", home, "a PrefillCluster")
        require(_HOME not in prefill, "prefill", list(prefill), f"names other than {_HOME}")
        number("threshold_tokens", threshold_tokens, least=0)
        require(isinstance(home_link, Link), "home_link", home_link, "a Link")
        self.home = home
        self.threshold_tokens = threshold_tokens
        self.home_link = home_link
        self._far = self.prefill
        self.prefill = {_HOME: home} | self._far

    def attach(self) -> None:
        """Put every part on the engine, empty and cold."""
        super().attach()
        self.home_link.attach(self.engine)

    def choose_prefill(self, request: Request) -> str:
        """At home, unless too much of it is new."""
        new_tokens = request.input_tokens - self.home.held_tokens(request)
        if new_tokens <= self.threshold_tokens:
            return _HOME
        return chosen(request, self._far, self.prefill_routing)

    def link_of(self, job: Job) -> Link:
        """The link that its KV cache takes to where it is decoded."""
        return self.home_link if job.cluster == _HOME else self.link

    def received(self, job: Job) -> None:
        """The whole prompt's KV cache is at home."""
        if job.cluster != _HOME:
            self.home.learn(job.request)
        super().received(job)

    def load(self) -> dict[str, float]:
        """What is under way now."""
        return super().load() | {"home_flows": self.home_link.flows}

    def counters(self) -> dict[str, float]:
        """What was done since the last reset, and what the caches hold."""
        return super().counters() | {"home_sent_bytes_total": self.home_link.sent_bytes}
