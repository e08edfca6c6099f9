"""Other hit rates for a trace's requests: their blocks are laid anew, and nothing else changes."""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.metrics import HIT_EDGES, HIT_LABELS, hit_bin, hit_shares
from harness.seed import stream
from harness.settings import whole
from harness.trace import Trace
from traces.rows import Ints, changed, named, run_columns

Floats = NDArray[np.float64]

_BINS = len(HIT_LABELS)
_NOWHERE = _BINS
"""The column of those for which no bin has room."""


def retarget(trace: Trace, bins: Sequence[float], seed: int) -> Trace:
    """The trace with so many of its requests' ideal hit rates in each bin of `metrics.HIT_LABELS`.

    `bins` are seven shares that sum to 1; inside a bin rates are uniform. Lengths, times and
    sessions stay. A turn takes the front of its prompt from the turn before it in its session, in
    the trace's order, a session's first turn from the longest first prompt so far; the rest are
    blocks that no other has had. It so hits what it takes, and can hit no more than that prompt
    has (its *reach*), in whole blocks: a short prompt has few rates to choose from.

    Which turn gets which rate: the n-th lowest rate of now becomes the n-th lowest target. Where
    a turn cannot reach a rate in its target's bin, bins are exchanged between turns, along the
    shortest ways, until no exchange puts one turn more into a bin that wants it (a maximum flow:
    no choice is nearer to `bins` in the sum of differences). Among turns with the same bins to
    choose from the order of rates holds; inside a bin the highest targets go first to those that
    reach them, the highest in order first. Who has no bin left takes the nearest it can to a
    target that is left.

    The header's parameters hold, under `retarget`, the bins asked for and achieved and their
    greatest difference; its changes how many turns fell short (`hit_target_out_of_reach`). Raises
    `ConfigError` for bad shares.
    """
    shares = hit_shares("transform.retarget.bins", bins)
    whole("transform.retarget.seed", seed, least=0)
    random = stream(seed, "transform.retarget")
    prompts = _Prompts.of(trace)
    ties = random.permutation(len(trace))
    rank = np.empty(len(trace), np.int64)
    rank[np.lexsort((ties, trace.ideal_hit_rates))] = np.arange(len(trace))
    target_bins, targets = _targets(shares, random.random(len(trace)))
    least, most = prompts.hits_in_bins()
    bin_of = _bins_of(rank, target_bins, least <= most)
    target = _targets_of(rank, bin_of, target_bins, targets, prompts)

    wanted = np.rint(target * prompts.tokens / prompts.block_tokens).astype(np.int64)
    turn = np.arange(len(trace))
    placed = bin_of != _NOWHERE
    low = np.where(placed, least[np.minimum(bin_of, _BINS - 1), turn], 0)
    high = np.where(placed, most[np.minimum(bin_of, _BINS - 1), turn], prompts.reach)
    hits = np.clip(wanted, low, high)
    short = int((~placed | (wanted > prompts.reach)).sum())

    achieved = np.bincount(hit_bin(prompts.rates(hits)), minlength=_BINS) / len(trace)
    told = {
        "bins": shares.tolist(),
        "achieved": achieved.tolist(),
        "greatest_difference": float(np.abs(achieved - shares).max()),
        "seed": seed,
    }
    header = replace(
        trace.header,
        prefix_data="generated",
        parameters={**trace.header.parameters, "retarget": told},
    )
    changes = {"hits_retargeted": len(trace), "hit_target_out_of_reach": short}
    return named(trace, changed(trace.table, prompts.laid(hits)), changes, header)


def _targets(shares: Floats, draws: Floats) -> tuple[Ints, Floats]:
    """(bin, rate) of one target in each of n strata of the distribution, from the lowest."""
    ends = np.cumsum(shares) / shares.sum()
    quantile = (np.arange(len(draws)) + draws) / len(draws)
    last = int(np.flatnonzero(shares)[-1])
    bins = np.minimum(np.searchsorted(ends, quantile, side="right"), last)
    begins = ends - shares / shares.sum()
    edges = np.array(HIT_EDGES)
    within = np.clip((quantile - begins[bins]) * shares.sum() / shares[bins], 0, 1)
    return bins, edges[bins] + within * np.diff(edges)[bins]


