"""Block ids of a file, or of a client, into dense ids as `harness.prefix` wants them.

A dense id stands for a block *and all before it*, whatever the ids it is made of mean: it is given
to a (dense id of the block before, id as it came). New suffixes get consecutive ids, so a prompt
comes out as few runs, and each run is the front of a chain.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

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
