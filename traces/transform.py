"""A trace made smaller, calmer or finer in time, under a name in its header.

What changes lengths alone is in `traces.lengths`, what makes one trace of several in
`traces.combine`, what changes hit rates in `traces.retarget`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.errors import ConfigError
from harness.pacing import first_arrivals
from harness.seed import stream
from harness.settings import number, whole
from harness.trace import Trace, list_column
from traces.capacity import hit_tokens
from traces.rows import Ints, changed, in_order, kept, named, parents_first, renumbered

_CLOCK = ("recorded_s", "arrival_s")
"""The times from the trace's zero."""


def cap_delays(trace: Trace, max_s: float) -> Trace:
    """No delay above `max_s`: think times in real traces reach 21 hours."""
    number("transform.cap_delays.max_s", max_s, least=0)
    delays = trace.column("delay_s")
    long = delays > max_s
    table = changed(trace.table, {"delay_s": np.where(long, max_s, delays)})
    return named(trace, table, {f"delay_capped_at_{max_s:g}_s": int(long.sum())})


def scale_time(trace: Trace, factor: float) -> Trace:
    """All times by this factor, delays inside sessions too: 0.5 is twice the load."""
    number("transform.scale_time.factor", factor, above=0, most=1e9)
    times = ("recorded_s", "arrival_s", "delay_s")
    table = changed(trace.table, {name: trace.column(name) * factor for name in times})
    return named(trace, table, {f"times_scaled_by_{factor:g}": 0 if factor == 1 else len(trace)})


def jitter(trace: Trace, tick_s: float, seed: int) -> Trace:
    """Each session later by a time of its own, uniform in [0, tick_s).

    For a source whose clock ticks coarsely: the 12,031 requests of Mooncake's conversation trace
    have 1,180 times, 3 s apart, and would come in bursts that its users never sent. A session's
    turns shift together. Rows are in order of time again, so of requests that shared a tick
    another may now be the one that meets a prefix first. Raises `ConfigError` where session starts
    are not recorded.
    """
    _require_starts(trace, "transform.jitter")
    number("transform.jitter.tick_s", tick_s, above=0, most=1e9)
    whole("transform.jitter.seed", seed, least=0)
    later_s = tick_s * stream(seed, "transform.jitter").random(trace.sessions)
    times = {name: trace.column(name) + later_s[trace.session] for name in _CLOCK}
    table = in_order(changed(trace.table, times))
    return named(trace, table, {f"start_jittered_within_{tick_s:g}_s": len(trace)})


def first_sessions(trace: Trace, sessions: int) -> Trace:
    """The sessions that begin first. Block ids keep their numbers, with gaps.

    Hits on what only left-out sessions have used are lost, and counted in the header.
    """
    whole("transform.first_sessions.sessions", sessions, least=1)
    _, begins = np.unique(trace.session, return_index=True)
    rank = np.empty(trace.sessions, np.int32)
    rank[np.argsort(begins)] = np.arange(trace.sessions)
    number_of = rank[trace.session]
    chosen = number_of < sessions
    table = kept(trace.table, chosen, number_of)
    return _fewer(trace, table, chosen, "turns_of_later_sessions_left_out")


def sample_sessions(trace: Trace, share: float, seed: int) -> Trace:
    """Whole sessions, each kept with this chance. Block ids keep their numbers, with gaps.

    Hits on what only left-out sessions have used are lost, and counted in the header. Raises
    `ConfigError` where none is left.
    """
    number("transform.sample_sessions.share", share, above=0, most=1)
    whole("transform.sample_sessions.seed", seed, least=0)
    chosen = stream(seed, "transform.sample_sessions").random(trace.sessions) < share
    return _of_sessions(trace, chosen, f"transform.sample_sessions.share is {share}")


def between(trace: Trace, from_s: float, until_s: float) -> Trace:
    """Whole sessions that start in this time of the trace, `until_s` not included.

    Hits on what only left-out sessions have used are lost, and counted in the header. Raises
    `ConfigError` where none does, or their starts are not recorded.
    """
    _require_starts(trace, "transform.between")
    number("transform.between.from_s", from_s, least=0)
    number("transform.between.until_s", until_s, above=from_s)
    starts = first_arrivals(trace)
    starts -= starts.min()
    chosen = (starts >= from_s) & (starts < until_s)
    return _of_sessions(trace, chosen, f"transform.between is {from_s:g} to {until_s:g} s")


def anonymise(trace: Trace) -> Trace:
    """Without the names of agents, files and settings: a trace to pass on.

    A trace holds no text. Blocks are numbered anew in order of use, so nothing of the source's ids
    is left, but who shares how much; turns are numbered from 0 in their session; times count from
    the earliest, so no date is left. What stays: lengths, the times between turns, the order of
    sessions, and the header's format, licence and changes, with the names these have.
    """
    names = trace.table.column("agent").to_pylist()
    numbers = {name: f"agent {at}" for at, name in enumerate(dict.fromkeys(names))}
    zero_s = min(np.nanmin(trace.column(name)) for name in _CLOCK)
    columns: dict[str, Any] = {name: trace.column(name) - zero_s for name in _CLOCK}
    columns["agent"] = [numbers[name] for name in names]
    columns["turn_index"] = _places(trace.session, trace.column("turn_index"))
    table = changed(renumbered(trace), columns)
    header = replace(trace.header, sources=(), parameters={})
    return named(trace, table, {"turns_of_agents_without_their_names": len(trace)}, header)


