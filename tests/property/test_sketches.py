"""A sketch of any trace reads back as it was, and any number of sessions can be drawn from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.stream import Stream
from harness.trace import Trace
from tests.property.test_transforms import traces
from traces import sketch, targets, transform
from traces.profile import measure
from traces.twin import generate, twin


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all examples: each writes over the one before."""
    return tmp_path_factory.mktemp("sketches")


@given(traces(), st.sampled_from((1e-9, 1e-5, 1.0, 1e9)), st.integers(1, 20))
def test_what_profile_writes_a_twin_reads(
    folder: Path, trace: Trace, factor: float, sessions: int
) -> None:
    """Graphs of any shape, sub-agents of sub-agents, times from all at once to centuries apart."""
    trace = transform.scale_time(trace, factor)
    made = sketch.fit(trace)
    path = folder / "sketch.json"
    path.write_text(json.dumps(measure(trace).sketch, allow_nan=False))
    assert sketch.load(path) == made
    drawn = generate(sketch=path, sessions=sessions, seed=3).whole()
    assert drawn.sessions == sessions
    assert drawn.input_tokens.max() <= trace.input_tokens.max()
    assert drawn.digest == twin(made, sessions, 3).whole().digest


HUGE: dict[str, Any] = {
    "hits": [0.164, 0.093, 0.097, 0.094, 0.196, 0.215, 0.141],
    "mean_hit": 0.9,
    "input_tokens": {"min": 2000, "max": 131072},
    "output_tokens": 10,
    "turns": {"min": 1, "max": 60},
    "delay_s": 1.0,
    "starts": {"per_s": 1.0},
    "block_tokens": 64,
    "nominal_s": 2.0,
    "nominal_token_s": 0.017,
}


def asked(sessions: int, **changes: Any) -> Stream:
    return targets.generate(sessions=sessions, seed=1, **(HUGE | changes))


@given(
    st.integers(1, 30),
    st.sampled_from((1, 64, 100_000)),
    st.sampled_from((1, 5e6, {"min": 1, "p50": 2, "max": 500_000_000})),
    st.sampled_from((0, 1e9, {"min": 0, "p50": 1, "max": 1e9})),
    st.sampled_from(({"per_s": 1e-9}, {"per_s": 1e9}, {"per_s": 1, "variation": 100.0})),
    st.lists(st.integers(0, 9), min_size=7, max_size=7).filter(any),
)
def test_targets_of_any_size_make_a_trace(
    sessions: int, block_tokens: int, tokens: Any, delay_s: Any, starts: Any, hits: list[int]
) -> None:
    drawn = asked(
        sessions, block_tokens=block_tokens, input_tokens=tokens, delay_s=delay_s, starts=starts,
        hits=(np.array(hits) / sum(hits)).tolist(), mean_hit=None,
    ).whole()  # fmt: skip
    assert drawn.sessions == sessions


def test_sessions_of_many_thousand_turns_are_not_drawn_a_thousand_at_once() -> None:
    drawn = asked(1, turns=20_000).whole()
    assert len(drawn) == 20_000
    assert drawn.digest == first_session(asked(2, turns=20_000).whole()).digest


def first_session(trace: Trace) -> Trace:
    return transform.first_sessions(trace, 1)
