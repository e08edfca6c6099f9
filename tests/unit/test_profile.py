"""A trace's figures, against ones worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from harness.trace import Trace
from traces.profile import profile

MakeTrace = Callable[..., Trace]


def test_the_figures_of_a_trace_known_by_hand(make_trace: MakeTrace) -> None:
    found = profile(make_trace())  # hits 0 of 128, 0 of 128, 128 of 256, 256 of 320
    assert (found.requests, found.sessions) == (4, 2)
    assert found.ideal_hit_mean == pytest.approx((0 + 0 + 1 / 2 + 4 / 5) / 4)
    assert found.ideal_hit_token_weighted == pytest.approx((128 + 256) / (128 + 128 + 256 + 320))
    assert found.above_95 == 0
    assert list(found.bins) == [1, 0, 0, 0, 0, 0, 0]
    assert list(found.input_tokens) == [128, 320, 320]
    assert list(found.output_tokens) == [3, 3, 3]
    assert found.outputs_under_500 == 1
    assert list(found.turns) == [1, 3, 3]
    assert list(found.delay_s) == [1.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("hit_blocks", "at", "above"),
    [
        (179, 0, 0), (180, 1, 0), (190, 2, 0), (191, 2, 1), (194, 3, 1),
        (196, 4, 1), (198, 5, 1), (199, 6, 1), (200, 6, 1),
    ],
)  # fmt: skip
def test_a_hit_rate_on_an_edge_is_in_the_bin_above(
    make_trace: MakeTrace, hit_blocks: int, at: int, above: int
) -> None:
    """200 blocks a prompt: 190 of them are 95% exactly, which is not above 95%."""
    second = ([0], [200]) if hit_blocks == 200 else ([0, 200], [hit_blocks, 200 - hit_blocks])
    found = profile(
        make_trace(
            session=[0, 0],
            turn_index=[0, 1],
            parents=[[], [0]],
            recorded_s=[0.0, 1.0],
            arrival_s=[0.0, None],
            delay_s=[None, 1.0],
            input_tokens=[200 * 64] * 2,
            output_tokens=[499, 500],
            run_starts=[[0], second[0]],
            run_lengths=[[200], second[1]],
            agent=["main"] * 2,
        )
    )
    wanted = [0.5 * (place == 0) + 0.5 * (place == at) for place in range(7)]
    assert list(found.bins) == wanted
    assert found.above_95 == above / 2
    assert found.outputs_under_500 == 0.5


def test_a_trace_without_followers_has_no_delays(make_trace: MakeTrace) -> None:
    found = profile(
        make_trace(
            session=[0, 1],
            turn_index=[0, 0],
            parents=[[], []],
            recorded_s=[0.0, 1.0],
            arrival_s=[0.0, 1.0],
            delay_s=[None, None],
            input_tokens=[64, 64],
            output_tokens=[1, 1],
            run_starts=[[0], [1]],
            run_lengths=[[1], [1]],
            agent=["main"] * 2,
        )
    )
    assert all(math.isnan(value) for value in found.delay_s)
    assert list(found.turns) == [1, 1, 1]
