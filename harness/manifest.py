"""`run.json`: all that must be known to repeat a run or to doubt it. Never a secret.

Secrets belong in the environment (`${oc.env:API_KEY}`), and interpolations are kept as written. One
that was given in the clear all the same is struck out by its name.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from dataclasses import asdict
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from harness.trace import Trace

_DISTRIBUTIONS = ("relaybench", "numpy", "pyarrow", "pandas", "hydra-core", "httpx", "locust")


_SECRET = re.compile(
    r"""(?ix) ( [\w.-]*
        (?: key | token | secret | password | passwd | credentials? | authorization )
        ["']? \s* [:=] \s* ) (?! \s | ["']? \$\{ ) ( "[^"]*" | '[^']*' | [^\s,}\]]+ )"""
)
_STRUCK = "(struck out: give secrets by the environment)"


def without_secrets(text: str) -> str:
    """The same, with the values of names that end in `key`, `token`, `password` ... struck out.

    Numbers and null stay: `per_token: 4444` is no secret.
    """

    def strike(found: re.Match[str]) -> str:
        harmless = re.fullmatch(r"[-+.\deE_]+|null|true|false|\?\?\?", found[2])
        return found[0] if harmless else found[1] + _STRUCK

    return _SECRET.sub(strike, text)


def asked(config: DictConfig) -> dict[str, Any]:
    """What the person asked for, as composed: interpolations are kept, so no secret is read."""
    return {
        "overrides": [without_secrets(each) for each in _overrides()],
        "command": [without_secrets(each) for each in ("relaybench", "run", *sys.argv[1:])],
        "seed": config.seed,
        "pacing": OmegaConf.to_container(config.pacing, resolve=False),
        "timeout_s": config.timeout_s,
    }


def _overrides() -> list[str]:
    """The settings that this job was given, of a sweep with its own values."""
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


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
