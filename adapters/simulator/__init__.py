"""A serving system in virtual time: prefill, decode, caches, links and their topologies.

    request -> PrefillCluster -> Link -> DecodePool          Disaggregated: in_dc, cross_dc
                              -> Link (WAN)  -> DecodePool   Pdd: the main decode
                              -> Link (RDMA) -> DecodePool        the relay

A first version of the right shape; `docs/simulator.md` says what is modelled and what is not.
"""

from adapters.simulator.costs import DecodeCost, KvBytes, PrefillCost
from adapters.simulator.decode import DecodePool
from adapters.simulator.decode_cache import DecodeCache
from adapters.simulator.disaggregated import Disaggregated
from adapters.simulator.network import Link
from adapters.simulator.prefill import PrefillCluster
from adapters.simulator.relay import Pdd

__all__ = [
    "DecodeCache",
    "DecodeCost",
    "DecodePool",
    "Disaggregated",
    "KvBytes",
    "Link",
    "Pdd",
    "PrefillCluster",
    "PrefillCost",
]
