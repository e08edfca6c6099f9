"""A sheet of prices: costs by the hour, revenue by the request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from harness.errors import ConfigError
from harness.prices import Prices
from harness.record import blank, to_batch
from tests.unit.rundir import prices


def sheet(**changes: Any) -> Prices:
    return Prices(**prices(**changes))


def test_an_hour_is_cards_by_role_and_the_lines_of_the_topology() -> None:
    assert sheet().hour("in_dc", {"P": 40, "D": 48}) == 88
    assert sheet().hour("pdd", {"P": 40, "RLD": 3, "MD": 32}) == pytest.approx(43 + 38.4 + 0.34)


def test_what_is_not_known_is_said_and_not_taken_as_free() -> None:
    with pytest.raises(ConfigError, match=r"of vllm no cards are known.*backend\.vllm\.cards"):
        sheet().hour("vllm", {})
    with pytest.raises(ConfigError, match=r"no price for a card of X: add prices\.cards\.X"):
        sheet().hour("pdd", {"P": 1, "X": 2})


def test_revenue_by_the_request() -> None:
    """900 of 1,000 tokens cached at a tenth of the price, 10 answered at four times."""
    known = {
        "turn": 0, "session": 0, "turn_index": 0, "agent": "", "input_tokens": 1000,
        "output_tokens": 10, "ideal_hit_tokens": 900, "served_input_tokens": 1000,
        "served_hit_tokens": 900, "served_output_tokens": 10, "status": "ok",
    }  # fmt: skip
    rows = [
        blank(**known),
        blank(**(known | {"status": "failed"})),
        blank(**(known | {"served_hit_tokens": None})),
    ]
    paid = sheet().revenue(pa.Table.from_batches([to_batch(rows)]))
    assert paid[0] == pytest.approx((100 * 1 + 900 * 0.1 + 10 * 4) / 1e6)
    assert paid[1] == 0
    assert np.isnan(paid[2])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"as_of": "last year"}, "prices.as_of is 'last year'"),
        ({"currency": ""}, "prices.currency is ''"),
        ({"cards": {"P": -1}}, "prices.cards.P is -1"),
        ({"output": "dear"}, "prices.output is 'dear'"),
    ],
)
def test_an_impossible_sheet_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sheet(**changes)
