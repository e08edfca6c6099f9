"""JSONL of a few plain fields, read in columns: for traces of hundreds of megabytes.

`pyarrow.json` parses 160 MB/s on one core, where `json` and checks a row at a time take 10. It is
looser than `traces.source` and names no line, so this is only for files that have nothing to tell:
anything that a row reader would count, refuse or read otherwise raises `NotPlain`, and the row
reader takes the file from its start. (By way of orjson columns take twice as long.)
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.json
from numpy.typing import NDArray

from harness.interner import Stretches
from harness.trace import Header, Trace
from traces.builder import single_turns
from traces.source import open_bytes

_PIECE_BYTES = 4 << 20
"""What is parsed at a time: 1 to 16 MiB are equally fast."""
_MOST_PIECES = 16
"""A line may be as long as so many; no row is."""

Ints = NDArray[np.int64]


class NotPlain(Exception):
    """A file for the row reader."""


def plain_rows(path: Path, schema: pa.Schema) -> Iterator[pa.Table]:
    """The rows of a JSONL file, plain or gzip, some megabytes at a time.

    Raises `NotPlain` unless every line is one object from brace to brace, with exactly the fields
    of `schema`, each with a value that Arrow reads as its type: no null, no name twice, no blank
    line.
    """
    try:
        for piece in _pieces(path):
            yield _parse(piece, schema)
    except (pa.ArrowException, OSError, EOFError, zlib.error) as error:
        raise NotPlain from error


def _pieces(path: Path) -> Iterator[bytes]:
    """The file in pieces of whole lines."""
    rest = b""
    with closing(open_bytes(path)) as stream:
        while more := stream.read(_PIECE_BYTES):
            whole, newline, tail = more.rpartition(b"\n")
            if newline:
                yield rest + whole + newline
                rest = tail
            else:
                rest += more
            if len(rest) > _MOST_PIECES * _PIECE_BYTES:
                raise NotPlain
    if rest:
        yield rest


def _parse(piece: bytes, schema: pa.Schema) -> pa.Table:
    lines = piece.count(b"\n") + (not piece.endswith(b"\n"))
    # Arrow takes objects however they stand in lines, a NUL for the end, and a null that stands
    # alone for a reason to crash. So every line must begin with a brace and end with its last one.
    if (
        not piece.startswith(b"{")
        or piece.count(b"}\n{") != lines - 1
        or piece.count(b"}") != lines
        or not piece.endswith((b"}", b"}\n"))
        or b"\0" in piece
    ):
        raise NotPlain
    table = pyarrow.json.read_json(
        pa.BufferReader(piece),
        read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(piece)),
        parse_options=pyarrow.json.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior="error"
        ),
    )
    if table.num_rows != lines:
        raise NotPlain
    for column in table.columns:
        flat = column.combine_chunks()
        if flat.null_count or (pa.types.is_list(flat.type) and flat.flatten().null_count):
            raise NotPlain
    return table


def trace_of_columns(
    header: Header,
    path: Path,
    *,
    recorded_s: NDArray[np.float64],
    input_tokens: Ints,
    output_tokens: Ints,
    blocks: Stretches,
) -> Trace:
    """A trace of sessions of one turn, of the rows of one file.

    The same as adding each row to a `TraceBuilder`: sorted by time, ties in the file's order; no
    output becomes one token; a row without input is dropped; each counted under the builder's name.
    Raises `NotPlain` where the builder would complain, and where an id follows two different ids.
    """
    kept = input_tokens > 0
    runs = blocks.numbered()
    if runs is None or not kept.any():
        raise NotPlain
    prompt = np.repeat(np.arange(len(kept)), runs.per_prompt)
    totals = np.bincount(prompt, runs.lengths, len(kept))
    if (totals > header.blocks(input_tokens)).any():
        raise NotPlain
    return single_turns(
        header,
        path,
        recorded_s=recorded_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        runs=runs,
    )
