"""The curve of all capacities against a cache replayed at each of them."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harness.prefix import PrefixCache
from harness.trace import Header, Trace, build_table
from tests.property.test_prefix import expand, trees
from traces.capacity import capacity_curve, working_set

BLOCK_TOKENS = 4


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Prompts over chains that branch, of up to three sessions, whole or partly filled at the end.

    Some have tokens without blocks beyond, which cannot hit.
    """
    prompts = draw(trees())
    rows = len(prompts)
    slack = draw(st.lists(st.integers(1 - BLOCK_TOKENS, 6), min_size=rows, max_size=rows))
    sessions = draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
    dense = {session: at for at, session in enumerate(dict.fromkeys(sessions))}
    columns = {
        "session": [dense[session] for session in sessions],
        "turn_index": range(rows),
        "parents": [[]] * rows,
        "recorded_s": np.arange(rows),
        "arrival_s": np.arange(rows),
        "delay_s": [None] * rows,
        "input_tokens": [
            len(expand(runs)) * BLOCK_TOKENS + more
            for runs, more in zip(prompts, slack, strict=True)
        ],
        "output_tokens": [1] * rows,
        "run_starts": [[start for start, _ in runs] for runs in prompts],
        "run_lengths": [[length for _, length in runs] for runs in prompts],
        "agent": ["main"] * rows,
    }
    return Trace(build_table(columns), Header("hand", BLOCK_TOKENS, "ceil", "global", "s", "none"))


def replayed(trace: Trace, caches: list[PrefixCache], from_request: int) -> int:
    """Hit tokens from a row on, where each row asks the cache that stands at its place."""
    total = 0
    for row, (cache, inputs) in enumerate(zip(caches, trace.input_tokens.tolist(), strict=True)):
        runs = trace.runs(row)
        if row >= from_request:
            total += min(cache.match(runs) * BLOCK_TOKENS, inputs)
        cache.insert(runs)
    return total


@given(trace=traces(), data=st.data())
def test_every_capacity_hits_what_a_replay_at_it_does(trace: Trace, data: st.DataObject) -> None:
    from_request = data.draw(st.integers(0, len(trace) - 1))
    blocks = [set(expand(trace.runs(row))) for row in range(len(trace))]
    distinct = len(set().union(*blocks))
    capacities = np.arange(distinct + 3)
    curve = capacity_curve(trace, capacities, from_request=from_request)
    hits = curve.table.column("hit_tokens").to_pylist()
    assert hits == [
        replayed(trace, [PrefixCache(capacity)] * len(trace), from_request)
        for capacity in capacities.tolist()
    ]
    assert hits[-1] == curve.unbounded_hit_tokens
    assert hits.index(hits[-1]) <= curve.enough_blocks <= distinct
    assert hits[curve.enough_blocks] == hits[-1]
    assert curve.distinct_blocks == len(set().union(*blocks[from_request:]))


@given(trace=traces(), data=st.data())
def test_hits_within_a_session_are_those_of_a_cache_of_its_own(
    trace: Trace, data: st.DataObject
) -> None:
    from_request = data.draw(st.integers(0, len(trace) - 1))
    own: defaultdict[int, PrefixCache] = defaultdict(PrefixCache)
    within = replayed(trace, [own[each] for each in trace.session.tolist()], from_request)
    curve = capacity_curve(trace, from_request=from_request)
    assert curve.within_session_hit_tokens == within
    assert curve.across_sessions_hit_tokens == curve.unbounded_hit_tokens - within >= 0
    whole = capacity_curve(trace)
    assert whole.unbounded_hit_share == trace.ideal_hit_token_weighted
    assert whole.table.column("hit_share")[-1].as_py() == trace.ideal_hit_token_weighted


@given(trace=traces(), data=st.data())
def test_a_working_set_is_what_the_requests_of_a_window_use(
    trace: Trace, data: st.DataObject
) -> None:
    from_request = data.draw(st.integers(0, len(trace) - 1))
    blocks = [set(expand(trace.runs(row))) for row in range(from_request, len(trace))]
    windows = list(range(1, len(blocks) + 1))
    found = working_set(trace, windows, from_request=from_request)
    wanted = [
        [len(set().union(*blocks[at : at + window])) for at in range(len(blocks) - window + 1)]
        for window in windows
    ]
    assert found.column("max_blocks").to_pylist() == [max(counts) for counts in wanted]
    means = [sum(counts) / len(counts) for counts in wanted]
    assert np.allclose(found.column("mean_blocks"), means, rtol=1e-12)
