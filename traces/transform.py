"""A trace made smaller or calmer, under a name in its header."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.errors import ConfigError
from harness.pacing import first_arrivals
from harness.settings import number, whole
from harness.trace import Header, Trace


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
    return _kept(trace, number_of < sessions, number_of, "turns_of_later_sessions_left_out")


def sample_sessions(trace: Trace, share: float, seed: int) -> Trace:
    """Whole sessions, each kept with this chance. Block ids keep their numbers, with gaps.

    Hits on what only left-out sessions have used are lost. Raises `ConfigError` where none is left.
    """
    number("transform.sample_sessions.share", share, above=0, most=1)
    whole("transform.sample_sessions.seed", seed, least=0)
    chosen = np.random.default_rng([seed, 1]).random(trace.sessions) < share
    return _of_sessions(trace, chosen, f"transform.sample_sessions.share is {share}")


def between(trace: Trace, from_s: float, until_s: float) -> Trace:
    """Whole sessions that start in this time of the trace, `until_s` not included.

    Raises `ConfigError` where none does.
    """
    number("transform.between.from_s", from_s, least=0)
    number("transform.between.until_s", until_s, above=from_s)
    starts = first_arrivals(trace)
    starts -= starts.min()
    chosen = (starts >= from_s) & (starts < until_s)
    return _of_sessions(trace, chosen, f"transform.between is {from_s:g} to {until_s:g} s")


def anonymise(trace: Trace) -> Trace:
    """Without the names of agents, files and settings: a trace to pass on.

    A trace holds no text, and its block ids are numbers in order of use: nothing of the source's
    hashes is left. Lengths and times stay as they are.
    """
    table, schema = trace.table, trace.table.schema
    names = trace.table.column("agent").to_pylist()
    numbers = {name: f"agent {at}" for at, name in enumerate(dict.fromkeys(names))}
    table = table.set_column(
        schema.get_field_index("agent"), schema.field("agent"),
        pa.array([numbers[name] for name in names], schema.field("agent").type),
    )  # fmt: skip
    header = replace(trace.header, sources=(), parameters={})
    return _named(trace, table, "turns_of_agents_without_their_names", len(trace), header)


def _of_sessions(trace: Trace, chosen: NDArray[np.bool_], asked: str) -> Trace:
    """The turns of these sessions."""
    if not chosen.any():
        raise ConfigError(f"{asked}: no session is left of {trace.sessions:,}")
    number_of = (np.cumsum(chosen) - 1).astype(np.int32)[trace.session]
    return _kept(trace, chosen[trace.session], number_of, "turns_of_other_sessions_left_out")


def within_context(trace: Trace, context_tokens: int) -> Trace:
    """Only turns whose prompt and answer fit a context, and that wait for no turn that does not.

    Raises `ConfigError` where none is left.
    """
    whole("transform.within_context.context_tokens", context_tokens, least=2)
    kept = trace.input_tokens.astype(np.int64) + trace.output_tokens <= context_tokens
    offsets, parents = trace.parents()
    for row in np.argsort(trace.column("recorded_s"), kind="stable"):
        kept[row] &= kept[parents[offsets[row] : offsets[row + 1]]].all()
    if not kept.any():
        raise ConfigError(
            f"transform.within_context.context_tokens is {context_tokens:,}: no turn fits, the "
            f"smallest prompt has {trace.input_tokens.min():,} tokens. Shrink the trace first"
        )
    _, number_of = np.unique(trace.session[kept], return_inverse=True)
    numbers = np.zeros(len(trace), np.int32)
    numbers[kept] = number_of
    return _kept(trace, kept, numbers, f"turns_beyond_{context_tokens}_tokens_left_out")


def shrink(trace: Trace, block_tokens: int) -> Trace:
    """Every block, prompt and answer smaller in the same proportion: the hit rates stay.

    For servers with a small context: the shape of the trace, in blocks of `block_tokens`.
    """
    whole("transform.shrink.block_tokens", block_tokens, least=1)
    before = trace.header.block_tokens
    if block_tokens > before:
        raise ConfigError(f"transform.shrink.block_tokens is {block_tokens}: give {before} or less")
    rounded_up = before - 1 if trace.header.partial_block == "ceil" else 0
    inputs = (trace.input_tokens.astype(np.int64) * block_tokens + rounded_up) // before
    outputs = trace.output_tokens.astype(np.int64) * block_tokens // before
    table = trace.table
    for name, values in (("input_tokens", inputs), ("output_tokens", outputs)):
        at = table.schema.get_field_index(name)
        smaller = pa.array(np.maximum(values, 1), pa.int32())
        table = table.set_column(at, table.schema.field(name), smaller)
    header = replace(trace.header, block_tokens=block_tokens)
    name = f"tokens_times_{block_tokens}_over_{before}"
    return _named(trace, table, name, len(trace), header)


def _kept(trace: Trace, kept: NDArray[np.bool_], number_of: NDArray[np.int32], name: str) -> Trace:
    """The rows `kept`, their sessions renumbered by `number_of`; parents must be kept too."""
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
    return _named(trace, table, name, int((~kept).sum()))


def _named(
    trace: Trace, table: pa.Table, name: str, count: int, header: Header | None = None
) -> Trace:
    """The new trace, with what was done to it and to how many turns in its header."""
    changes = dict(trace.header.changes)
    if count:
        changes[name] = changes.get(name, 0) + count
    return Trace(table, replace(header or trace.header, changes=changes))
