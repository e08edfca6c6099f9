"""How much of a trace a cache of each size would hit: every size in one pass.

The policy is `harness.prefix.PrefixCache`'s: least recently used, leaves first. A prompt uses all
its blocks at once, its front counting as more recent than its end, so the blocks stand in one
order: by last use, newest first, and by depth within a use. A cache of C blocks holds the first C
of that order, whatever C is, so larger caches hold what smaller ones do and a block is a hit
wherever C is at least its place in the order, its *stack distance* (Mattson, Gecsei, Slutz and
Traiger, "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2), 1970).

This is exact, to the block, at every capacity. That includes prompts larger than the cache, of
which both keep the first C blocks: what is given up first is the end of the prompt itself, since
all older blocks are gone by then or stand before it. As in a `Trace`'s ideal hits, requests go one
after another in the trace's order and leave their prompts only, not their answers.

The blocks that a prompt shares with one earlier prompt, and that no prompt between them used, are
neighbours both in the prompt and in the order: a *segment*. Segments, not blocks, are what is
counted here, all of them at once by numpy: time O(segments log requests).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from harness.trace import Trace

Ints = NDArray[np.int64]

_STEPS_AN_OCTAVE = 4
"""Capacities between one and twice it, where none are given."""


@dataclass(frozen=True)
class CapacityCurve:
    """Hits against capacity, of the requests that count. Shares are 0 to 1."""

    table: pa.Table
    """A row a capacity, in the order asked: `capacity_blocks`, `capacity_tokens`, `hit_tokens`
    (int64), and `hit_share`: hit tokens over input tokens (float64)."""
    requests: int
    input_tokens: int
    unbounded_hit_tokens: int
    """Of a cache without bounds: the trace's ideal hits."""
    within_session_hit_tokens: int
    """Of those, what an unbounded cache of each session's own would hit too."""
    across_sessions_hit_tokens: int
    """The rest: what only other sessions had used before."""
    distinct_blocks: int
    """Used by the requests that count."""
    enough_blocks: int
    """The smallest capacity that hits as much as an unbounded one."""

    @property
    def unbounded_hit_share(self) -> float:
        """Token-weighted. Over a whole trace it is `Trace.ideal_hit_token_weighted`."""
        return self.unbounded_hit_tokens / self.input_tokens


def capacity_curve(
    trace: Trace,
    capacities_blocks: NDArray[np.integer] | None = None,
    *,
    from_request: int = 0,
    reuse: Reuse | None = None,
) -> CapacityCurve:
    """The hits of a cache of each of `capacities_blocks`.

    They may stand in any order; by default they are four an octave, from 1 to the trace's distinct
    blocks, where nothing is ever given up. `from_request`: only requests from this row on count,
    in a cache warmed by those before. The block that a prompt's last tokens fill in part counts as
    those tokens, and only where the whole prompt is a hit. `reuse`: the trace's, where it is known
    already. Raises `ValueError` for a row that is not there and a capacity that is no whole number,
    negative, or beyond 64 bits in tokens.
    """
    _check_row(trace, from_request)
    reuse = reuse or Reuse.of(trace)
    runs = reuse.runs
    capacities = _capacities(trace, capacities_blocks, runs.distinct)
    counted = reuse.row >= from_request
    row, blocks = reuse.row[counted], reuse.blocks[counted]
    newer = _newer(reuse)[counted]
    block_tokens = trace.header.block_tokens
    hit_tokens = _ramps(capacities, newer, newer + blocks) * block_tokens

    inputs = trace.input_tokens.astype(np.int64)
    hits = _totals(row, blocks, len(trace))
    excess = (hits * block_tokens - inputs).clip(min=0)  # of whole prompts, where all hits
    first = np.flatnonzero(np.diff(row, prepend=-1))  # a row's deepest segment
    hit_tokens -= _steps(capacities, (newer + blocks)[first], excess[row[first]])

    def tokens(hit_blocks: Ints) -> int:
        return int(np.minimum(hit_blocks * block_tokens, inputs)[from_request:].sum())

    unbounded = tokens(hits)
    within = tokens(runs.seen_within(trace.session))
    input_tokens = int(inputs[from_request:].sum())
    return CapacityCurve(
        table=pa.table(
            {
                "capacity_blocks": capacities,
                "capacity_tokens": capacities * block_tokens,
                "hit_tokens": hit_tokens,
                "hit_share": hit_tokens / input_tokens,
            }
        ),
        requests=len(trace) - from_request,
        input_tokens=input_tokens,
        unbounded_hit_tokens=unbounded,
        within_session_hit_tokens=within,
        across_sessions_hit_tokens=unbounded - within,
        distinct_blocks=_distinct(reuse, from_request),
        enough_blocks=int((newer + blocks).max(initial=0)),
    )


