"""Prefix caches over block *chains*: infinite ones for ideal hit rates, bounded ones for engines.

A `Trace` numbers blocks so that an id stands for the block *and all before it*, and so that ids
given in a row usually follow each other in a prompt too. A **chain** is a longest stretch of ids
in which each id follows the id before it; a prompt is a list of *runs*, (first id, length), and
each run starts where its chain starts (`Trace` checks this). What a prefix-closed cache holds of
a chain is therefore always its first `depth` blocks: one integer instead of a node a block. A
look-up or an insertion costs the number of runs (one to a few), not the number of blocks
(hundreds), which is what lets a simulated cache follow millions of 100K-token prompts.

The policy is the one of SGLang's RadixCache and vLLM's prefix cache: least recently used, leaves
first, so that what is held is always a closed set of prefixes.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from math import inf

Runs = Sequence[tuple[int, int]]
"""A prompt's blocks: (id of the first, how many) for each stretch of consecutive ids."""


class _Chain:
    """What is held of one chain: its first `marks[0][0]` blocks.

    `marks` are (depth, last use), deepest and oldest first: a use to depth d renews all above it.
    `branches` counts the chains that are held and leave this one at a depth.
    """

    __slots__ = ("branches", "left_at", "marks", "parent", "queued", "start")

    def __init__(self, start: int, parent: _Chain | None, left_at: int) -> None:
        self.start = start
        self.parent = parent
        self.left_at = left_at
        self.marks: list[tuple[int, int]] = []
        self.branches: dict[int, int] = {}
        self.queued = False


class PrefixCache:
    """A set of cached blocks, closed under "and all before it", of bounded size.

    `capacity` is in blocks; infinite by default, which makes `match` the ideal hit. When an
    insertion overfills it, the least recently used blocks go, leaves first, one tail at a time.
    """

    MOST_LOST = 65_536
    """Of so many chains it remembers how deep they were: of those that lost blocks last."""

    def __init__(self, capacity: float = inf) -> None:
        if not capacity >= 0:
            raise ValueError(f"capacity must be 0 blocks or more, not {capacity}")
        self.capacity = capacity
        self._limit: int | None = None if capacity == inf else int(capacity)
        self.held = 0
        """Blocks now in the cache."""
        self.evicted = 0
        """Blocks pushed out since the last `clear`."""
        self._chains: dict[int, _Chain] = {}
        self._queue: list[tuple[int, int, _Chain]] = []
        self._use = 0
        self._lost: OrderedDict[int, int] = OrderedDict()
        """Start of a chain that lost blocks: the deepest it was when it did."""

    def clear(self) -> None:
        """Forget everything: a cold cache."""
        self.held = self.evicted = self._use = 0
        self._chains.clear()
        self._queue.clear()
        self._lost.clear()

    def match(self, runs: Runs) -> int:
        """How many blocks at the front of the prompt are held. Does not count as a use."""
        chains = self._chains
        found = 0
        for start, length in runs:
            chain = chains.get(start)
            if chain is None:
                break
            depth = chain.marks[0][0]
            if depth < length:
                return found + depth
            found += length
        return found

    def once_held(self, runs: Runs) -> int:
        """How many blocks at the front of the prompt are held, or were and have been evicted.

        Too few where a chain lost its blocks so long ago that this is forgotten.
        """
        found = 0
        for start, length in runs:
            chain = self._chains.get(start)
            depth = max(chain.marks[0][0] if chain else 0, self._lost.get(start, 0))
            if depth < length:
                return found + depth
            found += length
        return found

    def insert(self, runs: Runs) -> int:
        """Hold the whole prompt, as its most recent use. Returns how many blocks were new.

        A prompt larger than the cache leaves its front behind.
        """
        self._use = use = self._use + 1
        parent: _Chain | None = None
        left_at = 0
        new = 0
        for start, length in runs:
            chain = self._chains.get(start)
            if chain is None:
                chain = self._chains[start] = _Chain(start, parent, left_at)
                if parent is not None:
                    parent.branches[left_at] = parent.branches.get(left_at, 0) + 1
                if self._limit is not None:
                    self._enqueue(chain, use)
                chain.marks.append((length, use))
                new += length
            else:
                marks = chain.marks
                deepest = marks[0][0]
                if length > deepest:
                    new += length - deepest
                while marks and marks[-1][0] <= length:
                    marks.pop()
                marks.append((length, use))
                if self._limit is not None and not chain.queued:
                    self._enqueue(chain, marks[0][1])
            parent, left_at = chain, length
        self.held += new
        if self._limit is not None and self.held > self._limit:
            self._evict(self._limit)
        return new

    def _enqueue(self, chain: _Chain, use: int) -> None:
        chain.queued = True
        heapq.heappush(self._queue, (use, chain.start, chain))

    def _evict(self, limit: int) -> None:
        """Give up least recently used tails until the rest fits.

        A chain stands in the queue once, under a use that may be out of date: when it comes up,
        a newer one sends it back, and one whose tail carries branches waits for the last of them.
        """
        queue = self._queue
        while self.held > limit:
            use, _, chain = heapq.heappop(queue)
            marks = chain.marks
            depth, last_use = marks[0]
            if last_use != use:
                heapq.heappush(queue, (last_use, chain.start, chain))
                continue
            floor = max(chain.branches, default=0)
            if floor >= depth:
                chain.queued = False
                continue
            newer = marks[1][0] if len(marks) > 1 else 0
            keep = max(floor, newer, depth - (self.held - limit))
            self.held -= depth - keep
            self.evicted += depth - keep
            self._note_lost(chain.start, depth)
            if keep == newer:
                marks.pop(0)
            else:
                marks[0] = (keep, last_use)
            if marks:
                heapq.heappush(queue, (marks[0][1], chain.start, chain))
            else:
                self._drop(chain)

    def _note_lost(self, start: int, depth: int) -> None:
        """A chain that was so deep is no longer."""
        lost = self._lost
        lost[start] = max(depth, lost.pop(start, 0))
        if len(lost) > self.MOST_LOST:
            lost.popitem(last=False)

    def _drop(self, chain: _Chain) -> None:
        """Take an emptied chain away and let its parent be evicted again."""
        chain.queued = False
        del self._chains[chain.start]
        parent = chain.parent
        if parent is None:
            return
        left = parent.branches[chain.left_at] - 1
        if left:
            parent.branches[chain.left_at] = left
        else:
            del parent.branches[chain.left_at]
        if not parent.queued:
            self._enqueue(parent, parent.marks[0][1])
