"""Every way in which a trace file can be bad: one error with file, line, field and what to do."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import TraceError
from traces import kv_cache_tester, mooncake

GOOD = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}


def line(**changes: Any) -> str:
    return json.dumps({k: v for k, v in (GOOD | changes).items() if v != "absent"})


def write(folder: Path, *lines: str, end: str = "\n") -> str:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines) + end, encoding="utf-8")
    return str(path)


def failure(path: str) -> TraceError:
    with pytest.raises(TraceError) as caught:
        mooncake.read(path)
    assert caught.value.exit_code == 2
    return caught.value


# ---- the file as a whole


def test_no_file_names_what_is_there(tmp_path: Path) -> None:
    write(tmp_path, line())
    error = failure(str(tmp_path / "tracce.jsonl"))
    assert "tracce.jsonl: no such file" in str(error)
    assert "trace.jsonl" in error.do
    assert "not there or empty" in str(failure(str(tmp_path / "no" / "x.jsonl")))


def test_a_folder(tmp_path: Path) -> None:
    assert "a folder" in str(failure(str(tmp_path)))


@pytest.mark.parametrize("text", ["", "\n\n", "  \n"])
def test_an_empty_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    assert "empty" in str(failure(str(tmp_path / "trace.jsonl")))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 3\n", "git lfs pull"),
        (line().encode("utf-16"), "UTF-16"),
        (b"PAR1....", "trace=canonical"),
        (b"PK\x03\x04....", "zip"),
        (gzip.compress(line().encode())[:-12], "cut off or damaged"),
        (b'{"timestamp": "\xff"}\n', "not UTF-8"),
        (b"timestamp,input_length\n0,5\n", "not JSON"),
        (b"[1, 2]\n", "no object"),
        (b"42\n", "no object"),
    ],
)
def test_what_is_no_json_lines_file_says_what_it_is(
    tmp_path: Path, data: bytes, words: str
) -> None:
    (tmp_path / "trace.jsonl").write_bytes(data)
    assert words in str(failure(str(tmp_path / "trace.jsonl")))


@pytest.mark.parametrize(
    "data",
    [
        gzip.compress((line() + "\n").encode()),
        b"\xef\xbb\xbf" + line().encode() + b"\n",
        line().encode(),
        b"\n" + line().encode() + b"\n\n",
        line().encode() + b"\r\n",
    ],
    ids=["gzip", "byte-order mark", "no last newline", "blank lines", "CRLF"],
)
def test_what_is_merely_unusual_is_read(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "trace.jsonl").write_bytes(data)
    trace = mooncake.read(str(tmp_path / "trace.jsonl"))
    assert trace.input_tokens.tolist() == [1000]


# ---- one line


def test_half_a_line_looks_cut_off(tmp_path: Path) -> None:
    error = failure(write(tmp_path, line(), line()[:30], end=""))
    assert error.line == 2
    assert "cut off" in error.do


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    error = failure(write(tmp_path, line(), line()[:-1] + ",", line()))
    assert (error.line, error.do) == (2, "mend or remove it")


BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"output_length": "absent", "output_len": 5}, "output_len", "rename it output_length"),
    ({"output_length": "absent"}, "output_length", "missing"),
    ({"session_id": "a"}, "session_id", "may mean something else"),
    ({"delay": 3}, "delay", "an unknown field"),
    ({"input_length": -1}, "input_length", "-1 tokens"),
    ({"input_length": 2**31}, "input_length", "give 0 to 2,147,483,647"),
    ({"input_length": 10**30}, "input_length", "give 0 to"),
    ({"output_length": -5}, "output_length", "-5 tokens"),
    ({"output_length": 1.5}, "output_length", "no whole number"),
    ({"output_length": "12"}, "output_length", "no whole number"),
    ({"output_length": True}, "output_length", "no whole number"),
    ({"output_length": None}, "output_length", "no whole number"),
    ({"timestamp": -1}, "timestamp", "no time in this trace"),
    ({"timestamp": "2026-01-01"}, "timestamp", "no number"),
    ({"timestamp": 1_700_000_000_000}, "timestamp", "no time in this trace"),
    ({"timestamp": 10**400}, "timestamp", "no time in this trace"),
    ({"hash_ids": 7}, "hash_ids", "no list"),
    ({"hash_ids": [-1]}, "hash_ids", "no block id"),
    ({"hash_ids": [2**64]}, "hash_ids", "2^64 - 1"),
    ({"hash_ids": [1.0]}, "hash_ids", "no block id"),
    ({"hash_ids": ["a"]}, "hash_ids", "no block id"),
]


@pytest.mark.parametrize(("changes", "field", "words"), BAD_FIELDS)
def test_a_bad_field_is_named_with_its_line(
    tmp_path: Path, changes: dict[str, Any], field: str, words: str
) -> None:
    error = failure(write(tmp_path, line(), line(**changes)))
    assert (error.line, error.field) == (2, field)
    assert words in str(error).replace("Give", "give").replace("Rename", "rename")
    assert str(error).startswith(f"{tmp_path / 'trace.jsonl'}:2: {field}: ")


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_what_json_does_not_know_is_refused(tmp_path: Path, word: str) -> None:
    bad = line().replace('"timestamp": 0', f'"timestamp": {word}')
    assert f"{word} is no JSON number" in str(failure(write(tmp_path, bad)))


def test_a_field_twice_is_refused(tmp_path: Path) -> None:
    bad = line()[:-1] + ', "output_length": 500}'
    assert "'output_length' stands twice" in str(failure(write(tmp_path, bad)))


def test_more_ids_than_the_input_holds(tmp_path: Path) -> None:
    error = failure(write(tmp_path, line(), line(hash_ids=[1, 2, 3])))
    assert error.line == 2
    assert "3 block ids for 1000 tokens, which hold 2" in str(error)
    assert "block size" in error.do


# ---- not faults, but never silent


def test_zero_outputs_are_clamped_and_counted(tmp_path: Path) -> None:
    trace = mooncake.read(write(tmp_path, line(output_length=0), line()))
    assert trace.output_tokens.tolist() == [1, 5]
    assert trace.header.changes == {"zero_output_clamped_to_1": 1}


def test_empty_inputs_are_dropped_and_counted(tmp_path: Path) -> None:
    trace = mooncake.read(write(tmp_path, line(input_length=0, hash_ids=[]), line()))
    assert len(trace) == 1
    assert trace.header.changes == {"empty_input_dropped": 1}


def test_only_empty_inputs_are_no_trace(tmp_path: Path) -> None:
    error = failure(write(tmp_path, line(input_length=0, hash_ids=[])))
    assert "no turns (empty_input_dropped 1)" in str(error)


def test_times_out_of_order_are_sorted_stably_and_counted(tmp_path: Path) -> None:
    rows = [line(timestamp=t, output_length=n) for t, n in ((2000, 1), (500, 2), (2000, 3))]
    trace = mooncake.read(write(tmp_path, *rows))
    assert trace.output_tokens.tolist() == [2, 1, 3]
    assert trace.column("arrival_s").tolist() == [0.0, 1.5, 1.5]
    assert trace.header.changes == {"out_of_order_rows_sorted": 2}


def test_ids_of_64_bits_stay_apart(tmp_path: Path) -> None:
    ids = [2**64 - 1, 2**32 - 1, 2**63, 0]
    rows = [line(input_length=512, hash_ids=[each]) for each in [*ids, *ids]]
    trace = mooncake.read(write(tmp_path, *rows))
    assert trace.blocks == 4
    assert trace.ideal_hit_tokens.tolist() == [0, 0, 0, 0, 512, 512, 512, 512]


# ---- session files


def session(**changes: Any) -> dict[str, Any]:
    return {
        "id": "a", "block_size": 64, "hash_id_scope": "local",
        "requests": [{"t": 0.0, "type": "n", "in": 130, "out": 5, "hash_ids": [1, 2]}],
    } | changes  # fmt: skip


def session_failure(folder: Path, value: Any) -> TraceError:
    path = folder / "a.json"
    path.write_text(json.dumps(value))
    with pytest.raises(TraceError) as caught:
        kv_cache_tester.read(str(path))
    assert "a.json" in str(caught.value)
    return caught.value


REQUEST = session()["requests"][0]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (session(requests=[]), "requests: no list of requests"),
        (session(requests="x"), "requests: no list"),
        (session(requests=[3]), r"requests[0]: no object"),
        (session(block_size=0), "block_size: 0 tokens"),
        (session(hash_id_scope="global"), "Only 'local' ids"),
        (session(requests=[REQUEST | {"type": "x"}]), "'x' is an unknown type of request"),
        (session(requests=[REQUEST | {"in": -4}]), "requests[0].in: -4 tokens"),
        (session(requests=[REQUEST | {"hash_runs": [[1, 2]]}]), "Unpack it"),
        (session(requests=[REQUEST | {"hash_ids": [1, 2, 3]}]), "3 block ids for 130 tokens"),
        (
            session(requests=[{"t": 1, "type": "subagent", "requests": [REQUEST]}]),
            "only sub-agents",
        ),
        ([], "no object"),
    ],
)
def test_a_bad_session_is_named(tmp_path: Path, value: Any, words: str) -> None:
    assert words in str(session_failure(tmp_path, value))


def test_a_folder_without_sessions(tmp_path: Path) -> None:
    (tmp_path / "packed.jsonl.gz").write_bytes(b"x")
    with pytest.raises(TraceError, match=r"no \*\.json in this folder.*packed\.jsonl\.gz"):
        kv_cache_tester.read(str(tmp_path))


def test_block_sizes_do_not_mix(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(session()))
    (tmp_path / "b.json").write_text(json.dumps(session(block_size=16)))
    with pytest.raises(TraceError, match=r"b\.json: block_size: blocks of 16 tokens"):
        kv_cache_tester.read(str(tmp_path))
