"""Requests alike but for their hits."""

from __future__ import annotations

import numpy as np
import pytest
from hydra import compose, initialize_config_module

from harness.errors import ConfigError
from harness.run import load_trace
from harness.trace import Trace


def generated(*overrides: str) -> Trace:
    with initialize_config_module("conf", version_base="1.3"):
        settings = [f"trace.{each}" for each in overrides]
        return load_trace(compose("run", ["trace=constant", "trace.requests=500", *settings]))


@pytest.mark.parametrize("hit", [0.0, 0.25, 0.9, 1.0])
def test_every_request_hits_what_it_is_told_to(hit: float) -> None:
    trace = generated(f"hits=[{hit}]")
    rates = set((trace.ideal_hit_tokens[1:] / trace.input_tokens[1:]).tolist())
    assert rates == {round(hit * 1024) / 1024}
    assert trace.ideal_hit_tokens[0] == 0
    assert set(trace.input_tokens.tolist()) == {65_536}


def test_hits_are_drawn_in_proportion_to_their_weights() -> None:
    rates = generated("hits=[0.975,0.675]", "weights=[3,1]").ideal_hit_tokens[1:] / 65_536
    assert (rates > 0.9).mean() == pytest.approx(0.75, abs=0.06)
    assert sorted(set(np.round(rates, 2))) == pytest.approx([0.67, 0.98], abs=0.011)


def test_the_prefix_is_there_before_the_rest_comes() -> None:
    trace = generated("requests_per_s=4")
    arrivals_s = trace.column("arrival_s")
    assert arrivals_s[0] == 0.0
    assert arrivals_s[1] > 60
    assert np.diff(arrivals_s[1:]).mean() == pytest.approx(0.25, rel=0.15)


def test_a_seed_is_a_trace() -> None:
    assert generated("seed=3").digest == generated("seed=3").digest
    assert generated("seed=3").digest != generated("seed=4").digest


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("hits=[]", "trace.weights is"),
        ("weights=[1,2]", "one for each"),
        ("hits=[1.5]", "trace.hits is 1.5"),
        ("weights=[0]", "trace.weights is 0"),
        ("input_tokens=10", "trace.input_tokens is 10"),
        ("requests_per_s=0", "trace.requests_per_s is 0"),
    ],
)
def test_a_bad_setting_is_one_message(setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        generated(setting)
