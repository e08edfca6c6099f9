"""Prompts share a prefix exactly as far as their blocks do, and nothing else is in common."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from adapters.prompts import Histories, Tokens, Words
from harness.backend import Request
from harness.errors import ConfigError


def request(
    runs: list[tuple[int, int]], tokens: int, turn: int = 0, session: int = 0, size: int = 64
) -> Request:
    return Request(turn, session, 0, tokens, 1, size, runs, "main")


def common(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """How many tokens two prompts share from their start on."""
    shorter = min(len(a), len(b))
    same = a[:shorter] == b[:shorter]
    return shorter if same.all() else int(same.argmin())


def salted(prompts: Tokens, salt: str) -> Tokens:
    prompts.salted(salt)
    return prompts


@pytest.mark.parametrize("size", [1, 16, 64, 512])
@pytest.mark.parametrize("blocks", [0, 1, 5])
@pytest.mark.parametrize("more", [-1, 0, 1, 7])
def test_a_prompt_has_exactly_the_tokens_of_its_request(size: int, blocks: int, more: int) -> None:
    """Fewer than its blocks where the last one is a part, more where a part has no block."""
    tokens = max(1, size * blocks + more)
    runs = [(3, blocks)] if blocks else []
    ids = Tokens().token_ids(request(runs, tokens, size=size))
    assert len(ids) == tokens


@pytest.mark.parametrize(
    ("a", "b", "shared"),
    [
        ([(0, 5)], [(0, 5)], 5),
        ([(0, 5)], [(0, 3), (9, 2)], 3),
        ([(0, 5)], [(0, 3)], 3),
        ([(0, 5)], [(0, 2), (2, 3)], 5),
        ([(0, 1), (7, 2)], [(0, 1), (7, 1), (8, 1)], 3),
        ([(0, 5)], [(1, 5)], 0),
        ([(0, 5)], [(2**40, 5)], 0),
        ([(0, 5)], [(5, 1), (1, 4)], 0),
    ],
)
def test_prompts_share_tokens_exactly_as_far_as_their_blocks(
    a: list[tuple[int, int]], b: list[tuple[int, int]], shared: int
) -> None:
    prompts = Tokens()
    lengths = [64 * sum(length for _, length in runs) + 5 for runs in (a, b)]
    first, second = (
        prompts.token_ids(request(runs, tokens, turn))
        for turn, (runs, tokens) in enumerate(zip((a, b), lengths, strict=True))
    )
    assert common(first, second) == 64 * shared


@pytest.mark.parametrize("count", [2, 600, 15_000])
def test_no_two_blocks_agree(count: int) -> None:
    """4,000 of them; with two tokens to choose from it takes all 64 to tell any two apart."""
    ids = Tokens(count=count).token_ids(request([(0, 4000)], 4000 * 64)).reshape(4000, 64)
    assert len(np.unique(ids, axis=0)) == 4000


def test_sibling_blocks_differ_from_their_first_token_on() -> None:
    """By chance 1 in 15,000 of neighbours has the same first token, and none the same first five.

    Else a cache of pages smaller than the trace's blocks would hit where the trace says it cannot.
    """
    ids = Tokens().token_ids(request([(0, 4000)], 4000 * 64)).reshape(4000, 64)
    assert (ids[1:, 0] == ids[:-1, 0]).mean() < 0.002
    assert len(np.unique(ids[:, :5], axis=0)) == 4000


def test_a_part_of_a_block_at_the_end_is_the_front_of_it() -> None:
    """Traces that count blocks with `ceil`: the next turn has the whole block."""
    prompts = Tokens()
    part = prompts.token_ids(request([(0, 3)], 150, turn=0))
    whole = prompts.token_ids(request([(0, 3), (3, 1)], 256, turn=1))
    assert common(part, whole) == 150


def test_a_part_that_has_no_block_is_the_turn_s_own() -> None:
    """Traces that count blocks with `floor`."""
    prompts = Tokens()
    first = prompts.token_ids(request([(0, 2)], 150, turn=0))
    again = prompts.token_ids(request([(0, 2)], 150, turn=0))
    other = prompts.token_ids(request([(0, 2)], 150, turn=1))
    following = prompts.token_ids(request([(0, 3)], 192, turn=2))
    assert common(first, again) == 150
    assert common(first, other) == common(first, following) == 128


def test_nothing_is_shared_under_another_salt() -> None:
    asked = request([(0, 100)], 6_450)
    first, second = (salted(Tokens(), salt).token_ids(asked) for salt in ("a", "b"))
    assert (first == second).mean() < 0.002
    assert common(first[:64], second[:64]) == 0
    assert np.array_equal(first, salted(Tokens(), "a").token_ids(asked))


@pytest.mark.parametrize(("first", "count"), [(0, 2), (1000, 15_000), (9, 600)])
def test_tokens_stay_in_their_range(first: int, count: int) -> None:
    ids = Tokens(first, count).token_ids(request([(0, 200)], 200 * 64 + 50))
    assert ids.min() >= first
    assert ids.max() < first + count
    assert len(np.unique(ids)) > 0.55 * count


def test_another_process_makes_the_same_prompts() -> None:
    """No hash of Python's own, which is new for each process."""
    code = (
        "from adapters.prompts import Tokens, Words\n"
        "from tests.unit.test_prompts import request, salted\n"
        "asked = request([(5, 1), (2**40, 1)], 150, turn=3)\n"
        "print(salted(Tokens(), 's').token_ids(asked).tolist())\n"
        "print(Words().text(asked, 20))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    asked = request([(5, 1), (2**40, 1)], 150, turn=3)
    ids, words = done.stdout.splitlines()
    assert ids == str(salted(Tokens(), "s").token_ids(asked).tolist())
    assert words == Words().text(asked, 20)


def test_the_same_prompts_come_with_every_version() -> None:
    """Or a comparison of two versions on one server would compare two workloads."""
    ids = salted(Tokens(), "s").token_ids(request([(0, 1), (7, 1)], 140))
    assert ids[[0, 1, 2, 63, 64, 127, 128, 139]].tolist() == [
        9176,
        12625,
        10815,
        2590,
        13725,
        8564,
        14401,
        9187,
    ]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"first": -1}, "prompts.first"),
        ({"first": 1.5}, "prompts.first"),
        ({"count": 1}, "prompts.count"),
    ],
)
def test_a_range_of_tokens_that_cannot_be_used_is_refused(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Tokens(**settings)


# ---- words


def test_words_are_shared_as_tokens_are() -> None:
    prompts = Words()
    texts = [
        prompts.text(request(runs, 200, turn), 200).split(" ")
        for turn, runs in enumerate([[(0, 3)], [(0, 2), (9, 1)]])
    ]
    assert [len(words) for words in texts] == [200, 200]
    assert texts[0][:128] == texts[1][:128]
    assert texts[0][128:133] != texts[1][128:133]
    assert set(texts[0]) <= set(prompts.words)


@pytest.mark.parametrize("count", [1, 199, 200, 201, 450])
def test_as_many_words_as_asked(count: int) -> None:
    """Fewer by what the server's template adds; more where that is a negative number."""
    prompts = Words()
    text = prompts.text(request([(0, 3)], 200), count)
    assert len(text.split(" ")) == count
    longest = prompts.text(request([(0, 3)], 200), 450)
    assert longest.startswith(text)


def test_words_of_a_prefix() -> None:
    prompts = Words(prefix="w", count=600)
    assert prompts.words == [f"w{number}" for number in range(600)]
    text = prompts.text(request([(0, 50)], 3200), 3200)
    assert len(set(text.split(" "))) > 550


def test_a_word_that_is_given_twice_counts_once() -> None:
    assert Words(["a", "b", "a"]).words == ["a", "b"]
    assert len(Words().words) == len(set(Words().words)) == 113


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"words": ["one"]}, "two or more"),
        ({"words": ["one", "one"]}, "two or more"),
        ({"words": ["one", "two words"]}, "without a space"),
        ({"words": ["one", " two"]}, "without a space"),
        ({"words": ["one", ""]}, "without a space"),
        ({"prefix": "w ", "count": 9}, "two or more"),
        ({"prefix": "w"}, "prompts.count"),
        ({"prefix": "w", "count": 1}, "prompts.count"),
    ],
)
def test_words_that_cannot_be_used_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Words(**settings)


