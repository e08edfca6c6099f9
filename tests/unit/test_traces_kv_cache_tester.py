"""kv-cache-tester sessions: who waits for whom and how long, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import TraceError
from harness.trace import Trace, Turn
from traces import kv_cache_tester


def request(t: float, api_time: float | None = 1.0, out: int = 10, **more: Any) -> dict[str, Any]:
    """A request of two blocks and a bit."""
    call = {
        "t": t,
        "type": "n",
        "model": "m",
        "in": 150,
        "out": out,
        "hash_ids": [1, 2],
        "input_types": ["text"],
        "output_types": ["text"],
        "stop": "",
    }
    return call | ({} if api_time is None else {"api_time": api_time}) | more


def agent(t: float, duration_ms: int | None, *requests: Any, name: str = "Explore") -> Any:
    """A sub-agent whose result came back at `t`."""
    return {
        "t": t,
        "type": "subagent",
        "subagent_type": name,
        "agent_id": "a",
        "duration_ms": duration_ms,
        "requests": list(requests),
    }


def session(*requests: Any, **more: Any) -> dict[str, Any]:
    return {
        "id": "s",
        "models": ["m"],
        "block_size": 64,
        "hash_id_scope": "local",
        "tool_tokens": 1,
        "system_tokens": 1,
        "requests": list(requests),
    } | more


def read(folder: Path, *requests: Any, **more: Any) -> Trace:
    path = folder / "s.json"
    path.write_text(json.dumps(session(*requests, **more)))
    return kv_cache_tester.read(path)


def turns(trace: Trace) -> list[Turn]:
    return [trace.turn(row) for row in range(len(trace))]


def waits(trace: Trace) -> list[tuple[tuple[int, ...], float | None]]:
    """(parents, delay) of each turn."""
    return [(turn.parents, turn.delay_s) for turn in turns(trace)]


def test_turns_wait_as_long_as_in_the_recording(tmp_path: Path) -> None:
    trace = read(tmp_path, request(5, 2.5), request(10, 1.25, type="s"), request(13))
    assert waits(trace) == [((), None), ((0,), 2.5), ((1,), 1.75)]
    assert trace.column("recorded_s").tolist() == [0.0, 5.0, 8.0]
    assert trace.turn(0).arrival_s == 0.0
    header = trace.header
    assert (header.block_tokens, header.partial_block, header.id_scope) == (64, "floor", "file")
    assert (header.session_starts, header.changes) == ("unknown", {})


def test_a_subagent_starts_its_duration_before_its_result(tmp_path: Path) -> None:
    """The times of trace_0277: three agents in parallel, each reported when it came back."""
    trace = read(
        tmp_path,
        request(0.0, 18.78),
        agent(79.224, 59750, request(0.0, 2.16), request(19.0, 36.89)),
        agent(183.906, 164445, request(0.0, 2.31), request(116.0, 45.59), name="Plan"),
        request(228.0, 12.24),
    )
    assert [turn.agent for turn in turns(trace)] == [
        *("main", "Plan", "Explore", "Explore", "Plan", "main")
    ]
    assert [round(turn.recorded_s, 3) for turn in turns(trace)] == [
        *(0.0, 19.461, 19.474, 38.474, 135.461, 228.0)
    ]
    assert waits(trace) == [
        ((), None),
        ((0,), pytest.approx(0.681)),
        ((0,), pytest.approx(0.694)),
        ((2,), pytest.approx(16.84)),
        ((1,), pytest.approx(113.69)),
        ((0, 3, 4), pytest.approx(228.0 - 135.461 - 45.59)),
    ]


def test_subagents_share_the_ids_of_their_file(tmp_path: Path) -> None:
    trace = read(tmp_path, request(0), agent(5, 3000, request(0, hash_ids=[1, 9])), request(6))
    assert trace.ideal_hit_tokens.tolist() == [0, 64, 128]


def test_a_main_turn_of_whole_seconds_may_seem_to_begin_too_soon(tmp_path: Path) -> None:
    trace = read(tmp_path, request(0), agent(10.9, 8000, request(0, 7.9)), request(10))
    assert waits(trace)[2] == ((0, 1), 0.0)
    assert trace.header.changes == {"negative_delay_clamped_to_0": 1}


def test_a_subagent_that_is_back_too_late_is_not_waited_for(tmp_path: Path) -> None:
    trace = read(tmp_path, request(0), agent(30, 28000, request(0, 5)), request(10), request(40))
    assert waits(trace) == [((), None), ((0,), 1.0), ((0,), 9.0), ((2,), 29.0)]
    assert trace.header.changes == {"background_subagent_not_joined": 1}


@pytest.mark.parametrize("duration", [{"duration_ms": None}, {}])
def test_a_subagent_without_duration_was_launched_at_its_time(
    tmp_path: Path, duration: dict[str, Any]
) -> None:
    launched = agent(3, None, request(0), request(2))
    del launched["duration_ms"]
    trace = read(tmp_path, request(0), launched | duration, request(20))
    assert trace.column("recorded_s").tolist() == [0.0, 3.0, 5.0, 20.0]
    assert waits(trace) == [((), None), ((0,), 2.0), ((1,), 1.0), ((0,), 19.0)]
    assert trace.header.changes == {"background_subagent_not_joined": 1}


def test_a_subagent_may_call_its_own(tmp_path: Path) -> None:
    inner = agent(6, 4000, request(0, 3), name="Plan")
    outer = agent(12, 10000, request(0), inner, request(7))
    trace = read(tmp_path, request(0), outer, request(13))
    assert [turn.agent for turn in turns(trace)] == ["main", "Explore", "Plan", "Explore", "main"]
    assert [turn.recorded_s for turn in turns(trace)] == [0.0, 2.0, 4.0, 9.0, 13.0]
    assert waits(trace) == [((), None), ((0,), 1.0), ((1,), 1.0), ((1, 2), 2.0), ((0, 3), 3.0)]


def test_a_subagent_called_by_the_last_turn(tmp_path: Path) -> None:
    trace = read(tmp_path, request(0), agent(9, 7000, request(0)))
    assert waits(trace) == [((), None), ((0,), 1.0)]
    assert trace.header.changes == {}


def test_a_subagent_without_requests_is_counted(tmp_path: Path) -> None:
    trace = read(tmp_path, request(0), agent(9, 7000), request(10))
    assert waits(trace) == [((), None), ((0,), 9.0)]
    assert trace.header.changes == {"subagent_without_requests_dropped": 1}


def test_an_unknown_api_time_is_estimated_from_the_file(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        request(0, 2.0, out=10),
        request(5, None, out=20),
        request(50, None, out=1000),
        request(60, 0.5, out=0),
    )
    # 0.2 s a token: 4 s of 45, and 200 s that must be over in 10.
    assert waits(trace) == [((), None), ((0,), 3.0), ((1,), 41.0), ((2,), 0.0)]
    assert trace.header.changes == {"api_time_estimated": 2, "zero_output_clamped_to_1": 1}


def test_a_file_without_api_times_uses_the_others(tmp_path: Path) -> None:
    for name, api_time in (("a", None), ("b", 1.0), ("c", 3.0)):
        calls = [request(0, api_time, out=10), request(10, api_time, out=10)]
        (tmp_path / f"{name}.json").write_text(json.dumps(session(*calls, id=name)))
    trace = kv_cache_tester.read(tmp_path)
    assert sorted(trace.column("delay_s")[3:].tolist()) == [7.0, 8.0, 9.0]
    assert trace.header.changes == {"api_time_estimated": 2}


def test_no_api_time_at_all_counts_as_none(tmp_path: Path) -> None:
    trace = read(tmp_path, request(0, None), request(10, None))
    assert waits(trace)[1] == ((0,), 10.0)
    assert trace.header.changes == {"api_time_unknown_taken_as_0": 2}


def test_a_folder_is_read_by_name_with_ids_apart(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.json").write_text(json.dumps(session(request(0), id=name)))
    (tmp_path / "README.md").write_text("not a session")
    trace = kv_cache_tester.read(tmp_path)
    assert [source.name for source in trace.header.sources] == ["a.json", "b.json"]
    assert trace.sessions == 2
    assert trace.ideal_hit_tokens.tolist() == [0, 0]
    assert trace.column("arrival_s").tolist() == [0.0, 0.0]


def test_rows_out_of_order_are_sorted(tmp_path: Path) -> None:
    trace = read(tmp_path, request(0), request(20), request(10))
    assert waits(trace) == [((), None), ((0,), 9.0), ((1,), 9.0)]
    assert trace.header.changes == {"rows_out_of_order": 1}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown type": (request(1, type="x"), r"requests\[1\].type: 'x' is unknown. Give n, s"),
    "no type": ({"t": 1}, r"requests\[1\].type: missing"),
    "an unknown field": (request(1, extra=1), r"requests\[1\].extra: unknown field. The known"),
    "a wrong name": (
        {{"out": "output"}.get(name, name): value for name, value in request(1).items()},
        r"requests\[1\].out: missing; the closest field is 'output'",
    ),
    "a negative time": (request(-1), r"requests\[1\].t: -1 is not a time"),
    "a negative duration": (request(1, -2.0), r"requests\[1\].api_time: -2.0 is not a time"),
    "too many ids": (request(1, hash_ids=[1, 2, 3]), r"requests\[1\].hash_ids: 3 block ids, but"),
    "inside a sub-agent": (
        agent(9, 1000, request(0), request(1) | {"out": "5"}),
        r'requests\[1\].requests\[1\].out: "5" is not a whole number',
    ),
    "a packed request": (request(1, hash_runs=[[1, 2]]), "hash_runs: packed.* Unpack it"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_refused(tmp_path: Path, case: str) -> None:
    bad, message = BAD[case]
    with pytest.raises(TraceError, match=r"s.json(:1)?: " + message):
        read(tmp_path, request(0), bad)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"block_size": 0}, "block_size: 0 is below"),
        ({"hash_id_scope": "here"}, "hash_id_scope: 'here' is unknown. Give local or global"),
        ({"hash_ids": []}, "hash_ids: unknown field"),
        ({"requests": {}}, "requests: an object is not a list"),
        ({"requests": []}, "no turns"),
    ],
)
def test_a_bad_session_is_refused(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=r"s.json: " + message):
        read(tmp_path, request(0), **more)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"block_size": 32}, "b.json: block_size: 32, where a.json has another"),
        ({"hash_id_scope": "global"}, "b.json: hash_id_scope: 'global', where a.json has"),
        ({"id": "a"}, "b.json: id: session 'a' is in a.json too. Remove one"),
    ],
)
def test_files_that_do_not_go_together(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    for name, change in (("a", {}), ("b", more)):
        (tmp_path / f"{name}.json").write_text(
            json.dumps(session(request(0), **({"id": name} | change)))
        )
    with pytest.raises(TraceError, match=message):
        kv_cache_tester.read(tmp_path)


def test_a_folder_without_sessions_says_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="it has nothing"):
        kv_cache_tester.read(tmp_path)
    (tmp_path / "packed.jsonl.gz").touch()
    with pytest.raises(TraceError, match=r"no \*.json in this folder.*packed.jsonl.gz"):
        kv_cache_tester.read(tmp_path)
