"""A trace made smaller or calmer, under a name in its header."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa

from harness.settings import number, whole
from harness.trace import Trace


def cap_delays(trace: Trace, max_s: float) -> Trace:
    """No delay above `max_s`: think times in real traces reach 21 hours."""
    number("transform.cap_delays.max_s", max_s, least=0)
    delays = trace.column("delay_s")
    long = delays > max_s
    capped = pa.array(np.where(long, max_s, delays), from_pandas=True)
    table = trace.table.set_column(
        trace.table.schema.get_field_index("delay_s"), trace.table.schema.field("delay_s"), capped
    )
    return _named(trace, table, f"delay_capped_at_{max_s:g}_s", int(long.sum()))


def first_sessions(trace: Trace, sessions: int) -> Trace:
    """The sessions that begin first. Block ids keep their numbers, with gaps."""
    whole("transform.first_sessions.sessions", sessions, least=1)
    _, begins = np.unique(trace.session, return_index=True)
    rank = np.empty(trace.sessions, np.int32)
    rank[np.argsort(begins)] = np.arange(trace.sessions)
    number_of = rank[trace.session]
    kept = number_of < sessions
    row = np.cumsum(kept) - 1
    schema = trace.table.schema
    column = schema.get_field_index("session")
    table = trace.table.set_column(column, schema.field("session"), pa.array(number_of))
    table = table.filter(pa.array(kept))
    offsets, parents = trace.parents()
    counts = np.diff(offsets)
    mine = np.repeat(kept, counts)
    lists = pa.ListArray.from_arrays(
        pa.array(np.concatenate(([0], np.cumsum(counts[kept]))), pa.int32()),
        pa.array(row[parents[mine]], pa.int64()),
    ).cast(trace.table.schema.field("parents").type)
    at = trace.table.schema.get_field_index("parents")
    table = table.set_column(at, trace.table.schema.field("parents"), lists)
    return _named(trace, table, "turns_of_later_sessions_left_out", int((~kept).sum()))


def _named(trace: Trace, table: pa.Table, name: str, count: int) -> Trace:
    changes = dict(trace.header.changes)
    if count:
        changes[name] = changes.get(name, 0) + count
    return Trace(table, replace(trace.header, changes=changes))
