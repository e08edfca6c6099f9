"""A trace made smaller or calmer, under a name in its header."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa

from harness.errors import ConfigError
from harness.trace import Trace


def cap_delays(trace: Trace, max_s: float) -> Trace:
    """No delay above `max_s`: think times in real traces reach 21 hours."""
    if not max_s >= 0:
        raise ConfigError(f"transform.cap_delays.max_s is {max_s}: give 0 s or more")
    delays = trace.column("delay_s")
    long = delays > max_s
    capped = pa.array(np.where(long, max_s, delays), from_pandas=True)
    table = trace.table.set_column(
        trace.table.schema.get_field_index("delay_s"), trace.table.schema.field("delay_s"), capped
    )
    return _named(trace, table, f"delay_capped_at_{max_s:g}_s", int(long.sum()))


def first_sessions(trace: Trace, sessions: int) -> Trace:
    """The sessions numbered below `sessions`. Block ids keep their numbers, with gaps."""
    if sessions < 1:
        raise ConfigError(f"transform.first_sessions.sessions is {sessions}: give 1 or more")
    kept = trace.session < sessions
    row = np.cumsum(kept) - 1
    table = trace.table.filter(pa.array(kept))
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
