"""The canonical form on disk: the columns of `harness.trace.SCHEMA`, as Parquet or as JSONL.

What is saved reads back equal, digest and all, so any trace, filtered or generated, can be kept and
replayed as it was.

**Parquet** is for machines: small, and read in one step. The header is JSON in the file's metadata,
under `relaybench.header`.

**JSONL** is for people and for other programs to read, write and mend, plain or as gzip. The first
line is the header, every other a turn, in the order of `recorded_s`:

    {"relaybench": {"format": "mine", "block_tokens": 64, "partial_block": "floor", ...}}
    {"session": 0, "turn_index": 0, "parents": [], "recorded_s": 0.0, "arrival_s": 0.0,
     "input_tokens": 128, "output_tokens": 20, "runs": [[0, 2]], "agent": "main"}
    {"session": 0, "turn_index": 1, "parents": [0], "recorded_s": 4.5, "delay_s": 1.5,
     "input_tokens": 192, "output_tokens": 30, "runs": [[0, 3]], "agent": "main"}

(Each in one line.) The header has the fields of `harness.trace.Header`. Of a turn, `parents` are
rows, counted from 0 after the header; `runs` are [first block id, how many]; a turn without parents
has `arrival_s`, one with parents `delay_s`. What else holds is said in `harness.trace`. Numbers are
written so that they read back bit by bit.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args, get_origin, get_type_hints

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import ConfigError, TraceError
from harness.stream import Stream
from harness.trace import MAX_BLOCK, MAX_TOKENS, SCHEMA, Header, Trace
from traces.faults import require_sound, spared
from traces.source import Row, json_rows, locate_file

_HEADER = b"relaybench.header"
_COLUMNS = f"give {', '.join(SCHEMA.names)}, of the types in harness.trace.SCHEMA"
_PARQUET = b"PAR1"

_FIRST_LINE = "relaybench"
_FIELDS = (
    *("session", "turn_index", "parents", "recorded_s"),
    *("input_tokens", "output_tokens", "runs", "agent"),
)
_GATES = ("arrival_s", "delay_s")
_TURN = re.compile(r"turn ([0-9]+) ")
"""How a fault of a trace names its row."""
_JSON_TYPES = {int: int, str: str, Mapping: dict}
"""What a header's types are in JSON."""
_GROUP_ROWS = 131_072
_ROWS = 16_384
"""How many rows are in memory as Python objects at a time."""


def save(trace: Trace | Stream, path: Path | str) -> int:
    """Write a trace in one step, in place of any file of that name; returns its requests.

    Of a stream, only what it gives at a time is in memory, and what it holds back itself.
    `*.parquet` is Parquet, `*.jsonl` JSONL, `*.jsonl.gz` JSONL as gzip. Raises `ConfigError` for
    another name, `TraceError` where it cannot be written. Whatever breaks off, what is half
    written does not stay.
    """
    return saver(path)(trace)


def saver(path: Path | str) -> Callable[[Trace | Stream], int]:
    """`save`, to this path: for another name it raises `ConfigError` before there is a trace."""
    path = Path(path).expanduser()
    write = next((each for ending, each in _FORMS.items() if path.name.endswith(ending)), None)
    if write is None:
        raise ConfigError(f"{path}: name a file that ends in {', '.join(_FORMS)}")
    return partial(_save, write, path)


def _save(write: Callable[[Stream, Path], int], path: Path, trace: Trace | Stream) -> int:
    fresh = path.with_name(path.name + ".new")
    stream = trace if isinstance(trace, Stream) else Stream(trace.header, iter([trace.table]))
    try:
        rows = write(stream, fresh)
        fresh.replace(path)
    except OSError as error:
        raise TraceError(
            f"cannot be written ({error})", do="choose a folder that exists and has room", path=path
        ) from error
    finally:
        with suppress(OSError):  # there where something broke off
            fresh.unlink()
    return rows


def read(path: Path | str) -> Trace:
    """Read what `save` wrote, whatever its name. Raises `TraceError` for any other file."""
    path = locate_file(path)
    if _begins_as_parquet(path):
        table, header = _parquet(path)
        lines = array("q")
    else:
        table, header, lines = _jsonl(path)
    try:
        return Trace(table, header)
    except TraceError as error:
        # The trace names the source it once came from; at fault is this file.
        turn = _TURN.match(error.problem)
        line = lines[int(turn[1])] if turn and lines else None
        raise TraceError(
            error.problem, do=error.do, path=path, line=line, field=error.field
        ) from error


