"""Whether a run measured what was asked: wanted against sent against served; and the client itself.

Every check is on the records, so that a stranger can repeat it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.metrics import column, nearest_rank, status_is
from harness.record import OK, UNSENT
from harness.settings import number

COLUMNS = [
    "input_tokens",
    "output_tokens",
    "ideal_hit_tokens",
    "scheduled_s",
    "sent_s",
    "first_token_s",
    "stamped_by",
    "shared_reads",
    "loop_lag_s",
    "sent_input_tokens",
    "served_input_tokens",
    "served_output_tokens",
    "served_hit_tokens",
    "status",
]
"""What is read of a record."""

_SEND_LAG_S = 0.010
_SEND_LAG_SHARE = 0.05
_LOOP_LAG_S = 0.010
_FEWEST = 5
RULE = (
    f"the client was the bottleneck if more than 1 in 100 requests, and {_FEWEST} at least, were "
    f"sent more than {_SEND_LAG_S * 1e3:g} ms and more than {_SEND_LAG_SHARE:.0%} of the median "
    f"TTFT late; or if its loop was more than {_LOOP_LAG_S * 1e3:g} ms late for as many of those "
    "that it stamped by itself and not by the kernel"
)


@dataclass(frozen=True)
class Tolerance:
    """How far an answered request may be off before the run is not valid.

    `input_share`, `output_share`: of the tokens wanted. `hit_tokens`: tokens that the server served
    from its cache beyond, or short of, the ideal; None: any, as a real cache is not infinite.
    `hit_excess_tokens`: tokens beyond the ideal alone. More hits than any cache of this run's
    prompts can have mean that it was warm, or that prompts collide; a template's own tokens mean
    neither. None: any, as where live answers in the history are cached too. `requests_share`: how
    many of the answered requests may be off by more.
    """

    input_share: float = 0.01
    output_share: float = 0.01
    hit_tokens: float | None = None
    hit_excess_tokens: float | None = 256
    requests_share: float = 0.01

    def __post_init__(self) -> None:
        for name in ("input_share", "output_share", "requests_share"):
            number(f"tolerance.{name}", getattr(self, name), least=0)
        for name in ("hit_tokens", "hit_excess_tokens"):
            if getattr(self, name) is not None:
                number(f"tolerance.{name}", getattr(self, name), least=0)


def fidelity(records: pa.Table, tolerance: Tolerance) -> tuple[dict[str, Any], list[str]]:
    """(what was wanted, sent and served in all, reasons why the run is not valid)."""
    good = records.filter(pa.array(status_is(records, OK)))
    wanted = {"input": column(good, "input_tokens"), "output": column(good, "output_tokens")}
    hits = column(good, "ideal_hit_tokens")
    sent = column(good, "sent_input_tokens")
    served = {
        "input": column(good, "served_input_tokens"),
        "output": column(good, "served_output_tokens"),
    }
    served_hits = column(good, "served_hit_tokens")
    off = {
        "sent input": _off(sent, wanted["input"], tolerance.input_share),
        "served input": _off(served["input"], wanted["input"], tolerance.input_share),
        "served output": _off(served["output"], wanted["output"], tolerance.output_share),
    }
    if tolerance.hit_tokens is not None:
        off["served hit"] = int((np.abs(served_hits - hits) > tolerance.hit_tokens).sum())
    if tolerance.hit_excess_tokens is not None:
        excess = tolerance.hit_excess_tokens
        off["impossible hit"] = int((served_hits - hits > excess).sum())
    facts = {
        "tokens": {
            "input": {
                "wanted": _sum(wanted["input"]),
                "sent": _sum(sent),
                "served": _sum(served["input"]),
            },
            "output": {"wanted": _sum(wanted["output"]), "served": _sum(served["output"])},
            "hit": {"wanted": _sum(hits), "served": _sum(served_hits)},
        },
        "off": off,
    }
    limit = tolerance.requests_share * good.num_rows
    reasons = [
        f"{count} of {good.num_rows} answered requests are off in {name} tokens by more than the "
        "tolerance"
        for name, count in off.items()
        if count > limit
    ]
    return facts, reasons


def _off(got: NDArray[np.float64], wanted: NDArray[np.float64], share: float) -> int:
    """How many differ by more than `share`. What the server does not say (NaN) differs by nothing.

    One token more or less is rounding, and never counts.
    """
    return int((np.abs(got - wanted) > np.maximum(share * wanted, 1)).sum())


def _sum(values: NDArray[np.float64]) -> int | None:
    """None where a single one is not known: a sum would be too low."""
    return None if np.isnan(values).any() else int(values.sum())


def client(records: pa.Table, cpu_s: float, lasted_s: float) -> tuple[dict[str, Any], list[str]]:
    """(what is known of the client itself, warnings: by `RULE`)."""
    sent = records.filter(pa.array(~status_is(records, UNSENT)))
    lag_s = column(sent, "sent_s") - column(sent, "scheduled_s")
    loop_s = column(sent, "loop_lag_s")
    by_user = np.array([each == "user" for each in sent.column("stamped_by").to_pylist()], bool)
    ttft_s = column(sent, "first_token_s") - column(sent, "scheduled_s")
    facts: dict[str, Any] = {
        "send_lag_p50_s": _rank(lag_s, 0.5),
        "send_lag_p99_s": _rank(lag_s, 0.99),
        "loop_lag_p50_s": _rank(loop_s, 0.5),
        "loop_lag_p99_s": _rank(loop_s, 0.99),
        "stamped_by_user": int(by_user.sum()),
        "shared_reads": int(column(sent, "shared_reads").sum()),
        "cpu_s": round(cpu_s, 3),
        "cpu_share": round(cpu_s / lasted_s, 3) if lasted_s > 0 else None,
        "rule": RULE,
    }
    warnings = []
    limit_s = max(_SEND_LAG_S, _SEND_LAG_SHARE * (_rank(ttft_s, 0.5) or 0.0))
    if _many(late := int((lag_s > limit_s).sum()), len(lag_s)):
        warnings.append(
            f"the client was the bottleneck: {late} of {len(lag_s)} requests were sent more than "
            f"{limit_s * 1e3:.0f} ms late. Use a quieter machine, fewer requests a second, or more "
            "workers (host=locust)"
        )
    if _many(blind := int((loop_s[by_user] > _LOOP_LAG_S).sum()), int(by_user.sum())):
        warnings.append(
            f"the client was the bottleneck: its loop was more than {_LOOP_LAG_S * 1e3:.0f} ms "
            f"late for {blind} of {int(by_user.sum())} requests whose bytes it stamped by itself"
        )
    return facts, warnings


def _many(count: int, of: int) -> bool:
    """More than one in 100, and more than chance: a single hiccup condemns no run."""
    return count >= _FEWEST and count > of / 100


def _rank(values: NDArray[np.float64], q: float) -> float | None:
    known = values[~np.isnan(values)]
    return nearest_rank(known, q) if len(known) else None
