"""PDD: each way an answer can take, by hand; and what its authors say of the whole."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from adapters.simulator import (
    Handoff,
    Link,
    OracleOutputs,
    Pdd,
    PrefillCluster,
    RecentOutputs,
    SingularFilter,
)
from harness import metrics
from harness.backend import Answer, Request, Served
from harness.clock import VirtualTimeLoop
from harness.errors import BackendError, ConfigError
from harness.record import Record
from harness.run import load_trace
from tests.by_hand import KV, STEP_S, answer, ask, cluster, one, pdd, pool, site, virtually
from tests.simulated import backend, chip, configured, drive


def test_a_relayed_answer_by_hand() -> None:
    times_s, served = one(pdd(), ask())
    assert served.route == "P-RLD-MD"
    assert served.prefill_start_s == 0.0
    assert served.prefill_end_s == pytest.approx(1.0)
    assert served.transfer_end_s == pytest.approx(1.0 + 1.0 + 0.1)
    # The relay begins at 1.02 s; the step under way at 2.1 s is its eleventh, and ends at 2.12 s.
    assert served.relay_tokens == 11
    assert times_s[:11] == pytest.approx(1.02 + STEP_S * np.arange(1, 12), abs=1e-6)
    # Ids take 0.1 s one way; eleven at once are ten more than a step takes in anyway.
    assert served.handoff_s == times_s[11] == pytest.approx(2.12 + 0.1 + STEP_S + 10e-3, abs=1e-6)
    assert np.diff(times_s[11:]) == pytest.approx(STEP_S)
    assert len(times_s) == 30


def test_a_short_transfer_goes_straight_to_the_main_decode() -> None:
    times_s, served = one(pdd(threshold_s=1.2), ask())
    assert (served.route, served.relay_tokens, served.handoff_s) == ("P-MD", None, None)
    assert times_s == pytest.approx(2.1 + STEP_S * np.arange(1, 31))


def test_a_relay_without_room_leaves_it_to_the_main_decode() -> None:
    assert one(pdd(relay_bytes=1.99e6), ask())[1].route == "P-MD"
    # 1,000 tokens are 1 MB and their window state another; the answer's length is not known yet.
    assert one(pdd(relay_bytes=2e6), ask())[1].route == "P-RLD-MD"


def test_a_short_answer_ends_at_the_relay_and_its_cache_still_crosses() -> None:
    system = pdd()
    second: list[Served] = []

    async def main() -> None:
        async with system:
            times_s, served = await answer(system, ask(outputs=5))
            assert times_s == pytest.approx(1.02 + STEP_S * np.arange(1, 6), abs=1e-6)
            assert (served.relay_tokens, served.handoff_s) == (5, None)
            assert system.load()["requests"] == 0
            assert system.load()["link_flows"] == 1
            await asyncio.sleep(1.0)
            assert not any(system.load().values())
            second.append((await answer(system, ask(outputs=5)))[1])

    virtually(main)
    assert second[0].hit_tokens == 999
    assert second[0].decode_hit_tokens == 1000
    assert second[0].transfer_bytes == KV.fixed


def test_what_is_done_is_counted() -> None:
    system = pdd()
    counters: dict[str, float] = {}

    async def main() -> None:
        async with system:
            await answer(system, ask())
            counters.update({each.name: each.value for each in await system.scrape()})
            await system.reset()
            assert not any(system.counters().values())

    virtually(main)
    assert counters["requests_total"] == 1
    assert counters["prefill_computed_tokens_total"] == 1000
    assert counters["link_sent_bytes_total"] == counters["relay_sent_bytes_total"] == 2e6
    assert (counters["relay_tokens_total"], counters["decode_tokens_total"]) == (11, 19)
    assert counters["prefill_cached_blocks"] == counters["decode_cached_blocks"] == 10


@pytest.mark.parametrize("at_s", [0.5, 1.01, 1.5, 2.05, 2.15, 2.5])
def test_a_system_is_busy_wherever_its_only_request_is(at_s: float) -> None:
    """In a step, in set-up, on the road, or between the relay and the main decode."""
    system = pdd()

    async def main() -> None:
        async with system:
            task = asyncio.ensure_future(answer(system, ask()))
            await asyncio.sleep(at_s)
            with pytest.raises(BackendError, match="under way"):
                await system.reset()
            times_s, _ = await task
            assert len(times_s) == 30
            await system.reset()

    virtually(main)


def test_the_relay_takes_only_what_it_has_room_for() -> None:
    """Requests on their way to it count: they were promised a place."""
    system = backend(
        "pdd", "backend.pdd.link.bandwidth_bps=1e8", "backend.pdd.relay.pool.kv_bytes=6e8"
    )
    routes: list[str | None] = []

    async def ask(number: int) -> None:
        request = Request(number, number, 0, 60_000, 10, 64, [(number * 1000, 937)], "main")
        answer = Answer()
        await system.generate(request, answer)
        routes.append(answer.served.route)

    async def main() -> None:
        async with system, asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(ask(number))

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())
    assert sorted(route or "" for route in routes) == ["P-MD"] * 3 + ["P-RLD-MD"] * 2


# ---- the handoff


def test_catching_up_by_hand() -> None:
    """Ten are there at 2.1 s; they cross, are computed by 2.309 s, and by then two more are."""
    times_s, served = one(pdd(way="catch-up"), ask())
    assert (served.route, served.handoff, served.relay_tokens) == ("P-RLD-MD", "catch-up", 13)
    assert times_s[:13] == pytest.approx(1.02 + STEP_S * np.arange(1, 14), abs=1e-6)
    # The relay stops at 2.32 s with 13; three are left, the first of them a step's own.
    assert served.handoff_start_s == pytest.approx(2.1)
    assert served.handoff_s == times_s[13] == pytest.approx(2.32 + 0.1 + STEP_S + 2e-3, abs=1e-6)
    assert served.handoff_bytes == 13 * 15
    assert len(times_s) == 30


def test_catching_up_takes_as_many_rounds_as_its_batches_need() -> None:
    """6 of 10 at 2.1 s, 6 of 12 at 2.305 s, and 2 are left at 2.51 s."""
    system = pdd(handoff=Handoff("catch-up", batch_tokens=6))
    times_s, served = one(system, ask())
    assert served.relay_tokens == 15
    assert served.handoff_s == times_s[15] == pytest.approx(2.52 + 0.1 + STEP_S + 2e-3, abs=1e-6)
    # A batch at the main decode is no output there.
    assert system.counters()["decode_tokens_total"] == 30 - 15


def test_a_relay_that_ends_while_the_other_catches_up_hands_nothing_over() -> None:
    times_s, served = one(pdd(way="catch-up"), ask(outputs=12))
    assert times_s == pytest.approx(1.02 + STEP_S * np.arange(1, 13), abs=1e-6)
    assert (served.relay_tokens, served.handoff_s) == (12, None)


def test_little_is_handed_over_at_once() -> None:
    """With no more than `rest_tokens` there is nothing to catch up with."""
    served = one(pdd(handoff=Handoff("catch-up", rest_tokens=10)), ask())[1]
    assert (served.handoff, served.relay_tokens) == ("one-shot", 11)


def test_a_kv_handoff_by_hand() -> None:
    """Eleven tokens are 11 KB on the WAN, and then a copy."""
    times_s, served = one(pdd(way="kv"), ask())
    assert (served.relay_tokens, served.handoff_bytes) == (11, 11_000)
    crossed_s = 2.12 + 11e3 / 2e6 + 0.1
    assert served.handoff_s == times_s[11] == pytest.approx(crossed_s + 24.5e-3 + STEP_S, abs=1e-6)


def test_the_way_changes_with_the_relays_load_and_not_at_every_tremor() -> None:
    handoff = Handoff("auto", high=0.75, low=0.5)
    loads = [0.0, 0.7, 0.75, 0.6, 0.51, 0.5, 0.6, 0.74, 0.8]
    ways = [handoff.choose(load) for load in loads]
    assert ways == ["catch-up"] * 2 + ["one-shot"] * 3 + ["catch-up"] * 3 + ["one-shot"]
    assert handoff.switches == 3
    handoff.clear()
    assert (handoff.choose(0.6), handoff.switches) == ("catch-up", 0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"way": "by hand"}, "handoff.way is by hand"),
        ({"batch_tokens": 0}, "handoff.batch_tokens is 0"),
        ({"high": 0.4, "low": 0.5}, "handoff.low is 0.5"),
    ],
)
def test_an_impossible_handoff_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Handoff(**settings)


# ---- singular traffic


def test_a_short_answer_of_which_the_length_is_known_is_not_sent() -> None:
    """Five tokens are half a second at the relay, less than half of the 1.1 s of the transfer."""
    system = pdd(singular=SingularFilter(OracleOutputs()))
    times_s, served = one(system, ask(outputs=5))
    assert times_s == pytest.approx(1.02 + STEP_S * np.arange(1, 6), abs=1e-6)
    assert (served.route, served.transfer_bytes) == ("P-RLD", None)
    assert system.link.started_bytes == 0
    assert system.counters()["singular_total"] == 1
    assert one(pdd(singular=SingularFilter(OracleOutputs())), ask(outputs=6))[1].route != "P-RLD"


def test_lengths_are_guessed_from_what_was_seen() -> None:
    """Nothing is known at first; then 2 tokens are expected, and what takes longer is sent late."""
    system = pdd(singular=SingularFilter(RecentOutputs(), patience=2.0))
    got: list[tuple[np.ndarray, Served]] = []

    async def main() -> None:
        async with system:
            for number, outputs in enumerate((2, 2, 40)):
                got.append(await answer(system, ask(number, outputs=outputs)))
                await asyncio.sleep(10 - asyncio.get_running_loop().time() % 10)

    virtually(main)
    routes = [served.route for _, served in got]
    assert routes == ["P-RLD-MD", "P-RLD", "P-RLD-MD"]
    times_s, late = got[2]
    # Prefilled at 21 s, it is given twice the 1.1 s that its transfer would have taken.
    assert late.transfer_start_s == pytest.approx(21.0 + 2 * 1.1)
    assert late.transfer_end_s == pytest.approx(21.0 + 3 * 1.1)
    assert len(times_s) == 40
    assert (np.diff(times_s) > 0).all()
    assert system.counters()["singular_sent_late_total"] == 1


def test_a_guess_is_drawn_to_the_sessions_own() -> None:
    predictor = RecentOutputs(weight=0.1, prior=4.0)
    assert predictor.predict(ask()) == np.inf
    predictor.learn(ask(1), 100)
    assert predictor.predict(ask(2)) == pytest.approx(100)
    predictor.learn(ask(2), 1)
    # The agent's mean is that of 100 and 1, 10, and counts four times; the session's one is 1.
    assert predictor.predict(ask(2)) == pytest.approx(10 ** (4 / 5))
    assert predictor.predict(ask(3)) == pytest.approx(10)


# ---- a relay that is full, and one that never hands over


def waiting(overflow: str) -> tuple[list[str | None], float]:
    """Two at once for a relay with room for one; a transfer takes 16 s. Routes, last token."""
    system = pdd(relay_bytes=2.5e6, link=Link(1e6), overflow=overflow)
    answers: list[tuple[np.ndarray, Served]] = []

    async def each(number: int) -> None:
        answers.append(await answer(system, ask(number, outputs=20)))

    async def main() -> None:
        async with system, asyncio.TaskGroup() as group:
            for number in range(2):
                group.create_task(each(number))

    virtually(main)
    return [served.route for _, served in answers], float(answers[-1][0][-1])


def test_who_finds_the_relay_full_goes_direct_or_waits() -> None:
    routes, last_s = waiting("direct")
    assert routes == ["P-RLD-MD", "P-MD"]
    assert last_s > 2 + 16
    routes, last_s = waiting("wait")
    assert routes == ["P-RLD-MD", "P-RLD-MD"]
    # Prefilled by 1 and 2 s; the second begins when the first is done.
    assert last_s == pytest.approx(1.02 + 40 * STEP_S, abs=1e-3)


def test_the_negative_control_sends_nothing() -> None:
    system = pdd(finish_locally=True)
    times_s, served = one(system, ask())
    assert times_s == pytest.approx(1.02 + STEP_S * np.arange(1, 31), abs=1e-6)
    assert (served.route, served.relay_tokens) == ("P-RLD", 30)
    assert system.link.started_bytes == 0


def test_who_is_cut_off_on_the_way_to_the_relay_frees_its_place_there() -> None:
    system = pdd(relay_bytes=2e6, relay_link=Link(1e6))

    async def main() -> None:
        async with system:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(3.0):
                    await answer(system, ask())
            assert system.load()["relay_flows"] == 0
            assert system.relay.pool.load == 0
            assert (await answer(system, ask(1)))[1].route == "P-MD"  # 2 MB take 16 s here

    virtually(main)
    assert system.relay_link.cancelled_bytes == 2 * 2e6


# ---- as published


def test_the_relays_share_of_tokens_is_what_handing_over_takes_over_a_step() -> None:
    """Each token of the relay's is a step of its own while the KV cache is on the road."""
    system, got = pdd(), list[Served]()

    async def each(number: int) -> None:
        await asyncio.sleep(3.0 * number)
        got.append((await answer(system, ask(number, 800 + 100 * (number % 7), 100)))[1])

    async def main() -> None:
        async with system, asyncio.TaskGroup() as group:
            for number in range(40):
                group.create_task(each(number))

    virtually(main)
    assert all(served.route == "P-RLD-MD" for served in got)
    # From the KV cache's coming to the relay to its coming to the main decode, and the step then.
    on_the_road_s = sum(
        (served.transfer_end_s or 0) - (served.prefill_end_s or 0) - 0.02 for served in got
    )
    share = sum(served.relay_tokens or 0 for served in got) / (100 * len(got))
    assert share == pytest.approx((on_the_road_s / STEP_S / len(got) + 0.5) / 100, rel=0.03)


