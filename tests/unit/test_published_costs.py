"""The published prices of PDD, as arithmetic: what follows from what, and what cannot be."""

from __future__ import annotations

import pytest

from benchmarks.pdd.headline import CARDS_A, LINE_CARDS

GOODPUT = 1.278
"""Published: PDD's over that of one data centre."""


def cost(b_over_a: float, line_cards: float) -> float:
    """PDD's, in cards of one data centre."""
    return (43 + 32 * b_over_a + line_cards) / 88


def test_the_costs_leave_a_third_of_a_card_for_the_line() -> None:
    """-7.1% with B at 1.2 times A's price, -3.5% at 1.3: one line gives both, to their rounding."""
    assert cost(1.2, LINE_CARDS) == (CARDS_A["pdd"] + LINE_CARDS) / CARDS_A["in_dc"]
    assert 1 - cost(1.2, LINE_CARDS) == pytest.approx(0.071, abs=0.0005)
    assert 1 - cost(1.3, LINE_CARDS) == pytest.approx(0.035, abs=0.0005)
    for line_cards in (0.30, 0.37):
        assert (
            abs(1 - cost(1.2, line_cards) - 0.071) > 0.0004
            or abs(1 - cost(1.3, line_cards) - 0.035) > 0.0004
        )


def test_bcr_is_goodput_over_cost() -> None:
    assert pytest.approx(1.376, abs=0.0005) == GOODPUT / 0.929
    # So a unit of work costs 27.3% less; the -37.5% that is quoted is the BCR read as a cost.
    assert pytest.approx(0.273, abs=0.0005) == 1 - 0.929 / GOODPUT


def test_only_three_relay_cards_give_the_published_share_of_tokens() -> None:
    """88 cards are 40 P + 48 D; B decodes 1.41 times A, so 32 MD do what 45.1 of A do."""
    shares = {relay: relay / (relay + 32 * 1.41) for relay in range(1, 8)}
    assert min(shares, key=lambda relay: abs(shares[relay] - 0.062)) == 3
    assert shares[3] == pytest.approx(0.062, abs=0.001)
    assert 40 + 3 == 43
    assert pytest.approx(1.0, abs=0.005) == (3 + 32 * 1.41) / 48