@dataclass(frozen=True)
class _Prompts:
    """What can be laid: (turns,) each."""

    tokens: Ints
    blocks: Ints
    donor: Ints
    """The row whose front a prompt takes; -1: the first of all has none."""
    reach: Ints
    """How many blocks it can take: what the donor has, at most its own."""
    block_tokens: int

    @classmethod
    def of(cls, trace: Trace) -> _Prompts:
        tokens = trace.input_tokens.astype(np.int64)
        blocks = trace.header.blocks(tokens)
        donor = _donors(trace.session, blocks)
        reach = np.where(donor < 0, 0, np.minimum(blocks[donor], blocks))
        return cls(tokens, blocks, donor, reach, trace.header.block_tokens)

    def rates(self, hits: Ints) -> Floats:
        """As `Trace.ideal_hit_rates`, for so many blocks."""
        rates: Floats = np.minimum(hits * self.block_tokens, self.tokens) / self.tokens
        return rates

    def hits_in_bins(self) -> tuple[Ints, Ints]:
        """The fewest and the most blocks of a hit in each bin: (bins, turns).

        Where a turn can reach no rate in a bin, the fewest are more than the most.
        """
        least = np.zeros((_BINS + 1, len(self.tokens)), np.int64)
        least[_BINS] = self.reach + 1
        for at, edge in enumerate(HIT_EDGES[1:-1], 1):
            fewest = np.ceil(edge * self.tokens / self.block_tokens).astype(np.int64)
            # The rate is what decides, in floating point as everywhere else.
            fewest -= (fewest > 0) & (self.rates(fewest - 1) >= edge)
            fewest += self.rates(fewest) < edge
            least[at] = fewest
        return least[:-1], np.minimum(least[1:] - 1, self.reach)

    def laid(self, hits: Ints) -> dict[str, Any]:
        """The columns of blocks, of which each prompt takes so many from its donor."""
        # Of each run: its chain, and the place in its prompt at which it ends.
        chains, ends = array("i"), array("i")
        rows = array("q", [0])
        # Of each chain: the places at which it begins, and ends so far.
        begins, reached = array("i"), array("i")
        for donor, hit, blocks in zip(
            self.donor.tolist(), hits.tolist(), self.blocks.tolist(), strict=True
        ):
            if hit:
                low, high = rows[donor], rows[donor + 1]
                cut = bisect_left(ends, hit, low, high)
                chains.extend(chains[low : cut + 1])
                ends.extend(ends[low:cut])
                ends.append(hit)
            if blocks > hit:
                if hit and reached[chains[-1]] == hit:
                    reached[chains[-1]] = ends[-1] = blocks
                else:
                    chains.append(len(begins))
                    ends.append(blocks)
                    begins.append(hit)
                    reached.append(blocks)
            rows.append(len(ends))
        sizes = np.array(reached, np.int64) - np.array(begins, np.int64)
        first = np.cumsum(sizes) - sizes
        stops = np.array(rows, np.int64)
        counts = stops[1:] - stops[:-1]
        row = np.repeat(np.arange(len(counts)), counts)
        end = np.array(ends, np.int64)
        lengths = np.where(np.diff(row, prepend=-1) > 0, end, np.diff(end, prepend=0))
        return run_columns(len(counts), row, first[np.array(chains, np.int64)], lengths)


def _donors(session: NDArray[np.int32], blocks: Ints) -> Ints:
    """Whose front each turn takes: the turn before it, or the longest first one so far."""
    order = np.argsort(session, kind="stable")
    donor = np.full(len(session), -1, np.int64)
    follows = np.flatnonzero(np.diff(session[order]) == 0)
    donor[order[follows + 1]] = order[follows]
    firsts = np.flatnonzero(donor < 0)
    longest = np.maximum.accumulate(blocks[firsts])
    longer = np.diff(longest, prepend=-1) > 0
    holder = firsts[np.maximum.accumulate(np.where(longer, np.arange(len(firsts)), 0))]
    donor[firsts[1:]] = holder[:-1]
    return donor


