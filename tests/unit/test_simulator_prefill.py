"""The prefill cluster: closed forms, the published bathtub, causes of misses, routing."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest

from adapters.simulator import CacheAware, KvBytes, KvCache, LeastLoad, PrefillCluster, Sticky
from adapters.simulator.prefill import Prompt
from harness.backend import Request
from harness.errors import ConfigError
from tests.simulated import chip, play

KV = KvBytes(1000.0)
TOKEN_S = 1e-3


def cluster(**changes: Any) -> PrefillCluster:
    """A millisecond a token, and no fixed part."""
    values: dict[str, Any] = {
        "cards": 8, "chunk_tokens": 1000, "cache_bytes": 1e12,
        "chip": chip((0.0, TOKEN_S, 0.0)), "kv": KV,
    }  # fmt: skip
    return PrefillCluster(**(values | changes))


def request(number: int, tokens: int, runs: Any = None, session: int | None = None) -> Request:
    """Without a block in common with any other, unless `runs` says so. Blocks of 100 tokens."""
    own = [(number * 100_000, tokens // 100)] if runs is None else runs
    return Request(number, number if session is None else session, 0, tokens, 1, 100, own, "")


def drive(system: PrefillCluster, asked: Iterable[tuple[float, Request]]) -> dict[int, Any]:
    """When each prompt was done, and the prompt, by its turn, in the order they were done."""
    done: dict[int, Any] = {}

    def note(prompt: Prompt) -> None:
        done[prompt.request.turn] = (system._engine.now_s, prompt)

    events = [(at_s, partial(system.submit, Prompt(each, note))) for at_s, each in asked]
    play([system], events)
    return done


# ---- closed forms


def mean_wait_s(rho: float, seed: int, *, fixed: bool) -> float:
    """From arrival to the first chunk, prompts of 1 s in the mean on one instance."""
    random = np.random.default_rng(seed)
    arrivals_s = np.cumsum(random.exponential(1 / rho, 3000))
    tokens = np.full(3000, 1000) if fixed else np.ceil(random.exponential(1000, 3000)).astype(int)
    budget = 1000 if fixed else 10**6
    system = cluster(chunk_tokens=budget, pack_tail=False)
    done = drive(
        system,
        [(at_s, request(n, int(tokens[n]))) for n, at_s in enumerate(arrivals_s.tolist())],
    )
    waits_s = (done[n][1].started_s - arrivals_s[n] for n in range(500, 3000))
    return float(mean(waits_s))


@pytest.mark.parametrize("fixed", [True, False], ids=["M/D/1", "M/M/1"])
@pytest.mark.parametrize("rho", [0.5, 0.8])
def test_prompts_wait_as_long_as_queueing_theory_says(rho: float, fixed: bool) -> None:
    waits_s = [mean_wait_s(rho, seed, fixed=fixed) for seed in range(16)]
    wanted_s = rho / (1 - rho) * (0.5 if fixed else 1.0)
    half_width = 2.95 * stdev(waits_s) / 4  # Student's t of 15 degrees of freedom, 99%
    assert abs(mean(waits_s) - wanted_s) < half_width
    assert half_width < 0.25 * wanted_s


# ---- the bathtub

PROMPT, CHUNK, BLOCK = 65_500, 16_375, 6_550
GRID = range(0, 100, 10)
PUBLISHED = {  # physics of lock-step ranks, many of them, out of phase; cached tokens at 10%
    0: 1.0, 10: 0.99, 20: 0.84, 30: 1.10, 40: 0.90, 50: 1.10, 60: 1.00, 70: 0.76, 80: 1.37,
    90: 1.77,
}  # fmt: skip


def per_second(hit: int, *, ranks: int, pack_tail: bool) -> float:
    """Prompts a second of V3 on 8 H200 where they all hit `hit`% and the queue is never empty."""
    v3 = chip((35.2e-3, 0.0481e-3, 1e-9))
    system = PrefillCluster(8, CHUNK, 1e15, v3, KV, ranks, pack_tail)
    held = hit // 10
    prompts = [Request(0, 0, 0, PROMPT, 1, BLOCK, [(0, 10)], "")]
    for n in range(1, 2 * ranks + 1):  # of one to four chunks, so that ranks get out of phase
        tokens = CHUNK * (1 + n % 4)
        prompts.append(Request(n, n, 0, tokens, 1, BLOCK, [(10**6 + 100 * n, tokens // BLOCK)], ""))
    for n in range(len(prompts), len(prompts) + 50 * ranks):
        runs = [(0, held)] if held else []
        prompts.append(Request(n, n, 0, PROMPT, 1, BLOCK, [*runs, (1000 * n, 10 - held)], ""))
    ends = [end_s for end_s, _ in drive(system, [(0.0, each) for each in prompts]).values()]
    first = len(prompts) - 40 * ranks
    last = len(prompts) - 5 * ranks
    return float((last - first) / (ends[last] - ends[first]))


def gains(cached_price: float, **how: Any) -> dict[int, float]:
    """Revenue a second over that without hits, by hit rate in percent."""
    earned = {
        hit: per_second(hit, **how) * (1 - hit / 100 + cached_price * hit / 100) for hit in GRID
    }
    return {hit: value / earned[0] for hit, value in earned.items()}


def minima(values: dict[int, float]) -> set[int]:
    """Where a value is below both of its neighbours."""
    grid = sorted(values)
    return {
        at
        for before, at, after in zip(grid, grid[1:], grid[2:], strict=False)
        if values[before] > values[at] < values[after]
    }


@pytest.mark.parametrize("cached_price", [0.10, 0.25])
def test_lock_step_gives_the_published_singular_points(cached_price: float) -> None:
    assert minima(gains(cached_price, ranks=8, pack_tail=False)) == {20, 40, 70}


def test_the_gains_in_lock_step_are_those_of_many_ranks() -> None:
    found = gains(0.10, ranks=8, pack_tail=False)
    assert found == pytest.approx(PUBLISHED, abs=0.05)


def test_without_lock_step_there_is_a_floor_and_no_singular_point() -> None:
    found = gains(0.10, ranks=1, pack_tail=False)
    assert len(minima(found)) <= 1
    assert found[20] == pytest.approx(0.95, abs=0.02)
    assert found[50] == pytest.approx(0.93, abs=0.02)
    assert found[90] == pytest.approx(1.40, abs=0.05)


def test_packed_tails_make_the_tub_shallower() -> None:
    lost, packed = (gains(0.10, ranks=8, pack_tail=pack) for pack in (False, True))
    assert min(packed.values()) > min(lost.values()) + 0.05
    assert minima(packed) != minima(lost)


# ---- steps


def ends(system: PrefillCluster, *lengths: int) -> list[float]:
    done = drive(system, [(0.0, request(n, tokens)) for n, tokens in enumerate(lengths)])
    return [done[n][0] for n in range(len(lengths))]


def test_tails_of_prompts_share_a_step() -> None:
    system = cluster(chip=chip((0.1, TOKEN_S, 0.0)))
    # The first begins alone; then 500 + 500 share the budget, and 100 + 600 the next.
    assert ends(system, 300, 500, 600, 600) == pytest.approx([0.4, 1.5, 2.3, 2.3])


def test_without_packing_each_prompt_has_steps_of_its_own() -> None:
    system = cluster(chip=chip((0.1, TOKEN_S, 0.0)), pack_tail=False)
    assert ends(system, 300, 500, 1200) == pytest.approx([0.4, 1.0, 2.4])


def test_instances_work_side_by_side() -> None:
    assert ends(cluster(cards=16), 300, 300) == pytest.approx([0.3, 0.3])


def test_all_ranks_wait_for_the_busiest() -> None:
    """A rank is half of the instance: 300 tokens take it as long as 600 would take the whole."""
    system = cluster(ranks=2)
    # The first begins alone; the other two step together, as slow as the 500.
    assert ends(system, 100, 300, 500) == pytest.approx([0.2, 1.2, 1.2])


def test_each_is_told_how_far_it_has_come() -> None:
    seen: list[int] = []
    system = cluster()
    prompt = Prompt(request(0, 2500), lambda _: None, lambda _, tokens: seen.append(tokens))
    play([system], [(0.0, partial(system.submit, prompt))])
    assert seen == [1000, 2000, 2500]


def test_who_has_gone_costs_no_further_step_and_no_load() -> None:
    system = cluster(pack_tail=False)
    prompts = [Prompt(request(n, 2000), lambda _: None) for n in range(3)]
    events = [(0.0, partial(system.submit, each)) for each in prompts]
    events += [(0.5, partial(setattr, each, "gone", True)) for each in prompts[:2]]
    play([system], events)
    assert system.computed_tokens == 1000 + 2000
    assert system.load == 0
    assert system.waiting == system.busy == 0


# ---- hits and misses


def test_a_cached_prompt_still_computes_its_last_token() -> None:
    system = cluster()
    done = drive(system, [(0.0, request(0, 500, [(0, 5)])), (5.0, request(1, 500, [(0, 5)]))])
    assert [done[n][1].hit_tokens for n in (0, 1)] == [0, 499]
    assert system.computed_tokens == 501


def test_a_miss_is_cold_evicted_or_elsewhere() -> None:
    """Room for ten blocks: the first prompt is pushed out by the second."""
    system = cluster(cache_bytes=10 * 100 * 1000.0)
    runs = [(0, 10)]
    asked = [(0.0, request(0, 1000, runs)), (5.0, request(1, 1000)), (9.0, request(2, 1000, runs))]
    done = drive(system, asked)
    again = done[2][1]
    assert (again.hit_tokens, again.evicted_tokens, again.elsewhere_tokens) == (0, 1000, 0)
    assert system.missed_cold_tokens == 2000
    assert system.missed_evicted_tokens == 1000


def test_what_another_instance_holds_is_said_to_be_there() -> None:
    system = cluster(cards=16, shared_cache=False, routing=LeastLoad())
    runs = [(0, 9)]
    # The second comes while the first instance is at work, and so goes to the other.
    done = drive(
        system,
        [
            (0.0, request(0, 900, runs)),
            (5.0, request(1, 1000)),
            (5.1, request(2, 900, runs)),
            (9.0, request(3, 900, runs)),
        ],
    )
    assert [done[n][1].elsewhere_tokens for n in range(4)] == [0, 0, 900, 0]
    assert done[3][1].hit_tokens == 899


# ---- routing


def test_the_cache_aware_weighs_what_is_held_against_what_is_queued() -> None:
    for queued, hit in ((400, 899), (2000, 0)):
        system = cluster(cards=16, shared_cache=False, routing=CacheAware())
        runs = [(0, 9)]
        done = drive(
            system,
            [
                (0.0, request(0, 900, runs)),
                (5.0, request(1, 100, [(0, 1)])),
                (5.01, request(2, queued + 100, [(0, 1), (500, queued // 100)])),
                (5.02, request(3, 900, runs)),
            ],
        )
        assert done[3][1].hit_tokens == hit


def test_a_session_stays_where_it_is() -> None:
    system = cluster(cards=64)
    system.attach(play([], []))
    sticky = Sticky()
    places = [
        [sticky.choose(request(n, 100, session=session), system._instances) for n in range(3)]
        for session in range(4000)
    ]
    assert all(place[0] is place[1] is place[2] for place in places)
    counts = [sum(place[0] is each for place in places) for each in system._instances]
    assert min(counts) > 400
    assert max(counts) < 600


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cards": 12}, "prefill.cards is 12: give a multiple of 8"),
        ({"ranks": 3}, "prefill.ranks is 3: give a divisor of 8"),
        ({"routing": "best"}, "prefill.routing is best"),
        ({"chunk_tokens": 0}, "prefill.chunk_tokens is 0"),
        ({"pack_tail": 1}, "prefill.pack_tail is 1"),
        ({"chip": None}, "prefill.chip is None"),
    ],
)
def test_an_impossible_cluster_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cluster(**changes)


# ---- answers in a cache


def turn(session: int, tokens: int, runs: Any) -> Request:
    return Request(0, session, 0, tokens, 50, 10, runs, "")


def test_an_answer_is_held_for_the_prompt_that_carries_it() -> None:
    cache = KvCache(KV, 1e9, keeps_answers=True)
    cache.keep_answer(turn(1, 100, [(0, 10)]), 35)
    assert cache.look_up(turn(1, 200, [(0, 20)])) == 130
    assert cache.look_up(turn(1, 120, [(0, 12)])) == 120
    assert cache.look_up(turn(2, 200, [(0, 20)])) == 100  # another session's
    assert cache.look_up(turn(1, 200, [(0, 9), (500, 11)])) == 90  # edited before the answer
    plain = KvCache(KV, 1e9)
    plain.keep(turn(1, 100, [(0, 10)]))
    plain.keep_answer(turn(1, 100, [(0, 10)]), 35)
    assert plain.look_up(turn(1, 200, [(0, 20)])) == 100


def test_answers_are_forgotten_with_the_prompt_and_after_many_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = KvCache(KV, 10 * 10 * 1000.0, keeps_answers=True)
    small.keep_answer(turn(1, 100, [(0, 10)]), 35)
    small.keep(turn(2, 100, [(100, 10)]))
    assert small.look_up(turn(1, 200, [(0, 20)])) == 0
    monkeypatch.setattr(KvCache, "MOST_SESSIONS", 2)
    cache = KvCache(KV, 1e9, keeps_answers=True)
    for session in range(3):
        cache.keep_answer(turn(session, 100, [(1000 * session, 10)]), 20)
    held = [cache.look_up(turn(s, 200, [(1000 * s, 20)])) for s in range(3)]
    assert held == [100, 120, 120]
