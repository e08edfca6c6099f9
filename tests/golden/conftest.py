"""Published traces, where this machine has them beside the checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.trace import Trace
from traces import kv_cache_tester, mooncake

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"


@pytest.fixture(scope="session")
def conversation() -> Trace:
    """Mooncake's conversation trace, whole."""
    path = SHARED / "mooncake" / "conversation_trace.jsonl"
    if not path.exists():
        pytest.skip("../shared is absent: no published traces to compare with")
    return mooncake.read(str(path))


@pytest.fixture(scope="session")
def real_sessions(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """179 coding-agent sessions, unpacked into their published form."""
    folder = SHARED / "kv-cache-tester"
    if not folder.exists():
        pytest.skip("../shared is absent: no published traces to compare with")
    out = tmp_path_factory.mktemp("sessions")
    packed = folder / "agentic_mix_le50turns_le128k.compact.jsonl.gz"
    subprocess.run([sys.executable, folder / "unpack.py", packed, out], check=True)
    return kv_cache_tester.read(str(out))


@pytest.fixture(scope="session")
def with_subagents() -> Trace:
    """One published session with four sub-agents."""
    path = SHARED / "kv-cache-tester" / "raw_samples" / "trace_0277.json"
    if not path.exists():
        pytest.skip("../shared is absent: no published traces to compare with")
    return kv_cache_tester.read(str(path))
