"""Mooncake rows: their numbers, and each way in which they are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError, TraceError
from traces import mooncake

ROW = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}


def write(path: Path, *changes: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(ROW | change) + "\n" for change in changes))
    return path


def test_rows_become_turns(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        {"timestamp": 2500},
        {"timestamp": 4500, "input_length": 1025, "hash_ids": [1, 2, 2**64 - 1]},
    )
    trace = mooncake.read(path)
    assert trace.sessions == len(trace) == 2
    assert trace.column("arrival_s").tolist() == [0.0, 2.0]
    assert trace.input_tokens.tolist() == [1000, 1025]
    assert trace.ideal_hit_tokens.tolist() == [0, 1024]
    assert trace.turn(1).agent == "main"
    header = trace.header
    assert (header.format, header.block_tokens, header.partial_block) == ("mooncake", 512, "ceil")
    assert (header.time_unit, header.id_scope, header.changes) == ("ms", "global", {})
    assert [source.name for source in header.sources] == ["t.jsonl"]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a wrong name": (
        {"output_tokens": 3},
        "output_tokens: unknown field. The known ones are timestamp, input_length",
    ),
    "AIPerf's sessions": ({"session_id": "a"}, "session_id: .* input_length may be only"),
    "AIPerf's delays": ({"delay": 1}, "delay: .* input_length may be only.* Give whole prompts"),
    "a negative length": ({"input_length": -5}, "input_length: -5 is below"),
    "a huge length": ({"output_length": 2**31}, "output_length: 2147483648 is above"),
    "text for a number": ({"input_length": "12"}, 'input_length: "12" is not a whole number'),
    "seconds that are dates": ({"timestamp": 1.7e12}, "timestamp: .*over ten years"),
    "a negative time": ({"timestamp": -1}, "timestamp: -1 is not a time"),
    "a negative id": ({"hash_ids": [-1]}, r"hash_ids\[0\]: -1 is not a block id"),
    "an id too wide": ({"hash_ids": [2**64]}, r"hash_ids\[0\]: 18446744073709551616"),
    "too many ids": ({"hash_ids": [1, 2, 3]}, "hash_ids: 3 block ids, but 1000.*2 blocks of 512"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_refused(tmp_path: Path, case: str) -> None:
    change, message = BAD[case]
    with pytest.raises(TraceError, match=r"t.jsonl:2: " + message):
        mooncake.read(write(tmp_path / "t.jsonl", {}, change))


def test_a_missing_name_is_told_with_the_closest(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(ROW).replace("output_length", "output_tokens"))
    with pytest.raises(
        TraceError, match=r"t.jsonl:1: output_length: missing; the closest field is 'output_tokens'"
    ):
        mooncake.read(path)


def test_what_is_mended_is_counted(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        {"timestamp": 2000, "output_length": 0},
        {"timestamp": 1000, "hash_ids": []},
        {"timestamp": 3000, "input_length": 0, "hash_ids": []},
    )
    path.write_text(path.read_text() + "\n")
    trace = mooncake.read(path)
    assert trace.output_tokens.tolist() == [5, 1]
    assert trace.header.changes == {
        "blank_lines_skipped": 1,
        "empty_input_dropped": 1,
        "rows_out_of_order": 1,
        "zero_output_clamped_to_1": 1,
    }


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {"input_length": 0, "hash_ids": []})
    with pytest.raises(TraceError, match=r"t.jsonl: no turns"):
        mooncake.read(path)


def test_blocks_of_another_size(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {"hash_ids": list(range(63))})
    assert mooncake.read(path, block_tokens=16).runs(0) == [(0, 63)]
    with pytest.raises(ConfigError, match=r"trace.block_tokens is 0"):
        mooncake.read(path, block_tokens=0)
