"""What the transforms share: columns put in place of others, rows left out or put in order."""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from harness.trace import SCHEMA, Header, Trace, list_column

Ints = NDArray[np.int64]


def changed(table: pa.Table, columns: Mapping[str, Any]) -> pa.Table:
    """The table with these columns in place of its own; NaN becomes null."""
    for name, values in columns.items():
        field = SCHEMA.field(name)
        if not isinstance(values, pa.Array):
            values = pa.array(values, field.type, from_pandas=True)  # noqa: PLW2901 - as a column
        table = table.set_column(SCHEMA.get_field_index(name), field, values)
    return table


def runs(trace: Trace) -> tuple[Ints, Ints, Ints]:
    """(row, first id, length) of all runs, in the trace's order: (runs,) each."""
    starts = trace.table.column("run_starts")
    row = np.repeat(np.arange(len(trace)), pc.list_value_length(starts).to_numpy())
    lengths = pc.list_flatten(trace.table.column("run_lengths")).to_numpy().astype(np.int64)
    return row, pc.list_flatten(starts).to_numpy(), lengths


def run_columns(rows: int, row: Ints, starts: Ints, lengths: Ints) -> dict[str, pa.ListArray]:
    """The columns of such runs in a table of `rows`; those of length 0 are left out."""
    there = lengths > 0
    counts = np.bincount(row[there], minlength=rows)
    return {
        "run_starts": list_column("run_starts", counts, starts[there]),
        "run_lengths": list_column("run_lengths", counts, lengths[there]),
    }


def numbered(row: Ints, starts: Ints, lengths: Ints) -> Ints:
    """New first ids of runs of 1 or more: chains one behind another, in order of first use.

    A number is left free where a prompt goes on from the end of one chain into the next numbered:
    two runs that ought to be one.
    """
    _, first, chain = np.unique(starts, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    chain = place[chain]
    longest = np.zeros(len(order), np.int64)
    np.maximum.at(longest, chain, lengths)
    at = first[order][1:]
    before = at - 1
    goes_on = (row[before] == row[at]) & (chain[before] == chain[at] - 1)
    goes_on &= lengths[before] == longest[chain[before]]
    begins = np.zeros(len(order), np.int64)
    np.cumsum(longest[:-1] + goes_on, out=begins[1:])
    return begins[chain]


def renumbered(trace: Trace) -> pa.Table:
    """The trace's rows, their blocks `numbered` anew: who shares what stays."""
    row, starts, lengths = runs(trace)
    return changed(
        trace.table, run_columns(len(trace), row, numbered(row, starts, lengths), lengths)
    )


def before_in_prompt(row: Ints, lengths: Ints) -> Ints:
    """How many blocks of its prompt stand before each run: (runs,)."""
    ends = np.cumsum(lengths)
    begins = ends - lengths
    first = np.flatnonzero(np.diff(row, prepend=-1))
    return begins - np.repeat(begins[first], np.diff(first, append=len(row)))


def in_order(table: pa.Table) -> pa.Table:
    """The rows by `recorded_s`, ties as they stand, and the parents where they have gone."""
    order = np.argsort(table.column("recorded_s").to_numpy(), kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return _moved(table, place).take(pa.array(order))


def parents_first(trace: Trace) -> Iterable[int]:
    """All rows, each after its parents. As they stand, unless a parent was recorded later."""
    offsets, parents = trace.parents()
    if (parents < np.repeat(np.arange(len(trace)), np.diff(offsets))).all():
        return range(len(trace))
    graph = {row: parents[offsets[row] : offsets[row + 1]].tolist() for row in range(len(trace))}
    return graphlib.TopologicalSorter(graph).static_order()


def kept(table: pa.Table, rows: NDArray[np.bool_], number_of: NDArray[np.int32]) -> pa.Table:
    """The rows kept, their sessions renumbered by `number_of`; parents must be kept too."""
    place = np.cumsum(rows) - 1
    table = changed(table, {"session": number_of}).filter(pa.array(rows))
    return _moved(table, place)


def _moved(table: pa.Table, place: Ints) -> pa.Table:
    """The parents where they have gone: row i is now `place[i]`."""
    parents = table.column("parents")
    counts = pc.list_value_length(parents).to_numpy()
    rows = place[pc.list_flatten(parents).to_numpy()]
    return changed(table, {"parents": list_column("parents", counts, rows)})


def named(
    trace: Trace, table: pa.Table, changes: Mapping[str, int], header: Header | None = None
) -> Trace:
    """The new trace, with what was done to it and to how many turns in its header."""
    counts = dict(trace.header.changes)
    for name, turns in changes.items():
        if turns:
            counts[name] = counts.get(name, 0) + turns
    return Trace(table, replace(header or trace.header, changes=counts))