def hit_tokens(trace: Trace, groups: NDArray[np.integer] | NDArray[np.bool_]) -> Ints:
    """Of each prompt, what an endless cache of its group's own would hit, in tokens: (turns,).

    With one group for all these are the trace's ideal hits.
    """
    hits = _Runs.of(trace).seen_within(groups)
    inputs = trace.input_tokens.astype(np.int64)
    return np.minimum(hits * trace.header.block_tokens, inputs)


def working_set(
    trace: Trace,
    windows_requests: Sequence[int] | None = None,
    *,
    from_request: int = 0,
    reuse: Reuse | None = None,
) -> pa.Table:
    """Distinct blocks that so many requests in a row use.

    A row a window: `window_requests`, and `mean_blocks` and `max_blocks` over all windows of so
    many rows from `from_request` on. By default they are powers of two, and all rows. `reuse`: the
    trace's, where it is known already. Raises `ValueError` for a row that is not there, and a
    window of no rows or more than there are.
    """
    _check_row(trace, from_request)
    requests = len(trace) - from_request
    if windows_requests is None:
        windows_requests = [*(1 << at for at in range((requests - 1).bit_length())), requests]
    if not all(1 <= window <= requests for window in windows_requests):
        raise ValueError(f"a window is 1 to {requests} requests, not {list(windows_requests)}")
    reuse = reuse or Reuse.of(trace)
    used = np.concatenate(([0], np.cumsum(reuse.runs.totals)))
    means, most = [], []
    for window in windows_requests:
        # A segment is there twice in the windows that hold both its uses: count it once.
        twice = reuse.row - reuse.before < window
        blocks = reuse.blocks[twice]
        enter = _totals(reuse.row[twice], blocks, len(trace))
        leave = _totals(reuse.before[twice] + window, blocks, len(trace) + window)
        doubled = np.cumsum(enter - leave[: len(trace)])
        held = (used[window:] - used[:-window] - doubled[window - 1 :])[from_request:]
        means.append(float(held.mean()))
        most.append(int(held.max()))
    return pa.table(
        {
            "window_requests": pa.array(windows_requests, pa.int64()),
            "mean_blocks": pa.array(means, pa.float64()),
            "max_blocks": pa.array(most, pa.int64()),
        }
    )


def _check_row(trace: Trace, from_request: int) -> None:
    if not 0 <= from_request < len(trace):
        raise ValueError(f"from_request is 0 to {len(trace) - 1}, not {from_request}")


def _capacities(trace: Trace, given: NDArray[np.integer] | None, distinct: int) -> Ints:
    if given is None:
        octaves = np.arange(_STEPS_AN_OCTAVE * max(distinct, 1).bit_length()) / _STEPS_AN_OCTAVE
        steps = np.rint(2.0**octaves).astype(np.int64)
        return np.unique(np.append(steps[steps < distinct], max(distinct, 1)))
    capacities = np.asarray(given)
    most = np.iinfo(np.int64).max // trace.header.block_tokens
    if capacities.ndim != 1 or (
        len(capacities)
        and (capacities.dtype.kind not in "iu" or capacities.min() < 0 or capacities.max() > most)
    ):
        raise ValueError(f"capacities are a row of whole numbers, 0 to {most} blocks")
    return capacities.astype(np.int64)


@dataclass(frozen=True)
class _Runs:
    """All runs of a trace, by chain and then by row: the uses of a chain, one after another."""

    start: Ints
    row: Ints
    depth: Ints
    """How many blocks of its chain the run uses: its length."""
    totals: Ints
    """Blocks of each row's prompt."""

    @classmethod
    def of(cls, trace: Trace) -> _Runs:
        starts = trace.table.column("run_starts")
        start = pc.list_flatten(starts).to_numpy()
        depth = pc.list_flatten(trace.table.column("run_lengths")).to_numpy().astype(np.int64)
        row = np.repeat(np.arange(len(trace)), pc.list_value_length(starts).to_numpy())
        order = np.argsort(start, kind="stable")
        totals = _totals(row, depth, len(trace))
        return cls(start[order], row[order], depth[order], totals)

    @property
    def first(self) -> NDArray[np.bool_]:
        """Whether a run is the first of its chain."""
        first: NDArray[np.bool_] = np.diff(self.start, prepend=-1) != 0
        return first

    @property
    def distinct(self) -> int:
        """Blocks of all chains."""
        at = np.flatnonzero(self.first)
        return int(np.maximum.reduceat(self.depth, at).sum()) if len(at) else 0

    def seen_within(self, session: NDArray[np.integer] | NDArray[np.bool_]) -> Ints:
        """Blocks of each row that its session has used before."""
        of_run = session[self.row]
        order = np.lexsort((of_run, self.start))  # stable: rows stay in order
        depth = self.depth[order]
        first = self.first  # chains lie where they lay
        first |= np.diff(of_run[order], prepend=-1) != 0
        floor = (np.cumsum(first) - 1) * (depth.max(initial=0) + 1)
        before = np.maximum.accumulate(depth + floor)
        before[1:] = before[:-1] - floor[1:]
        before[first] = 0
        return _totals(self.row[order], np.minimum(before, depth), len(self.totals))