def _of_sessions(trace: Trace, chosen: NDArray[np.bool_], asked: str) -> Trace:
    """The turns of these sessions."""
    if not chosen.any():
        raise ConfigError(f"{asked}: no session is left of {trace.sessions:,}")
    number_of = (np.cumsum(chosen) - 1).astype(np.int32)[trace.session]
    mine = chosen[trace.session]
    table = kept(trace.table, mine, number_of)
    return _fewer(trace, table, mine, "turns_of_other_sessions_left_out")


def _fewer(trace: Trace, table: pa.Table, rows: NDArray[np.bool_], name: str) -> Trace:
    """The table of these rows as a trace, with the turns left out and the hits lost with them."""
    together, apart = (hit_tokens(trace, groups)[rows] for groups in (np.ones_like(rows), rows))
    lost = int(together.sum() - apart.sum())
    changes = {name: int((~rows).sum()), "hit_tokens_lost_with_left_out_turns": lost}
    return named(trace, table, changes)


def _require_starts(trace: Trace, transform: str) -> None:
    if trace.header.session_starts != "recorded":
        raise ConfigError(
            f"{transform}: this trace does not say when its sessions began relative to each other, "
            "so there are no starts to go by. Leave it out: pacing=poisson sets starts at replay"
        )


def within_context(trace: Trace, context_tokens: int) -> Trace:
    """Only turns whose prompt and answer fit a context, and that wait for no turn that does not.

    Hits on what only left-out turns have used are lost, and counted in the header. Raises
    `ConfigError` where none is left.
    """
    whole("transform.within_context.context_tokens", context_tokens, least=2)
    fits = trace.input_tokens.astype(np.int64) + trace.output_tokens <= context_tokens
    offsets, parents = trace.parents()
    for row in parents_first(trace):
        fits[row] &= fits[parents[offsets[row] : offsets[row + 1]]].all()
    if not fits.any():
        raise ConfigError(
            f"transform.within_context.context_tokens is {context_tokens:,}: no turn fits, the "
            f"smallest prompt has {trace.input_tokens.min():,} tokens. Shrink the trace first"
        )
    table = kept(trace.table, fits, _densely(trace, fits))
    return _fewer(trace, table, fits, f"turns_beyond_{context_tokens}_tokens_left_out")


def only_agents(trace: Trace, agents: Sequence[str]) -> Trace:
    """Only the turns of agents with these names; sessions and their turns are numbered anew.

    A turn that waited for one left out waits for what that one waited for, the delays added (of
    several the longest); where that was nothing, it arrives so long after that one would have.
    How long the answer left out took is not added: a trace does not have it. Hits on what only
    left-out turns have used are lost, and counted in the header. Raises `ConfigError` for a name
    that no turn has.
    """
    names = np.array(trace.table.column("agent").to_pylist())
    mine = np.isin(names, _known(agents, np.unique(names).tolist()))
    table = kept(changed(trace.table, _lifted(trace, mine)), mine, _densely(trace, mine))
    session, index = table.column("session").to_numpy(), table.column("turn_index").to_numpy()
    table = changed(table, {"turn_index": _places(session, index)})
    return _fewer(trace, table, mine, "turns_of_other_agents_left_out")


def _places(session: NDArray[np.int32], index: NDArray[np.int32]) -> Ints:
    """Each turn's place among those of its session, from 0: (turns,)."""
    order = np.lexsort((index, session))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order)) - np.searchsorted(session[order], session[order])
    return place


def _known(agents: Any, there: list[str]) -> list[str]:
    """The names asked for. Raises `ConfigError` unless each is there."""
    setting = f"transform.only_agents.agents is {agents!r}"
    choice = f"the trace has {', '.join(there)}"
    if isinstance(agents, str) or not isinstance(agents, Sequence) or not agents:
        raise ConfigError(f"{setting}: give a list of names; {choice}")
    unknown = [str(name) for name in agents if name not in there]
    if unknown:
        raise ConfigError(f"{setting}: no turn is of {', '.join(unknown)}; {choice}")
    return list(agents)


def _lifted(trace: Trace, mine: NDArray[np.bool_]) -> dict[str, Any]:
    """The gates, where what a turn left out waited for stands in its place."""
    waits: list[list[int]] = trace.table.column("parents").to_pylist()
    arrival_s = trace.column("arrival_s").copy()
    delay_s = trace.column("delay_s").copy()
    for row in parents_first(trace):
        gone = [each for each in waits[row] if not mine[each]]
        if not gone:
            continue
        still = [each for each in waits[row] if mine[each]]
        still += [parent for each in gone for parent in waits[each]]
        waits[row] = list(dict.fromkeys(still))
        if waits[row]:
            delay_s[row] += np.nan_to_num(delay_s[gone]).max()  # a root's is none
        else:
            arrival_s[row] = arrival_s[gone].max() + delay_s[row]
            delay_s[row] = np.nan
    counts = np.array([len(each) for each in waits])
    flat = np.array([parent for each in waits for parent in each], np.int64)
    return {
        "parents": list_column("parents", counts, flat),
        "arrival_s": arrival_s,
        "delay_s": delay_s,
    }


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
    smaller = {"input_tokens": np.maximum(inputs, 1), "output_tokens": np.maximum(outputs, 1)}
    header = replace(trace.header, block_tokens=block_tokens)
    name = f"tokens_times_{block_tokens}_over_{before}"
    return named(trace, changed(trace.table, smaller), {name: len(trace)}, header)


def _densely(trace: Trace, rows: NDArray[np.bool_]) -> NDArray[np.int32]:
    """New numbers of the sessions that these rows are of, for every row: (turns,)."""
    numbers = np.zeros(len(trace), np.int32)
    _, numbers[rows] = np.unique(trace.session[rows], return_inverse=True)
    return numbers
