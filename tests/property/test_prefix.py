"""The chain cache against one that keeps every block by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harness.prefix import PrefixCache


class NaiveCache:
    """Every block a node with its last use; the least recently used leaf goes first."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.used: dict[int, int] = {}
        self.before: dict[int, int] = {}
        self.clock = 0

    def match(self, blocks: list[int]) -> int:
        found = 0
        for block in blocks:
            if block not in self.used:
                break
            found += 1
        return found

    def insert(self, blocks: list[int]) -> int:
        self.clock += 1
        new = sum(block not in self.used for block in blocks)
        before = -1
        for block in blocks:
            self.used[block] = self.clock
            self.before[block] = before
            before = block
        while len(self.used) > self.capacity:
            inner = {self.before[block] for block in self.used}
            leaves = [block for block in self.used if block not in inner]
            # Ties within a prompt cannot happen: of one prompt's blocks only the last is a leaf.
            del self.used[min(leaves, key=lambda block: (self.used[block], block))]
        return new


Tree = list[tuple[int, int]]


@st.composite
def trees(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Prompts over chains that branch off each other: lists of runs."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    starts = [sum(lengths[:at]) for at in range(len(lengths))]
    paths: list[Tree] = []
    for at, length in enumerate(lengths):
        parent = draw(st.integers(-1, at - 1))
        if parent == -1 or (
            (leave := draw(st.integers(1, lengths[parent]))) == lengths[parent]
            and (starts[parent] + lengths[parent] == starts[at])
        ):
            paths.append([(starts[at], length)])
        else:
            paths.append([*paths[parent][:-1], (starts[parent], leave), (starts[at], length)])
    prompts = []
    for _ in range(draw(st.integers(1, 25))):
        path = draw(st.sampled_from(paths))
        start, length = path[-1]
        prompts.append([*path[:-1], (start, draw(st.integers(1, length)))])
    return prompts


def expand(runs: list[tuple[int, int]]) -> list[int]:
    return [start + at for start, length in runs for at in range(length)]


@given(prompts=trees(), capacity=st.one_of(st.integers(0, 30), st.just(float("inf"))))
def test_chains_behave_as_single_blocks_do(
    prompts: list[list[tuple[int, int]]], capacity: float
) -> None:
    cache, naive = PrefixCache(capacity), NaiveCache(capacity)
    for runs in prompts:
        blocks = expand(runs)
        assert cache.match(runs) == naive.match(blocks)
        assert cache.insert(runs) == naive.insert(blocks)
        assert cache.held == len(naive.used) <= capacity
        for other in prompts:
            assert cache.match(other) == naive.match(expand(other))


@given(prompts=trees(), capacity=st.integers(0, 30))
def test_what_goes_in_is_held_or_was_evicted(
    prompts: list[list[tuple[int, int]]], capacity: int
) -> None:
    cache = PrefixCache(capacity)
    inserted = sum(cache.insert(runs) for runs in prompts)
    assert inserted == cache.held + cache.evicted
    cache.clear()
    assert cache.held == cache.evicted == 0
    assert cache.match(prompts[0]) == 0


@given(prompts=trees(), capacity=st.integers(0, 30))
def test_what_was_held_once_is_known(prompts: list[list[tuple[int, int]]], capacity: int) -> None:
    """So many of these few chains are never forgotten: it is what an endless cache would hold.

    Except of a prompt larger than the cache, of which the end never was in it.
    """
    cache, endless = PrefixCache(capacity), PrefixCache(float("inf"))
    for runs in prompts:
        cache.insert(runs)
        endless.insert(runs)
        for other in prompts:
            once = cache.once_held(other)
            assert cache.match(other) <= once <= endless.match(other)
            if all(len(expand(each)) <= capacity for each in prompts):
                assert once == endless.match(other)


def test_a_chain_that_grows_again_can_be_evicted_again() -> None:
    """Its tail carried a branch, so it waited outside the queue; growing must bring it back."""
    cache = PrefixCache(3)
    cache.insert([(0, 1), (10, 1), (40, 2)])
    cache.insert([(0, 2)])
    cache.insert([(0, 1), (10, 2)])
    assert cache.match([(0, 1), (10, 2)]) == 3
    assert cache.match([(0, 3)]) == 1
