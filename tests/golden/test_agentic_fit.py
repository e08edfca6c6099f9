"""How near the shipped workload is to the real sessions that it is fitted to: a fit, checked."""

from __future__ import annotations

import numpy as np
import pytest
from hydra import compose, initialize_config_module

from harness.run import load_trace
from harness.trace import Trace
from traces.profile import Profile, profile


def shipped(seed: int) -> Profile:
    with initialize_config_module("conf", version_base="1.3"):
        return profile(load_trace(compose("run", [f"seed={seed}"])))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_default_workload_meets_its_targets(seed: int) -> None:
    found = shipped(seed)
    assert found.ideal_hit_mean == pytest.approx(0.900, abs=0.010)
    assert found.above_95 == pytest.approx(0.743, abs=0.020)
    wanted = np.array([16.4, 9.3, 9.7, 9.4, 19.6, 21.5, 14.1])
    assert np.abs(100 * np.array(found.bins) - wanted).max() < 2.5
    assert found.input_tokens == pytest.approx((58_000, 105_000, 125_000), rel=0.07)
    assert found.output_tokens == pytest.approx((239, 1_127, 5_097), rel=0.10)
    assert found.outputs_under_500 == pytest.approx(0.768, abs=0.015)


def test_the_targets_are_the_real_sessions(real_sessions: Trace) -> None:
    """So that the numbers above cannot drift from what they stand for."""
    real, ours = profile(real_sessions), shipped(1)
    assert ours.ideal_hit_mean == pytest.approx(real.ideal_hit_mean, abs=0.010)
    assert np.abs(np.array(ours.bins) - np.array(real.bins)).max() < 0.025
    assert ours.turns == pytest.approx(real.turns, rel=0.25)
    assert ours.delay_s[0] == pytest.approx(real.delay_s[0], rel=0.15)