# ---- headers


def _understood(text: str, path: Path, field: str, do: str, line: int | None = None) -> Header:
    try:
        header = Header.from_json(text)
        _check_header(header)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TraceError(
            f"a header that cannot be understood ({error})",
            do=do,
            path=path,
            line=line,
            field=field,
        ) from error
    return header


def _check_header(header: Header) -> None:
    """JSON has no types: blocks of "64" tokens would pass until something divides by them."""
    for name, kind in get_type_hints(Header).items():
        value = getattr(header, name)
        origin = get_origin(kind)
        wanted = _JSON_TYPES.get(origin or kind)
        if (origin is Literal and value not in get_args(kind)) or (
            wanted is not None and type(value) is not wanted
        ):
            raise ValueError(f"{name} is {value!r}")
    if not all(type(turns) is int for turns in header.changes.values()):
        raise ValueError(f"changes is {header.changes!r}")
    if not all(type(text) is str for each in header.sources for text in vars(each).values()):
        raise ValueError(f"sources is {header.sources!r}")


# ---- Parquet


def _write_parquet(stream: Stream, path: Path) -> int:
    schema = SCHEMA.with_metadata({_HEADER: stream.header.to_json()})
    rows = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for table in _grouped(stream.tables):
            writer.write_table(table.replace_schema_metadata(schema.metadata))
            rows += len(table)
    return rows


def _grouped(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in tables of a Parquet row group's size, or more."""
    held: list[pa.Table] = []
    for table in tables:
        held.append(table)
        if sum(map(len, held)) >= _GROUP_ROWS:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)


