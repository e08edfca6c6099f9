"""Distributions by their quantiles."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from harness.errors import ConfigError
from traces.likeness import distances
from traces.spread import Spread


def test_quantiles_come_out_as_given() -> None:
    spread = Spread.of({"p50": 99, "min": 0, "max": 9999, "p99.5": 999}, "x")
    assert spread.at(np.array([0, 0.5, 0.995, 1])) == pytest.approx([0, 99, 999, 9999])
    # Half way from 0 to 99 on the scale of log(1 + x): the root of 100, less 1.
    assert spread.at(np.array([0.25])) == pytest.approx([9])


def test_one_number_is_always_drawn() -> None:
    assert Spread.of(7, "x").at(np.array([0, 0.3, 1])).tolist() == [7, 7, 7]


def test_a_fit_is_its_sample() -> None:
    many = np.random.default_rng(1).lognormal(5, 2, 5000)
    spread = Spread.fit(many)
    assert spread.values[0] == many.min()
    assert spread.values[-1] == many.max()
    assert distances(spread, many)["ks"] < 0.02
    assert Spread.of(spread.to_json(), "x") == spread


@pytest.mark.parametrize("count", [1, 2, 3, 20, 74, 75, 300, 5000])
def test_a_fit_keeps_the_mean(count: int) -> None:
    """However far apart the values are: P50 to the largest is a factor of thousands here."""
    sample = np.random.default_rng(count).lognormal(3, 3, count)
    spread = Spread.fit(sample)
    assert spread.mean == pytest.approx(sample.mean(), rel=2e-3)
    drawn = spread.at((np.arange(1_000_000) + 0.5) / 1_000_000)
    assert drawn.mean() == pytest.approx(spread.mean, rel=1e-3)


def test_the_ends_of_a_small_sample_are_drawn_as_often_as_the_rest() -> None:
    spread = Spread.fit(np.array([1.0, 100.0, 10_000.0]))
    assert (spread.values[0], spread.values[-1]) == (1, 10_000)
    drawn = spread.at((np.arange(3000) + 0.5) / 3000)
    assert np.median(drawn) == pytest.approx(100, rel=0.01)
    assert (drawn < 2).mean() > 0.15
    assert (drawn > 5000).mean() > 0.25


def test_what_always_is_one_value_is_told_by_its_ends() -> None:
    assert Spread.fit(np.full(500, 4.0)).to_json() == {"min": 4, "max": 4}
    assert Spread.fit(np.array([4.0])).at(np.array([0.5])) == pytest.approx([4])


def test_values_beyond_the_bounds_are_refused() -> None:
    assert Spread.of({"min": 1, "max": 5}, "x", least=1, most=5).values == (1, 5)
    for given in ({"min": 0, "max": 5}, {"min": 1, "max": 6}):
        with pytest.raises(ConfigError, match=r"x\.(min|max) is \d"):
            Spread.of(given, "x", least=1, most=5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"min": 1, "p50": 5}, "give min and max too"),
        ({"min": 1, "q50": 5, "max": 9}, "x.q50 is unknown"),
        ({"min": 1, "p50": 20, "max": 9}, "a higher share cannot have a lower value"),
        ({"min": 1, "p50": "many", "max": 9}, "x.p50 is 'many'"),
        ({"min": -1, "max": 9}, "x.min is -1"),
        ({"min": 1, "p0": 1, "max": 9}, "a share is given twice"),
        ({"min": 1, "max": math.inf}, "x.max is inf"),
        ({}, "give min and max too"),
        (True, "x.min is True"),
    ],
)
def test_what_is_no_distribution_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Spread.of(given, "x")
    assert words in str(caught.value)


def test_distances_by_hand() -> None:
    """Wanted even on 1 to 3 at three places; got 2 everywhere."""
    told = distances(Spread((0.0, 1.0), (2.0, 2.0)), np.array([2.0, 2.0, 4.0, 4.0]))
    assert told["ks"] == pytest.approx(0.5)
    assert told["distance"] == pytest.approx(0.5)
    assert (told["wanted_mean"], told["mean"]) == (2.0, 3.0)
    same = distances(Spread((0.0, 1.0), (2.0, 2.0)), np.array([2.0, 2.0]))
    assert (same["ks"], same["distance"]) == (0.0, 0.0)
