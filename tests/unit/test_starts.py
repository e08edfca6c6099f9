"""When sessions start: rates, bursts, hours of the day; drawn, and fitted to what was drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.errors import ConfigError
from harness.trace import Trace
from tests.unit.conftest import HEADER, MakeTrace
from traces.starts import Starts


def drawn(starts: Starts, sessions: int) -> np.ndarray:
    return np.concatenate([chunk.starts_s for chunk in starts.chunks(sessions, [7])])


def at(make_trace: MakeTrace, starts_s: np.ndarray, **header: Any) -> Trace:
    count = len(starts_s)
    return make_trace(
        replace(HEADER, **header),
        session=np.arange(count), turn_index=[0] * count, parents=[[]] * count,
        recorded_s=starts_s - starts_s[0], arrival_s=starts_s - starts_s[0],
        delay_s=[None] * count, input_tokens=[64] * count, output_tokens=[1] * count,
        run_starts=[[]] * count, run_lengths=[[]] * count, agent=["main"] * count,
    )  # fmt: skip


@pytest.mark.parametrize("variation", [0.5, 1.0, 3.0])
def test_gaps_have_the_rate_and_the_burstiness_asked_for(variation: float) -> None:
    gaps = np.diff(drawn(Starts(4.0, variation), 40_000))
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.06)


def test_a_busy_hour_has_as_many_starts_as_it_is_busier() -> None:
    starts = Starts(2.0, 1.0, (1.0, 3.0), period_s=1000.0)
    times = drawn(starts, 20_000)
    busy = (times % 1000 >= 500).mean()
    assert busy == pytest.approx(0.75, abs=0.02)
    assert times[-1] == pytest.approx(10_000, rel=0.03)


def test_an_hour_without_starts_has_none() -> None:
    busy_s = np.cumsum(np.random.default_rng(7).exponential(size=5000))
    times = Starts(1.0, 1.0, (1.0, 0.0), period_s=10.0).clock(busy_s)
    assert (times % 10 <= 5).all()


def test_a_fit_finds_what_was_drawn(make_trace: MakeTrace) -> None:
    asked = Starts(5.0, 2.0, tuple(np.repeat([0.5, 1.5], 12)), period_s=86_400.0)
    found = Starts.fit(at(make_trace, drawn(asked, 900_000)))
    assert found is not None
    assert found.per_s == pytest.approx(5.0, rel=0.05)
    assert found.variation == pytest.approx(2.0, rel=0.05)
    assert found.period_s == 86_400
    assert found.profile == pytest.approx(asked.profile, abs=0.06)


def dispersion(starts_s: np.ndarray, parts: int = 100) -> float:
    counts = np.histogram(starts_s, parts)[0]
    return float(counts.var() / counts.mean())


@pytest.mark.parametrize("sessions", [300, 12_000])
def test_a_coarse_clock_is_not_taken_for_bursts(make_trace: MakeTrace, sessions: int) -> None:
    """A Poisson process told in steps of 3 s: ten starts share a time, and most gaps are 0."""
    told = drawn(Starts(3.4, tick_s=3.0), sessions)
    assert (told % 3 == 0).all()
    found = Starts.fit(at(make_trace, told))
    assert found is not None
    assert found.tick_s == 3
    assert found.variation == pytest.approx(1.0, abs=0.15)
    assert dispersion(drawn(found, sessions), sessions // 50) < 2.5  # that of the gaps is 9


def test_bursts_within_bursts_are_fitted_by_their_counts(make_trace: MakeTrace) -> None:
    """Minutes that are busy and minutes that are not: each a Poisson process, whose gaps say so."""
    random = np.random.default_rng(7)
    rates = np.repeat(random.gamma(1.0, 4.0, 400), 60)
    told = np.sort(
        np.concatenate([at_s + random.random(n) for at_s, n in enumerate(random.poisson(rates))])
    )
    gaps = np.diff(told)
    found = Starts.fit(at(make_trace, told))
    assert found is not None
    assert found.variation > 2 * gaps.std() / gaps.mean()
    windows = len(told) // 50
    again = dispersion(drawn(found, len(told)), windows)
    assert again == pytest.approx(dispersion(told, windows), rel=0.3)


def test_a_trace_without_a_clock_has_no_starts(make_trace: MakeTrace) -> None:
    times = np.arange(5.0)
    assert Starts.fit(at(make_trace, times, session_starts="unknown")) is None
    assert Starts.fit(at(make_trace, np.zeros(3))) is None
    assert Starts.fit(at(make_trace, times)) is not None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"per_s": 0}, "x.per_s is 0"),
        ({"per_s": 1, "variation": 0}, "x.variation is 0"),
        ({"per_s": 1, "profile": []}, "x.profile is []"),
        ({"per_s": 1, "profile": "busy"}, "x.profile is 'busy'"),
        ({"per_s": 1, "profile": [0, 0]}, "x.profile is all 0"),
        ({"per_s": 1, "profile": [1, -1]}, "x.profile is -1"),
        ({"per_s": 1, "period_s": 0}, "x.period_s is 0"),
        ({"per_s": 1, "speed": 2}, "x: "),
        ({}, "x: "),
    ],
)
def test_what_is_no_load_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Starts.of("x", **given)
    assert words in str(caught.value)
