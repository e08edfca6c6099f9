"""Hits against capacity: by hand, on Mooncake's trace, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.prefix import PrefixCache
from harness.trace import Trace
from tests.unit.conftest import HEADER
from traces import mooncake
from traces.capacity import Reuse, capacity_curve, hit_tokens, working_set
from traces.profile import measure

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"

MakeTrace = Callable[..., Trace]


def test_a_curve_known_by_hand(make_trace: MakeTrace) -> None:
    """Prompts 0-1, 10-11, 0-3, 0-4: the third finds 0-1 behind 10-11, the last 0-3 in front."""
    curve = capacity_curve(make_trace(), np.array([7, 0, 1, 2, 3, 4]))
    assert curve.table.column_names == [
        "capacity_blocks",
        "capacity_tokens",
        "hit_tokens",
        "hit_share",
    ]
    assert curve.table.column("capacity_tokens").to_pylist() == [448, 0, 64, 128, 192, 256]
    hits = [6, 0, 1, 2, 4, 6]
    assert curve.table.column("hit_tokens").to_pylist() == [each * 64 for each in hits]
    assert curve.table.column("hit_share").to_pylist() == [each * 64 / 832 for each in hits]
    assert (curve.requests, curve.input_tokens, curve.unbounded_hit_tokens) == (4, 832, 384)
    assert (curve.within_session_hit_tokens, curve.across_sessions_hit_tokens) == (384, 0)
    assert (curve.distinct_blocks, curve.enough_blocks) == (7, 4)


def test_only_requests_from_a_row_on_count(make_trace: MakeTrace) -> None:
    curve = capacity_curve(make_trace(), np.array([2, 3, 4]), from_request=3)
    assert curve.table.column("hit_tokens").to_pylist() == [128, 192, 256]
    assert (curve.requests, curve.input_tokens, curve.unbounded_hit_share) == (1, 320, 0.8)
    assert (curve.distinct_blocks, curve.enough_blocks) == (5, 4)


def test_a_partly_filled_last_block_counts_as_its_tokens(make_trace: MakeTrace) -> None:
    trace = make_trace(
        replace(HEADER, partial_block="ceil"),
        input_tokens=[128, 128, 130, 130],
        run_lengths=[[2], [2], [3], [3]],
    )
    hits = capacity_curve(trace, np.array([2, 3, 4])).table.column("hit_tokens").to_pylist()
    assert hits == [128, 64 + 130, 128 + 130]


def test_a_block_is_the_sessions_own_however_many_others_used_it_since(
    make_trace: MakeTrace,
) -> None:
    """Session 1 brings blocks 0-1 to session 0's second turn, which had brought 0 itself."""
    trace = make_trace(
        run_starts=[[0], [0], [0], [0]],
        run_lengths=[[1], [2], [2], [2]],
    )
    curve = capacity_curve(trace)
    assert curve.unbounded_hit_tokens == (1 + 2 + 2) * 64
    assert curve.within_session_hit_tokens == (0 + 1 + 2) * 64
    assert curve.across_sessions_hit_tokens == (1 + 1) * 64


def test_a_trace_without_a_hit_or_a_block(make_trace: MakeTrace) -> None:
    empty = make_trace(run_starts=[[]] * 4, run_lengths=[[]] * 4)
    apart = make_trace(run_starts=[[0], [], [10], [20]], run_lengths=[[2], [], [4], [5]])
    for trace, distinct in ((empty, 0), (apart, 11)):
        curve = capacity_curve(trace)
        assert set(curve.table.column("hit_tokens").to_pylist()) == {0}
        assert (curve.unbounded_hit_share, curve.enough_blocks) == (0.0, 0)
        assert curve.distinct_blocks == distinct
        assert working_set(trace).column("max_blocks")[-1].as_py() == distinct


def test_capacities_go_to_where_nothing_is_given_up(make_trace: MakeTrace) -> None:
    curve = capacity_curve(make_trace())
    capacities = curve.table.column("capacity_blocks").to_pylist()
    assert capacities == [1, 2, 3, 4, 5, 6, 7]
    assert capacity_curve(make_trace(), np.array([], np.int64)).table.num_rows == 0


def test_a_working_set_known_by_hand(make_trace: MakeTrace) -> None:
    found = working_set(make_trace())
    assert found.column("window_requests").to_pylist() == [1, 2, 4]
    assert found.column("mean_blocks").to_pylist() == [13 / 4, (4 + 6 + 5) / 3, 7]
    assert found.column("max_blocks").to_pylist() == [5, 6, 7]
    later = working_set(make_trace(), [1, 2], from_request=2)
    assert later.column("mean_blocks").to_pylist() == [4.5, 5]
    assert working_set(make_trace(), from_request=3).column("max_blocks").to_pylist() == [5]


