"""`run.json`: all that must be known to repeat a run or to doubt it. Never a secret."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, OmegaConf

from harness.trace import Trace

_DISTRIBUTIONS = ("relaybench", "numpy", "pyarrow", "pandas", "hydra-core", "httpx", "locust")


def asked(config: DictConfig) -> dict[str, Any]:
    """What the person asked for, as composed: interpolations are kept, so no secret is read."""
    return {
        "command": ["relaybench", *sys.argv[1:]],
        "seed": config.seed,
        "pacing": OmegaConf.to_container(config.pacing, resolve=False),
        "timeout_s": config.timeout_s,
    }


def replayed(trace: Trace) -> dict[str, Any]:
    """The trace: its header, its digest and its ideal hit rates."""
    return asdict(trace.header) | {
        "digest": trace.digest,
        "turns": len(trace),
        "sessions": trace.sessions,
        "ideal_hit_mean": float(trace.ideal_hit_rates.mean()),
        "ideal_hit_token_weighted": trace.ideal_hit_token_weighted,
    }


def where() -> dict[str, Any]:
    """The versions that decide the numbers, and the machine."""
    return {
        "relaybench": importlib.metadata.version("relaybench"),
        "versions": {each: importlib.metadata.version(each) for each in _DISTRIBUTIONS},
        "host": {
            "python": platform.python_version(),
            "system": platform.platform(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
        },
    }