def _begins_as_parquet(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(len(_PARQUET)) == _PARQUET
    except OSError:
        return False  # what reads its lines says why


def _parquet(path: Path) -> tuple[pa.Table, Header]:
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise TraceError(
            f"not a whole Parquet file ({error})", do="save the trace again", path=path
        ) from error
    field = _HEADER.decode()
    text = (table.schema.metadata or {}).get(_HEADER)
    if text is None:
        raise TraceError(
            "Parquet without a trace's header",
            do="save it with traces.canonical.save: the numbers cannot be read without",
            path=path,
            field=field,
        )
    do = "save the trace again with this version"
    header = _understood(text.decode(errors="replace"), path, field, do)
    table = table.replace_schema_metadata()
    _check_columns(table, path)
    return table, header


def _check_columns(table: pa.Table, path: Path) -> None:
    found = {field.name: field for field in table.schema}
    for wanted in SCHEMA:
        field = found.get(wanted.name)
        # Parquet calls a list's items otherwise than Arrow does; `equals` sees past that.
        if field is None or not field.equals(wanted):
            problem = f"{'missing' if field is None else _kind(field)}, not {_kind(wanted)}"
            raise TraceError(problem, do=_COLUMNS, path=path, field=wanted.name)
    if table.schema.names != SCHEMA.names:
        raise TraceError(
            f"columns are {', '.join(table.schema.names)}", do=_COLUMNS, path=path, field="columns"
        )


def _kind(field: pa.Field) -> str:
    return str(field.type) + ("" if field.nullable else " not null")


# ---- JSONL


def _write_jsonl(stream: Stream, path: Path) -> int:
    with path.open("wb") as file:
        return _write_lines(stream, file)


def _write_gzip(stream: Stream, path: Path) -> int:
    # Without a name and a time inside, the same trace is the same file.
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
        return _write_lines(stream, file)


_FORMS: dict[str, Callable[[Stream, Path], int]] = {
    ".parquet": _write_parquet,
    ".jsonl": _write_jsonl,
    ".jsonl.gz": _write_gzip,
}


def _write_lines(stream: Stream, file: BinaryIO | gzip.GzipFile) -> int:
    """The file, some rows at a time."""
    file.write(f'{{"{_FIRST_LINE}": {stream.header.to_json()}}}\n'.encode())
    rows = 0
    for table in stream.tables:
        for batch in table.to_batches(max_chunksize=_ROWS):
            lines = map(_line, batch.to_pylist())
            file.writelines(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in lines)
            rows += len(batch)
    return rows


def _line(row: dict[str, Any]) -> dict[str, Any]:
    gate = "delay_s" if row["arrival_s"] is None else "arrival_s"
    return {
        "session": row["session"],
        "turn_index": row["turn_index"],
        "parents": row["parents"],
        "recorded_s": row["recorded_s"],
        gate: row[gate],
        "input_tokens": row["input_tokens"],
        "output_tokens": row["output_tokens"],
        "runs": list(zip(row["run_starts"], row["run_lengths"], strict=True)),
        "agent": row["agent"],
    }


def _jsonl(path: Path) -> tuple[pa.Table, Header, array[int]]:
    """The columns, the header, and the line of each row."""
    changes: Counter[str] = Counter()
    rows = json_rows(path, lambda change: changes.update([change]))
    first = next(rows)
    require_sound(path)
    header = _first_line(first, path)
    tables = [SCHEMA.empty_table()]
    held: list[dict[str, Any]] = []
    lines = array("q")
    for row in rows:
        with spared():
            held.append(_values(row))
            lines.append(row.line or 0)
        if len(held) == _ROWS:
            tables.append(pa.Table.from_pylist(held, SCHEMA))
            held.clear()
    require_sound(path)
    tables.append(pa.Table.from_pylist(held, SCHEMA))
    return pa.concat_tables(tables), replace(header, changes={**header.changes, **changes}), lines


def _first_line(row: Row, path: Path) -> Header:
    if set(row.values) != {_FIRST_LINE}:
        raise row.error(
            "not a trace in our own form: its header is not here",
            f'begin with {{"{_FIRST_LINE}": {{...}}}}; another format has another reader, such as '
            "trace=mooncake",
            _FIRST_LINE,
        )
    header = row.values[_FIRST_LINE]
    if isinstance(header, dict):
        header = {"sources": [], **header}
    do = "give the fields of harness.trace.Header"
    return _understood(json.dumps(header), path, _FIRST_LINE, do, row.line)


def _values(row: Row) -> dict[str, Any]:
    """A row of `SCHEMA`. That it can stand in a trace is for the trace to check."""
    row.expect(_FIELDS, _GATES)
    runs = _runs(row)
    return {
        "session": row.integer("session", 0, MAX_TOKENS),
        "turn_index": row.integer("turn_index", -MAX_TOKENS - 1, MAX_TOKENS),
        "parents": _wholes(row, "parents", row.values["parents"]),
        "recorded_s": _seconds(row, "recorded_s"),
        **{name: _seconds(row, name) for name in _GATES if row.values.get(name) is not None},
        "input_tokens": row.tokens("input_tokens"),
        "output_tokens": row.tokens("output_tokens"),
        "run_starts": [start for start, _ in runs],
        "run_lengths": [length for _, length in runs],
        "agent": row.text("agent"),
    }


def _runs(row: Row) -> list[tuple[int, int]]:
    values = row.values["runs"]
    if not isinstance(values, list):
        raise row.error("not a list", "give [[first block id, how many], ...]", "runs")
    runs = []
    for at, value in enumerate(values):
        run = _wholes(row, f"runs[{at}]", value)
        if len(run) != 2 or run[1] > MAX_TOKENS:  # noqa: PLR2004 - a pair
            raise row.error(
                f"{run!r:.40} is no run", "give [first block id, how many]", f"runs[{at}]"
            )
        runs.append((run[0], run[1]))
    return runs


def _wholes(row: Row, field: str, values: Any) -> list[int]:
    if isinstance(values, list) and all(
        type(each) is int and 0 <= each <= MAX_BLOCK for each in values
    ):
        return values
    raise row.error(
        f"{values!r:.40} is not a list of whole numbers", "give numbers of 0 or more", field
    )


def _seconds(row: Row, name: str) -> float:
    """Any finite time: one that a trace has must read back, be it ever so late."""
    value = row.values[name]
    if type(value) not in {int, float} or not -sys.float_info.max <= value <= sys.float_info.max:
        raise row.error(f"{value!r:.40} is not a time", "give a finite number of s", name)
    return float(value)
