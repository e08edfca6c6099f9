"""A small trace, built by hand, for whoever needs one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.trace import Header, Trace, build_table

HEADER = Header("hand", 64, "floor", "global", "s", "none")

MakeTrace = Callable[..., Trace]


@pytest.fixture
def make_trace() -> MakeTrace:
    """`make_trace(column=values, ...)`: two sessions, of three turns and one, unless told."""

    def make(header: Header = HEADER, **columns: Any) -> Trace:
        rows: dict[str, Any] = {
            "session": [0, 1, 0, 0],
            "turn_index": [0, 0, 1, 2],
            "parents": [[], [], [0], [2]],
            "recorded_s": [0.0, 0.5, 2.0, 5.0],
            "arrival_s": [0.0, 0.5, None, None],
            "delay_s": [None, None, 1.0, 2.0],
            "input_tokens": [128, 128, 256, 320],
            "output_tokens": [3, 3, 3, 3],
            "run_starts": [[0], [10], [0], [0]],
            "run_lengths": [[2], [2], [4], [5]],
            "agent": ["main"] * 4,
        }
        return Trace(build_table(rows | columns), header)

    return make
