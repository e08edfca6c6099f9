"""The replay on the virtual clock: gates, pacing, failures and interruptions, to the nanosecond."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from harness.clock import VirtualTimeLoop
from harness.errors import BadStream, ConfigError, ConnectFailed, ResultError
from harness.pacing import Closed, Pacing, Poisson, Recorded, Scaled
from harness.record import Record, to_batch
from harness.replay import Replay
from harness.seed import stream
from harness.trace import Header, Trace
from tests.unit.echo import Echo, broken

MakeTrace = Callable[..., Trace]


def replay(
    trace: Trace, backend: Echo, pacing: Pacing | None = None, **options: Any
) -> dict[int, Record]:
    """Records by turn. Each turn must have exactly one."""
    records: list[Record] = []
    plan = (pacing or Recorded()).plan(trace, stream(1, "pacing"))
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(Replay(trace, plan, backend, records.append, **options).run())
    assert sorted(record.turn for record in records) == list(range(len(trace)))
    return {record.turn: record for record in records}


def singles(make_trace: MakeTrace, turns: int, **columns: Any) -> Trace:
    """As many sessions of one turn each, one a second."""
    header = columns.pop("header", None)
    rows: dict[str, Any] = {
        "session": list(range(turns)),
        "turn_index": [0] * turns,
        "parents": [[]] * turns,
        "recorded_s": [float(at) for at in range(turns)],
        "arrival_s": [float(at) for at in range(turns)],
        "delay_s": [None] * turns,
        "input_tokens": [64] * turns,
        "output_tokens": [3] * turns,
        "run_starts": [[]] * turns,
        "run_lengths": [[]] * turns,
        "agent": ["main"] * turns,
    }
    return make_trace(**({"header": header} if header else {}), **(rows | columns))


def test_a_turn_waits_for_its_parent_and_then_its_delay(make_trace: MakeTrace) -> None:
    records = replay(make_trace(), Echo(first_s=0.5, gap_s=0.25))
    # Three tokens end 1.0 s after the send: 0 -> 1; +1 s -> 2..3; +2 s -> 5..6.
    assert [records[row].scheduled_s for row in (0, 2, 3)] == [0.0, 2.0, 5.0]
    assert records[1].scheduled_s == 0.5
    assert all(record.sent_s == record.scheduled_s for record in records.values())


def test_a_record_says_what_was_wanted_sent_and_served(make_trace: MakeTrace) -> None:
    record = replay(make_trace(), Echo())[2]
    assert (record.session, record.turn_index, record.agent) == (0, 1, "main")
    assert (record.input_tokens, record.output_tokens, record.ideal_hit_tokens) == (256, 3, 128)
    assert (record.first_token_s, record.first_answer_s, record.last_token_s) == (2.5, 2.75, 3.0)
    assert record.gaps_us is not None
    assert record.gaps_us.tolist() == [250_000, 250_000]
    assert (record.served_input_tokens, record.served_hit_tokens) == (256, 64)
    assert (record.route, record.status, record.error) == ("P-D", "ok", None)


def test_a_join_waits_for_the_last_of_its_parents(make_trace: MakeTrace) -> None:
    trace = make_trace(
        session=[0, 0, 0, 0],
        turn_index=[0, 1, 2, 3],
        parents=[[], [0], [0], [1, 2]],
        recorded_s=[0.0, 2.0, 2.0, 9.0],
        arrival_s=[0.0, None, None, None],
        delay_s=[None, 1.0, 1.0, 0.5],
        output_tokens=[3, 1, 9, 1],
        run_starts=[[0], [0], [0], [0]],
    )
    records = replay(trace, Echo())
    # The short branch ends at 2.5, the long one at 2 + 0.5 + 8 * 0.25 = 4.5.
    assert [records[row].scheduled_s for row in (1, 2, 3)] == [2.0, 2.0, 5.0]


def test_scaled_time_shortens_gaps_and_delays(make_trace: MakeTrace) -> None:
    records = replay(make_trace(), Echo(), Scaled(2.0))
    assert [records[row].scheduled_s for row in (0, 1, 2, 3)] == [0.0, 0.25, 1.5, 3.5]


def test_a_closed_loop_holds_its_number_of_sessions(make_trace: MakeTrace) -> None:
    backend = Echo()
    records = replay(singles(make_trace, 7), backend, Closed(2))
    assert backend.most_in_flight == 2
    assert [records[row].scheduled_s for row in range(7)] == [0, 0, 1, 1, 2, 2, 3]


def test_a_poisson_rate_is_kept_on_the_whole(make_trace: MakeTrace) -> None:
    records = replay(singles(make_trace, 4000), Echo(), Poisson(50.0))
    starts = np.array([records[row].scheduled_s for row in range(4000)])
    gaps = np.diff(starts)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.08)


def test_the_same_seed_draws_the_same_arrivals(make_trace: MakeTrace) -> None:
    trace = singles(make_trace, 50)
    plans = [Poisson(5.0).plan(trace, stream(seed, "pacing")).starts_s for seed in (1, 1, 2)]
    assert np.array_equal(plans[0], plans[1])
    assert not np.array_equal(plans[0], plans[2])


def test_recorded_times_are_refused_where_there_are_none(make_trace: MakeTrace) -> None:
    trace = make_trace(Header("h", 64, "floor", "file", "s", "-", session_starts="unknown"))
    with pytest.raises(ConfigError, match="pacing=poisson or pacing=closed"):
        Recorded().plan(trace, stream(1, "pacing"))


@pytest.mark.parametrize("bad", [lambda: Scaled(0), lambda: Poisson(-1), lambda: Closed(0)])
def test_an_impossible_pacing_is_refused(bad: Callable[[], Pacing]) -> None:
    with pytest.raises(ConfigError, match="give"):
        bad()


def test_a_failure_ends_its_session_and_no_other(make_trace: MakeTrace) -> None:
    records = replay(make_trace(), Echo(fail=broken(2, BadStream)))
    assert [records[row].status for row in range(4)] == ["ok", "ok", "failed", "unsent"]
    assert (records[2].error_class, records[2].error) == ("BadStream", "on purpose")
    assert records[2].first_token_s == 2.5  # what came before the failure is kept
    assert records[3].error == "an earlier turn of its session failed"
    assert records[3].scheduled_s is None


def test_a_failed_session_gives_its_place_to_the_next(make_trace: MakeTrace) -> None:
    backend = Echo(fail=broken(0, ConnectFailed))
    records = replay(singles(make_trace, 3), backend, Closed(1))
    assert [records[row].status for row in range(3)] == ["failed", "ok", "ok"]


def test_a_late_answer_times_out(make_trace: MakeTrace) -> None:
    records = replay(singles(make_trace, 1), Echo(first_s=0.5, gap_s=9.0), timeout_s=3.0)
    assert records[0].status == "failed"
    assert records[0].error_class == "RequestTimeout"
    assert records[0].error == "no whole answer within 3 s"
    assert records[0].first_token_s == 0.5


def test_an_answer_without_a_token_is_a_failure(make_trace: MakeTrace) -> None:
    class Mute(Echo):
        async def generate(self, request: Any, answer: Any) -> None:
            pass

    records = replay(singles(make_trace, 1), Mute())
    assert records[0].error == "the answer ended without a token"


def test_a_fault_of_ours_stops_the_run_and_keeps_the_records(make_trace: MakeTrace) -> None:
    records: list[Record] = []
    trace = singles(make_trace, 3)
    backend = Echo(fail=lambda request: ZeroDivisionError() if request.turn == 1 else None)

    async def main() -> None:
        plan = Recorded().plan(trace, stream(1, "pacing"))
        await Replay(trace, plan, backend, records.append).run()

    with (
        pytest.raises(ZeroDivisionError),
        asyncio.Runner(loop_factory=VirtualTimeLoop) as runner,
    ):
        runner.run(main())
    assert [record.status for record in records] == ["ok", "cancelled", "unsent"]


def test_an_interruption_records_everything_once(make_trace: MakeTrace) -> None:
    records: list[Record] = []
    trace = singles(make_trace, 4, arrival_s=[0.0, 0.0, 1.25, 9.0])
    backend = Echo()

    async def main() -> None:
        plan = Recorded().plan(trace, stream(1, "pacing"))
        async with asyncio.timeout(1.5):
            await Replay(trace, plan, backend, records.append).run()

    with pytest.raises(TimeoutError), asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())
    assert [record.status for record in records] == ["ok", "ok", "cancelled", "unsent"]
    assert backend.in_flight == 0


def test_a_full_disk_stops_the_run(make_trace: MakeTrace) -> None:
    def write(_: Record) -> None:
        raise ResultError("no space left")

    trace = singles(make_trace, 3)
    plan = Recorded().plan(trace, stream(1, "pacing"))
    with (
        pytest.raises(ResultError, match="no space"),
        asyncio.Runner(loop_factory=VirtualTimeLoop) as runner,
    ):
        runner.run(Replay(trace, plan, Echo(), write).run())


def test_a_request_that_the_backend_cancels_is_a_failure_and_not_the_end(
    make_trace: MakeTrace,
) -> None:
    class LettingGo(Echo):
        async def generate(self, request: Any, answer: Any) -> None:
            if request.turn == 0:
                future = asyncio.get_running_loop().create_future()
                future.cancel()
                await future
            await super().generate(request, answer)

    records = replay(singles(make_trace, 2), LettingGo())
    assert [records[row].status for row in (0, 1)] == ["failed", "ok"]
    assert records[0].error == "the backend cancelled it"


def test_nothing_is_sent_once_the_run_winds_up(make_trace: MakeTrace) -> None:
    class Stubborn(Echo):
        """Turns its own cancellation into a failure, which would let the next session start."""

        async def generate(self, request: Any, answer: Any) -> None:
            self.seen.append(request)
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                if request.turn:
                    await asyncio.sleep(5)
                raise BadStream("broken off") from None

    records: list[Record] = []
    trace, backend = singles(make_trace, 4), Stubborn()

    async def main() -> None:
        plan = Closed(2).plan(trace, stream(1, "pacing"))
        async with asyncio.timeout(1):
            await Replay(trace, plan, backend, records.append).run()

    with pytest.raises(TimeoutError), asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())
    assert [request.turn for request in backend.seen] == [0, 1]
    assert sorted(record.turn for record in records) == [0, 1, 2, 3]


def test_half_a_character_in_an_error_costs_no_record(make_trace: MakeTrace) -> None:
    fail = broken(0, BadStream)
    backend = Echo(fail=lambda r: BadStream("body: \udcff") if fail(r) else None)
    records = replay(singles(make_trace, 2), backend)
    assert records[0].error == r"body: \udcff"
    assert to_batch(list(records.values())).num_rows == 2


def test_a_gap_too_long_for_its_column_is_cut_and_not_turned_round(make_trace: MakeTrace) -> None:
    record = replay(singles(make_trace, 1, output_tokens=[2]), Echo(gap_s=3000.0))[0]
    assert record.gaps_us is not None
    assert record.gaps_us.tolist() == [2**31 - 1]
    assert record.last_token_s == 3000.5


def test_a_run_of_years_comes_to_its_end(make_trace: MakeTrace) -> None:
    records = replay(singles(make_trace, 2, arrival_s=[0.0, 9 * 365 * 86_400.0]), Echo())
    assert [records[row].status for row in (0, 1)] == ["ok", "ok"]
