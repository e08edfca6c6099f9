"""Mooncake rows: their numbers, and each way in which they are refused."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import ConfigError, TraceError
from harness.trace import Trace
from traces import mooncake
from traces.columns import NotPlain
from traces.faults import gathering

SHARED = Path(__file__).parents[3] / "shared" / "traces"

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
    "a session that says not what it is": (
        {"session_id": "a"},
        "session_id: a session, of which .*trace.turns=added .* adds .*trace.turns=whole",
    ),
    "a delay after nothing": ({"delay": 1}, "delay: a delay, and no session"),
    "a name that is a number": ({"request_id": 3}, "request_id: 3 is not a string"),
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


# ---- the two readers of the same file


def both(path: Path) -> tuple[Trace | str, Trace | str | None]:
    """What the rows give, and the columns: a trace or a complaint, and None for no plain file."""
    header = mooncake.read(write(path.with_suffix(".one"), {})).header
    rows: Trace | str
    columns: Trace | str | None
    try:
        rows = mooncake._read_rows(path, header, None)
    except TraceError as error:
        rows = str(error)
    try:
        columns = mooncake._read_columns(path, header)
    except NotPlain:
        columns = None
    return rows, columns


def assert_alike(path: Path) -> Trace | str | None:
    """Whatever the columns give, the rows give too."""
    rows, columns = both(path)
    if isinstance(columns, Trace):
        assert isinstance(rows, Trace)
        assert columns.header == rows.header
        assert columns.table.equals(rows.table)
        assert columns.digest == rows.digest
    return columns


@st.composite
def plain_files(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows that are no errors: ids are prefixes of a few, or of their own."""
    name = draw(st.sampled_from([lambda at: at, lambda at: 2**64 - 1 - 3 * at]))
    rows = []
    for at in range(draw(st.integers(1, 8))):
        shared = draw(st.integers(0, 4))
        own = draw(st.integers(0, 3))
        ids = [name(each) for each in range(shared)]
        ids += [name(10 * at + 10 + each) for each in range(own)]
        size = 512 * len(ids)
        rows.append(
            {
                "timestamp": draw(st.integers(0, 9) | st.floats(0, 9)),
                "input_length": draw(st.integers(size, size + 600)),
                "output_length": draw(st.integers(0, 3)),
                "hash_ids": ids,
            }
        )
    return rows


@given(rows=plain_files())
def test_a_plain_file_is_read_alike_in_columns_and_in_rows(rows: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        columns = assert_alike(path)
        assert isinstance(columns, Trace) == any(row["input_length"] for row in rows)


ODD = [
    *("{", "}", "[", "]", ",", ":", '"', "\n", "\n\n", "\r\n", " ", "\0", "\ufeff", "-", ".", "e"),
    *("0", "1", "-0", "-1", "1.5", "1e3", "1e400", "NaN", "Infinity", "null", "true", '"7"', "[1]"),
    *(
        "{}",
        '"timestamp": 1',
        '"hash_ids": []',
        '"extra": 0',
        "18446744073709551616",
        "// x",
        "\x0b",
    ),
]


@given(
    rows=plain_files(),
    edits=st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(0, 3), st.sampled_from(ODD)),
        min_size=1,
        max_size=3,
    ),
)
def test_an_odd_file_is_never_read_otherwise_in_columns(
    rows: list[dict[str, Any]], edits: list[tuple[int, int, str]]
) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for at, dropped, put in edits:
        cut = at % (len(text) + 1)
        text = text[:cut] + put + text[cut + dropped :]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        path.write_bytes(text.encode())
        assert_alike(path)


LINE = json.dumps(ROW)
NOT_PLAIN = {
    "a blank line": f"{LINE}\n\n{LINE}\n",
    "two objects a line, and a blank one": f"{LINE}{LINE}\n\n",
    "a name twice": LINE.replace("{", '{"timestamp": 0, ') + "\n",
    "a null alone": f"null\n{LINE}\n",
    "a null behind": f"{LINE}null\n",
    "carriage returns": f"{LINE}\r\n{LINE}\r\n",
    "a NUL": f"{LINE}\0\n",
    "strings as ids": LINE.replace("[1, 2]", '["1", "2"]') + "\n",
    "an id that is null": LINE.replace("[1, 2]", "[1, null]") + "\n",
    "a length that is null": LINE.replace("1000", "null") + "\n",
    "a field more": LINE.replace("{", '{"request_id": "a", ') + "\n",
    "minus nothing": LINE.replace('"timestamp": 0', '"timestamp": -0.0') + "\n",
    "an id after two others": LINE + "\n" + LINE.replace("[1, 2]", "[2]") + "\n",
    "an id twice": LINE.replace("[1, 2]", "[1, 1]") + "\n",
    "too many ids": LINE.replace("1000", "512") + "\n",
    "a date": LINE.replace('"timestamp": 0', '"timestamp": 1.7e12') + "\n",
    "a huge length": LINE.replace("1000", str(2**31)) + "\n",
    "no turn with input": LINE.replace("1000", "0").replace("[1, 2]", "[]") + "\n",
    "nothing": "",
    "a mark of byte order": f"\ufeff{LINE}\n",
}


