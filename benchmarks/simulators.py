"""Our simulator beside NVIDIA's DynoSim: the same trace, the same cards, what each costs in CPU.

    python3.11 -m venv ~/dynosim
    ~/dynosim/bin/pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1 typing-extensions
    python -m benchmarks.simulators --peer ~/dynosim/bin/python --trace conversation_trace.jsonl

Run it from the root of the repository, on a machine that does nothing else. `--peer` is an
interpreter that has `dynamo.replay`, which is DynoSim (AISimulate's engine, in Rust); with its
dependencies `ai-dynamo` does not install where the `aisimulate` wheel cannot be had, and a replay
needs none of them. The trace is one in Mooncake's format, which both read. Further arguments are
overrides of `relaybench run`: of the model and chip A for both, all others for ours alone.

Ours is `benchmarks.replay_speed --whole-only`: `in_dc`, every record written, with each token's
time. DynoSim is given the same deployment: prefill and decode apart, as many instances of 8 cards,
the same steps (our chip's, as the table that it interpolates), the same caches and bandwidth, and a
line written a request. It has no place for a prefill step's attention to what is cached, a link's
set-up time (20 ms in ours) and a hybrid model's fixed state. It runs twice, since no policy of its
is ours: dealt round robin, each instance's cache its own, and with its KV router. Ours has one
store for all of prefill, so nothing to route. What is modelled is not the same: DynoSim makes every
decode step an event and its blocks are real; ours jumps from one change of the batch to the next.

CPU is user and system time of the whole process with all it started and waited for. `start-up` is
that of the same command on the first request alone; requests a second are of what is left. Every
command is run once unmeasured, then in turn; ratios are pair by pair. Median (lowest to highest).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from adapters.simulator.costs import Chip
from benchmarks.replay_speed import replay
from harness.metrics import nearest_rank
from harness.plugins import build
from harness.record import Record
from harness.run import jobs, load_trace

_BLOCK_TOKENS = 512
_CHUNK_TOKENS = 16_384
_PREFILL, _DECODE = 5, 6
"""Instances of 8 cards."""
_PREFILL_CACHE_BYTES, _DECODE_KV_BYTES = 4.0e12, 0.3e12
"""An instance."""
_LINK_GB_PER_S = 50.0

_PEER = """
import json, sys
from dynamo.replay import run_trace_replay
trace, options = sys.argv[1], json.loads(sys.argv[2])
report = run_trace_replay(trace, **options)
print(json.dumps(report.summary))
"""
_ROUTERS = {"DynoSim, round robin": "round_robin", "DynoSim, KV router": "kv_router"}
_OURS = "ours"


@dataclass(frozen=True)
class Cost:
    """What one command took, s."""

    cpu_s: float
    wall_s: float


@dataclass(frozen=True)
class Outcome:
    """What one simulator says of the trace."""

    requests: int
    tokens: int
    hit_share: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float


@dataclass(frozen=True)
class Side:
    """A simulator's command on the whole trace and on its first request."""

    whole: list[str]
    first: list[str]


