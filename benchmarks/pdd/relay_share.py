"""The relay's share of output tokens in the published scene, and what it depends on.

    python -m benchmarks.pdd.relay_share

64K of prompt, 1K of answer, 90% hit, 40 P + 3 RLD + 32 MD; published: 6.2%. Every request is
relayed. The share is the time from the relay's first token to its last, over TPOT, over 1K: so it
grows with what a transfer takes, that is with bytes a token, with load and on a narrow WAN.
"""

from __future__ import annotations

from functools import partial

from benchmarks.pdd.study import Outcome, config, each, outcome, replay, solve, table
from harness.run import load_trace

PUBLISHED = 0.062
REQUESTS = 2000


def scene(rate_per_s: float, gbps: float, kv_bytes: float = 4444.0, way: str = "auto") -> Outcome:
    """Simulate it."""
    trace = load_trace(
        config(
            "trace=constant", f"trace.requests={REQUESTS}", f"trace.requests_per_s={rate_per_s}",
            "trace.input_tokens=65536", "trace.output_tokens=1000", "trace.hits=[0.9]",
        )
    )  # fmt: skip
    system = (
        f"backend.pdd.link.bandwidth_bps={gbps * 1e9}", "backend.pdd.relay_threshold_s=0",
        "backend.pdd.singular=null", f"model.kv.per_token={kv_bytes}",
        f"backend.pdd.handoff.way={way}",
        "backend.pdd.relay.pool.kv_bytes=1e13",  # as many as come: the share is what is asked for
    )  # fmt: skip
    return outcome(replay(trace, "pdd", system))


def share(rate_per_s: float, kv_bytes: float, narrowness: float) -> float:
    """It grows as the link narrows: 100 Gbit/s over `narrowness`."""
    return scene(rate_per_s, 100 / narrowness, kv_bytes).relay_tokens


def line(case: tuple[float, float, float, str]) -> list[str]:
    """One row."""
    rate_per_s, gbps, kv_bytes, way = case
    found = scene(rate_per_s, gbps, kv_bytes, way)
    return [
        f"{rate_per_s:g}", f"{gbps:.1f}", f"{kv_bytes / 1e3:.1f}", way,
        f"{found.transfer_s[0]:.2f} / {found.transfer_s[2]:.2f}", f"{found.relay_tokens:.1%}",
    ]  # fmt: skip


def fitted(kv_bytes: float, rate_per_s: float) -> list[str]:
    """The bandwidth that gives the published share."""
    gbps = 100 / solve(PUBLISHED, 1.0, 200.0, partial(share, rate_per_s, kv_bytes))
    return line((rate_per_s, gbps, kv_bytes, "auto"))


def main() -> None:
    """Print both tables."""
    cases = [
        (rate, gbps, kv_bytes, way)
        for kv_bytes in (4444.0, 50e3)
        for rate, gbps in ((8, 20), (8, 50), (12, 20), (12, 50))
        for way in ("one-shot", "catch-up")
        if rate * 6554 * 8 * kv_bytes < gbps * 1e9  # else the transfers pile up for ever
    ]
    head = (
        "requests/s", "WAN, Gbit/s", "KV, KB a token", "handoff", "transfer P50 / P99, s",
        "RLD's tokens",
    )  # fmt: skip
    print(table(head, each(line, cases)))
    print("\nFITTED: the bandwidth that gives the published 6.2%\n")
    print(table(head, [*each(partial(fitted, 4444.0), [4, 8, 12]), fitted(50e3, 8)]))


if __name__ == "__main__":
    main()
