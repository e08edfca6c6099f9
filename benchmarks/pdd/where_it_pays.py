"""Where PDD pays, and where it does not: the bandwidth of the WAN against the share of low hits.

    python -m benchmarks.pdd.where_it_pays

Each cell holds TTFT P99 of PDD over that of decode across the WAN without a relay, but with the
same decode-side cache: below 1 the relay pays. Then the same against one data centre. Prefill is
packed here, so that the WAN and not the queue decides.
"""

from __future__ import annotations

from benchmarks.pdd.headline import on_wan
from benchmarks.pdd.study import Case, each, run, table

GBPS = (0.5, 1, 2, 5, 20)
EDITS = (0.0, 0.0075, 0.03, 0.1, 0.2)
"""Share of turns that keep of their history only tools and system prompt."""
RATE_PER_S = 0.3


def main() -> None:
    """Print both maps."""
    cases = [
        Case(name, RATE_PER_S, on_wan(gbps * 1e9), (f"trace.shape.edited_share={edits}",), 800)
        for edits in EDITS
        for gbps in GBPS
        for name in ("in_dc", "cross_dc_drc", "pdd")
    ]
    found = iter(each(run, cases))
    against_drc, against_in_dc = [], []
    for _ in EDITS:
        line = [(next(found), next(found), next(found)) for _ in GBPS]
        low = f"{line[0][2].low_hits:.1%}"
        against_drc.append([low, *(f"{pdd.ttft_s[2] / drc.ttft_s[2]:.2f}" for _, drc, pdd in line)])
        against_in_dc.append(
            [low, *(f"{pdd.ttft_s[2] / near.ttft_s[2]:.2f}" for near, _, pdd in line)]
        )
    head = ("requests under 90% hit", *(f"{gbps:g} Gbit/s" for gbps in GBPS))
    print("TTFT P99, PDD over decode across the WAN with the same cache\n")
    print(table(head, against_drc))
    print("\nTTFT P99, PDD over one data centre\n")
    print(table(head, against_in_dc))


if __name__ == "__main__":
    main()
