"""Our own form on disk: Parquet with the columns of a `Trace`, its header in the metadata."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import TraceError
from harness.trace import SCHEMA, Header, Trace

_HEADER = b"relaybench.header"


def save(trace: Trace, path: Path) -> None:
    """Write it. Read back, the trace has the same digest."""
    metadata = {_HEADER: trace.header.to_json().encode()}
    pq.write_table(trace.table.replace_schema_metadata(metadata), path, compression="zstd")


def read(path: str) -> Trace:
    """The trace that `save` wrote. Raises `TraceError`."""
    file = Path(path)
    try:
        table = pq.read_table(file)
    except FileNotFoundError:
        raise TraceError("no such file", do="check the path", path=file) from None
    except (OSError, pa.ArrowException) as error:
        text = str(error).splitlines()[0]
        do = "name a file that relaybench wrote"
        raise TraceError(f"not a Parquet file ({text})", do=do, path=file) from None
    metadata = table.schema.metadata or {}
    if _HEADER not in metadata:
        do = "write it with traces.canonical.save"
        raise TraceError("Parquet without a trace's header", do=do, path=file)
    try:
        header = Header.from_json(metadata[_HEADER].decode())
        table = table.replace_schema_metadata(None).select(SCHEMA.names).cast(SCHEMA)
    except (ValueError, KeyError, TypeError, pa.ArrowException) as error:
        do = "write it with this version of relaybench"
        raise TraceError(f"columns or header of another form ({error})", do=do, path=file) from None
    return Trace(table, header)
