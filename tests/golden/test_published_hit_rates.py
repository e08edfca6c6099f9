"""Ideal hit rates of published traces against figures counted apart from this project."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.trace import Trace


def hit_rates(trace: Trace) -> NDArray[np.float64]:
    return trace.ideal_hit_tokens / trace.input_tokens


def test_mooncake_conversation(conversation: Trace) -> None:
    assert len(conversation) == conversation.sessions == 12_031
    hits, inputs = conversation.ideal_hit_tokens, conversation.input_tokens
    assert hits.sum(dtype=int) / inputs.sum(dtype=int) == pytest.approx(0.37362, abs=5e-6)
    assert conversation.column("arrival_s")[[0, -1]].tolist() == [0.0, 3536.999]
    assert conversation.header.changes == {}


def test_agent_sessions(real_sessions: Trace) -> None:
    assert (len(real_sessions), real_sessions.sessions) == (3_558, 179)
    rates = hit_rates(real_sessions)
    assert rates.mean() == pytest.approx(0.90041, abs=2e-5)
    assert (rates > 0.95).mean() == pytest.approx(0.743, abs=5e-4)
    assert set(real_sessions.column("agent")) == {"main", "Explore", "Plan"}


def test_agent_sessions_by_hit_rate(real_sessions: Trace) -> None:
    edges = [0, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, np.inf]
    shares = np.histogram(hit_rates(real_sessions), edges)[0] / len(real_sessions)
    assert shares == pytest.approx([0.164, 0.093, 0.097, 0.094, 0.196, 0.215, 0.141], abs=5e-4)


def test_agent_sessions_by_length(real_sessions: Trace) -> None:
    inputs = np.percentile(real_sessions.input_tokens, [50, 90, 99])
    outputs = np.percentile(real_sessions.output_tokens, [50, 90, 99])
    assert inputs == pytest.approx([58_323, 105_370, 124_661], abs=0.5)
    assert outputs == pytest.approx([239, 1_127, 5_097], abs=0.5)
    assert (real_sessions.output_tokens < 500).mean() == pytest.approx(0.768, abs=5e-4)


def test_agents_called_by_one_turn_run_side_by_side(with_subagents: Trace) -> None:
    """trace_0277: three are called by turn 0, and the turn after joins all of them."""
    trace = with_subagents
    calls = [trace.turn(row) for row in range(len(trace))]
    first = [call for call in calls if call.parents == (0,) and call.agent == "Explore"]
    assert [round(call.recorded_s, 2) for call in first] == [19.46, 19.47, 19.47]
    join = next(call for call in calls if call.agent == "main" and call.recorded_s == 228.0)
    assert len(join.parents) == 4
    assert join.parents[0] == 0
    ends_s = max(trace.turn(row).recorded_s for row in join.parents)
    assert join.delay_s is not None
    assert 0 < join.delay_s < 228.0 - ends_s
