"""A twin: like its trace, of no session of it, the same for a seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from harness.errors import TraceError
from harness.run import load_trace
from harness.trace import Trace
from tests.simulated import configured
from tests.unit.conftest import MakeTrace
from traces import sketch
from traces.capacity import capacity_curve
from traces.sketch import samples
from traces.twin import generate, twin


@pytest.fixture(scope="module")
def trace() -> Trace:
    return load_trace(configured("trace.sessions=500", "trace.products=3"))


@pytest.fixture(scope="module")
def drawn(trace: Trace) -> Trace:
    return twin(sketch.fit(trace), 1500, 1).whole()


def test_a_twin_is_like_its_trace(trace: Trace, drawn: Trace) -> None:
    """Turns, answers and delays are drawn as they were; the others are what comes of it."""
    real, ours = samples(trace), samples(drawn)
    ks = {name: stats.ks_2samp(real[name], ours[name]).statistic for name in real}
    assert ks["turns"] < 0.05
    assert ks["output_tokens"] < 0.02
    assert ks["delay_s"] < 0.02
    assert ks["input_tokens"] < 0.08
    assert ks["new_tokens"] < 0.05
    assert ks["ideal_hit_rate"] < 0.05
    assert drawn.ideal_hit_rates.mean() == pytest.approx(trace.ideal_hit_rates.mean(), abs=0.01)


def test_openings_share_what_they_did(trace: Trace, drawn: Trace) -> None:
    """Three products' tools and prompts: nearly every session begins with one of three fronts."""
    for each in (trace, drawn):
        first = each.column("turn_index") == 0
        shared = each.ideal_hit_tokens[first] > 0
        assert shared.mean() > 0.98
    across = [
        capacity_curve(each).across_sessions_hit_tokens / len(each) for each in (trace, drawn)
    ]
    assert across[1] == pytest.approx(across[0], rel=0.25)


def test_a_seed_is_a_twin_and_more_sessions_begin_with_the_same(trace: Trace) -> None:
    made = sketch.fit(trace)
    few, many = twin(made, 30, 5).whole(), twin(made, 1100, 5).whole()
    assert twin(made, 30, 5).whole().digest == few.digest
    assert twin(made, 30, 6).whole().digest != few.digest
    for one, other in zip(few.by_session(), many.by_session(), strict=False):
        assert [t.input_tokens for t in one.turns] == [t.input_tokens for t in other.turns]
        assert [t.delay_s for t in one.turns] == [t.delay_s for t in other.turns]


def test_a_twin_given_in_pieces_is_the_same_trace(trace: Trace) -> None:
    stream = twin(sketch.fit(trace), 3000, 1)
    sizes = [len(table) for table in stream.tables]
    assert len(sizes) > 2
    assert sum(sizes) == len(twin(sketch.fit(trace), 3000, 1).whole())


def test_no_session_of_the_trace_is_in_its_sketch(trace: Trace) -> None:
    text = json.dumps(sketch.to_json(sketch.fit(trace)))
    assert len(text) < 100_000
    lengths = trace.input_tokens[trace.session == 7].tolist()
    assert json.dumps(lengths)[1:-1] not in text


def test_a_sketch_reads_back_equal(trace: Trace, tmp_path: Path) -> None:
    made = sketch.fit(trace)
    path = tmp_path / "sketch.json"
    path.write_text(json.dumps(sketch.to_json(made)))
    again = sketch.load(path)
    assert sketch.to_json(again) == sketch.to_json(made)
    asked = generate(sketch=path, sessions=40, seed=3).whole()
    assert asked.digest == twin(made, 40, 3).whole().digest


