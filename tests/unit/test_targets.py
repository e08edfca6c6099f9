"""A trace from targets: what was asked for is what comes out."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from harness.errors import ConfigError
from harness.metrics import HIT_LABELS
from harness.run import load_trace
from harness.trace import Trace
from tests.simulated import configured
from traces.profile import profile
from traces.targets import Hits


def drawn(*overrides: str) -> Trace:
    return load_trace(configured("trace=targets", *(f"trace.{each}" for each in overrides)))


@pytest.mark.parametrize(
    ("hits", "mean"),
    [
        ([0.164, 0.093, 0.097, 0.094, 0.196, 0.215, 0.141], 0.90),
        ([0.6, 0.1, 0.1, 0.1, 0.05, 0.03, 0.02], 0.60),
        ([0.05, 0.05, 0.1, 0.2, 0.2, 0.2, 0.2], None),
    ],
)
def test_the_bins_and_the_mean_come_out_as_asked(hits: list[float], mean: float | None) -> None:
    trace = drawn(f"hits={hits}", f"mean_hit={'null' if mean is None else mean}")
    found = profile(trace)
    assert np.abs(np.array(found.bins) - hits).max() < 0.004
    if mean is not None:
        assert found.ideal_hit_mean == pytest.approx(mean, abs=0.004)


def test_lengths_turns_and_delays_come_out_as_asked() -> None:
    found = profile(drawn("sessions=3000"))
    assert found.input_tokens == pytest.approx((58_000, 105_000, 125_000), rel=0.06)
    assert found.output_tokens == pytest.approx((239, 1127, 5097), rel=0.02)
    assert found.turns == pytest.approx((17, 40, 50), abs=1)
    assert found.delay_s == pytest.approx((8.6, 128, 2700), rel=0.05)
    assert found.starts_per_s == pytest.approx(1.0, rel=0.1)


def test_more_sessions_begin_with_the_same_ones() -> None:
    few, many = drawn("sessions=20"), drawn("sessions=1100")
    for one, other in zip(few.by_session(), many.by_session(), strict=False):
        assert [t.input_tokens for t in one.turns] == [t.input_tokens for t in other.turns]
        assert [t.delay_s for t in one.turns] == [t.delay_s for t in other.turns]
    assert drawn("sessions=20").digest == few.digest
    assert drawn("sessions=20", "seed=2").digest != few.digest


def test_a_turn_that_hits_carries_the_one_before() -> None:
    trace = drawn("hits=[0,0,0,0,0,1,0]", "mean_hit=null", "sessions=200")
    first = trace.column("turn_index") == 0
    assert trace.ideal_hit_rates[~first].min() >= 0.98
    for session in trace.by_session():
        for before, after in zip(session.turns, session.turns[1:], strict=False):
            assert after.parents == (before.row,)
            assert after.runs[0][0] == before.runs[0][0]


def test_requests_of_one_turn_share_a_front() -> None:
    trace = drawn("turns=1", "hits=[1,0,0,0,0,0,0]", "mean_hit=0.4", "sessions=4000")
    assert trace.ideal_hit_rates.mean() == pytest.approx(0.4, abs=0.02)
    assert trace.sessions == len(trace)


def test_a_power_gives_the_lowest_bin_its_mean() -> None:
    bins = (0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5)
    hits = Hits.of(bins, 0.7)
    shares = (np.arange(100_000) + 0.5) / 100_000
    assert hits.at(shares).mean() == pytest.approx(0.7, abs=1e-3)
    assert (hits.at(shares) < 0.9).mean() == pytest.approx(0.5)


def test_a_mean_at_the_printed_ends_of_its_range_is_taken() -> None:
    """Whoever is told that it can be 0.8188 to 0.9664 may ask for these."""
    bins = [0.164, 0.093, 0.097, 0.094, 0.196, 0.215, 0.141]
    with pytest.raises(ConfigError) as caught:
        Hits.of(bins, 0.1)
    low, high = re.findall(r"\d\.\d{4}", str(caught.value))
    shares = (np.arange(100_000) + 0.5) / 100_000
    for end in (float(low), float(high)):
        assert Hits.of(bins, end).at(shares).mean() == pytest.approx(end, abs=2e-4)
    without = [0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0]
    assert Hits.of(without, 0.9425).at(shares).mean() == pytest.approx(0.9425, abs=1e-4)
    with pytest.raises(ConfigError, match=r"it can be 0\.9425 to 0\.9425"):
        Hits.of(without, 0.9430)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("hits=[1,0]", f"give {len(HIT_LABELS)} shares, of 0-90%"),
        ("hits=[0.5,0,0,0,0,0,0]", "which sum to 0.5: make it 1"),
        ("hits=[2,-1,0,0,0,0,0]", "trace.hits, of 0-90%, is 2"),
        ("mean_hit=0.99", "with these bins it can be"),
        ("mean_hit=2", "trace.mean_hit is 2"),
        ("input_tokens=0", "trace.input_tokens.min is 0"),
        ("turns={min:1,max:2e9}", "trace.turns.max is 2000000000.0"),
        ("block_tokens=0", "trace.block_tokens is 0"),
        ("sessions=0", "trace.sessions is 0"),
        ("starts.per_s=0", "trace.starts.per_s is 0"),
        ("delay_s=soon", "trace.delay_s.min is 'soon'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        drawn(override)
    assert words in str(caught.value)


def test_what_is_asked_for_stands_in_the_header() -> None:
    told: dict[str, Any] = dict(drawn("sessions=5").header.parameters)
    assert told["sessions"] == 5
    assert told["hits"][0] == 0.164
    assert told["input_tokens"]["p50"] == 58_000
