"""The published headline: two figures fitted, the others held out, and how much they hang on what.

    python -m benchmarks.pdd.headline

FITTED: the load, so that TTFT P50 in one data centre is the published one; then the bandwidth of
the WAN, so that the naive P50 is. HELD OUT: every other figure. Prefill is in lock-step without
packing, as the published bathtub needs (eight ranks an instance).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from benchmarks.pdd.study import Case, Outcome, each, everywhere, run, solve, table, triple

IN_DC_P50_S, NAIVE_P50_S = 4.2, 6.7
PUBLISHED = {
    "in_dc": (IN_DC_P50_S, None, None),
    "cross_dc": (NAIVE_P50_S, 18.3, 29.7),
    "cross_dc_drc": (None, None, None),
    "pdd": (None, None, None),
}
SLA_S = 30.0
"""Published: latency never above. Taken as TTFT P99."""
CARDS_A = {"in_dc": 88.0, "pdd": 43 + 32 * 1.2}
"""Cards, those of chip B at 1.2 times the price of A's."""
LINE_CARDS = 0.34
"""The leased line, in cards of A: what the published cost leaves for it."""
LOCK_STEP = (*everywhere("prefill.P.ranks", 8), *everywhere("prefill.P.pack_tail", value=False))


def on_wan(bandwidth_bps: float) -> tuple[str, ...]:
    """Its bandwidth in every topology that has one."""
    return everywhere("link.bandwidth_bps", bandwidth_bps, ("cross_dc", "cross_dc_drc", "pdd"))


def p50_at(rate_per_s: float) -> float:
    """TTFT P50 in one data centre under this load."""
    return run(Case("in_dc", rate_per_s, LOCK_STEP)).ttft_s[0]


def p50_saved(rate_per_s: float, bandwidth_bps: float) -> float:
    """The naive TTFT P50, negated so that it grows with the bandwidth."""
    return -run(Case("cross_dc", rate_per_s, LOCK_STEP + on_wan(bandwidth_bps))).ttft_s[0]


def goodput(case: Case) -> float:
    """The highest offered load, requests/s, at which TTFT P99 is within the SLA."""

    def p99(rate_per_s: float) -> float:
        return run(replace(case, sessions_per_s=rate_per_s)).ttft_s[2]

    rate_per_s = solve(SLA_S, 0.05, 2.0, p99)
    return run(replace(case, sessions_per_s=rate_per_s)).offered_per_s


def row(name: str, found: Outcome) -> list[str]:
    """One line of a table of outcomes."""
    return [
        name,
        f"{found.offered_per_s:.1f}",
        triple(found.ttft_s),
        triple(found.transfer_s, ".2f"),
        f"{found.wan_bps / 1e9:.1f}",
        f"{found.relayed:.1%}",
        f"{found.singular:.1%}",
        f"{found.relay_tokens:.1%}",
        f"{found.longest_gap_s[2]:.2f}",
    ]


HEAD = (
    "", "requests/s", "TTFT P50 / P90 / P99, s", "transfer, s", "on the WAN, Gbit/s", "relayed",
    "singular", "RLD's tokens", "longest gap P99, s",
)  # fmt: skip


def main() -> None:
    """Print every table."""
    rate_per_s = solve(IN_DC_P50_S, 0.05, 2.0, p50_at)
    bandwidth_bps = solve(-NAIVE_P50_S, 1e9, 200e9, partial(p50_saved, rate_per_s))
    system = LOCK_STEP + on_wan(bandwidth_bps)
    print(f"FITTED: {rate_per_s:.3f} sessions/s, WAN {bandwidth_bps / 1e9:.2f} Gbit/s\n")
    cases = [Case(name, rate_per_s, system) for name in PUBLISHED]
    names = [*PUBLISHED]
    print(table(HEAD, map(row, names, each(run, cases))))

    changes = {
        **{f"load x {by}": (rate_per_s * by, system, ()) for by in (0.8, 0.9, 1.1, 1.2)},
        **{
            f"WAN x {by}": (rate_per_s, LOCK_STEP + on_wan(bandwidth_bps * by), ())
            for by in (0.5, 2, 4)
        },
        "edits x 4": (rate_per_s, system, ("trace.shape.edited_share=0.03",)),
        "no edits": (
            rate_per_s, system,
            ("trace.shape.edited_share=0", "trace.shape.second_edited_share=0"),
        ),
        "ranks packed": (rate_per_s, (*system, *everywhere("prefill.P.pack_tail", value=True)), ()),
        "seed 2": (rate_per_s, system, ("seed=2",)),
    }  # fmt: skip
    cases = [
        Case(name, rate, how, shape)
        for rate, how, shape in changes.values()
        for name in ("in_dc", "cross_dc", "pdd")
    ]
    found = [triple(each_one.ttft_s) for each_one in each(run, cases)]
    rows = [[name, *found[3 * at : 3 * at + 3]] for at, name in enumerate(changes)]
    print("\n" + table(("TTFT P50 / P90 / P99, s", "in_dc", "cross_dc", "pdd"), rows))

    per_s = each(goodput, [Case(name, rate_per_s, system) for name in names])
    best = dict(zip(names, per_s, strict=True))
    print("\n" + table(names, [[f"{value:.2f}" for value in per_s]]))
    gain = best["pdd"] / best["in_dc"]
    cost = (CARDS_A["pdd"] + LINE_CARDS) / CARDS_A["in_dc"]
    print(f"\npdd / in_dc: goodput {gain:.3f}, cost {cost:.3f}, BCR {gain / cost:.3f}")


if __name__ == "__main__":
    main()
