"""Replays agent sessions, shrunk to its context, against a stack that `stack.py` has started.

    python tests/live/stack.py up vllm --from DIR -- python tests/live/replay.py

Finds the servers in its environment (RELAYBENCH_*), calls `relaybench run` as anyone would, and
then checks on the records what the run must show: hits served equal to hits wanted within one
block, and counters of P and D that grew by what was sent. Exit code 1 where they do not.
"""
# ruff: noqa: T201 - a command line prints

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

BLOCK_TOKENS = 32
"""Of the engines as `stack.py` starts them."""
TRACE_BLOCK = 2
"""Of the shrunk trace."""


def settings(stack: str, environment: dict[str, str]) -> list[str]:
    """What `relaybench run` is told of this stack."""
    roles = {role: environment[f"RELAYBENCH_{role}"] for role in ("P", "D")}
    pages = {role: environment[f"RELAYBENCH_METRICS_{role}"] for role in ("P", "D")}
    # A frontend of Dynamo has workers with pages of metrics and no API; an engine has both.
    named = {"metrics": pages} if stack == "dynamo" else {"servers": roles}
    return [
        f"backend={stack}",
        f"backend.{stack}.url={environment['RELAYBENCH_URL']}",
        f"backend.{stack}.topology=in_dc",
        *(f"backend.{stack}.{key}={_inline(urls)}" for key, urls in named.items()),
        *([f"backend.dynamo.block_tokens={BLOCK_TOKENS}"] if stack == "dynamo" else []),
        f"transform.within_context.context_tokens={environment['RELAYBENCH_CONTEXT_TOKENS']}",
    ]


def _inline(urls: dict[str, str]) -> str:
    """As Hydra's command line wants a mapping."""
    return "{" + ", ".join(f"{role}: '{url}'" for role, url in urls.items()) + "}"


def run(out: Path, stack: str, sessions: int, speed: float, more: list[str]) -> int:
    """`relaybench run`; returns its exit code."""
    command = [
        *(sys.executable, "-m", "harness", "run", f"out={out}"),
        *("trace=agentic", f"trace.sessions={sessions}", "transform=[shrink,within_context]"),
        *(f"transform.shrink.block_tokens={TRACE_BLOCK}", "pacing=scaled", f"pacing.speed={speed}"),
        *("prompts.first=16", "prompts.count=3900", "timeout_s=120"),
        *settings(stack, dict(os.environ)),
        *more,
    ]
    print(" ".join(command), flush=True)
    return subprocess.run(command, check=False).returncode


def check(path: Path) -> list[str]:
    """What the run directory does not show and should, in words; prints what it does show."""
    manifest: dict[str, Any] = json.loads((path / "run.json").read_text())
    records = pd.read_parquet(path / "records", columns=_COLUMNS)
    good = records[records["status"] == "ok"]
    # A prompt that is cached whole is computed from its last block on, or its last token.
    short = good["ideal_hit_tokens"] - good["served_hit_tokens"]
    details = manifest["backend"]["details"]
    summary = pd.read_parquet(path / "summary.parquet").iloc[0]
    tokens = manifest["fidelity"]["tokens"]
    print(f"requests           {len(records)} sent, {len(good)} ok")
    for name, counts in tokens.items():
        print(f"{name:<6} tokens      " + ", ".join(f"{k} {v:,}" for k, v in counts.items()))
    print(f"hits short by      {short.min():g} to {short.max():g} tokens, mean {short.mean():.1f}")
    print(f"cold start         {details['cold_start']}")
    print(f"PD counters        {details.get('pd_counters')}")
    print(f"routes             {good['route'].value_counts(dropna=False).to_dict()}")
    print(f"stamped by         {good['stamped_by'].value_counts().to_dict()}")
    ttft = (summary[f"ttft_p{p}_s"] for p in (50, 90, 99))
    print("TTFT P50/P90/P99   " + " / ".join(f"{value:.3f}" for value in ttft) + " s")
    print(f"metrics.parquet    {len(pd.read_parquet(path / 'metrics.parquet')):,} rows")
    print(f"valid              {manifest['validity']}")
    print(f"errors             {records['error'].value_counts().to_dict()}")
    faults = {
        "a request was not answered": len(good) < len(records),
        "the run is not valid": not manifest["validity"]["valid"],
        f"hits are short by more than {BLOCK_TOKENS} tokens": short.max() > BLOCK_TOKENS,
        "more hits than an infinite cache could have": short.min() < -TRACE_BLOCK,
        "no hit was reported": not good["served_hit_tokens"].sum(),
        "no counter of P or D": not details.get("pd_counters"),
    }
    return [words for words, true in faults.items() if true]


_COLUMNS = ["status", "error", "route", "stamped_by", "ideal_hit_tokens", "served_hit_tokens"]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--speed", type=float, default=100.0, help="delays are divided by it")
    parser.add_argument("--out", type=Path, help="a new folder; default: a temporary one")
    parser.add_argument("more", nargs="*", help="more settings of relaybench run")
    chosen = parser.parse_args()
    stack = os.environ.get("RELAYBENCH_STACK")
    if stack is None:
        parser.error("no stack is up: call this by `python tests/live/stack.py up ... -- `")
    with tempfile.TemporaryDirectory() as folder:
        out = chosen.out or Path(folder) / "run"
        code = run(out, stack, chosen.sessions, chosen.speed, chosen.more)
        faults = check(out / stack) if (out / stack).exists() else ["there is no run"]
    for words in faults:
        print(f"NOT SHOWN: {words}")
    return code or bool(faults)


if __name__ == "__main__":
    sys.exit(main())
