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
    few = Spread.fit(np.array([5.0, 1.0, 3.0]))
    assert few.to_json() == {"min": 1, "p50": 3, "max": 5}
    many = np.random.default_rng(1).lognormal(5, 2, 5000)
    spread = Spread.fit(many)
    assert spread.values[0] == many.min()
    assert spread.values[-1] == many.max()
    assert distances(spread, many)["ks"] < 0.02
    assert Spread.of(spread.to_json(), "x").values == spread.values


def test_a_sample_of_one_is_that_value() -> None:
    assert Spread.fit(np.array([4.0])).at(np.array([0.5])) == pytest.approx([4])


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
