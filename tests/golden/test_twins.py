"""Synthetic twins of published traces, beside them: their figures, and how a system answers them.

The sketch is fitted to distributions of turns. Nothing of capacity curves, of TTFT or of a session
as a whole was fitted, so those are predictions, within the distances that stand here.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from harness import metrics
from harness.clock import VirtualTimeLoop
from harness.pacing import Pacing, Poisson, Recorded
from harness.record import Record
from harness.replay import Replay
from harness.seed import stream
from harness.trace import Trace
from tests.simulated import backend
from traces import sketch
from traces.capacity import capacity_curve
from traces.profile import profile
from traces.sketch import samples
from traces.transform import cap_delays
from traces.twin import twin

MEBI = 2**20


def ks(one: Trace, other: Trace) -> dict[str, float]:
    a, b = samples(one), samples(other)
    return {name: float(stats.ks_2samp(a[name], b[name]).statistic) for name in a if len(a[name])}


SIX: Pacing = Poisson(6.0)


def ttft_s(trace: Trace, system: str, seed: int, pacing: Pacing = SIX) -> NDArray[np.float64]:
    """P50, P90 and P99 from the scheduled time, at 6 requests/s where no pacing is given."""
    records: list[Record] = []
    simulated = backend(system)

    async def main() -> None:
        async with simulated:
            await simulated.reset()
            plan = pacing.plan(trace, stream(seed, "pacing"))
            await Replay(trace, plan, simulated, records.append).run()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())
    first_s = np.array([(each.first_token_s, each.scheduled_s) for each in records], float)
    waits_s = first_s[:, 0] - first_s[:, 1]
    return np.array([metrics.nearest_rank(waits_s, q) for q in metrics.QUANTILES])


def test_agent_sessions_and_their_twin(real_sessions: Trace) -> None:
    """A bootstrap of the real sessions moves their median prompt by 8%."""
    ours = twin(sketch.fit(real_sessions), 2000, 1).whole()
    apart = ks(real_sessions, ours)
    assert apart["output_tokens"] < 0.02
    assert apart["delay_s"] < 0.02
    assert apart["turns"] < 0.05
    assert apart["new_tokens"] < 0.05
    assert apart["ideal_hit_rate"] < 0.05
    assert apart["input_tokens"] < 0.11
    assert ours.ideal_hit_rates.mean() == pytest.approx(0.900, abs=0.006)
    assert (ours.ideal_hit_rates > 0.95).mean() == pytest.approx(0.743, abs=0.015)


@pytest.mark.parametrize("system", ["in_dc", "cross_dc", "pdd"])
def test_a_system_answers_the_twin_as_it_answers_agent_sessions(
    real_sessions: Trace, system: str
) -> None:
    """Of the same number of sessions; delays capped at 600 s, as one of 21 h is no load."""
    real = cap_delays(real_sessions, 600)
    made = sketch.fit(real)
    wanted = np.mean([ttft_s(real, system, seed) for seed in (1, 2)], axis=0)
    found = np.mean(
        [ttft_s(twin(made, 179, seed).whole(), system, seed) for seed in (1, 2, 3)], axis=0
    )
    apart = np.abs(found / wanted - 1)
    assert (apart < [0.06, 0.13, 0.15]).all(), (found, wanted)


def test_mooncake_and_its_twin(conversation: Trace) -> None:
    """Rows of one turn: all hits are on what other rows laid."""
    ours = twin(sketch.fit(conversation), 12_031, 1).whole()
    apart = ks(conversation, ours)
    assert apart["input_tokens"] < 0.01
    assert apart["output_tokens"] < 0.015
    assert apart["ideal_hit_rate"] < 0.04
    assert apart["new_tokens"] < 0.05
    assert apart["start_gap_s"] < 0.03
    assert ours.ideal_hit_token_weighted == pytest.approx(0.374, abs=0.02)


@pytest.mark.parametrize("from_request", [0, 6015])
def test_mooncake_s_capacity_curve_is_its_twin_s(conversation: Trace, from_request: int) -> None:
    """The sketch knows how many rows ago hits were laid; a cache of a size was not fitted."""
    sizes = np.array([1, 4, 16, 64]) * MEBI // 512
    twins = twin(sketch.fit(conversation), 12_031, 1).whole()
    real, ours = (
        capacity_curve(each, sizes, from_request=from_request).table.column("hit_share").to_numpy()
        for each in (conversation, twins)
    )
    assert np.abs(ours - real).max() < 0.025
    assert ours[0] == pytest.approx(real[0], rel=0.25)
    assert (np.diff(ours) > 0).all()


def test_a_system_answers_the_twin_s_load_as_it_answers_mooncake_s(conversation: Trace) -> None:
    """At the recorded times, which a clock tells in steps of 3 s: of their counts, not of TTFT."""
    twins = twin(sketch.fit(conversation), 12_031, 1).whole()
    wanted, found = (ttft_s(each, "in_dc", 1, Recorded()) for each in (conversation, twins))
    assert (np.abs(found / wanted - 1) < [0.10, 0.12, 0.08]).all(), (found, wanted)
    assert profile(twins).starts_dispersion == pytest.approx(2.65, rel=0.3)
