"""Block ids of a file, or of a client, into dense ids as `harness.prefix` wants them.

A dense id stands for a block *and all before it*, whatever the ids it is made of mean: it is given
to a (dense id of the block before, id as it came). New suffixes get consecutive ids, so a prompt
comes out as few runs, and each run is the front of a chain.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

BlockIds = Sequence[int] | Sequence[str]


class _Chain:
    """Dense ids from `start` on, one for each of `blocks`; the tree holds it under `key`."""

    __slots__ = ("blocks", "key", "start")

    def __init__(self, key: tuple[int, int | str], start: int) -> None:
        self.key = key
        self.start = start
        self.blocks: list[int | str] = []


class Interner:
    """A radix tree of the prompts seen. Its edges are the chains, so a path down it is the runs.

    `limit`: the blocks it may know, for one that lives on. Beyond it the least recently used
    chains are forgotten, leaves first; a prompt that comes back after that gets new ids.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.blocks = 0
        """Dense ids given so far; the next is this."""
        self.known = 0
        """Blocks in the tree."""
        self._limit = limit
        self._chains: OrderedDict[tuple[int, int | str], _Chain] = OrderedDict()

    def new_scope(self) -> None:
        """From here on ids mean other blocks than before."""
        self._chains.clear()
        self.known = 0

    def runs(self, ids: BlockIds) -> tuple[list[int], list[int]]:
        """(starts, lengths) of the prompt's runs of dense ids.

        A chain may only grow while its last id is the newest of all: then the next id continues
        it. No later chain can so come to stand right behind the block that it follows.
        """
        prompt: list[int | str] = [*ids]
        starts: list[int] = []
        lengths: list[int] = []
        path: list[_Chain] = []
        before, at = -1, 0
        while at < len(prompt):
            key = before, prompt[at]
            chain = self._chains.get(key)
            if chain is None:
                chain = self._chains[key] = _Chain(key, self.blocks)
                shared = 0
            else:
                shared = _shared(chain.blocks, prompt, at)
            if shared == len(chain.blocks) and chain.start + shared == self.blocks:
                rest = prompt[at + shared :]
                chain.blocks += rest
                self.blocks += len(rest)
                self.known += len(rest)
                shared += len(rest)
            starts.append(chain.start)
            lengths.append(shared)
            path.append(chain)
            before, at = chain.start + shared - 1, at + shared
        if self._limit is not None:
            self._forget(self._limit, path)
        return starts, lengths

    def _forget(self, limit: int, path: list[_Chain]) -> None:
        """Note the use of `path`, and keep to the limit.

        The leaf is noted first, so that no chain stands before one that leaves it.
        """
        chains = self._chains
        for chain in reversed(path):
            chains.move_to_end(chain.key)
        while self.known > limit and len(chains) > len(path):
            _, oldest = chains.popitem(last=False)
            self.known -= len(oldest.blocks)


def _shared(chain: list[int | str], prompt: list[int | str], at: int) -> int:
    """How many blocks `chain` and `prompt[at:]` have in common at their fronts."""
    rest = prompt[at : at + len(chain)]
    if chain[: len(rest)] == rest:
        return len(rest)
    return next(same for same, (a, b) in enumerate(zip(chain, rest, strict=False)) if a != b)


class Stretches(NamedTuple):
    """Prompts as stretches of consecutive ids, each given as its first id and its length."""

    per_prompt: NDArray[np.int64]
    """How many each prompt has, shape (prompts,)."""
    starts: NDArray[np.int64]
    """First ids, of all stretches in a row. Ids of 63 bits and more wrap to negative ones."""
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, ids: NDArray[np.uint64], blocks: NDArray[np.int64]) -> Self:
        """`ids` are those of all prompts in a row, `blocks` how many each prompt has."""
        wrapped = ids.view(np.int64)
        ends = np.cumsum(blocks)
        begins = np.empty(len(wrapped), bool)
        np.not_equal(wrapped[1:] - wrapped[:-1], 1, out=begins[1:])
        begins[(ends - blocks)[blocks > 0]] = True
        at = np.flatnonzero(begins)
        per_prompt = np.diff(np.searchsorted(at, ends), prepend=0)
        return cls(per_prompt, wrapped[at], np.diff(at, append=len(wrapped)))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All prompts of `parts`, of which there is one or more."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    def numbered(self) -> Self | None:
        """What a new `Interner`'s `runs` gives for prompt after prompt, of all at once.

        None where an id follows two different ids, or itself: such ids do not stand for all before
        them, and take the tree. Where none does, an id is an edge of the tree: dense ids count the
        ids in order of first appearance. Since the newest id ends its chain, a dense id is of the
        same chain as the one before it in the prompt wherever it is one more: runs are stretches.
        """
        met = np.maximum.accumulate(np.concatenate(([0], self.starts + self.lengths)))[:-1]
        runs = self
        if not ((self.starts >= 0) & (self.starts <= met)).all():
            # Not in that order already, as Mooncake's own files are.
            runs = self._by_first_appearance()
        return runs if runs.are_chains() else None

    def _by_first_appearance(self) -> Self:
        import pandas as pd  # noqa: PLC0415 - 0.2 s, for the files that need it

        ends = np.cumsum(self.lengths)
        ids = np.arange(ends[-1]) + np.repeat(self.starts - ends + self.lengths, self.lengths)
        prompt = np.repeat(np.arange(len(self.per_prompt)), self.per_prompt)
        blocks = np.zeros(len(self.per_prompt), np.int64)
        np.add.at(blocks, prompt, self.lengths)
        return type(self).of(pd.factorize(ids)[0].astype(np.uint64), blocks)

    def are_chains(self) -> bool:
        """Whether each id always follows the same one."""
        before = np.empty_like(self.starts)
        before[1:] = (self.starts + self.lengths)[:-1] - 1
        before[(np.cumsum(self.per_prompt) - self.per_prompt)[self.per_prompt > 0]] = -1
        order = np.argsort(self.starts, kind="stable")
        starts, ends, before = (
            self.starts[order],
            (self.starts + self.lengths)[order],
            before[order],
        )
        first = np.flatnonzero(np.diff(starts, prepend=-1))
        again = np.diff(starts) == 0
        if not len(first) or (again & (np.diff(before) != 0)).any():
            return not len(first)
        reach = np.maximum.reduceat(ends, first)
        return bool((reach[:-1] <= starts[first][1:]).all())