# ---- live answers


def test_a_live_answer_stands_in_the_next_prompt() -> None:
    histories, prompts = Histories(), Tokens()
    first = request([(0, 2)], 150, turn=0)
    second = request([(0, 5)], 320, turn=1)
    sent = histories.apply(first, prompts.token_ids(first))
    assert np.array_equal(sent, prompts.token_ids(first))
    histories.keep(first, sent, [1, 2, 3])
    grown = histories.apply(second, prompts.token_ids(second))
    assert len(grown) == 320
    assert np.array_equal(grown[:150], sent)
    assert grown[150:153].tolist() == [1, 2, 3]
    assert np.array_equal(grown[153:], prompts.token_ids(second)[153:])


def test_a_conversation_grows_turn_by_turn() -> None:
    """What was sent is always the front of what is sent next."""
    histories, prompts = Histories(), Tokens()
    before = np.empty(0, np.int64)
    for turn in range(20):
        asked = request([(0, 1 + 2 * turn)], 64 * (1 + 2 * turn) + 9, turn)
        sent = histories.apply(asked, prompts.token_ids(asked))
        assert common(sent, before) == len(before)
        assert len(sent) == asked.input_tokens
        histories.keep(asked, sent, [turn] * 70)
        before = np.concatenate((sent, np.full(70, turn)))


