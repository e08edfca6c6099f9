"""Whole runs against a server that answers byte by byte, from the command line."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

from tests.unit import raw_server as raw


def command(out: Path, url: str, *more: str) -> list[str]:
    settings = ["backend=openai", f"backend.openai.url={url}", "trace.sessions=3", f"out={out}"]
    return [sys.executable, "-m", "harness", "run", *settings, *more]


def test_a_trace_that_the_context_has_no_room_for_is_refused_before_a_request(
    tmp_path: Path,
) -> None:
    asked: list[bytes] = []

    async def answer(writer: asyncio.StreamWriter) -> None:
        asked.append(b"")
        await raw.good(writer)

    with raw.in_thread(answer) as url:
        done = subprocess.run(
            command(tmp_path / "run", url),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2, done.stderr
    assert "than the 4,096 tokens of openai's context" in done.stderr
    assert "transform.within_context.context_tokens=4096" in done.stderr
    assert "no request was sent" in done.stdout
    assert len(asked) <= 4  # the probes of the cold start


def test_a_run_that_is_told_to_end_keeps_what_it_has(tmp_path: Path) -> None:
    """As a scheduler ends it: SIGTERM."""
    with raw.in_thread(raw.good) as url:
        running = subprocess.Popen(
            command(tmp_path / "run", url, "transform=[shrink]"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        records = tmp_path / "run" / "openai" / "records"
        deadline_s = time.monotonic() + 30
        while not list(records.glob("*.arrows")) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        running.terminate()
        said, _ = running.communicate(timeout=30)
    assert running.returncode == 130, said
    assert "interrupted" in said
    assert list(records.glob("*.parquet"))
