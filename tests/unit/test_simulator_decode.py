"""The decode pool: its memory, its steps, and who has to wait."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from adapters.simulator import DecodePool, KvBytes
from adapters.simulator.decode import Sequence
from harness.errors import ConfigError
from tests.by_hand import STEP_S, pool
from tests.simulated import chip, play


def test_a_faster_chip_takes_in_the_handed_over_faster_too() -> None:
    ends: list[np.ndarray] = []
    for speed in (1.0, 2.0):
        decode = pool(speed=speed)
        eager = Sequence(500, 4, ends.append, extend=21)
        play([decode], [(0.0, partial(decode.join, eager))])
    assert ends[0] == pytest.approx([0.12, 0.22, 0.32, 0.42])
    assert ends[1] == pytest.approx(ends[0] / 2)


def test_memory_holds_the_window_state_of_each_request() -> None:
    """Two of 0.1 MB and 1 MB of state: 2.1 MB are too few for both at once."""
    for kv_bytes, together in ((2.1e6, False), (2.2e6, True)):
        decode = pool(kv_bytes=kv_bytes)
        ends: list[np.ndarray] = []
        both = [Sequence(90, 10, ends.append) for _ in range(2)]
        play([decode], [(0.0, partial(decode.join, each)) for each in both])
        assert ends[1][0] == pytest.approx(STEP_S if together else 11 * STEP_S)


def pooled(*joins: tuple[float, Sequence], cards: float = 8, speed: float = 1.0) -> None:
    timed = chip((0.0, 1e-3, 0.0), (0.01, 0.0, 0.0, 0.0), speed)
    pool = DecodePool(int(cards), 1e12, timed, KvBytes(1.0))
    play([pool], [(time_s, partial(pool.join, sequence)) for time_s, sequence in joins])


@pytest.mark.parametrize(
    ("cards", "speed", "extras", "step_s"),
    [
        (8, 1.0, [0.1], 0.11),
        (8, 2.0, [0.1], 0.055),
        (8, 1.0, [0.1, 0.1], 0.21),
        (32, 1.0, [0.1, 0.1, 0.1, 0.1], 0.11),  # each on a group of its own
        (16, 1.0, [0.1, 0.1, 0.1, 0.1], 0.21),
        (16, 1.0, [0.3, 0.1], 0.31),
    ],
)
def test_extended_steps_take_as_long_as_the_busiest_group(
    cards: float, speed: float, extras: list[float], step_s: float
) -> None:
    ends: list[float] = []
    joins = [
        (0.0, Sequence(1000, 1, lambda t: ends.append(t[0]), round(1000 * extra_s) + 1))
        for extra_s in extras
    ]
    pooled(*joins, cards=cards, speed=speed)
    assert ends == pytest.approx([step_s] * len(extras))


def test_who_leaves_before_its_first_step_leaves_no_extra_behind() -> None:
    pool = DecodePool(8, 1e12, chip((0.0, 1e-3, 0.0), (0.01, 0.0, 0.0, 0.0)), KvBytes(1.0))
    ends: list[float] = []
    first, second = Sequence(5001, 5, lambda _: None, 5001), Sequence(10, 1, ends.extend)
    play(
        [pool],
        [
            (0.0, partial(pool.join, first)),
            (0.0, partial(pool.release, first, lambda _: None)),
            (10.0, partial(pool.join, second)),
        ],
    )
    assert ends == pytest.approx([10.01])


# ---- memory


def run(decode: DecodePool, *joins: tuple[float, int, int]) -> list[Sequence]:
    """(when, context, tokens) each; the sequences in the order of `joins`, with `times_s` whole."""
    sequences: list[Sequence] = []
    for _, context, tokens in joins:
        sequence = Sequence(context, tokens, lambda _: None)
        sequence.finished = partial(setattr, sequence, "times_s")
        sequences.append(sequence)
    events = [
        (at_s, partial(decode.join, sequence))
        for (at_s, *_), sequence in zip(joins, sequences, strict=True)
    ]
    play([decode], events)
    return sequences


def crowded(when_full: str, blocks: int = 10) -> DecodePool:
    """Blocks of 10 tokens; 0.1 s a step, and 1 ms for each token taken in beyond the first."""
    timed = chip((0.0, 1e-3, 0.0), (STEP_S, 0.0, 0.0, 0.0))
    return DecodePool(8, 100.0 * blocks, timed, KvBytes(10.0), block_tokens=10, when_full=when_full)


def test_the_youngest_goes_back_and_computes_its_context_again() -> None:
    """Two of 40 tokens have 51 in their step 11: twelve blocks, and there are ten."""
    old, young = run(crowded("preempt"), (0.0, 40, 30), (0.0, 40, 30))
    assert old.times_s == pytest.approx(STEP_S * np.arange(1, 31))
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert young.times_s[:10] == pytest.approx(STEP_S * np.arange(1, 11))
    # The old one is done at 3 s; then 50 tokens are computed at once, 49 more than a step's own.
    assert young.times_s[10] == pytest.approx(3.0 + STEP_S + 49e-3)
    assert np.diff(young.times_s[10:]) == pytest.approx(STEP_S)
    assert len(young.times_s) == 30


def test_who_goes_back_goes_to_the_front() -> None:
    old, young, later = run(crowded("preempt"), (0.0, 40, 30), (0.0, 40, 30), (1.0, 40, 1))
    assert old.preemptions == later.preemptions == 0
    assert young.started_s == 0.0
    assert later.started_s is not None
    assert later.started_s >= 3.0 - 1e-9, "behind the one that has lost its place"


def test_memory_for_whole_answers_is_reserved_or_waited_for() -> None:
    """40 tokens and 20 more are six blocks: two do not fit at once in ten."""
    first, second = run(crowded("reserve"), (0.0, 40, 20), (0.0, 40, 20))
    assert (first.preemptions, second.preemptions) == (0, 0)
    assert second.started_s == pytest.approx(2.0)
    assert [len(each.times_s) for each in (first, second)] == [20, 20]


def test_one_alone_may_hold_more_than_there_is() -> None:
    (alone,) = run(crowded("preempt", blocks=3), (0.0, 40, 5))
    assert alone.times_s == pytest.approx(STEP_S * np.arange(1, 6))


def test_a_place_that_is_kept_is_nobody_elses() -> None:
    decode = crowded("preempt")
    first, second = (Sequence(40, 9, lambda _: None) for _ in range(2))
    kept: list[bool] = []
    play(
        [decode],
        [
            (0.0, lambda: kept.append(decode.reserve(40))),
            (0.1, lambda: kept.append(decode.reserve(60))),  # 5 blocks are kept, 7 wanted
            (0.2, partial(decode.join, first)),
            (0.2, partial(decode.join, second)),
            (0.65, lambda: decode.give_up(40)),
        ],
    )
    assert kept == [True, False]
    assert first.started_s == pytest.approx(0.2)
    assert second.started_s == pytest.approx(0.7), "as the step under way ends"
    assert decode.load == 0


def test_how_full_it_is() -> None:
    decode = crowded("preempt")
    seen: list[tuple[float, float]] = []

    def look() -> None:
        seen.append((decode.filled, decode.load))

    first, second = (Sequence(context, 10, lambda _: None) for context in (38, 60))
    play(
        [decode],
        [
            (0.0, partial(decode.join, first)),
            (0.05, look),
            (0.06, partial(decode.join, second)),
            (0.35, look),
            (0.36, lambda: decode.release(second, lambda _: None)),
            (9.0, look),
        ],
    )
    # 38 tokens are four blocks, the 41st takes a fifth; 60 more are six and one to grow, which
    # must wait: tokens in whole blocks for each of 8 cards.
    assert seen[0] == (0.4, 40 / 8)
    assert seen[1] == (0.5, (50 + 70) / 8)
    assert seen[2] == (0.0, 0.0)


# ---- what a batch makes of it


def test_silent_tokens_are_no_output() -> None:
    decode = pool()
    batch, loud = (
        Sequence(500, 1, lambda _: None, extend=21, silent=True),
        Sequence(500, 4, lambda _: None),
    )
    play([decode], [(0.0, partial(decode.join, each)) for each in (batch, loud)])
    assert (decode.emitted_tokens, decode.silent_tokens) == (4, 1)


def test_a_batch_is_spread_over_instances_and_parts_of_one() -> None:
    """10 ms and 1 ms for each sequence of an instance of 8 cards; a step is not below one of 1."""
    ends: dict[float, float] = {}
    for cards in (3, 8, 16, 64):
        timed = chip(decode=(0.01, 1e-3, 0.0, 0.0))
        decode = DecodePool(cards, 1e12, timed, KvBytes(1.0))
        ends[cards] = float(run(decode, *[(0.0, 10, 1)] * 16)[0].times_s[0])
    assert ends[8] == pytest.approx(0.026)
    assert ends[16] == pytest.approx(0.018)
    assert ends[3] == pytest.approx(0.01 + 1e-3 * 16 / (3 / 8))
    assert ends[64] == pytest.approx(0.012)


def test_what_a_step_takes_now() -> None:
    decode = DecodePool(8, 1e12, chip(decode=(0.01, 1e-3, 1e-6, 0.0)), KvBytes(1.0))
    seen: list[float] = []
    one = Sequence(1000, 5, lambda _: None)
    play(
        [decode],
        [
            (0.0, lambda: seen.append(decode.step_s)),
            (1.0, partial(decode.join, one)),
            (1.001, lambda: seen.append(decode.step_s)),
        ],
    )
    assert seen[0] == pytest.approx(0.011)
    assert seen[1] == pytest.approx(0.012, rel=1e-3)


def test_a_sequence_that_waits_is_let_go_with_what_it_had() -> None:
    """Of one that has lost its place, and of one that never had one."""
    decode = crowded("preempt")
    old, young, never = (Sequence(40, tokens, lambda _: None) for tokens in (30, 30, 5))
    left: list[int] = []
    seen: list[int] = []
    play(
        [decode],
        [
            (0.0, partial(decode.join, old)),
            (0.0, partial(decode.join, young)),
            (0.5, partial(decode.join, never)),
            (2.0, lambda: seen.append(len(decode.so_far(young)))),
            (2.0, lambda: decode.release(young, lambda times_s: left.append(len(times_s)))),
            (2.0, lambda: decode.release(never, lambda times_s: left.append(len(times_s)))),
        ],
    )
    assert seen == [10]
    assert left == [10, 0]


@pytest.mark.parametrize("rate_per_s", [1.0, 4.0])
def test_as_many_are_in_the_batch_as_littles_law_says(rate_per_s: float) -> None:
    """Requests in the batch = rate x time in it, of Poisson arrivals and steps of 50 ms."""
    random = np.random.default_rng(3)
    decode = DecodePool(8, 1e12, chip(decode=(0.05, 0.0, 0.0, 0.0)), KvBytes(1.0))
    arrivals_s = np.cumsum(random.exponential(1 / rate_per_s, 4000))
    tokens = random.geometric(1 / 60, 4000)
    seen: list[int] = []
    joins = [
        (at_s, partial(decode.join, Sequence(10, int(wanted), lambda _: None)))
        for at_s, wanted in zip(arrivals_s.tolist(), tokens.tolist(), strict=True)
    ]
    looks_s = np.arange(100.0, arrivals_s[-1], 0.37).tolist()
    play([decode], [*joins, *((at_s, lambda: seen.append(decode.batch)) for at_s in looks_s)])
    # A newcomer waits for the end of the step under way, half of one on average, then has its own.
    in_batch_s = 0.05 * 60
    assert np.mean(seen) == pytest.approx(rate_per_s * in_batch_s, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"when_full": "swap"}, "decode.when_full is swap"),
        ({"block_tokens": 0}, "decode.block_tokens is 0"),
        ({"kv_bytes": 0}, "decode.kv_bytes is 0"),
        ({"cards": -1}, "decode.cards is -1"),
    ],
)
def test_an_impossible_pool_is_refused(changes: dict[str, Any], words: str) -> None:
    settings: dict[str, Any] = {"cards": 8, "kv_bytes": 1e9, "chip": chip(), "kv": KvBytes(1.0)}
    with pytest.raises(ConfigError, match=words):
        DecodePool(**(settings | changes))