@pytest.mark.parametrize("case", NOT_PLAIN)
def test_what_is_not_plain_is_left_to_the_rows(tmp_path: Path, case: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(NOT_PLAIN[case].encode())
    assert assert_alike(path) is None


def test_gzip_and_a_last_line_without_an_end_are_plain(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(gzip.compress(f"{LINE}\n{LINE}".encode()))
    columns = assert_alike(path)
    assert isinstance(columns, Trace)
    assert columns.ideal_hit_tokens.tolist() == [0, 1000]


def test_a_file_of_many_pieces_is_read_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traces.columns._PIECE_BYTES", 100)  # a row is 84 bytes
    rows = [{"hash_ids": [999, at], "timestamp": 9 * at} for at in range(40)]
    rows[20] = {"hash_ids": [*range(100, 200)], "input_length": 51200}
    columns = assert_alike(write(tmp_path / "t.jsonl", *rows))
    assert isinstance(columns, Trace)
    assert columns.header.changes == {"rows_out_of_order": 1}


# ---- sessions


def session(path: Path, *turns: dict[str, Any], name: str = "s") -> Path:
    return write(path, *({"session_id": name} | turn for turn in turns))


def test_whole_turns_wait_for_the_answer_before(tmp_path: Path) -> None:
    path = session(
        tmp_path / "t.jsonl",
        {"timestamp": 1000},
        {"timestamp": 9000, "delay": 2500, "input_length": 1500, "hash_ids": [1, 2, 3]},
        {"timestamp": 12000, "input_length": 1536, "hash_ids": [1, 2, 4], "request_id": "r"},
    )
    trace = mooncake.read(path, turns="whole")
    assert trace.sessions == 1
    assert [trace.turn(row).parents for row in range(3)] == [(), (0,), (1,)]
    assert [trace.turn(row).delay_s for row in range(3)] == [None, 2.5, 3.0]
    assert trace.column("recorded_s").tolist() == [0.0, 8.0, 11.0]
    assert trace.input_tokens.tolist() == [1000, 1500, 1536]
    assert trace.ideal_hit_tokens.tolist() == [0, 1024, 1024]
    assert trace.header.session_starts == "recorded"
    assert trace.header.changes == {"delay_from_timestamps": 1}


def test_added_turns_are_made_whole(tmp_path: Path) -> None:
    path = session(
        tmp_path / "t.jsonl",
        {"timestamp": 0, "input_length": 10, "output_length": 4, "hash_ids": [1, 2, 3]},
        {"timestamp": None, "delay": 100, "input_length": 3, "output_length": 1, "hash_ids": [9]},
        {
            "timestamp": None,
            "delay_ms": 50,
            "input_length": 6,
            "output_length": 2,
            "hash_ids": [9, 9],
        },
    )
    path.write_text(
        path.read_text()
        + "".join(
            json.dumps({"timestamp": 500, "input_length": n, "output_length": 1, "hash_ids": ids})
            + "\n"
            for n, ids in [(12, [1, 2, 3]), (9, [1, 2, 9])]
        )
    )
    trace = mooncake.read(path, block_tokens=4, turns="added")
    # 10, then 10 + 4 + 3, then 17 + 1 + 6; the requests that follow are alone.
    assert trace.input_tokens.tolist() == [10, 17, 24, 12, 9]
    # The first prompt is blocks 1 and 2, and 2 tokens of 3. The second keeps 1 and 2; its third
    # block, with 2 tokens of the answer, is another than 3; its fifth has 1 token. The third keeps
    # the second's four whole blocks, not its fifth, which is whole now.
    assert trace.ideal_hit_tokens.tolist() == [0, 8, 16, 12, 8]
    assert [sum(length for _, length in trace.runs(row)) for row in range(5)] == [3, 5, 6, 3, 3]
    assert trace.column("recorded_s").tolist() == [0.0, 0.1, 0.15, 0.5, 0.5]
    assert trace.turn(2).delay_s == 0.05
    assert trace.header.changes == {
        "added_made_whole": 2,
        "timestamp_estimated": 2,
    }


def test_a_last_block_that_nothing_fills_stays_the_same_block(tmp_path: Path) -> None:
    path = session(
        tmp_path / "t.jsonl",
        {"input_length": 6, "output_length": 0, "hash_ids": [1, 2]},
        {"input_length": 1, "output_length": 0, "hash_ids": [3], "timestamp": 1},
        {"input_length": 0, "output_length": 0, "hash_ids": [], "timestamp": 2},
    )
    trace = mooncake.read(path, block_tokens=4, turns="added")
    assert trace.input_tokens.tolist() == [6, 7, 7]
    assert trace.ideal_hit_tokens.tolist() == [0, 4, 7]


def test_sessions_share_their_first_prompts_and_nothing_after(tmp_path: Path) -> None:
    turns = [
        {"input_length": 8, "output_length": 4, "hash_ids": [1, 2]},
        {"input_length": 4, "hash_ids": [3], "timestamp": 10},
    ]
    path = session(tmp_path / "t.jsonl", *turns)
    other = session(tmp_path / "u.jsonl", *turns, name="t")
    path.write_text(path.read_text() + other.read_text())
    trace = mooncake.read(path, block_tokens=4, turns="added")
    assert trace.session.tolist() == [0, 1, 0, 1]
    assert trace.input_tokens.tolist() == [8, 8, 16, 16]
    assert trace.ideal_hit_tokens.tolist() == [0, 8, 8, 8]


def test_an_id_and_the_same_digits_in_quotes_are_two_blocks(tmp_path: Path) -> None:
    path = session(tmp_path / "t.jsonl", {"hash_ids": [1, 2]})
    path.write_text(path.read_text() + json.dumps(ROW | {"hash_ids": ["1", "2"]}) + "\n")
    assert mooncake.read(path, turns="added").ideal_hit_tokens.tolist() == [0, 0]


def test_an_empty_first_turn_leaves_the_next_one_to_be_the_first(tmp_path: Path) -> None:
    path = session(
        tmp_path / "t.jsonl",
        {"timestamp": 3000, "input_length": 0, "output_length": 0, "hash_ids": []},
        {"timestamp": None, "delay": 1000},
    )
    path.write_text(path.read_text() + json.dumps(ROW | {"timestamp": 9000}) + "\n")
    trace = mooncake.read(path, turns="added")
    assert trace.column("arrival_s").tolist() == [1.0, 6.0]
    assert trace.ideal_hit_tokens.tolist() == [0, 1000]


def test_what_sessions_do_not_say_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    bare = {name: ROW[name] for name in mooncake.FIELDS[1:]} | {"session_id": "s"}
    path.write_text(f"{json.dumps(bare)}\n{json.dumps(bare)}\n")
    trace = mooncake.read(path, turns="whole")
    assert trace.header.session_starts == "unknown"
    assert trace.column("recorded_s").tolist() == [0.0, 0.0]
    assert trace.turn(1).delay_s == 0.0
    assert trace.header.changes == {
        "delay_absent_taken_as_0": 1,
        "session_start_unknown_taken_as_0": 1,
        "timestamp_estimated": 1,
    }


BAD_TURNS: dict[str, tuple[dict[str, Any], str]] = {
    "time that runs backwards": ({"timestamp": 500}, r"2: timestamp: -500 ms after line 1, the"),
    "two delays": ({"delay": 1, "delay_ms": 1}, "2: delay_ms: given beside delay"),
    "a negative delay": ({"delay": -1}, "2: delay: -1 is not a time"),
    "too many added ids": ({"hash_ids": [1, 2, 3]}, "2: hash_ids: 3 block ids, but 1000 added"),
    "a prompt beyond all models": (
        {"input_length": 2**24, "hash_ids": []},
        "2: input_length: with all before it a prompt of 16778221 tokens.*trace.turns=whole",
    ),
    "a session without a name": ({"session_id": 5}, "2: session_id: 5 is not a string"),
}


@pytest.mark.parametrize("case", BAD_TURNS)
def test_a_bad_turn_is_refused(tmp_path: Path, case: str) -> None:
    change, message = BAD_TURNS[case]
    path = session(tmp_path / "t.jsonl", {"timestamp": 1000}, {"timestamp": 2000} | change)
    with pytest.raises(TraceError, match=r"t.jsonl:" + message):
        mooncake.read(path, turns="added")


def test_a_first_turn_has_no_delay(tmp_path: Path) -> None:
    path = session(tmp_path / "t.jsonl", {"delay": 1})
    with pytest.raises(TraceError, match=r"t.jsonl:1: delay: a delay in the first row"):
        mooncake.read(path, turns="whole")


def test_a_first_turn_at_fault_does_not_put_the_next_at_fault(tmp_path: Path) -> None:
    path = session(
        tmp_path / "t.jsonl",
        {"output_length": -1},
        {"delay": 5, "timestamp": None},
        {"output_length": -2},
    )
    with gathering() as faults:
        mooncake.read(path, turns="added")
    assert [(kind.first.field, kind.lines) for kind in faults.kinds.values()] == [
        ("output_length", [1, 3])
    ]


def test_other_turns_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {})
    with pytest.raises(ConfigError, match=r"trace.turns is delta: give whole, added or null"):
        mooncake.read(path, turns="delta")  # type: ignore[arg-type] # what a YAML could say


def test_dynamos_own_examples() -> None:
    folder = SHARED / "dynamo" / "fixtures"
    if not folder.exists():
        pytest.skip("no shared traces here")
    trace = mooncake.read(folder / "mooncake-delta.jsonl", block_tokens=16, turns="added")
    assert trace.input_tokens.tolist() == [16, 28]
    assert trace.ideal_hit_tokens.tolist() == [0, 16]
    assert trace.turn(1).delay_s == 0.005
    assert trace.header.changes == {"added_made_whole": 1}
    trace = mooncake.read(folder / "mooncake.jsonl", block_tokens=32)
    assert trace.column("arrival_s").tolist() == [0.0, 0.02]
    assert trace.sessions == 2
