"""Block ids of a file into the dense ids of a `Trace`.

A dense id stands for a block *and all before it*, whatever the file's ids mean: it is given to a
(dense id of the block before, id in the file). New suffixes get consecutive ids, so a prompt comes
out as few runs, and each run is the front of a chain as `harness.prefix` wants it.
"""

from __future__ import annotations

from collections.abc import Sequence

BlockIds = Sequence[int] | Sequence[str]


class _Chain:
    """Dense ids from `start` on, one for each id of the file in `blocks`."""

    __slots__ = ("blocks", "start")

    def __init__(self, start: int, blocks: list[int | str]) -> None:
        self.start = start
        self.blocks = blocks


class Interner:
    """A radix tree of the prompts seen. Its edges are the chains, so a path down it is the runs."""

    def __init__(self) -> None:
        self.blocks = 0
        """Dense ids given so far; the next is this."""
        self._chains: dict[tuple[int, int | str], _Chain] = {}

    def new_scope(self) -> None:
        """From here on the file's ids mean other blocks than before."""
        self._chains.clear()

    def runs(self, ids: BlockIds) -> tuple[list[int], list[int]]:
        """(starts, lengths) of the prompt's runs of dense ids.

        A chain may only grow while its last id is the newest of all: then the next id continues
        it. No later chain can so come to stand right behind the block that it follows.
        """
        prompt: list[int | str] = [*ids]
        starts: list[int] = []
        lengths: list[int] = []
        before, at = -1, 0
        while at < len(prompt):
            chain = self._chains.get((before, prompt[at]))
            if chain is None:
                chain = self._chains[before, prompt[at]] = _Chain(self.blocks, [])
                shared = 0
            else:
                shared = _shared(chain.blocks, prompt, at)
            if shared == len(chain.blocks) and chain.start + shared == self.blocks:
                rest = prompt[at + shared :]
                chain.blocks += rest
                self.blocks += len(rest)
                shared += len(rest)
            starts.append(chain.start)
            lengths.append(shared)
            before, at = chain.start + shared - 1, at + shared
        return starts, lengths


def _shared(chain: list[int | str], prompt: list[int | str], at: int) -> int:
    """How many blocks `chain` and `prompt[at:]` have in common at their fronts."""
    rest = prompt[at : at + len(chain)]
    if chain[: len(rest)] == rest:
        return len(rest)
    return next(same for same, (a, b) in enumerate(zip(chain, rest, strict=False)) if a != b)
