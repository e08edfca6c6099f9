"""A twin: like its trace, of no session of it, the same for a seed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from harness.errors import TraceError
from harness.run import load_trace
from harness.trace import Trace
from tests.simulated import configured
from tests.unit.conftest import HEADER, MakeTrace
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
        ({"relaybench_sketch": 99}, "not a sketch of version 2"),
        ({"calling": 2}, "calling is 2"),
        ({"block_tokens": 0}, "block_tokens is 0"),
        ({"starts": {"per_s": -1}}, "starts.per_s is -1"),
        ({"calls": {"min": 1}}, "give min and max too"),
        ({"main": {}}, "cannot be understood"),
        ({"more": 1}, "cannot be understood"),
        ({"agent": 3}, "agent is no text"),
        ({"partial_block": "round"}, "partial_block is 'round'"),
        ({"prefixes": "yes"}, "prefixes is 'yes'"),
        ({"like": {"hits": 1}}, "like.hits is unknown"),
        ({"calls": 0}, "calls.min is 0"),
        ({"nominal_s": 10**400}, "cannot be understood"),
        ({"block_tokens": True}, "block_tokens is True"),
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"turns": {"min": 1, "max": 1e9}}, "turns.max is 1000000000.0"),
        ({"opening_tokens": 0}, "opening_tokens.min is 0"),
        ({"opening_hits": []}, "opening_hits is []"),
        ({"opening_hits": [2]}, "opening_hits.min is 2"),
        ({"opening_lags": {}}, "opening_lags is {}"),
        ({"delay_s": 1e300}, "delay_s.min is 1e+300"),
        ({"correlation": [[1, 2], [3]]}, "main.correlation is no matrix"),
        ({"correlation": np.full((5, 5), 2.0).tolist()}, "main.correlation is no matrix"),
        ({"answer_in_added": -2}, "main.answer_in_added is -2"),
        ({"within": [0.1, 0.2, 3]}, "main.within is 3"),
    ],
)
def test_a_line_that_cannot_be_drawn_is_refused(
    trace: Trace, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path = tmp_path / "sketch.json"
    made = sketch.to_json(sketch.fit(trace))
    path.write_text(json.dumps(made | {"main": made["main"] | change}))
    with pytest.raises(TraceError) as caught:
        sketch.load(path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"from_turn": 2}, "main.phases begin at turns [2"),
        ({"kept": 1.5}, "kept.min is 1.5"),
        ({"broken": -1}, "broken is -1"),
        ({"added_tokens": 0}, "added_tokens.min is 0"),
    ],
)
def test_a_phase_that_cannot_be_drawn_is_refused(
    trace: Trace, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path = tmp_path / "sketch.json"
    made = sketch.to_json(sketch.fit(trace))
    made["main"]["phases"][0] |= change
    path.write_text(json.dumps(made))
    with pytest.raises(TraceError) as caught:
        sketch.load(path)
    assert words in str(caught.value)


def openings(make_trace: MakeTrace, runs: list[list[tuple[int, int]]], **header: Any) -> Trace:
    """Sessions of one turn, a second apart."""
    count = len(runs)
    return make_trace(
        replace(HEADER, **header),
        session=range(count), turn_index=[0] * count, parents=[[]] * count,
        recorded_s=np.arange(float(count)), arrival_s=np.arange(float(count)),
        delay_s=[None] * count, input_tokens=[64 * sum(n for _, n in each) for each in runs],
        output_tokens=[1] * count, run_starts=[[start for start, _ in each] for each in runs],
        run_lengths=[[length for _, length in each] for each in runs], agent=["main"] * count,
    )  # fmt: skip


def test_a_twin_s_openings_lie_as_far_apart_as_the_trace_s(make_trace: MakeTrace) -> None:
    """Each lays again what the one 50 before it laid, and nobody between: a cache of 49 has none.

    The first 50 have nobody to share with but the system's prompt, and neither have the twin's.
    """
    runs = [[(0, 2), (100 * (at % 50) + 100, 8)] for at in range(2000)]
    real = openings(make_trace, runs)
    drawn = twin(sketch.fit(real), 2000, 1).whole()
    for each in (real, drawn):
        curve = capacity_curve(each, np.array([2 + 8 * 45, 2 + 8 * 55]))
        low, high = curve.table.column("hit_share").to_pylist()
        assert low == pytest.approx(0.2, abs=0.01)
        assert high == pytest.approx(0.98, abs=0.01)
        assert each.ideal_hit_tokens[1:50].tolist() == [128] * 49


def test_a_twin_keeps_at_breaks_what_the_trace_keeps(make_trace: MakeTrace) -> None:
    """9 of 10 blocks: rounded down at the last digit of a share they would be 8."""
    count = 300
    rows = range(2 * count)
    real = make_trace(
        session=[row // 2 for row in rows], turn_index=[row % 2 for row in rows],
        parents=[[row - 1] if row % 2 else [] for row in rows],
        recorded_s=np.arange(2.0 * count),
        arrival_s=[None if row % 2 else float(row) for row in rows],
        delay_s=[1.0 if row % 2 else None for row in rows],
        input_tokens=[640] * (2 * count), output_tokens=[1] * (2 * count),
        run_starts=[
            [20 * (row // 2), 20 * (row // 2) + 10] if row % 2 else [20 * (row // 2)]
            for row in rows
        ],
        run_lengths=[[9, 1] if row % 2 else [10] for row in rows], agent=["main"] * (2 * count),
    )  # fmt: skip
    drawn = twin(sketch.fit(real), count, 1).whole()
    assert drawn.ideal_hit_tokens.mean() == real.ideal_hit_tokens.mean() == 9 * 64 / 2


def test_what_is_not_known_of_prefixes_is_not_known_of_a_twin_s(make_trace: MakeTrace) -> None:
    real = openings(make_trace, [[(10 * at, 2)] for at in range(20)], prefix_data="absent")
    drawn = twin(sketch.fit(real), 20, 1).whole()
    assert drawn.header.prefix_data == "absent"
    for each in (real, drawn):
        found = samples(each)
        assert len(found["ideal_hit_rate"]) == len(found["new_tokens"]) == 0
        assert len(found["input_tokens"]) == 20


def test_sub_agents_of_sub_agents_are_called_by_the_session_s_own_turns(
    make_trace: MakeTrace,
) -> None:
    """A turn, a scout it calls, two of the scout's own, and a turn that waits for all of them."""
    real = make_trace(
        session=[0] * 5, turn_index=range(5), parents=[[], [0], [1], [1], [0, 1, 2, 3]],
        recorded_s=[0.0, 1, 2, 2, 9], arrival_s=[0.0, *[None] * 4], delay_s=[None, 1, 1, 1, 1],
        input_tokens=[100] * 5, output_tokens=[1] * 5, run_starts=[[0], [1], [2], [3], [0]],
        run_lengths=[[1]] * 5, agent=["main", "scout", "digger", "digger", "main"],
    )  # fmt: skip
    made = sketch.fit(real)
    assert (made.calling, made.calls.values, made.joined) == (0.5, (3, 3), 1.0)