@dataclass(frozen=True)
class Reuse:
    """Segments of a trace: `blocks` blocks that `row` uses and that `before` was the last to use.

    One a pair of rows, ordered by `row`, then by `before`: the deepest of a row first.
    """

    row: Ints
    before: Ints
    blocks: Ints
    runs: _Runs

    @classmethod
    def of(cls, trace: Trace) -> Reuse:
        """Most of the work of a curve, and of a working set: done once for both."""
        runs = _Runs.of(trace)
        depth = runs.depth
        deeper = _previous_deeper(runs)
        at = np.flatnonzero(~runs.first)
        used = at - 1
        above = np.zeros(len(at), np.int64)
        keys, blocks = [], []
        while len(at):  # each run of `at` meets the next older use that reaches deeper
            deep = np.minimum(depth[at], depth[used])
            keys.append(runs.row[at] * len(runs.totals) + runs.row[used])
            blocks.append(deep - above)
            more = (deep < depth[at]) & (deeper[used] >= 0)
            at, used, above = at[more], deeper[used[more]], deep[more]
        if not keys:
            none = np.empty(0, np.int64)
            return cls(none, none, none, runs)
        key = np.concatenate(keys)
        order = np.argsort(key, kind="stable")
        key = key[order]
        pair = np.flatnonzero(np.diff(key, prepend=-1))
        row, before = np.divmod(key[pair], len(runs.totals))
        return cls(row, before, np.add.reduceat(np.concatenate(blocks)[order], pair), runs)


def _previous_deeper(runs: _Runs) -> Ints:
    """For each run, the place of the last one of its chain before it that is deeper; or -1.

    All look at once, each from where the one it looks at has got to.
    """
    depth = runs.depth
    deeper = np.arange(-1, len(depth) - 1)
    deeper[runs.first] = -1
    at = np.flatnonzero(deeper >= 0)
    while len(at := at[depth[deeper[at]] <= depth[at]]):
        deeper[at] = deeper[deeper[at]]
        at = at[deeper[at] >= 0]
    return deeper


def _newer(reuse: Reuse) -> Ints:
    """How many blocks are more recent than each segment, when its row comes: stand before it.

    They are those that the rows between its two uses used, each counted at its last: all uses
    less those that a later row repeats, the segments that lie within it in time.
    """
    used = np.concatenate(([0], np.cumsum(reuse.runs.totals)))
    within = _earlier_and_greater(reuse.before, reuse.blocks)
    found: Ints = used[reuse.row] - used[reuse.before + 1] - within
    return found


def _earlier_and_greater(keys: Ints, weights: Ints) -> Ints:
    """For each place, the weights of those before it whose key is greater.

    From the highest bit down: at the first bit in which two keys differ they still stand in their
    first order, side by side with those that agree so far. Then each bit parts them, stably.
    """
    found = np.zeros(len(keys), np.int64)
    place = np.arange(len(keys))
    for bit in range(int(keys.max(initial=0)).bit_length() - 1, -1, -1):
        one = (keys >> bit & 1).astype(bool)
        ones = np.cumsum(np.where(one, weights, 0))
        group = np.flatnonzero(np.diff(keys >> (bit + 1), prepend=-1))
        base = np.zeros(len(keys), np.int64)
        base[group[1:]] = ones[group[1:] - 1]
        zero = ~one
        found[place[zero]] += (ones - np.maximum.accumulate(base))[zero]
        keys, weights, place = (
            np.concatenate((each[zero], each[one])) for each in (keys, weights, place)
        )
    return found


def _totals(places: Ints, values: Ints, length: int) -> Ints:
    """The sum of the values of each place. Exact: below 2**53."""
    return np.bincount(places, values, length).astype(np.int64)


def _distinct(reuse: Reuse, from_request: int) -> int:
    """Blocks that the rows from this one on use."""
    again = reuse.blocks[reuse.before >= from_request]
    return int(reuse.runs.totals[from_request:].sum() - again.sum())


def _ramps(at: Ints, low: Ints, high: Ints) -> Ints:
    """At each value, the sum of how far it is beyond `low`, at most `high`: of all pairs."""
    at = np.minimum(at, high.max(initial=0))
    return _beyond(at, low) - _beyond(at, high)


def _beyond(at: Ints, low: Ints) -> Ints:
    low = np.sort(low)
    below = np.searchsorted(low, at)
    found: Ints = at * below - np.concatenate(([0], np.cumsum(low)))[below]
    return found


def _steps(at: Ints, places: Ints, values: Ints) -> Ints:
    """At each value, the sum of the values of the places up to it."""
    order = np.argsort(places)
    below = np.searchsorted(places[order], at, side="right")
    found: Ints = np.concatenate(([0], np.cumsum(values[order])))[below]
    return found
