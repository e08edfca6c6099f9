"""The generator: deterministic, valid, and what its parameters say."""

from __future__ import annotations

import numpy as np
import pytest
from hydra import compose, initialize_config_module

from harness.errors import ConfigError
from harness.run import load_trace
from harness.trace import Trace


def generated(*overrides: str) -> Trace:
    with initialize_config_module("conf", version_base="1.3"):
        return load_trace(
            compose("run", [f"trace.{each}" for each in ("sessions=200", *overrides)])
        )


def test_a_seed_is_a_trace() -> None:
    assert generated("seed=5").digest == generated("seed=5").digest
    assert generated("seed=5").digest != generated("seed=6").digest


def test_more_sessions_begin_with_the_same_ones() -> None:
    few, many = generated("sessions=20"), generated("sessions=60")
    for one, other in zip(few.by_session(), many.by_session(), strict=False):
        assert [t.input_tokens for t in one.turns] == [t.input_tokens for t in other.turns]
        assert [t.delay_s for t in one.turns] == [t.delay_s for t in other.turns]
        assert one.turns[0].arrival_s == other.turns[0].arrival_s


def test_a_tail_without_end_is_cut_where_the_columns_end() -> None:
    assert generated("shape.answer_tokens.median=1e12").output_tokens.max() == 10**8


def test_sessions_start_at_the_rate_asked_for() -> None:
    trace = generated("sessions=2000", "session_rate_per_s=4")
    starts = np.sort(trace.column("arrival_s")[trace.column("turn_index") == 0])
    assert np.diff(starts).mean() == pytest.approx(0.25, rel=0.08)
    assert np.diff(starts).std() == pytest.approx(0.25, rel=0.12)


def test_a_prompt_carries_the_one_before() -> None:
    trace = generated("shape.relaid_share=0", "shape.edited_share=0")
    for session in trace.by_session():
        for before, after in zip(session.turns, session.turns[1:], strict=False):
            assert after.parents == (before.row,)
            assert after.input_tokens > before.input_tokens
            assert trace.ideal_hit_tokens[after.row] == before.input_tokens // 64 * 64


def test_contexts_and_delays_stay_below_their_limits() -> None:
    trace = generated("shape.context_limit_tokens=60000", "shape.delay_limit_s=30")
    assert trace.input_tokens.max() <= 60_000
    assert np.nanmax(trace.column("delay_s")) == 30


def test_sessions_share_nothing_unless_they_are_of_one_product() -> None:
    first = generated("products=0").column("turn_index") == 0
    assert generated("products=0").ideal_hit_tokens[first].max() == 0
    shared = generated("products=3")
    hits = shared.ideal_hit_tokens[shared.column("turn_index") == 0]
    assert (hits > 0).sum() == shared.sessions - 3
    assert len(set(hits.tolist())) == 4  # none, or one of three prefixes


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("sessions=0", "trace.sessions is 0"),
        ("sessions=1.5", "trace.sessions is 1.5"),
        ("products=-1", "trace.products is -1"),
        ("session_rate_per_s=0", "trace.session_rate_per_s is 0"),
        ("session_rate_per_s=fast", "trace.session_rate_per_s is 'fast'"),
        ("nominal_s=-1", "trace.nominal_s is -1"),
        ("nominal_token_s=abc", "trace.nominal_token_s is 'abc'"),
        ("nominal_s=nan", "trace.nominal_s is nan"),
        ("shape.prefix_tokens=1e12", "trace.shape.prefix_tokens is 1000000000000.0"),
        ("shape.resumed_share=1.5", "trace.shape.resumed_share is 1.5: give a number, 0 to 1"),
        ("shape.turns_mean=0", "turns_mean"),
        ("shape.answer_tokens.sigma=-1", "trace.shape.answer_tokens.sigma is -1"),
        ("shape.answer_tokens.rare_share=2", "trace.shape.answer_tokens.rare_share is 2"),
        ("shape.kept_share=nan", "trace.shape.kept_share is nan"),
    ],
)
def test_an_impossible_workload_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        generated(override)
