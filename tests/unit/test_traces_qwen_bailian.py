"""Qwen-Bailian's rows: conversations by parents, and each way in which they are refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError, TraceError
from traces import qwen_bailian

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces" / "qwen-bailian"

ROW = {
    "chat_id": 0,
    "parent_chat_id": -1,
    "timestamp": 0.0,
    "input_length": 32,
    "output_length": 5,
    "type": "text",
    "turn": 1,
    "hash_ids": [1, 2],
}


def text(*changes: dict[str, Any]) -> str:
    return "".join(json.dumps(ROW | change) + "\n" for change in changes)


def write(path: Path, *changes: dict[str, Any]) -> Path:
    path.write_text(text(*changes))
    return path


def test_a_conversation_becomes_a_session(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        {"chat_id": 7, "timestamp": 61.5},
        {"chat_id": 8, "timestamp": 62.5, "type": "search", "hash_ids": [5, 6]},
        {"chat_id": 9, "parent_chat_id": 7, "timestamp": 71.114, "hash_ids": [1, 2]},
        {"chat_id": 10, "parent_chat_id": 9, "timestamp": 80.114, "turn": 3},
    )
    trace = qwen_bailian.read(path)
    assert trace.session.tolist() == [0, 1, 0, 0]
    assert trace.column("turn_index").tolist() == [0, 0, 1, 2]
    assert [trace.turn(row).parents for row in range(4)] == [(), (), (0,), (2,)]
    assert [trace.turn(row).arrival_s for row in range(4)] == [0.0, 1.0, None, None]
    assert [trace.turn(row).delay_s for row in range(4)] == [None, None, 9.614, 9.0]
    assert trace.ideal_hit_tokens.tolist() == [0, 0, 32, 32]
    assert trace.turn(1).agent == "search"
    header = trace.header
    assert (header.format, header.block_tokens) == ("qwen_bailian", 16)
    assert (header.partial_block, header.id_scope) == ("ceil", "file")
    assert (header.prefix_data, header.licence) == ("recorded", "Apache-2.0")
    assert header.changes == {"api_time_unknown_taken_as_0": 2}


def test_branches_are_of_one_session(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        {"chat_id": 1},
        {"chat_id": 2, "parent_chat_id": 1, "timestamp": 5},
        {"chat_id": 3, "parent_chat_id": 1, "timestamp": 9},
        {"chat_id": 4, "parent_chat_id": 2, "timestamp": 9},
    )
    trace = qwen_bailian.read(path)
    assert trace.sessions == 1
    assert [trace.turn(row).parents for row in range(4)] == [(), (0,), (0,), (1,)]


def test_a_parent_may_stand_below(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        {"chat_id": 3, "parent_chat_id": 2, "timestamp": 4},
        {"chat_id": 2, "parent_chat_id": 1, "timestamp": 2},
        {"chat_id": 1, "timestamp": 1},
    )
    trace = qwen_bailian.read(path)
    assert trace.session.tolist() == [0, 0, 0]
    assert [trace.turn(row).delay_s for row in range(3)] == [None, 1.0, 2.0]
    assert trace.header.changes == {"api_time_unknown_taken_as_0": 2, "rows_out_of_order": 2}


def test_a_missing_parent_makes_a_first_turn(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        {"chat_id": 1, "parent_chat_id": 99, "timestamp": 1, "turn": 4},
        {"chat_id": 2, "parent_chat_id": 1, "timestamp": 3, "turn": 5},
        {"chat_id": 3, "parent_chat_id": 99, "timestamp": 4, "turn": 4},
    )
    trace = qwen_bailian.read(path)
    assert trace.session.tolist() == [0, 0, 1]
    assert [trace.turn(row).arrival_s for row in range(3)] == [0.0, None, 3.0]
    assert trace.header.changes == {
        "api_time_unknown_taken_as_0": 1,
        "parent_not_in_file_made_first_turn": 2,
    }


def test_what_is_mended_is_counted(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        {"chat_id": 1, "timestamp": 5, "output_length": 0},
        {"chat_id": 2, "parent_chat_id": 1, "timestamp": 4},
        {"chat_id": 3, "timestamp": 6, "input_length": 0, "hash_ids": []},
        {"chat_id": 4, "parent_chat_id": 3, "timestamp": 8},
    )
    path.write_text(path.read_text() + "\n")
    trace = qwen_bailian.read(path)
    assert [trace.turn(row).delay_s for row in range(3)] == [0.0, None, None]
    assert [trace.turn(row).arrival_s for row in range(3)] == [None, 1.0, 4.0]
    assert trace.output_tokens.tolist() == [5, 1, 5]
    assert trace.header.changes == {
        "api_time_unknown_taken_as_0": 2,
        "blank_lines_skipped": 1,
        "empty_input_dropped": 1,
        "negative_delay_clamped_to_0": 1,
        "rows_out_of_order": 1,
        "zero_output_clamped_to_1": 1,
    }


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a wrong name": ({"hashes": []}, "hashes: unknown field. The known ones are chat_id, parent"),
    "a negative id": ({"chat_id": -1}, "chat_id: -1 is below"),
    "an id of letters": ({"chat_id": "a"}, 'chat_id: "a" is not a whole number'),
    "an id twice": ({"chat_id": 0}, "chat_id: chat 0 is in line 1 too. Remove one of the two"),
    "no parent": ({"parent_chat_id": None}, "parent_chat_id: null is not a whole number"),
    "another word for none": ({"parent_chat_id": -2}, "parent_chat_id: -2 is below"),
    "its own parent": ({"parent_chat_id": 1}, "waits for itself: 1 after 1. Break the cycle"),
    "a negative length": ({"input_length": -5}, "input_length: -5 is below"),
    "a huge length": ({"output_length": 2**31}, "output_length: 2147483648 is above"),
    "text for a number": ({"input_length": "12"}, 'input_length: "12" is not a whole number'),
    "milliseconds that are dates": ({"timestamp": 1.7e12}, "timestamp: .*over ten years"),
    "a negative time": ({"timestamp": -1}, "timestamp: -1 is not a time"),
    "NaN": ({"timestamp": float("nan")}, "not usable JSON: NaN is not JSON"),
    "a negative turn": ({"turn": -1}, "turn: -1 is below"),
    "a type that is a number": ({"type": 3}, "type: 3 is not a string"),
    "a blank type": ({"type": " "}, "type: ' ' is no type"),
    "a negative block": ({"hash_ids": [-1]}, r"hash_ids\[0\]: -1 is not a block id"),
    "too many blocks": (
        {"hash_ids": [1, 2, 3]},
        "hash_ids: 3 block ids, but 32 .*2 blocks of 16",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_refused(tmp_path: Path, case: str) -> None:
    change, message = BAD[case]
    path = write(tmp_path / "t.jsonl", {}, {"chat_id": 1} | change, {"chat_id": 2})
    with pytest.raises(TraceError, match=r"t.jsonl:2: " + message):
        qwen_bailian.read(path)


@pytest.mark.parametrize("name", qwen_bailian.FIELDS)
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({key: value for key, value in ROW.items() if key != name}))
    with pytest.raises(TraceError, match=rf"t.jsonl:1: {name}: missing"):
        qwen_bailian.read(path)


def test_a_cycle_of_parents_is_refused(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        {"chat_id": 1, "parent_chat_id": 3},
        {"chat_id": 2, "parent_chat_id": 1},
        {"chat_id": 3, "parent_chat_id": 2},
        {"chat_id": 4, "parent_chat_id": 3},
    )
    with pytest.raises(TraceError, match=r"t.jsonl:[123]: waits for itself: .* after "):
        qwen_bailian.read(path)


BAD_FILES: dict[str, tuple[str, str]] = {
    "empty": ("", "t.jsonl: empty"),
    "nothing to replay": (text({"input_length": 0, "hash_ids": []}), "t.jsonl: no turns"),
    "half a line": (text({}) + text({"chat_id": 1})[:60], "t.jsonl:2: half a line.*cut off"),
    "a CSV": ("chat_id,parent_chat_id\n0,-1\n", "t.jsonl:1: not JSON"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_one_error(tmp_path: Path, case: str) -> None:
    content, message = BAD_FILES[case]
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    with pytest.raises(TraceError, match=message):
        qwen_bailian.read(path)


def test_gzip_a_mark_and_windows_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    content = "\ufeff" + text({}, {"chat_id": 1}).replace("\n", "\r\n")
    path.write_bytes(gzip.compress(content.encode()))
    assert len(qwen_bailian.read(path)) == 2


def test_blocks_of_another_size(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {"hash_ids": list(range(4))})
    assert qwen_bailian.read(path, block_tokens=8).runs(0) == [(0, 4)]
    with pytest.raises(ConfigError, match=r"trace.block_tokens is 0"):
        qwen_bailian.read(path, block_tokens=0)


def test_the_published_row() -> None:
    path = SHARED / "sample_rows.jsonl"
    if not path.exists():
        pytest.skip("../shared is absent: no published traces to compare with")
    turn = qwen_bailian.read(path).turn(0)
    assert (turn.input_tokens, turn.output_tokens, turn.agent) == (502, 1494, "thinking")
    assert turn.runs == [(0, 32)]