def measured(command: Sequence[str]) -> tuple[Cost, str]:
    """Run a command to its end. Also what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began_s = time.monotonic()
    done = subprocess.run(
        command,
        env=os.environ | {"DYN_LOG": "error"},  # its own default logs a line a request
        check=False,
        capture_output=True,
        text=True,
    )
    wall_s = time.monotonic() - began_s
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(cpu_s, wall_s), done.stdout


def lay_costs(chip: Chip, path: Path) -> None:
    """Our chip as DynoSim's table: a prefill step by new tokens, a decode step by context.

    Decode has two axes, the context of the batch and of a sequence; their ratio is the batch.
    """
    tokens = np.unique(np.geomspace(1, 2**20, 400).round())
    contexts = np.unique(np.geomspace(1, 2**20, 80).round())
    total = np.unique(np.geomspace(1, 2**27, 160).round())
    decode_s = [
        [chip.decode(max(held / each, 1.0), held)[0] for each in contexts] for held in total
    ]
    np.savez(
        path,
        prefill_isl=tokens,
        prefill_ttft_ms=1e3 * np.array([chip.prefill_s([(int(new), 0)]) for new in tokens]),
        decode_active_kv_tokens=total,
        decode_context_length=contexts,
        decode_itl=1e3 * np.array(decode_s),
    )


def peer_options(config: DictConfig, folder: Path, router: str) -> dict[str, Any]:
    """What DynoSim is asked to simulate."""
    costs = folder / "costs.npz"
    lay_costs(build(config, "chip_a"), costs)
    kv_bytes = config.model.kv.per_token
    per_block = kv_bytes * _BLOCK_TOKENS
    engine = {
        "block_size": _BLOCK_TOKENS,
        "timing_model": {
            "type": "external",
            "provider": "dynamo_profile",
            "config": {"path": str(costs)},
        },
        "max_num_seqs": 1_000_000,  # memory decides, as with ours
        "max_num_batched_tokens": _CHUNK_TOKENS,
        "kv_transfer_bytes_per_token": kv_bytes,
        "kv_transfer_bandwidth": _LINK_GB_PER_S,
    }
    roles = {"prefill": _PREFILL_CACHE_BYTES, "decode": _DECODE_KV_BYTES}
    options: dict[str, Any] = {
        f"{role}_engine_args": {
            "engine": engine | {"worker_type": role, "num_gpu_blocks": int(held / per_block)}
        }
        for role, held in roles.items()
    }
    return options | {
        "num_prefill_workers": _PREFILL,
        "num_decode_workers": _DECODE,
        "trace_block_size": _BLOCK_TOKENS,
        "router_mode": router,
        "report_jsonl_path": str(folder / "requests.jsonl"),
    }


def sides(
    peer: str, config: DictConfig, trace: Path, first: Path, folder: Path, overrides: Sequence[str]
) -> dict[str, Side]:
    """Every command."""
    ours = [sys.executable, "-m", "benchmarks.replay_speed", "--whole-only", *overrides]
    found = {_OURS: Side(*([*ours, *asked(path)] for path in (trace, first)))}
    for name, router in _ROUTERS.items():
        options = json.dumps(peer_options(config, folder, router))
        found[name] = Side(*([peer, "-c", _PEER, str(path), options] for path in (trace, first)))
    return found


def asked(trace: Path) -> list[str]:
    """The overrides that are not the caller's to choose."""
    return ["trace=mooncake", f"trace.path={trace}", "backend=[in_dc]"]


def our_outcome(config: DictConfig) -> Outcome:
    """Ours, once more and in this process, for what it says."""
    trace = load_trace(config)
    [job] = jobs(config, trace, Path("unused"))
    records: list[Record] = []
    replay(job, job.backend, records.append)
    done = [row for row in records if row.status == "ok"]
    tokens = [row.served_output_tokens or 0 for row in done]
    ttft_s = np.array([_span(row.sent_s, row.first_token_s) for row in done])
    spans_s = [_span(row.first_token_s, row.last_token_s) for row in done]
    tpot_s = [each / (n - 1) for each, n in zip(spans_s, tokens, strict=True) if n > 1]
    return Outcome(
        requests=len(done),
        tokens=sum(tokens),
        hit_share=sum(row.served_hit_tokens or 0 for row in done)
        / sum(row.input_tokens for row in done),
        ttft_p50_s=nearest_rank(ttft_s, 0.5),
        ttft_p99_s=nearest_rank(ttft_s, 0.99),
        tpot_p50_s=nearest_rank(np.array(tpot_s), 0.5),
    )


def _span(start_s: float | None, end_s: float | None) -> float:
    return math.nan if start_s is None or end_s is None else end_s - start_s


