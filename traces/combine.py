"""One trace of several: copies of one, or two of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harness.errors import ConfigError
from harness.settings import number, whole
from harness.stream import Stream
from harness.trace import Header, Trace, list_column
from traces.rows import changed, in_order, named

_MOST_ROWS = 2**31 - 1
"""Sessions, and the places of all runs and parents, are counted in 32 bits."""

_LEAST_RECORDED = ("recorded", "generated", "synthesised")


def replicate(trace: Trace, copies: int, shift_s: float = 0.0) -> Trace:
    """The trace so many times, itself the first, each copy `shift_s` later than the one before.

    Each copy has sessions and blocks of its own: none meets what another has cached, and its ideal
    hits are those of the trace.
    """
    whole("transform.replicate.copies", copies, least=1, most=_MOST_ROWS // _size(trace))
    number("transform.replicate.shift_s", shift_s, least=0, most=1e9)
    table = _together([trace] * copies, [copy * shift_s for copy in range(copies)])
    return named(trace, table, {"turns_of_copies_added": (copies - 1) * len(trace)})


def merge(trace: Trace, other: Any) -> Trace:
    """Both traces as one, each from its own zero, with sessions and blocks of its own.

    `other` is a `Trace`, or a `Stream` of one. Its header is kept among the parameters, as one of
    `merged`. Raises `ConfigError` unless both have blocks alike.
    """
    if isinstance(other, Stream):
        other = other.whole()
    if not isinstance(other, Trace):
        raise ConfigError(
            f"transform.merge.other is {other!r}: choose a trace, as in "
            "trace@transform.merge.other=mooncake transform.merge.other.path=..."
        )
    kinds = [f"{h.block_tokens} tokens ({h.partial_block})" for h in (trace.header, other.header)]
    if kinds[0] != kinds[1]:
        raise ConfigError(
            f"transform.merge: the trace's blocks have {kinds[0]}, the other's {kinds[1]}. Merge "
            "traces whose blocks are alike: where a trace has a setting block_tokens, give it"
        )
    if _size(trace) + _size(other) > _MOST_ROWS:
        raise ConfigError("transform.merge: more rows than one trace can hold. Sample them first")
    header = _joined(trace.header, other.header)
    added = {**other.header.changes, "turns_merged_in": len(other)}
    return named(trace, _together([trace, other], [0.0, 0.0]), added, header)


def _size(trace: Trace) -> int:
    """Its longest column: rows, or runs or parents of all rows."""
    names = ("parents", "run_starts")
    return max(len(trace), *(len(pc.list_flatten(trace.table.column(name))) for name in names))


def _together(traces: Sequence[Trace], later_s: Sequence[float]) -> pa.Table:
    """The rows of all, each trace so much later and numbered on from the one before."""
    parts = []
    rows = sessions = blocks = 0
    for trace, shift_s in zip(traces, later_s, strict=True):
        columns: dict[str, Any] = {
            name: trace.column(name) + shift_s for name in ("recorded_s", "arrival_s")
        }
        columns["session"] = trace.session.astype(np.int64) + sessions
        for name, first in (("parents", rows), ("run_starts", blocks)):
            column = trace.table.column(name)
            counts = pc.list_value_length(column).to_numpy()
            columns[name] = list_column(name, counts, pc.list_flatten(column).to_numpy() + first)
        parts.append(changed(trace.table, columns))
        rows += len(trace)
        sessions += trace.sessions
        blocks += trace.blocks
    return in_order(pa.concat_tables(parts).combine_chunks())


def _joined(one: Header, other: Header) -> Header:
    """What is true of both together; `named` adds up the changes."""
    both = (one, other)
    data = [each.prefix_data for each in both]
    merged = [*one.parameters.get("merged", []), json.loads(other.to_json())]
    return replace(
        one,
        format=_words("+", *(each.format for each in both)),
        id_scope=one.id_scope if one.id_scope == other.id_scope else "global",
        time_unit=_words("+", *(each.time_unit for each in both)),
        licence=_words(" and ", *(each.licence for each in both)),
        session_starts=max(each.session_starts for each in both),  # "unknown" stands last
        prefix_data=max(data, key=_LEAST_RECORDED.index),
        sources=tuple(dict.fromkeys(one.sources + other.sources)),
        parameters={**one.parameters, "merged": merged},
    )


def _words(between: str, *texts: str) -> str:
    """Each word once."""
    return between.join(dict.fromkeys(word for text in texts for word in text.split(between)))
