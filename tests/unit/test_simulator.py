"""What the simulator's parts and topologies must do."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from harness import metrics
from harness.backend import Answer, Request
from harness.clock import VirtualTimeLoop
from harness.errors import BackendError, ConfigError
from harness.record import Record, to_batch
from harness.run import load_trace
from harness.trace import Trace
from tests.simulated import backend, configured, drive


@pytest.fixture(scope="module")
def trace() -> Trace:
    return load_trace(configured("trace.sessions=120", "trace.session_rate_per_s=1.0"))


@pytest.fixture(scope="module")
def answered(trace: Trace) -> dict[str, dict[int, Record]]:
    """Every topology over the same trace, on a WAN of 5 Gbit/s, which the naive one fills."""
    plain = [
        "backend.pdd.singular=null",
        *(
            f"backend.{site}.cache.keeps_answers=false"
            for site in ("cross_dc_drc.decode.MD", "pdd.decode.MD", "pdd.relay")
        ),
    ]
    wan = [f"backend.{name}.link.bandwidth_bps=5e9" for name in ("cross_dc", "cross_dc_drc", "pdd")]
    return {
        name: drive(backend(name, *wan, *plain), trace)
        for name in ("in_dc", "cross_dc", "cross_dc_drc", "pdd")
    }


def ttft(records: dict[int, Record], q: float) -> float:
    values = [r.first_token_s - r.scheduled_s for r in records.values()]  # type: ignore[operator]
    return metrics.nearest_rank(np.array(values), q)


# ---- topologies


@pytest.mark.parametrize("name", ["in_dc", "cross_dc", "cross_dc_drc", "pdd"])
def test_every_token_of_every_request_has_its_time(
    answered: dict[str, dict[int, Record]], trace: Trace, name: str
) -> None:
    assert len(answered[name]) == len(trace)
    for record in answered[name].values():
        assert record.status == "ok"
        assert record.gaps_us is not None
        assert record.served_output_tokens == record.output_tokens == len(record.gaps_us) + 1
        assert (record.gaps_us > 0).all()
        moments = (
            record.scheduled_s, record.prefill_start_s, record.prefill_end_s, record.last_token_s
        )  # fmt: skip
        assert list(moments) == sorted(moments)  # type: ignore[type-var]
        assert record.prefill_end_s < record.first_token_s  # type: ignore[operator]


def test_what_is_served_is_never_more_than_an_infinite_cache_would(
    answered: dict[str, dict[int, Record]],
) -> None:
    for records in answered.values():
        for record in records.values():
            assert record.served_hit_tokens is not None
            assert record.served_hit_tokens <= record.ideal_hit_tokens


def test_pdd_lies_between_its_rivals(answered: dict[str, dict[int, Record]]) -> None:
    for q in (0.50, 0.90, 0.99):
        assert ttft(answered["pdd"], q) < ttft(answered["cross_dc"], q)
    assert ttft(answered["in_dc"], 0.50) <= ttft(answered["pdd"], 0.50)
    assert ttft(answered["pdd"], 0.99) < ttft(answered["cross_dc_drc"], 0.99)


def test_the_decode_side_cache_saves_the_wan_what_the_hits_say(
    answered: dict[str, dict[int, Record]], trace: Trace
) -> None:
    """About ten times at a mean hit of 90%, less the window state that is always sent."""
    sent = {
        name: sum(record.transfer_bytes or 0 for record in records.values())
        for name, records in answered.items()
    }
    ideal = trace.ideal_hit_tokens.sum() / trace.input_tokens.sum()
    fixed = 4.0e6 * len(trace)
    assert (sent["cross_dc_drc"] - fixed) / (sent["cross_dc"] - fixed) == pytest.approx(
        1 - ideal, rel=0.05
    )
    assert sent["pdd"] == pytest.approx(sent["cross_dc_drc"], rel=0.02)


def test_both_caches_of_pdd_hold_the_same(answered: dict[str, dict[int, Record]]) -> None:
    """Both pipelines end at the main decode, so its hits do not fall behind the prefill's."""
    hits = [
        (record.served_hit_tokens, record.decode_hit_tokens) for record in answered["pdd"].values()
    ]
    at_prefill, at_decode = (sum(side) for side in zip(*hits, strict=True))
    assert at_decode == pytest.approx(at_prefill, rel=0.01)


