"""Run directories made by hand, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness import metrics, result
from harness.record import Record


def manifest(name: str, turns: int, **values: Any) -> dict[str, Any]:
    """A whole `run.json` of a valid simulated run; `values` replace top-level keys."""
    return {
        "relaybench": "0.1.0",
        "command": ["relaybench", "run", "seed=7"],
        "seed": 7,
        "pacing": {"_target_": "harness.pacing.Recorded"},
        "timeout_s": None,
        "backend": {
            "name": name,
            "topology": name,
            "cards": {"P": 40, "D": 48.0},
            "details": {"link": {"bandwidth_bps": 2e10, "rtt_s": 0.03}},
        },
        "clock": "virtual",
        "trace": trace(turns=turns),
        "window": {"warmup_s": 0.0, "cooldown_s": 0.0, "steady": None},
        "slo": {"ttft_s": 30.0, "tpot_s": None, "e2e_s": None, "share": 0.99},
        "prices": prices(),
        "counts": None,
        "validity": {"valid": True, "reasons": []},
        "warnings": [],
        "partial": False,
        "started": "2026-12-02T10:00:00+00:00",
        "ended": "2026-12-02T10:00:01+00:00",
        "wall_s": 1.25,
        "versions": {"numpy": "2.0"},
        "host": {"python": "3.11"},
    } | values


def prices(**values: Any) -> dict[str, Any]:
    """A sheet of prices; `values` replace its keys."""
    return {
        "name": "a sheet",
        "currency": "A-card",
        "as_of": "2026-02-28",
        "source": "a test",
        "cards": {"P": 1.0, "D": 1.0, "RLD": 1.0, "MD": 1.2},
        "lines": {"pdd": 0.34, "cross_dc": 0.34},
        "input": 1.0,
        "cached_input": 0.1,
        "output": 4.0,
    } | values


def trace(**values: Any) -> dict[str, Any]:
    """The manifest's account of a trace; `values` replace its keys."""
    return {
        "format": "agentic",
        "block_tokens": 64,
        "partial_block": "floor",
        "id_scope": "file",
        "time_unit": "s",
        "licence": "Apache-2.0 (generated)",
        "session_starts": "recorded",
        "prefix_data": "generated",
        "sources": [],
        "changes": {"output_clamped": 2},
        "parameters": {"sessions": 3},
        "digest": "d" * 64,
        "turns": 10,
        "sessions": 3,
        "ideal_hit_mean": 0.9,
        "ideal_hit_token_weighted": 0.95,
    } | values


def make_run(
    path: Path, records: Iterable[Record], *, summarised: bool = True, **values: Any
) -> result.Run:
    """A run directory at `path`, named after its last part, as the harness leaves it."""
    rows = list(records)
    result.create(path)
    with result.RecordWriter(path) as writer:
        for row in rows:
            writer.append(row)
    result.write_manifest(path, manifest(path.name, len(rows)) | values)
    run = result.Run.open(path)
    if summarised:
        summary = metrics.summarise(run.records(metrics.COLUMNS), run.window, run.name, run.slo)
        result.write_table(summary, path / result.SUMMARY_FILE)
    return run
