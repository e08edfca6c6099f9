"""Reading a Mooncake trace and hits against capacity, beside other packages: CPU of each.

    python3.11 -m venv ~/lens; ~/lens/bin/pip install llmtrafficlens==0.13.4
    python3.11 -m venv ~/aiperf; ~/aiperf/bin/pip install aiperf==0.13.0
    python -m benchmarks.trace_speed --trace conversation_trace.jsonl \
        --peer llmtrafficlens=~/lens/bin/python --peer aiperf=~/aiperf/bin/python

Run it from the root of the repository, on a machine that does nothing else. `--peer` gives a
package's interpreter. All read the same file, in turn, each in a process of its own and without
network. They do not compute the same:

- ours reads strictly (every field of every row, what is odd counted, the file's SHA-256), and
  computes the hits of an LRU cache of each capacity, exactly and in one pass for all of them.
- llmtrafficlens 0.13.4 reads with `json` and checks nothing, then replays an LRU of blocks once for
  each capacity and once more without a bound. From cold, as ours. It gives up the front of a prompt
  before its end, and counts a block as a hit though its front is gone, which no engine does; the
  last block of a prompt counts as full.
- AIPerf's (0.13.0) `analyze-trace` reads with orjson and gives hits of an infinite cache only, with
  lengths' statistics and a count of every prefix. Its hit rate is the mean over requests, of
  blocks.

CPU is user and system time of the work alone, without the imports (0.2 s of ours is pandas, which
pyarrow imports with the first array); memory is the process's peak.
Every side is run once unmeasured; ratios are pair by pair. Median (lowest to highest).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.simulators import spread, table

_OURS = "ours"
_CAPACITIES = 8
"""Capacities of the curve: so many halvings of the trace's distinct blocks."""

_HEAD = """
import json, resource, sys, time
path, block_tokens, capacities = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
def say(**said):
    said["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps(said))
"""
_WORK = {
    _OURS: "strict reading with the file's SHA-256; exact hits at every capacity in one pass",
    "llmtrafficlens": "reading without checks; a replay of an LRU of blocks for each capacity",
    "aiperf": "AIPerf's analyze-trace: hits of an infinite cache only, lengths, prefixes counted",
}
_SIDES = {
    _OURS: """
import numpy as np, pandas
from traces.capacity import capacity_curve
from traces.mooncake import read
began = time.process_time()
trace = read(path, block_tokens)
been_read = time.process_time()
curve = capacity_curve(trace, np.array(capacities, int) if capacities else None)
say(read_s=been_read - began, curve_s=time.process_time() - been_read,
    hits=[*curve.table["hit_share"].to_pylist(), curve.unbounded_hit_share] if capacities else [],
    requests=curve.requests, distinct=curve.distinct_blocks)
""",
    "llmtrafficlens": """
from llmtrafficlens.adapters import read_hashed_jsonl
from llmtrafficlens.metrics import capacity_curve
began = time.process_time()
requests = read_hashed_jsonl(path, block_tokens)
been_read = time.process_time()
tokens = [each * block_tokens for each in capacities]
curve = capacity_curve(requests, block_tokens, tokens, warmup=0.0)
say(read_s=been_read - began, curve_s=time.process_time() - been_read,
    hits=[each["hit_rate"] for each in curve], requests=len(requests))
""",
    "aiperf": """
from aiperf.dataset.synthesis.prefix_analyzer import PrefixAnalyzer
began = time.process_time()
found = PrefixAnalyzer(block_size=block_tokens).analyze_file(path)
say(curve_s=time.process_time() - began, hits=[found.cache_hit_rate],
    requests=found.total_requests)
""",
}


def run(name: str, python: str, trace: Path, block_tokens: int, capacities: list[int]) -> Any:
    """What one side says of the trace, with what it took, CPU s."""
    arguments = [str(trace), str(block_tokens), json.dumps(capacities)]
    done = subprocess.run(
        [str(Path(python).expanduser()), "-c", _HEAD + _SIDES[name], *arguments],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{name}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def show(taken: dict[str, list[Any]], trace: Path, capacities: Sequence[int]) -> None:
    """Print both tables."""
    megabytes = trace.stat().st_size / 1e6
    print(f"{trace.name}: {megabytes:.1f} MB, {taken[_OURS][0]['requests']:,} requests\n")
    head = ["", "read, CPU s", "MB a CPU second", "read / ours", "then hits, CPU s"]
    rows = [[*head, "hits / ours", "all / ours", "peak, GiB"]]
    for name, said in taken.items():
        pairs = list(zip(said, taken[_OURS], strict=True))
        reads = [each["read_s"] for each in said if "read_s" in each]
        alone = bool(reads)  # where reading is timed apart
        rows.append(
            [
                name,
                spread(reads, ".2f") if alone else "with hits",
                spread([megabytes / each for each in reads], ".1f") if alone else "",
                spread([a["read_s"] / b["read_s"] for a, b in pairs], ".1f") if alone else "",
                spread([each["curve_s"] for each in said], ".2f"),
                spread([a["curve_s"] / b["curve_s"] for a, b in pairs], ".1f") if alone else "",
                spread([_all_s(a) / _all_s(b) for a, b in pairs], ".1f"),
                spread([each["peak_gib"] for each in said], ".2f"),
            ]
        )
    print(table(rows), end="\n\n")
    rows = [["hit share", *(f"{each:,} blocks" for each in capacities), "no bound"]]
    for name, said in taken.items():
        hits = said[-1]["hits"]
        shown = [f"{each:.2%}" for each in hits]
        rows.append([name, *[""] * (len(capacities) + 1 - len(hits)), *shown])
    print(table(rows), end="\n\n")
    print("\n".join(f"{name}: {_WORK[name]}" for name in taken))


def _all_s(said: Any) -> float:
    return float(said.get("read_s", 0.0) + said["curve_s"])


def main() -> None:
    """Run them all and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="in Mooncake's format")
    parser.add_argument("--block-tokens", type=int, default=512)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--repeats", type=int, default=5)
    known = parser.parse_args()
    sides = {_OURS: sys.executable} | dict(each.split("=", 1) for each in known.peer)
    if unknown := sides.keys() - _SIDES.keys():
        parser.error(f"no peer {', '.join(unknown)}: they are {', '.join(list(_SIDES)[1:])}")
    distinct = run(_OURS, sys.executable, known.trace, known.block_tokens, [])["distinct"]
    capacities = [max(distinct >> at, 1) for at in reversed(range(_CAPACITIES))]
    taken: dict[str, list[Any]] = {each: [] for each in sides}
    for turn in range(known.repeats + 1):
        for name, python in sides.items():
            said = run(name, python, known.trace, known.block_tokens, capacities)
            print(f"{turn} {name}: {said}", file=sys.stderr)
            if turn:  # the first only had the files read
                taken[name].append(said)
    show(taken, known.trace, capacities)


if __name__ == "__main__":
    main()