def test_reuse_found_once_serves_both(make_trace: MakeTrace) -> None:
    trace = make_trace()
    reuse = Reuse.of(trace)
    curve = capacity_curve(trace, np.array([1, 3]), from_request=1, reuse=reuse)
    assert curve.table.equals(capacity_curve(trace, np.array([1, 3]), from_request=1).table)
    found = working_set(trace, from_request=1, reuse=reuse)
    assert found.equals(working_set(trace, from_request=1))
    assert (curve.distinct_blocks, found.column("max_blocks")[-1].as_py()) == (7, 7)


def test_a_profile_looks_for_reuse_once(
    make_trace: MakeTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    of = Reuse.of

    def counted(trace: Trace) -> Reuse:
        found.append(of(trace))
        return found[-1]

    monkeypatch.setattr(Reuse, "of", counted)
    measure(make_trace())
    assert len(found) == 1


def test_hits_of_one_group_are_the_trace_s(make_trace: MakeTrace) -> None:
    trace = make_trace(run_starts=[[0]] * 4)
    assert hit_tokens(trace, np.zeros(4, int)).tolist() == trace.ideal_hit_tokens.tolist()
    assert hit_tokens(trace, trace.session).tolist() == [0, 0, 128, 256]


@pytest.mark.parametrize(
    ("capacities", "words"),
    [
        ([-1], "capacities are a row of whole numbers, 0 to"),
        ([1.0], "whole numbers"),
        ([[1]], "a row"),
        ([2**58], "0 to 144115188075855871 blocks"),
    ],
)
def test_a_capacity_that_is_none_is_refused(
    make_trace: MakeTrace, capacities: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        capacity_curve(make_trace(), np.array(capacities))


def test_a_row_or_a_window_that_is_not_there_is_refused(make_trace: MakeTrace) -> None:
    for row in (-1, 4):
        with pytest.raises(ValueError, match=f"from_request is 0 to 3, not {row}"):
            capacity_curve(make_trace(), from_request=row)
        with pytest.raises(ValueError, match=f"from_request is 0 to 3, not {row}"):
            working_set(make_trace(), from_request=row)
    for window in (0, 3):
        with pytest.raises(ValueError, match="a window is 1 to 2 requests"):
            working_set(make_trace(), [window], from_request=2)


def test_one_chain_used_to_many_depths(make_trace: MakeTrace) -> None:
    """Each use meets many older ones, each of which reached a little deeper."""
    rows = 5_000
    depths = np.random.default_rng(3).integers(1, 201, rows)
    trace = make_trace(
        session=np.zeros(rows, int),
        turn_index=np.arange(rows),
        parents=[[]] * rows,
        recorded_s=np.arange(rows),
        arrival_s=np.arange(rows),
        delay_s=[None] * rows,
        input_tokens=depths * 64,
        output_tokens=np.ones(rows, int),
        run_starts=[[0]] * rows,
        run_lengths=[[depth] for depth in depths.tolist()],
        agent=["main"] * rows,
    )
    cache, hits = PrefixCache(150), 0
    for depth in depths.tolist():
        hits += cache.match([(0, depth)])
        cache.insert([(0, depth)])
    found = capacity_curve(trace, np.array([150])).table.column("hit_tokens")[0].as_py()
    assert found == hits * 64


@pytest.fixture(scope="module")
def conversation() -> Trace:
    path = SHARED / "mooncake" / "conversation_trace.jsonl"
    if not path.exists():
        pytest.skip("../shared is absent: no published trace to read")
    return mooncake.read(path)


def test_mooncake_over_all_requests(conversation: Trace) -> None:
    """Hit tokens as `PrefixCache` counts them, replayed once at each capacity."""
    curve = capacity_curve(conversation, np.array([10, 1953, 7812, 31_250, 100_000, 182_790]))
    assert curve.table.column("hit_tokens").to_pylist() == [
        6_159_360, 7_865_590, 25_817_509, 48_650_284, 53_695_979, 54_098_411,
    ]  # fmt: skip
    assert curve.unbounded_hit_share == conversation.ideal_hit_token_weighted
    assert curve.unbounded_hit_share == pytest.approx(0.374, abs=5e-4)
    assert (curve.distinct_blocks, curve.enough_blocks) == (182_790, 158_281)


def test_mooncake_in_its_steady_half(conversation: Trace) -> None:
    """The published figures, to the last digit given: a million tokens is 2**20 there."""
    capacities = np.array([1, 4, 16]) * (2**20 // 512)
    curve = capacity_curve(conversation, capacities, from_request=len(conversation) // 2)
    shares = curve.table.column("hit_share").to_pylist()
    assert shares == pytest.approx([0.056, 0.188, 0.356], abs=5e-4)
    assert curve.unbounded_hit_share == pytest.approx(0.398, abs=5e-4)