def test_a_relayed_request_is_handed_over_without_a_hole(
    answered: dict[str, dict[int, Record]],
) -> None:
    records = answered["pdd"].values()
    relayed = [record for record in records if record.route == "P-RLD-MD"]
    direct = [record for record in records if record.route == "P-MD"]
    assert len(relayed) + len(direct) == len(records)
    assert len(relayed) > 20
    assert len(direct) > 20
    handed_over = [record for record in relayed if record.handoff_s is not None]
    assert handed_over
    for record in handed_over:
        assert record.transfer_end_s is not None
        assert record.first_token_s < record.transfer_end_s < record.handoff_s  # type: ignore[operator]
        assert 0 < record.relay_tokens < record.output_tokens  # type: ignore[operator]
    for record in relayed:
        if record.handoff_s is None:  # the relay was done before the KV cache had crossed
            assert record.relay_tokens == record.output_tokens
    for record in direct:
        assert record.relay_tokens is None


def test_two_drives_are_one(trace: Trace) -> None:
    tables = [to_batch(list(drive(backend("pdd"), trace).values())) for _ in range(2)]
    assert tables[0].equals(tables[1])


def test_a_full_cache_evicts_and_serves_fewer_hits(trace: Trace) -> None:
    small = drive(backend("in_dc", "backend.in_dc.prefill.P.cache_bytes=2e9"), trace)
    assert sum(record.served_hit_tokens or 0 for record in small.values()) < 0.8 * float(
        trace.ideal_hit_tokens.sum()
    )
    none = drive(backend("in_dc", "backend.in_dc.prefill.P.cache_bytes=0"), trace)
    assert all(record.served_hit_tokens == 0 for record in none.values())


@pytest.mark.parametrize("after_s", [0.001, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("name", ["cross_dc", "pdd"])
def test_a_cancelled_request_frees_what_it_held(name: str, after_s: float) -> None:
    system = backend(name, f"backend.{name}.link.bandwidth_bps=1e9")
    requests = [
        Request(number, number, 0, 60_000, 100, 64, [(number * 1000, 937)], "main")
        for number in range(12)
    ]

    async def ask(request: Request) -> None:
        await system.generate(request, Answer())

    async def main() -> None:
        async with system:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask(request)) for request in requests]
                await asyncio.sleep(after_s)
                for task in tasks[::2]:
                    task.cancel()
            await asyncio.sleep(60)
            assert not any(system.load().values()), system.load()
            await system.reset()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


def test_a_busy_system_is_not_reset() -> None:
    system = backend("in_dc")

    async def main() -> None:
        async with system:
            request = Request(0, 0, 0, 60_000, 100, 64, [(0, 900)], "main")
            task = asyncio.ensure_future(system.generate(request, Answer()))
            await asyncio.sleep(0.01)
            with pytest.raises(BackendError, match="under way"):
                await system.reset()
            await task

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


def test_the_description_holds_every_number() -> None:
    described = dataclasses.asdict(backend("pdd").describe())
    assert described["cards"] == {"P": 40, "RLD": 3, "MD": 32}
    details = described["details"]
    assert details["link"]["bandwidth_bps"] == 20e9
    assert details["prefill"]["P"]["chip"]["prefill"]["t0_s"] == pytest.approx(42.3e-3, rel=0.1)
    assert details["decode"]["MD"]["pool"]["chip"]["decode_speed"] == 1.41
    assert details["singular"]["predictor"]["kind"] == "RecentOutputs"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("backend.pdd.prefill.P.cards=12", "prefill.cards is 12: give a multiple of 8"),
        ("backend.pdd.prefill.P.chunk_tokens=0", "prefill.chunk_tokens is 0"),
        ("backend.pdd.decode.MD.pool.cards=0", "decode.cards is 0"),
        ("chip_b.decode_speed=-1", "chip.decode_speed is -1"),
        ("backend.pdd.link.bandwidth_bps=0", "bandwidth_bps is 0"),
        ("backend.pdd.link.rtt_s=-1", "rtt_s is -1"),
        ("backend.pdd.link.bandwidth_bps=fast", "bandwidth_bps is 'fast'"),
        ("backend.pdd.relay.pool.cards=lots", "decode.cards is 'lots'"),
        ("backend.pdd.decode.MD.pool.chip=null", "decode.chip is None"),
        ("backend.pdd.prefill.P.kv=null", "prefill.kv is None"),
        ("backend.pdd.link.bandwidth_bps=inf", "bandwidth_bps is inf"),
        ("backend.pdd.relay_threshold_s=-0.1", "relay_threshold_s is -0.1"),
        ("backend.pdd.decode.MD.cache.cache_bytes=-1", "cache_bytes is -1"),
    ],
)
def test_an_impossible_system_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        backend("pdd", override)


def test_an_error_in_the_model_ends_the_run_and_not_in_a_deadlock(trace: Trace) -> None:
    system = backend("in_dc")

    def fail(_: object) -> None:
        raise ZeroDivisionError("a fault of the model")

    system.prefilled = fail
    with pytest.raises(ZeroDivisionError, match="of the model"):
        drive(system, trace)