def _bins_of(rank: Ints, target_bins: Ints, can: NDArray[np.bool_]) -> Ints:
    """A bin for each turn, or `_NOWHERE`: as many as can be in bins that want them.

    `can`: (bins, turns). Turns that can be in the same bins make a kind; the flow is between the
    kinds and the bins, and in a kind bins go by rank.
    """
    kind = (1 << np.arange(_BINS)) @ can
    asked = target_bins[rank]
    there = np.where(can[asked, np.arange(len(rank))], asked, _NOWHERE)
    flow = np.zeros((1 << _BINS, _BINS + 1), np.int64)
    np.add.at(flow, (kind, there), 1)
    wanting = np.bincount(target_bins, minlength=_BINS) - flow[:, :_BINS].sum(0)
    while way := _way(flow, wanting):
        end = way[-1][2]
        turns = min(wanting[end], *(flow[kind_, from_] for kind_, from_, _ in way))
        for kind_, from_, to in way:
            flow[kind_, from_] -= turns
            flow[kind_, to] += turns
        wanting[end] -= turns
    bin_of = np.empty(len(rank), np.int64)
    bin_of[np.lexsort((rank, kind))] = np.tile(np.arange(_BINS + 1), 1 << _BINS).repeat(
        flow.ravel()
    )
    return bin_of


def _way(flow: Ints, wanting: Ints) -> list[tuple[int, int, int]]:
    """The shortest way for a turn that is nowhere into a bin that wants one more.

    Steps of (kind, from bin, to bin): at each a turn of that kind makes room. Empty: there is none.
    """
    can = (np.arange(1 << _BINS)[:, None] >> np.arange(_BINS)) & 1
    came: dict[int, tuple[int, int]] = {_NOWHERE: (0, 0)}
    queue = deque([_NOWHERE])
    while queue:
        from_ = queue.popleft()
        for to in range(_BINS):
            movable = flow[:, from_] * can[:, to]
            if to in came or not movable.any():
                continue
            came[to] = int(movable.argmax()), from_
            if wanting[to]:
                return _back(came, to)
            queue.append(to)
    return []


def _back(came: dict[int, tuple[int, int]], end: int) -> list[tuple[int, int, int]]:
    """The steps that led to this bin."""
    way = []
    while end != _NOWHERE:
        kind, before = came[end]
        way.append((kind, before, end))
        end = before
    return way[::-1]


def _targets_of(
    rank: Ints, bin_of: Ints, target_bins: Ints, targets: Floats, prompts: _Prompts
) -> Floats:
    """A rate for each turn; in each bin, the highest first, to the highest rank that reaches it.

    Where a bin has too few turns, targets all over it are left, for those that are nowhere.
    """
    top = prompts.rates(prompts.reach)
    target = np.empty(len(rank))
    left = []
    for at in range(_BINS):
        mine = np.flatnonzero(bin_of == at)
        its = targets[target_bins == at]
        chosen = ((np.arange(len(mine)) + 0.5) * (len(its) / max(len(mine), 1))).astype(np.int64)
        target[mine] = _given(rank[mine], top[mine], its[chosen])
        left.append(np.delete(its, chosen))
    nowhere = np.flatnonzero(bin_of == _NOWHERE)
    target[nowhere[np.lexsort((rank[nowhere], top[nowhere]))]] = np.concatenate(left)
    return target


def _given(rank: Ints, top: Floats, targets: Floats) -> Floats:
    """Of ascending targets, one for each turn: as many as can be within its `top`."""
    given = np.full(len(rank), np.nan)
    by_top = np.argsort(-top, kind="stable").tolist()
    tops, ranks = top.tolist(), rank.tolist()
    able: list[tuple[int, int]] = []
    missed = []
    at = 0
    for target in targets[::-1].tolist():
        while at < len(by_top) and tops[by_top[at]] >= target:
            heapq.heappush(able, (-ranks[by_top[at]], by_top[at]))
            at += 1
        if able:
            given[heapq.heappop(able)[1]] = target
        else:
            missed.append(target)
    rest = np.flatnonzero(np.isnan(given))
    given[rest[np.lexsort((rank[rest], top[rest]))]] = missed[::-1]
    return given
