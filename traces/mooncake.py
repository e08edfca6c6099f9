"""Mooncake's JSON Lines: one request a line, no sessions.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}

Milliseconds; whole prompts; an id for each 512 tokens, the last one for what is left over; ids
are valid across the file.
"""

from __future__ import annotations

from pathlib import Path

from harness.errors import ConfigError
from harness.trace import Header, Trace
from traces.builder import TraceBuilder
from traces.source import json_rows

_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def read(path: str, block_tokens: int = 512) -> Trace:
    """Each line a session of its own. Raises `TraceError`.

    Rows with fields of other tools' dialects (`session_id`, `delay`) are refused: there
    `input_length` counts only what a turn adds.
    """
    if block_tokens < 1:
        raise ConfigError(f"trace.block_tokens is {block_tokens}: give 1 or more")
    file = Path(path)
    header = Header("mooncake", block_tokens, "ceil", "global", "ms", "Apache-2.0")
    builder = TraceBuilder(header)
    builder.source(file)
    hint = (
        f"this reader knows {', '.join(_FIELDS)}; with others the lengths may mean something else"
    )
    for row in json_rows(file):
        row.only(_FIELDS, hint)
        builder.turn(
            row.line,
            session=row.line,
            recorded_s=row.seconds("timestamp", 1e-3),
            input_tokens=row.count("input_length"),
            output_tokens=row.count("output_length"),
            blocks=row.ids("hash_ids"),
            path=file,
            line=row.line,
        )
    return builder.build()