def test_branches_share_their_trunk_and_not_each_other_s_answers() -> None:
    histories, prompts = Histories(), Tokens()
    trunk = request([(0, 2)], 128, turn=0)
    histories.keep(trunk, prompts.token_ids(trunk), [7] * 10)
    left = request([(0, 4)], 256, turn=1)
    right = request([(0, 2), (90, 2)], 256, turn=2)
    sent = [histories.apply(each, prompts.token_ids(each)) for each in (left, right)]
    assert common(sent[0], sent[1]) == 138
    for each, ids, answer in zip((left, right), sent, ([8] * 10, [9] * 10), strict=True):
        histories.keep(each, ids, answer)
    longer = request([(0, 2), (90, 4)], 384, turn=3)
    ids = histories.apply(longer, prompts.token_ids(longer))
    assert np.array_equal(ids[:256], sent[1])
    assert ids[256:266].tolist() == [9] * 10


def test_a_prompt_that_goes_another_way_is_left_alone() -> None:
    """A compacted conversation, a shorter one, another session."""
    histories, prompts = Histories(), Tokens()
    first = request([(0, 4)], 256)
    histories.keep(first, prompts.token_ids(first), [7] * 10)
    for other in (
        request([(0, 3), (50, 2)], 320),
        request([(0, 2)], 128),
        request([(0, 5)], 320, session=1),
    ):
        assert np.array_equal(
            histories.apply(other, prompts.token_ids(other)), prompts.token_ids(other)
        )


def test_an_answer_without_room_is_cut_and_not_left_out() -> None:
    histories, prompts = Histories(), Tokens()
    first = request([(0, 4)], 256)
    histories.keep(first, prompts.token_ids(first), [7] * 10)
    second = request([(0, 4)], 260)
    ids = histories.apply(second, prompts.token_ids(second))
    assert len(ids) == 260
    assert ids[256:].tolist() == [7] * 4


def test_runs_that_are_cut_elsewhere_are_the_same_front() -> None:
    histories, prompts = Histories(), Tokens()
    first = request([(0, 1), (1, 1), (8, 1)], 192)
    histories.keep(first, prompts.token_ids(first), [7] * 10)
    second = request([(0, 2), (8, 3)], 320)
    assert histories.apply(second, prompts.token_ids(second))[192:202].tolist() == [7] * 10


def test_an_edited_prompt_keeps_the_live_answers_before_the_edit() -> None:
    """What the cache holds is what was sent, recorded or live: up to the edit it is hit."""
    histories, prompts = Histories(), Tokens()
    first = request([(0, 1)], 64, turn=0)
    histories.keep(first, prompts.token_ids(first), [7] * 64)
    second = request([(0, 4)], 256, turn=1)
    sent = histories.apply(second, prompts.token_ids(second))
    histories.keep(second, sent, [8] * 10)
    edited = request([(0, 3), (90, 2)], 320, turn=2)
    ids = histories.apply(edited, prompts.token_ids(edited))
    assert np.array_equal(ids[:192], sent[:192])
    assert ids[64:128].tolist() == [7] * 64
    assert np.array_equal(ids[192:], prompts.token_ids(edited)[192:])


def test_the_longest_history_is_put_in() -> None:
    histories, prompts = Histories(), Tokens()
    for turn, blocks in enumerate([2, 6, 4]):
        each = request([(0, blocks)], 64 * blocks, turn)
        histories.keep(each, prompts.token_ids(each), [blocks] * 5)
    last = request([(0, 9)], 64 * 9)
    assert histories.apply(last, prompts.token_ids(last))[384:389].tolist() == [6] * 5


def test_histories_are_bounded_and_the_latest_stay() -> None:
    histories, prompts = Histories(most_tokens=1000), Tokens()
    for session in range(50):
        for turn in range(3):
            each = request([(0, 1 + turn)], 64 * (1 + turn), turn, session)
            histories.keep(each, prompts.token_ids(each), [7] * 10)
            held = [len(ids) for kept in histories._sessions.values() for _, ids in kept]
            assert histories._held == sum(held) <= 1000
    following = [request([(0, 5)], 320, session=session) for session in (0, 49)]
    ids = [histories.apply(each, prompts.token_ids(each)) for each in following]
    assert np.array_equal(ids[0], prompts.token_ids(following[0]))
    assert ids[1][192:202].tolist() == [7] * 10


def test_of_one_session_the_latest_eight_are_kept() -> None:
    histories, prompts = Histories(), Tokens()
    for turn in range(20):
        each = request([(100 * turn, 1)], 64, turn)
        histories.keep(each, prompts.token_ids(each), [7] * 10)
    assert histories._held == 8 * 74
    nothing = np.zeros(128, np.int64)
    following = [request([(100 * turn, 2)], 128) for turn in range(20)]
    kept = [bool(histories.apply(each, nothing).any()) for each in following]
    assert kept == [False] * 12 + [True] * 8
