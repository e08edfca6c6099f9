"""The table at the top of the page: what a run came to, a column a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.result import Run
from reports.units import DASH, number, percent, seconds

_LATENCIES = {
    "TTFT from the scheduled time": "ttft",
    "TTFT from the send": "ttft_sent",
    "Time per output token (TPOT)": "tpot",
    "Longest gap between tokens": "longest_gap",
    "End to end (E2E)": "e2e",
}


@dataclass(frozen=True)
class Cell:
    """A figure as text, with a warning where it should not be trusted."""

    text: str
    warning: str = ""


@dataclass(frozen=True)
class Line:
    """A row of the table. `starts` names the group that begins here, if one does."""

    name: str
    cells: Sequence[Cell]
    starts: str = ""


def lines(runs: Sequence[Run], rows: Sequence[Mapping[str, Any]]) -> list[Line]:
    """`rows` are the runs' whole-run rows of `harness.metrics.SUMMARY`, in the same order."""
    table = [
        Line(
            "Topology", [Cell(str(run.manifest["backend"]["topology"])) for run in runs], "System"
        ),
        Line("Cards by role", [Cell(_cards(run)) for run in runs]),
    ]
    for title, name in _LATENCIES.items():
        table += [
            Line(p.upper(), [_latency(row, name, p) for row in rows], title if p == "p50" else "")
            for p in ("p50", "p90", "p99")
        ]
    throughput = {
        "Requests/s": "requests_per_s",
        "Input tokens/s": "input_tokens_per_s",
        "Output tokens/s": "output_tokens_per_s",
    }
    promised = {run.slo.words for run in runs}
    goodput = {
        "Requests/s": "goodput_requests_per_s",
        "Sessions/s": "goodput_sessions_per_s",
    }
    hits = {"Served, mean": "served_hit_mean", "Ideal, mean": "ideal_hit_mean"}
    for starts, names, tell in (
        ("Throughput", throughput, number),
        (f"Goodput: {'; '.join(sorted(promised))}", goodput, number),
        ("Of requests within the SLO", {"Share": "slo_share"}, percent),
        ("Prefix-hit rate", hits, percent),
    ):
        table += [
            Line(name, [Cell(tell(row[key])) for row in rows], starts if at == 0 else "")
            for at, (name, key) in enumerate(names.items())
        ]
    requests = [
        Line("Answered", [_answered(row) for row in rows], "Requests"),
        Line("Measured", [Cell(f"{row['measured']:,}") for row in rows]),
    ]
    return table + requests


def latency_cells(row: Mapping[str, Any]) -> list[Cell]:
    """TTFT P50, P90 and P99 from the scheduled time, of one row of a summary."""
    return [_latency(row, "ttft", p) for p in ("p50", "p90", "p99")]


def _latency(row: Mapping[str, Any], name: str, percentile: str) -> Cell:
    value_s = row[f"{name}_{percentile}_s"]
    if value_s is None:
        return Cell(DASH)
    if math.isinf(value_s):
        return Cell("inf", "too many failed")
    return Cell(seconds(value_s), "" if row.get(f"{percentile}_supported", True) else "n too small")


def _cards(run: Run) -> str:
    cards = run.manifest["backend"]["cards"]
    return ", ".join(f"{count:g} {role}" for role, count in cards.items()) or "unknown"


def _answered(row: Mapping[str, Any]) -> Cell:
    lost = {name: row[name] for name in ("failed", "cancelled", "unsent") if row[name]}
    warning = ", ".join(f"{count:,} {name}" for name, count in lost.items())
    return Cell(f"{row['ok']:,} of {row['scheduled']:,}", warning)
