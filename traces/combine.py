"""One trace of several: copies of one, or two of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harness.errors import ConfigError
from harness.settings import number, whole
from harness.stream import Stream
from harness.trace import MAX_BLOCK, Header, Trace, list_column
from traces.rows import changed, in_order, named, renumbered

_MOST_ROWS = 2**31 - 1
"""Sessions, and the places of all runs and parents, are counted in 32 bits."""

CHOOSING = ("constant", "otel", "sharegpt", "targets", "tensorrt_llm", "tracelab")
"""Readers whose `block_tokens` is a choice; with others it is the source's, or there is none."""

_LEAST_RECORDED = ("recorded", "generated", "absent")
"""The last stands for both: no claim is stronger than what is known of either."""


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
    `merged`. Its prefix data are those of the less recorded of the two; where one has none, they
    are the other's, and the turns without are counted. Raises `ConfigError` unless both have blocks
    alike, or one has no blocks.
    """
    if isinstance(other, Stream):
        other = other.whole()
    if not isinstance(other, Trace):
        raise ConfigError(
            f"transform.merge.other is {other!r}: choose a trace, as in "
            "trace@transform.merge.other=mooncake transform.merge.other.path=..."
        )
    if trace.blocks and other.blocks:
        _require_alike(trace.header, other.header)
    if _size(trace) + _size(other) > _MOST_ROWS:
        raise ConfigError("transform.merge: more rows than one trace can hold. Sample them first")
    both = (trace, other)
    added = Counter(other.header.changes)
    added["turns_merged_in"] += len(other)
    known = [each for each in both if each.header.prefix_data != "absent"]
    if known:
        added["turns_without_prefix_data"] += sum(len(each) for each in both if each not in known)
    data = [each.header.prefix_data for each in known or both]
    rule = (other if other.blocks and not trace.blocks else trace).header
    header = replace(
        _joined(trace.header, other.header),
        block_tokens=rule.block_tokens,
        partial_block=rule.partial_block,
        prefix_data=max(data, key=_LEAST_RECORDED.index),
    )
    return named(trace, _together(both, [0.0, 0.0]), added, header)


def _require_alike(one: Header, other: Header) -> None:
    """Raises `ConfigError` unless blocks of both mean the same."""
    kinds = [f"{each.block_tokens} tokens ({each.partial_block})" for each in (one, other)]
    if kinds[0] == kinds[1]:
        return
    do = "no setting makes these alike, replay each trace alone"
    if one.partial_block == other.partial_block:
        do = (
            f"where one is read by {', '.join(CHOOSING[:-1])} or {CHOOSING[-1]}, give that one the "
            "other's block_tokens; other sources have blocks of one size, replay each trace alone"
        )
    raise ConfigError(
        f"transform.merge: the trace's blocks have {kinds[0]}, the other's {kinds[1]}: {do}"
    )


def _size(trace: Trace) -> int:
    """Its longest column: rows, or runs or parents of all rows."""
    names = ("parents", "run_starts")
    return max(len(trace), *(len(pc.list_flatten(trace.table.column(name))) for name in names))


def _together(traces: Sequence[Trace], later_s: Sequence[float]) -> pa.Table:
    """The rows of all, each trace so much later and numbered on from the one before."""
    if sum(trace.blocks for trace in traces) > MAX_BLOCK:
        low = {trace: Trace(renumbered(trace), trace.header) for trace in set(traces)}
        traces = [low[trace] for trace in traces]
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
    """What is true of both together, but for their blocks; `named` adds up the changes."""
    both = (one, other)
    merged = [*one.parameters.get("merged", []), json.loads(other.to_json())]
    return replace(
        one,
        format=_words("+", *(each.format for each in both)),
        id_scope=one.id_scope if one.id_scope == other.id_scope else "global",
        time_unit=_words("+", *(each.time_unit for each in both)),
        licence=_words(" and ", *(each.licence for each in both)),
        session_starts=max(each.session_starts for each in both),  # "unknown" stands last
        sources=tuple(dict.fromkeys(one.sources + other.sources)),
        parameters={**one.parameters, "merged": merged},
    )


def _words(between: str, *texts: str) -> str:
    """Each word once."""
    return between.join(dict.fromkeys(word for text in texts for word in text.split(between)))
