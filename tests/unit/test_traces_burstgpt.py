"""BurstGPT's rows: both layouts, requests that failed, and each way in which a file is refused."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError, TraceError
from harness.trace import Trace
from traces import burstgpt

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces" / "burstgpt"

FIRST_RELEASE = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
THIRD_FILE = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
)
ROW = "45,ChatGPT,1087,230,1317,Conversation log"


def read(folder: Path, *lines: str, end: str = "\n", **settings: Any) -> Trace:
    path = folder / "t.csv"
    path.write_bytes((end.join(lines) + end).encode())
    return burstgpt.read(path, **settings)


def test_rows_of_the_first_release(tmp_path: Path) -> None:
    trace = read(tmp_path, FIRST_RELEASE, "5,GPT-4,472,18,490,API log", ROW)
    assert trace.sessions == len(trace) == 2
    assert trace.column("arrival_s").tolist() == [0.0, 40.0]
    assert trace.input_tokens.tolist() == [472, 1087]
    assert trace.output_tokens.tolist() == [18, 230]
    assert [trace.turn(row).agent for row in range(2)] == ["API log", "Conversation log"]
    header = trace.header
    assert (header.format, header.time_unit, header.licence) == ("burstgpt", "s", "CC-BY-4.0")
    assert header.changes == {}


def test_rows_of_the_third_file(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        THIRD_FILE,
        "19440110.0,1722ac82-0a46,43,GPT-4,906,446,1352,Conversation log",
        "19440161.25,1722ac82-0a46,2.5,GPT-4,36,29,65,Conversation log",
        "19440192.0,,,ChatGPT,1779,123,1902,API log",
    )
    assert trace.sessions == 3
    assert trace.column("arrival_s").tolist() == [0.0, 51.25, 82.0]
    assert trace.header.changes == {"session_id_not_used": 2}


def test_no_prompt_shares_anything(tmp_path: Path) -> None:
    trace = read(tmp_path, FIRST_RELEASE, ROW, ROW)
    assert trace.header.prefix_data == "absent"
    assert (trace.blocks, trace.ideal_hit_token_weighted) == (0, 0.0)


def test_requests_that_failed(tmp_path: Path) -> None:
    lines = [FIRST_RELEASE, ROW, "46,ChatGPT,9,0,9,API log", "47,ChatGPT,8,3,11,API log"]
    dropped = read(tmp_path, *lines)
    assert dropped.input_tokens.tolist() == [1087, 8]
    assert dropped.header.changes == {"failed_request_dropped": 1}
    kept = read(tmp_path, *lines, failures="keep")
    assert kept.output_tokens.tolist() == [230, 1, 3]
    assert kept.header.changes == {"zero_output_clamped_to_1": 1}
    with pytest.raises(ConfigError, match=r"trace.failures is 'retry': give drop or keep"):
        read(tmp_path, *lines, failures="retry")


def test_nothing_but_failures_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"t.csv: no turns"):
        read(tmp_path, FIRST_RELEASE, "46,ChatGPT,9,0,9,API log")


def test_what_is_mended_is_counted(tmp_path: Path) -> None:
    lines = [ROW, "", "40,GPT-4,9,1,11,API log", "50,GPT-4,0,1,1,API log"]
    trace = read(tmp_path, FIRST_RELEASE, *lines)
    assert trace.input_tokens.tolist() == [9, 1087]
    assert [trace.turn(row).agent for row in range(2)] == ["API log", "Conversation log"]
    assert trace.header.changes == {
        "blank_lines_skipped": 1,
        "empty_input_dropped": 1,
        "rows_out_of_order": 1,
        "total_tokens_is_not_the_sum": 1,
    }


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_columns_may_stand_in_any_order(tmp_path: Path, end: str) -> None:
    names = "\ufeffLog Type,Total tokens,Response tokens,Request tokens,Model,Timestamp"
    trace = read(tmp_path, names, '"API log",9,4,"5","GPT-4, the first",7', end=end)
    turn = trace.turn(0)
    assert (turn.input_tokens, turn.output_tokens, turn.agent) == (5, 4, "API log")


def test_gzip_and_a_last_line_without_its_end(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(gzip.compress(f"{FIRST_RELEASE}\n{ROW}".encode()))
    assert len(burstgpt.read(path)) == 1


BAD_ROWS: dict[str, tuple[str, str]] = {
    "a negative length": ("5,GPT-4,-5,3,-2,API log", "Total tokens: '-2' is below"),
    "a negative answer": ("5,GPT-4,5,-3,2,API log", "Response tokens: '-3' is below.*Give 0 to"),
    "a huge length": ("5,GPT-4,2147483648,3,9,API log", "Request tokens: '2147483648' is above"),
    "no number": ("5,GPT-4,many,3,9,API log", "Request tokens: 'many' is not a whole number"),
    "NaN": ("5,GPT-4,5,nan,9,API log", "Response tokens: 'nan' is not a whole number"),
    "a fraction": ("5,GPT-4,5.0,3,9,API log", "Request tokens: '5.0' is not a whole number"),
    "no total": ("5,GPT-4,5,3,,API log", "Total tokens: nothing is not a whole number"),
    "no model": ("5, ,5,3,8,API log", "Model: ' ' is no name"),
    "another log": ("5,GPT-4,5,3,8,Batch log", "Log Type: 'Batch log' is unknown. Give Conv"),
    "a negative time": ("-5,GPT-4,5,3,8,API log", "Timestamp: '-5' is not a time. Give s, fin"),
    "a time that is NaN": ("NaN,GPT-4,5,3,8,API log", "Timestamp: 'NaN' is not a time"),
    "an infinite time": ("inf,GPT-4,5,3,8,API log", "Timestamp: 'inf' is not a time"),
    "a date": ("1700000000,GPT-4,5,3,8,API log", "Timestamp: '1700000000' s is over ten years"),
    "a field too few": ("5,GPT-4,5,3,8", "5 fields, where the header has 6"),
    "a field too many": ("5,GPT-4,5,3,8,API log,1", "7 fields, where the header has 6"),
    "an open quote": ('5,"GPT-4,5,3,8,API log', "a quote that is not closed in its line"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_refused(tmp_path: Path, case: str) -> None:
    row, message = BAD_ROWS[case]
    with pytest.raises(TraceError, match=r"t.csv:3: " + message):
        read(tmp_path, FIRST_RELEASE, ROW, row, ROW)


def test_a_bad_elapsed_time_is_refused(tmp_path: Path) -> None:
    good = "5,,,GPT-4,5,3,8,API log"
    with pytest.raises(TraceError, match=r"t.csv:3: Elapsed time: '-2' is not a time"):
        read(tmp_path, THIRD_FILE, good, "6,,-2,GPT-4,5,3,8,API log")


@pytest.mark.parametrize("name", burstgpt.COLUMNS)
def test_a_missing_column_is_named(tmp_path: Path, name: str) -> None:
    names = [each for each in FIRST_RELEASE.split(",") if each != name]
    with pytest.raises(TraceError, match=rf"t.csv:1: {name}: missing"):
        read(tmp_path, ",".join(names), ROW)


def test_an_unknown_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"t.csv:1: User: unknown column.*Elapsed time"):
        read(tmp_path, f"{FIRST_RELEASE},User", f"{ROW},me")


BAD_FILES: dict[str, tuple[str, str]] = {
    "empty": ("", "t.csv: empty"),
    "header only": (FIRST_RELEASE + "\n", "t.csv: no turns"),
    "half a line": (f"{FIRST_RELEASE}\n{ROW}\n46,Chat", "t.csv:3: half a line: .*cut off here"),
    "half a word": (f"{FIRST_RELEASE}\n{ROW}\n4,GPT-4,5,3,8,API l", "t.csv:3: Log Type: 'API l'"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_one_error(tmp_path: Path, case: str) -> None:
    content, message = BAD_FILES[case]
    path = tmp_path / "t.csv"
    path.write_text(content)
    with pytest.raises(TraceError, match=message):
        burstgpt.read(path)


def test_the_published_rows() -> None:
    path = SHARED / "sample_rows.csv"
    if not path.exists():
        pytest.skip("../shared is absent: no published traces to compare with")
    trace = burstgpt.read(path)
    assert trace.column("arrival_s").tolist() == [0, 40, 113]
    assert trace.header.changes == {}
