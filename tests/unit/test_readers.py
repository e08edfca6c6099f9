"""What readers and the builder make of good files and of knotted sessions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.errors import TraceError
from harness.trace import Header, Trace
from traces import canonical, kv_cache_tester, transform
from traces.builder import TraceBuilder

HERE = Path(__file__)


def builder() -> TraceBuilder:
    return TraceBuilder(Header("hand", 64, "floor", "global", "s", "none"))


def add(build: TraceBuilder, key: str, at: float, **changes: Any) -> None:
    turn: dict[str, Any] = {
        "session": "s", "recorded_s": at, "input_tokens": 64, "output_tokens": 1, "blocks": [],
        "path": HERE, "line": 1,
    }  # fmt: skip
    build.turn(key, **(turn | changes))


@pytest.mark.parametrize(
    ("parents", "words"),
    [
        ({"b": ["z"]}, "turn b waits for z, which is not in the trace: an orphan"),
        ({"a": ["b"], "b": ["a"]}, "waits for itself through its parents: a cycle"),
        ({"b": ["b"]}, "turn b waits for itself"),
    ],
)
def test_a_knot_is_named_with_its_line(parents: dict[str, list[str]], words: str) -> None:
    build = builder()
    for number, key in enumerate("ab"):
        add(build, key, number, parents=parents.get(key, []), line=number + 7)
    with pytest.raises(TraceError) as caught:
        build.build()
    assert words in str(caught.value)
    assert caught.value.line in (7, 8)


def test_a_key_twice_is_refused() -> None:
    build = builder()
    add(build, "a", 0)
    with pytest.raises(TraceError, match="turn a twice"):
        add(build, "a", 1)


def test_who_waited_for_a_dropped_turn_waits_for_its_parents() -> None:
    build = builder()
    add(build, "a", 0)
    add(build, "b", 5, parents=["a"], delay_s=2.0, input_tokens=0)
    add(build, "c", 9, parents=["b"], delay_s=3.0)
    trace = build.build()
    assert trace.turn(1).parents == (0,)
    assert trace.turn(1).delay_s == 5.0
    assert trace.header.changes == {"empty_input_dropped": 1}


def subagents(**changes: Any) -> dict[str, Any]:
    """Two sub-agents called by the first turn, the second one `changes` it."""

    def call(t: float, ids: list[int], **more: Any) -> dict[str, Any]:
        values = {"t": t, "type": "n", "in": 64 * len(ids), "out": 10, "api_time": 2.0}
        return values | {"hash_ids": ids} | more

    agent = {"type": "subagent", "subagent_type": "Explore"}
    return {
        "id": "a", "block_size": 64, "hash_id_scope": "local",
        "requests": [
            call(0, [1, 2]),
            agent | {"t": 13.0, "duration_ms": 10_000, "requests": [call(0, [8]), call(5, [8, 9])]},
            agent | {"t": 23.0, "duration_ms": 20_000, "requests": [call(0, [8])]} | changes,
            call(30, [1, 2, 3]),
        ],
    }  # fmt: skip


def read(folder: Path, value: dict[str, Any]) -> Trace:
    (folder / "a.json").write_text(json.dumps(value))
    return kv_cache_tester.read(str(folder))


def test_subagents_start_before_their_mark_and_are_joined(tmp_path: Path) -> None:
    trace = read(tmp_path, subagents())
    turns = {turn.recorded_s: turn for turn in map(trace.turn, range(len(trace)))}
    assert trace.column("recorded_s").tolist() == [0.0, 3.0, 3.0, 8.0, 30.0]
    assert trace.column("agent").tolist() == ["main", "Explore", "Explore", "Explore", "main"]
    # Both start 1 s after the first turn's end; the last main turn waits for it and both.
    assert [trace.turn(row).delay_s for row in (1, 2)] == [1.0, 1.0]
    assert turns[8.0].parents == (1,)
    assert set(turns[30.0].parents) == {0, 2, 3}
    assert turns[30.0].delay_s == 30.0 - 10.0
    assert trace.ideal_hit_tokens.tolist() == [0, 0, 64, 64, 128]


def test_a_subagent_that_comes_back_late_is_not_waited_for(tmp_path: Path) -> None:
    trace = read(tmp_path, subagents(t=93.0, duration_ms=90_000))
    last_main = trace.column("recorded_s").tolist().index(30.0)
    assert len(trace.turn(last_main).parents) == 2
    assert trace.header.changes["background_subagents"] == 1


def test_a_subagent_of_unknown_duration_runs_in_the_background(tmp_path: Path) -> None:
    trace = read(tmp_path, subagents(duration_ms=None))
    assert trace.column("recorded_s").tolist() == [0.0, 3.0, 8.0, 23.0, 30.0]
    assert trace.header.changes["background_subagents"] == 1


def test_an_answer_of_unknown_length_is_estimated_and_counted(tmp_path: Path) -> None:
    value = subagents()
    del value["requests"][0]["api_time"]
    trace = read(tmp_path, value)
    assert trace.header.changes == {"api_time_estimated": 1}
    assert trace.turn(1).delay_s == pytest.approx(1.0)  # 10 tokens at the file's 0.2 s each


def test_ids_of_two_files_never_meet(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(subagents()))
    trace = kv_cache_tester.read(str(tmp_path))
    assert trace.sessions == 2
    assert trace.blocks == 2 * 5
    assert [source.name for source in trace.header.sources] == ["a.json", "b.json"]
    assert trace.header.session_starts == "unknown"


# ---- our own form


def test_a_trace_survives_parquet(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    trace = read(tmp_path / "in", subagents())
    canonical.save(trace, tmp_path / "trace.parquet")
    again = canonical.read(str(tmp_path / "trace.parquet"))
    assert again.digest == trace.digest
    assert again.header == trace.header
    assert again.table.equals(trace.table)


def test_another_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(TraceError, match="without a trace's header"):
        canonical.read(str(path))
    path.write_bytes(b"PAR1 but no more")
    with pytest.raises(TraceError, match="not a Parquet file"):
        canonical.read(str(path))
    with pytest.raises(TraceError, match="no such file"):
        canonical.read(str(tmp_path / "absent"))
    metadata = {b"relaybench.header": b'{"format": "x"}'}
    pq.write_table(pa.table({"x": [1]}).replace_schema_metadata(metadata), path)
    with pytest.raises(TraceError, match="of another form"):
        canonical.read(str(path))


# ---- transforms


def test_long_delays_are_capped_and_counted(tmp_path: Path) -> None:
    trace = transform.cap_delays(read(tmp_path, subagents()), 3.0)
    assert trace.column("delay_s")[4] == 3.0
    assert trace.header.changes == {"delay_capped_at_3_s": 1}


def test_the_first_sessions_keep_their_gates(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.json").write_text(json.dumps(subagents()))
    trace = kv_cache_tester.read(str(tmp_path))
    fewer = transform.first_sessions(trace, 2)
    assert (len(fewer), fewer.sessions) == (10, 2)
    assert fewer.header.changes == {"turns_of_later_sessions_left_out": 5}
    whole = [s for s in trace.by_session() if s.session < 2]
    for one, other in zip(whole, fewer.by_session(), strict=True):
        assert [t.runs for t in one.turns] == [t.runs for t in other.turns]
        assert [len(t.parents) for t in one.turns] == [len(t.parents) for t in other.turns]
