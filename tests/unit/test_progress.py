"""A bar on a terminal, plain lines elsewhere; standard output is left alone."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from harness import progress

SCRIPT = (
    "from harness.progress import progress\n"
    "with progress('pdd', 1000) as bar:\n"
    "    for _ in range(1000): bar.advance()\n"
    "print('done')\n"
)


def test_lines_come_at_intervals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("harness.progress.time.monotonic", lambda: now[0])
    with progress.progress("pdd", 1024) as bar:
        for _ in range(1024):
            now[0] += 0.04  # few a second, as on a real server: a line needs no round number
            bar.advance()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "pdd: 251 of 1,024 requests (25%)"
    assert len(lines) == 4


def test_a_terminal_gets_a_bar() -> None:
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], stderr=theirs, stdout=subprocess.PIPE, check=True,
        cwd=Path(__file__).parents[2], env=os.environ | {"TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert done.stdout == b"done\n"
    assert "pdd" in shown
    assert "/1000" in shown
