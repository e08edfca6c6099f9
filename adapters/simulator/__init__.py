"""A serving system in virtual time: prefill, links, decode, and PDD's relay between.

    request -> PrefillCluster -> Link -> DecodeSite            Disaggregated
                              -> Link (WAN)  -> DecodeSite     Pdd: the main decode
                              -> Link (RDMA) -> DecodeSite          the relay
            -> near or far PrefillCluster -> DecodeSite        PrefillService

The parts are named here for `conf/backend`; `docs/simulator.md` has their equations.
"""

from adapters.simulator.cache import KvCache
from adapters.simulator.costs import Architecture, Fitted, KvBytes, Roofline
from adapters.simulator.decode import DecodePool
from adapters.simulator.disaggregated import Disaggregated
from adapters.simulator.handoff import Handoff
from adapters.simulator.network import Link
from adapters.simulator.prefill import PrefillCluster
from adapters.simulator.relay import Pdd
from adapters.simulator.routing import CacheAware, LeastLoad, Sticky
from adapters.simulator.service import PrefillService
from adapters.simulator.singular import OracleOutputs, RecentOutputs, SingularFilter
from adapters.simulator.site import DecodeSite

__all__ = [
    "Architecture",
    "CacheAware",
    "DecodePool",
    "DecodeSite",
    "Disaggregated",
    "Fitted",
    "Handoff",
    "KvBytes",
    "KvCache",
    "LeastLoad",
    "Link",
    "OracleOutputs",
    "Pdd",
    "PrefillCluster",
    "PrefillService",
    "RecentOutputs",
    "Roofline",
    "SingularFilter",
    "Sticky",
]
