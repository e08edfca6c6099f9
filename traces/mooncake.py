"""Mooncake's trace: JSONL, one request a line, times in milliseconds.

Format: https://github.com/kvcache-ai/Mooncake, FAST25-release. Rows stand for themselves: the
source does not say which of them belong to one conversation, so each is a session of one turn.
"""

from __future__ import annotations

from pathlib import Path

from harness.errors import ConfigError
from harness.trace import Header, Trace
from traces.builder import TraceBuilder
from traces.source import Row, json_rows, locate_file

FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")

_DIALECT = ("session_id", "delay", "delay_ms")
"""Fields by which other tools turn Mooncake rows into sessions."""


def read(path: Path | str, block_tokens: int = 512) -> Trace:
    """Read a Mooncake file: whole prompts, arrivals as recorded, block ids valid across the file.

    `block_tokens` is the tokens a hash id stands for; the last block of a prompt may be partly
    filled. Raises `TraceError`, and `ConfigError` for blocks of less than a token.
    """
    if block_tokens < 1:
        raise ConfigError(f"trace.block_tokens is {block_tokens}: give 1 or more")
    path = locate_file(path)
    header = Header(
        format="mooncake",
        block_tokens=block_tokens,
        partial_block="ceil",
        id_scope="global",
        time_unit="ms",
        licence="Apache-2.0",
    )
    builder = TraceBuilder(header, ids_field="hash_ids")
    builder.file(path)
    for row in json_rows(path, builder.count):
        _refuse_dialect(row)
        row.expect(FIELDS)
        arrival_s = row.time_s("timestamp", "ms")
        builder.add(
            row.line,
            session=row.line,
            recorded_s=arrival_s,
            arrival_s=arrival_s,
            input_tokens=row.tokens("input_length"),
            output_tokens=row.tokens("output_length"),
            block_ids=row.block_ids("hash_ids"),
            line=row.line,
        )
    return builder.build()


def _refuse_dialect(row: Row) -> None:
    for name in _DIALECT:
        if name in row.values:
            raise row.error(
                "not Mooncake's, but a dialect's in which input_length may be only what a turn "
                "adds to the one before",
                f"give whole prompts in rows of {', '.join(FIELDS)}",
                name,
            )