def with_agents(make_trace: MakeTrace, sessions: int) -> Trace:
    """Each session: a turn, two sub-agents of two turns that it calls, and a turn after both."""
    rows: dict[str, list[Any]] = {
        name: []
        for name in (
            *("session", "turn_index", "parents", "recorded_s", "arrival_s", "delay_s"),
            *("input_tokens", "output_tokens", "run_starts", "run_lengths", "agent"),
        )
    }
    for session in range(sessions):
        at, zero_s, block = session * 6, session * 100.0, session * 40
        plan = [
            ("main", [], 0, 640, [(0, 10)]),
            ("scout", [0], 2, 320, [(10, 5)]),
            ("scout", [0], 2, 320, [(20, 5)]),
            ("scout", [1], 5, 640, [(10, 10)]),
            ("scout", [2], 5, 640, [(20, 10)]),
            ("main", [0, 3, 4], 9, 960, [(0, 10), (30, 5)]),
        ]
        for index, (agent, parents, late_s, tokens, runs) in enumerate(plan):
            rows["session"].append(session)
            rows["turn_index"].append(index)
            rows["parents"].append([at + each for each in parents])
            rows["recorded_s"].append(zero_s + late_s)
            rows["arrival_s"].append(None if parents else zero_s)
            rows["delay_s"].append(1.0 if parents else None)
            rows["input_tokens"].append(tokens)
            rows["output_tokens"].append(20)
            rows["run_starts"].append([block + start for start, _ in runs])
            rows["run_lengths"].append([length for _, length in runs])
            rows["agent"].append(agent)
    return make_trace(**rows)


def test_sub_agents_are_called_and_waited_for(make_trace: MakeTrace) -> None:
    real = with_agents(make_trace, 200)
    made = sketch.fit(real)
    assert made.calling == pytest.approx(0.5)  # of two turns, the first
    assert made.calls.values[0] == made.calls.values[-1] == 2
    assert made.joined == 1.0
    assert made.agent == "scout"
    assert made.called is not None
    assert made.called.turns.values[-1] == 2
    drawn = twin(made, 400, 1).whole()
    agents = np.array(drawn.table.column("agent").to_pylist())
    assert (agents == "scout").mean() == pytest.approx(4 / 6, abs=0.05)
    joins = np.diff(drawn.parents()[0])
    assert (joins == 3).sum() > 100, "a turn that waits for the one before and two sub-agents"


def test_one_turn_sessions_have_one_turn(make_trace: MakeTrace) -> None:
    real = make_trace(
        session=[0, 1], turn_index=[0, 0], parents=[[], []], recorded_s=[0.0, 1.0],
        arrival_s=[0.0, 1.0], delay_s=[None, None], input_tokens=[100, 100],
        output_tokens=[1, 1], run_starts=[[0], [1]], run_lengths=[[1], [1]], agent=["main"] * 2,
    )  # fmt: skip
    drawn = twin(sketch.fit(real), 50, 1).whole()
    assert len(drawn) == drawn.sessions == 50
    assert set(drawn.input_tokens.tolist()) == {100}
    assert drawn.ideal_hit_tokens.max() == 0


def test_a_trace_without_a_clock_has_a_twin_without_one(trace: Trace) -> None:
    timeless = Trace(
        trace.table, type(trace.header)(**{**vars(trace.header), "session_starts": "unknown"})
    )
    assert twin(sketch.fit(timeless), 30, 1).whole().header.session_starts == "unknown"
    assert twin(sketch.fit(trace), 30, 1).whole().header.session_starts == "recorded"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"relaybench_sketch": 99}, "not a sketch of version 1"),
        ({"calling": 2}, "calling is 2"),
        ({"block_tokens": 0}, "block_tokens is 0"),
        ({"starts": {"per_s": -1}}, "starts.per_s is -1"),
        ({"calls": {"min": 1}}, "give min and max too"),
        ({"main": {}}, "cannot be understood"),
        ({"more": 1}, "cannot be understood"),
        ({"agent": 3}, "agent is no text"),
    ],
)
def test_what_is_no_sketch_is_refused(
    trace: Trace, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path = tmp_path / "sketch.json"
    path.write_text(json.dumps(sketch.to_json(sketch.fit(trace)) | change))
    with pytest.raises(TraceError) as caught:
        sketch.load(path)
    assert words in str(caught.value)
    assert "sketch.json" in str(caught.value)