def peer_outcome(printed: str) -> Outcome:
    """Of DynoSim's summary, the last line that it printed."""
    summary = json.loads(printed.splitlines()[-1])
    return Outcome(
        requests=summary["completed_requests"],
        tokens=summary["total_output_tokens"],
        hit_share=summary["prefix_cache_reused_ratio"],
        ttft_p50_s=summary["median_ttft_ms"] / 1e3,
        ttft_p99_s=summary["p99_ttft_ms"] / 1e3,
        tpot_p50_s=summary["median_tpot_ms"] / 1e3,
    )


def spread(values: Sequence[float], shown: str) -> str:
    """Median (lowest to highest)."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:{shown}} ({low:{shown}} to {high:{shown}})"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown; the first row is the head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show(costs: Mapping[str, Sequence[tuple[Cost, Cost]]], outcomes: Mapping[str, Outcome]) -> None:
    """Print both tables."""
    ours = costs[_OURS]
    head = ["", "CPU, s", "wall, s", "start-up, CPU s", "requests a CPU second", "CPU / ours"]
    rows = [[*head, "beyond start-up / ours"]]
    for name, pairs in costs.items():
        requests = outcomes[name].requests
        beyond = [whole.cpu_s - first.cpu_s for whole, first in pairs]
        ours_beyond = [whole.cpu_s - first.cpu_s for whole, first in ours]
        against = [pair[0].cpu_s / own[0].cpu_s for pair, own in zip(pairs, ours, strict=True)]
        against_beyond = [a / b for a, b in zip(beyond, ours_beyond, strict=True)]
        rows.append(
            [
                name,
                spread([whole.cpu_s for whole, _ in pairs], ".2f"),
                spread([whole.wall_s for whole, _ in pairs], ".2f"),
                spread([first.cpu_s for _, first in pairs], ".2f"),
                spread([requests / each for each in beyond], ",.0f"),
                spread(against, ".2f"),
                spread(against_beyond, ".2f"),
            ]
        )
    print(table(rows), end="\n\n")
    rows = [["", "answered", "tokens", "hits", "TTFT P50, s", "TTFT P99, s", "TPOT P50, ms"]]
    for name, said in outcomes.items():
        ttft = [f"{said.ttft_p50_s:.2f}", f"{said.ttft_p99_s:.2f}"]
        counts = [f"{said.requests:,}", f"{said.tokens:,}", f"{said.hit_share:.1%}"]
        rows.append([name, *counts, *ttft, f"{1e3 * said.tpot_p50_s:.1f}"])
    print(table(rows))


def version(peer: str) -> str:
    """What is installed of DynoSim."""
    ask = "import importlib.metadata as m; print(m.version('ai-dynamo'))"
    answer = subprocess.run([peer, "-c", ask], capture_output=True, text=True, check=True)
    return answer.stdout.strip()


def main() -> None:
    """Run them all and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", required=True, help="an interpreter that has dynamo.replay")
    parser.add_argument("--trace", type=Path, required=True, help="in Mooncake's format")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, help="only the first so many; default: all")
    known, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = known.trace.read_text(encoding="utf-8").splitlines(keepends=True)
        trace, first = folder / "trace.jsonl", folder / "first.jsonl"
        trace.write_text("".join(rows[: known.requests]), encoding="utf-8")
        first.write_text(rows[0], encoding="utf-8")
        with initialize_config_module("conf", version_base="1.3"):
            config = compose("run", [*overrides, *asked(trace)])
        todo = sides(known.peer, config, trace, first, folder, overrides)
        print(f"DynoSim of ai-dynamo {version(known.peer)}, Python {sys.version.split()[0]}")
        costs: dict[str, list[tuple[Cost, Cost]]] = {each: [] for each in todo}
        outcomes = {_OURS: our_outcome(config)}
        for turn in range(known.repeats + 1):
            for each, side in todo.items():
                start_up, _ = measured(side.first)
                whole, printed = measured(side.whole)
                print(f"{turn} {each}: {whole}, start-up {start_up}", file=sys.stderr)
                if each != _OURS:
                    outcomes[each] = peer_outcome(printed)
                if turn:  # the first only had the files read
                    costs[each].append((whole, start_up))
    show(costs, outcomes)


if __name__ == "__main__":
    main()
