"""The canonical form on disk: Parquet with the columns of `harness.trace.SCHEMA`.

The header is JSON in the file's metadata, under `relaybench.header`. What is saved reads back
equal, digest and all, so any trace, filtered or generated, can be kept and replayed as it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import TraceError
from harness.trace import SCHEMA, Header, Trace
from traces.source import locate_file

_HEADER = b"relaybench.header"
_COLUMNS = f"give {', '.join(SCHEMA.names)}, of the types in harness.trace.SCHEMA"


def save(trace: Trace, path: Path | str) -> None:
    """Write a trace in one step, in place of any file of that name. Raises `TraceError`."""
    path = Path(path).expanduser()
    fresh = path.with_name(path.name + ".new")
    table = trace.table.replace_schema_metadata({_HEADER: trace.header.to_json()})
    try:
        pq.write_table(table, fresh, compression="zstd")
        fresh.replace(path)
    except OSError as error:
        raise TraceError(
            f"cannot be written ({error})", do="choose a folder that exists and has room", path=path
        ) from error


def read(path: Path | str) -> Trace:
    """Read what `save` wrote. Raises `TraceError` for any other file."""
    path = locate_file(path)
    table = _table(path)
    header = _header(table, path)
    table = table.replace_schema_metadata()
    _check_columns(table, path)
    try:
        return Trace(table, header)
    except TraceError as error:
        # The trace names the source it once came from; at fault is this file.
        raise TraceError(error.problem, do=error.do, path=path, field=error.field) from error


def _table(path: Path) -> pa.Table:
    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise TraceError(
            f"not a whole Parquet file ({error})",
            do="save the trace again; another format has another reader, such as trace=mooncake",
            path=path,
        ) from error


def _header(table: pa.Table, path: Path) -> Header:
    text = (table.schema.metadata or {}).get(_HEADER)
    if text is None:
        raise TraceError(
            "Parquet without a trace's header",
            do="save it with traces.canonical.save: the numbers cannot be read without",
            path=path,
            field=_HEADER.decode(),
        )
    try:
        header = Header.from_json(text.decode())
        _check_header(header)
    except (ValueError, TypeError, KeyError) as error:
        raise TraceError(
            f"a header that cannot be understood ({error})",
            do="save the trace again with this version",
            path=path,
            field=_HEADER.decode(),
        ) from error
    return header


def _check_header(header: Header) -> None:
    """JSON has no types: blocks of "64" tokens would pass until something divides by them."""
    if type(header.block_tokens) is not int:
        raise TypeError(f"block_tokens is {header.block_tokens!r}")
    for name, kind in get_type_hints(Header).items():
        if get_origin(kind) is Literal and getattr(header, name) not in get_args(kind):
            raise ValueError(f"{name} is {getattr(header, name)!r}")


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