def test_handing_over_ids_takes_about_the_same_and_kv_does_not() -> None:
    """Ids are recomputed; KV caches queue on the WAN behind those of others."""
    spread_s: dict[str, float] = {}
    trace = load_trace(configured("trace.sessions=200", "trace.session_rate_per_s=1.0"))
    for way in ("one-shot", "kv"):
        system = backend(
            "pdd", f"backend.pdd.handoff.way={way}", "backend.pdd.singular=null",
            "backend.pdd.relay.pool.kv_bytes=1e12", "model.kv.per_token=46490",
        )  # fmt: skip
        handed = [each for each in drive(system, trace).values() if each.handoff_s is not None]
        took_s = np.array([(each.handoff_s or 0) - (each.handoff_start_s or 0) for each in handed])
        assert len(took_s) > 1000
        p50_s, p99_s = (metrics.nearest_rank(took_s, q) for q in (0.5, 0.99))
        spread_s[way] = p99_s - p50_s
    assert spread_s["one-shot"] < 0.1 * spread_s["kv"], spread_s


def test_skewed_hits_make_transfers_short_at_the_median_and_long_at_the_end() -> None:
    """At a mean hit of 90%: three of four hit 97.5%, the fourth 67.5%, and 81% of the bytes."""
    served: dict[float, list[Served]] = {0.975: [], 0.675: []}
    system = pdd(threshold_s=0.1, link=Link(1e9), prefill={"P": cluster(1e-6)})

    async def main() -> None:
        async with system:
            for session in range(100):
                hit = 0.675 if session % 4 == 3 else 0.975
                first, blocks = session * 10_000, round(hit * 1000)
                runs = [(first, blocks)]
                await answer(system, Request(0, session, 0, 100 * blocks, 1, 100, runs, ""))
                await asyncio.sleep(5)  # the relay was done first; its KV cache crosses still
                runs = [*runs, (first + 5000, 1000 - blocks)]
                whole = Request(1, session, 1, 100_000, 50, 100, runs, "")
                served[hit].append((await answer(system, whole))[1])

    virtually(main)
    sent = {
        hit: sum((each.transfer_bytes or 0) - KV.fixed for each in some)
        for hit, some in served.items()
    }
    assert sent[0.675] / sum(sent.values()) == pytest.approx(0.8125)
    crossed_s = np.array(
        [
            (each.transfer_end_s or 0) - (each.transfer_start_s or 0)
            for some in served.values()
            for each in some
        ]
    )
    p50_s, p99_s = (metrics.nearest_rank(crossed_s, q) for q in (0.5, 0.99))
    assert p50_s == pytest.approx(8 * 3.5e6 / 1e9)
    assert p99_s == pytest.approx(8 * 33.5e6 / 1e9)
    assert {each.route for each in served[0.975]} == {"P-MD"}
    assert {each.route for each in served[0.675]} == {"P-RLD-MD"}


