"""Dense ids against their meaning: two prompts share ids as far as they share what they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.interner import Interner, Stretches

Prompts = list[list[int]]

# Few distinct ids, so that prompts meet, branch inside chains and grow where others ended.
prompts_lists = st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=14)


def shared(a: list[int], b: list[int]) -> int:
    return next(
        (at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def expand(starts: list[int], lengths: list[int]) -> list[int]:
    runs = zip(starts, lengths, strict=True)
    return [start + at for start, length in runs for at in range(length)]


@given(prompts=prompts_lists)
def test_dense_ids_are_shared_as_prefixes_are(prompts: Prompts) -> None:
    interner = Interner()
    dense = [expand(*interner.runs(prompt)) for prompt in prompts]
    for ids, prompt in zip(dense, prompts, strict=True):
        assert len(ids) == len(prompt)
        for other_ids, other in zip(dense, prompts, strict=True):
            assert shared(ids, other_ids) == shared(prompt, other)
            apart = shared(ids, other_ids)
            assert not set(ids[apart:]) & set(other_ids[apart:])


@given(scopes=st.lists(prompts_lists, max_size=4))
def test_runs_are_the_fronts_of_chains(scopes: list[Prompts]) -> None:
    interner = Interner()
    runs = []
    for prompts in scopes:
        interner.new_scope()
        runs += [interner.runs(prompt) for prompt in prompts]
    before: dict[int, int] = {}
    for starts, lengths in runs:
        ids = expand(starts, lengths)
        for at, block in enumerate(ids):
            assert before.setdefault(block, ids[at - 1] if at else -1) == (
                ids[at - 1] if at else -1
            )
    chain_starts = {block for block, last in before.items() if block == 0 or last != block - 1}
    assert {start for starts, _ in runs for start in starts} <= chain_starts
    assert sorted(before) == list(range(interner.blocks))


@given(prompts=prompts_lists)
def test_ids_of_two_scopes_never_meet(prompts: Prompts) -> None:
    interner = Interner()
    first = {block for prompt in prompts for block in expand(*interner.runs(prompt))}
    interner.new_scope()
    second = {block for prompt in prompts for block in expand(*interner.runs(prompt))}
    assert not first & second


@given(prompts=prompts_lists, limit=st.integers(0, 12))
def test_what_is_forgotten_is_the_least_recently_used_and_comes_back_as_new(
    prompts: Prompts, limit: int
) -> None:
    interner = Interner(limit)
    everything = Interner()
    before: dict[int, int] = {}
    said: dict[int, tuple[int, ...]] = {}
    for prompt in prompts:
        runs = interner.runs(prompt)
        ids = expand(*runs)
        everything.runs(prompt)
        assert len(ids) == len(prompt)
        assert interner.known <= limit or len(interner._chains) == len(runs[0])
        for at, block in enumerate(ids):
            # Still one block and all before it an id, whatever was forgotten in between.
            assert before.setdefault(block, ids[at - 1] if at else -1) == (
                ids[at - 1] if at else -1
            )
            assert said.setdefault(block, tuple(prompt[: at + 1])) == tuple(prompt[: at + 1])
        assert expand(*interner.runs(prompt)) == ids  # the newest is never forgotten
    if everything.blocks <= limit:
        assert interner.blocks == everything.blocks


def test_a_limit_keeps_the_trunk_and_lets_its_oldest_branch_go() -> None:
    interner = Interner(limit=6)
    trunk, *_ = interner.runs([1, 2, 3])
    interner.runs([1, 2, 3, 4, 5])
    assert interner.runs([1, 2, 3, 6]) == ([0, 5], [3, 1])
    assert interner.known == 6
    assert interner.runs([9]) == ([6], [1])  # 0 to 4 are one chain: the branch of 6 goes
    assert interner.known == 6
    assert interner.runs([1, 2, 3, 6]) == ([0, 7], [3, 1])
    assert trunk == [0]


def test_new_blocks_follow_each_other() -> None:
    interner = Interner()
    assert interner.runs([7, 8]) == ([0], [2])
    assert interner.runs([7, 8, 2**64 - 1]) == ([0], [3])
    assert interner.runs([7, 9]) == ([0, 3], [1, 1])
    assert interner.runs([7, 8, 2**64 - 1, 5]) == ([0, 4], [3, 1])
    assert interner.runs(["7"]) == ([5], [1])
    assert interner.runs([]) == ([], [])


def at_once(prompts: Prompts, parts: int = 1) -> list[tuple[list[int], list[int]]] | None:
    """The runs of each prompt by `Stretches`, the prompts cut into so many parts."""
    size = -(-len(prompts) // parts)
    cut = [prompts[at : at + size] for at in range(0, len(prompts), size)]
    stretches = [
        Stretches.of(
            np.array([each for prompt in part for each in prompt], np.uint64),
            np.array([len(prompt) for prompt in part], np.int64),
        )
        for part in cut
    ]
    runs = Stretches.joined(stretches).numbered()
    if runs is None:
        return None
    ends = np.cumsum(runs.per_prompt).tolist()
    starts, lengths = runs.starts.tolist(), runs.lengths.tolist()
    return [
        (starts[low:high], lengths[low:high]) for low, high in zip([0, *ends], ends, strict=False)
    ]


@st.composite
def prefix_named(draw: st.DrawFn) -> Prompts:
    """Prompts whose ids stand for the block and all before it, under numbers at random."""
    prompts = draw(st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=14))
    prefixes = sorted({tuple(p[: at + 1]) for p in prompts for at in range(len(p))})
    values = st.integers(0, 2**64 - 1) | st.integers(0, 40)
    number = st.lists(values, min_size=len(prefixes), max_size=len(prefixes), unique=True)
    names = dict(zip(prefixes, draw(number), strict=True))
    return [[names[tuple(p[: at + 1])] for at in range(len(p))] for p in prompts]


@given(prompts=prefix_named(), parts=st.integers(1, 3))
def test_all_prompts_at_once_get_the_runs_that_they_get_one_by_one(
    prompts: Prompts, parts: int
) -> None:
    interner = Interner()
    assert at_once(prompts, parts) == [interner.runs(prompt) for prompt in prompts]


@given(prompts=st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=8))
def test_all_at_once_are_chains_only_where_each_id_follows_one_other(prompts: Prompts) -> None:
    before: dict[int, set[int]] = {}
    for prompt in prompts:
        for last, block in zip([-1, *prompt], prompt, strict=False):
            before.setdefault(block, set()).add(last)
    found = at_once(prompts)
    if all(len(each) == 1 for each in before.values()):
        interner = Interner()
        assert found == [interner.runs(prompt) for prompt in prompts]
    else:
        assert found is None


@pytest.mark.parametrize(
    ("prompts", "runs"),
    [
        ([[0, 1, 2], [0, 1, 3, 4]], [([0], [3]), ([0, 3], [2, 2])]),
        ([[7, 8], [], [9]], [([0], [2]), ([], []), ([2], [1])]),
        ([[2**64 - 1, 0], [2**64 - 1, 5]], [([0], [2]), ([0, 2], [1, 1])]),  # it does not wrap
        ([[0, 0]], None),
        ([[0, 1], [1]], None),
        ([[0, 1, 2], [0, 2]], None),
    ],
)
def test_all_at_once_by_hand(
    prompts: Prompts, runs: list[tuple[list[int], list[int]]] | None
) -> None:
    assert at_once(prompts) == runs