def test_finishing_at_the_relay_collapses_and_handing_over_does_not() -> None:
    """What is finished there leaves the main decode's cache cold, so that all is relayed next."""
    trace = load_trace(
        configured(
            "transform=[cap_delays]", "transform.cap_delays.max_s=60",
            "trace.sessions=250", "trace.session_rate_per_s=0.3",
        )
    )  # fmt: skip
    middle: dict[bool, list[Record]] = {}
    for local in (False, True):
        records = drive(
            backend(
                "pdd", f"backend.pdd.finish_locally={local}", "backend.pdd.singular=null",
                "backend.pdd.overflow=wait", "backend.pdd.link.bandwidth_bps=10e9",
                "backend.pdd.relay.pool.kv_bytes=20e9",
            ),
            trace,
        )  # fmt: skip
        order = sorted(records.values(), key=lambda each: each.scheduled_s or 0)
        middle[local] = order[len(order) // 3 : 2 * len(order) // 3]

    def relayed(local: bool) -> float:
        return float(np.mean(["RLD" in str(each.route) for each in middle[local]]))

    def hits(local: bool, name: str) -> float:
        held, whole = (
            sum(getattr(each, key) or 0 for each in middle[local]) for key in (name, "input_tokens")
        )
        return float(held / whole)

    def ttft_s(local: bool) -> float:
        return float(
            np.median(
                [(each.first_token_s or 0) - (each.scheduled_s or 0) for each in middle[local]]
            )
        )

    assert relayed(local=False) < 0.2
    assert relayed(local=True) > 0.9
    stable = hits(local=False, name="decode_hit_tokens")
    assert stable == pytest.approx(hits(local=False, name="served_hit_tokens"), rel=0.03)
    assert hits(local=True, name="decode_hit_tokens") < 0.1 * stable
    assert ttft_s(local=True) > 10 * ttft_s(local=False)


# ---- what was found to be wrong


def test_an_outage_makes_nobody_singular() -> None:
    """How long the transfer would take is not known, so it is sent, and waits."""
    wan = Link([[0, 16e6], [5, 0], [20, 16e6]])
    system = pdd(link=wan, singular=SingularFilter(RecentOutputs()))
    got: list[Served] = []

    async def main() -> None:
        async with system:
            got.append((await answer(system, ask(0, outputs=2)))[1])
            await asyncio.sleep(10 - asyncio.get_running_loop().time())
            got.append((await answer(system, ask(1, outputs=400)))[1])
            await asyncio.sleep(30)
            assert not system.engine._events, "nothing is left for ever"

    virtually(main)
    assert got[1].route == "P-RLD-MD"
    assert got[1].transfer_end_s == pytest.approx(21.0, abs=1e-3)
    assert got[1].handoff_s is not None


def chunked(**changes: Any) -> Pdd:
    """Prefill in ten steps of 0.1 s, each of which sends its 0.1 MB ahead."""
    small = PrefillCluster(8, 100, 1e12, chip((0.0, 1e-3, 0.0)), KV)
    return pdd(prefill={"P": small}, overlap=True, **changes)


def test_a_stream_is_no_rival_of_its_own() -> None:
    """Alone on 0.2 MB/s, 0.18 MB of 2 MB are there at 1 s: the rest takes 9.1 s."""
    served = one(chunked(link=Link(1.6e6), threshold_s=9.2), ask())[1]
    assert served.route == "P-MD"
    assert served.transfer_end_s == pytest.approx(0.1 + 10.0)
    assert one(chunked(link=Link(1.6e6), threshold_s=9.0), ask())[1].route == "P-RLD-MD"


def test_nothing_is_sent_ahead_of_what_is_finished_at_the_relay() -> None:
    system = chunked(finish_locally=True)
    served = one(system, ask())[1]
    assert (served.route, served.transfer_start_s, served.transfer_bytes) == ("P-RLD", None, None)
    assert system.link.started_bytes == 0


def test_what_was_sent_ahead_in_vain_is_in_the_record() -> None:
    """Taken for singular, 0.8 MB had crossed; sent late, it is 2 MB more."""
    system = chunked(singular=SingularFilter(RecentOutputs(), share=10.0))
    got: list[Served] = []

    async def main() -> None:
        async with system:
            got.append((await answer(system, ask(0, outputs=2)))[1])
            await asyncio.sleep(10 - asyncio.get_running_loop().time())
            got.append((await answer(system, ask(1, outputs=80)))[1])

    virtually(main)
    assert got[1].route == "P-RLD-MD"
    assert system.link.started_bytes == pytest.approx(
        system.link.sent_bytes + system.link.cancelled_bytes
    )
    assert got[1].transfer_bytes is not None
    assert got[1].transfer_bytes > 2e6
    sent = sum(each.transfer_bytes or 0 for each in got)
    assert sent == pytest.approx(system.link.sent_bytes + system.link.cancelled_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decode": {"RLD": site(pool())}}, "names other than RLD"),
        ({"decode": {"P": site(pool())}}, "names that no prefill cluster has"),
        ({"prefill_routing": "LeastLoad"}, "prefill_routing is LeastLoad"),
        ({"decode_routing": "Sticky"}, "decode_routing is Sticky"),
        ({"topology": None}, "topology is None"),
    ],
)
def test_an_impossible_pdd_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        pdd(**changes)
