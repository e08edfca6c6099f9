"""Azure's rows: dates to 100 ns, columns by name, and each way in which a file is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from harness.errors import TraceError
from harness.trace import Header, Trace
from traces import azure
from traces.builder import TraceBuilder, single_turns

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces" / "azure-llm-2023"

NAMES = "TIMESTAMP,ContextTokens,GeneratedTokens"
FIRST = "2023-11-16 18:17:03.9799600,4808,10"
SECOND = "2023-11-16 18:17:04.0319601,3180,8"


def read(folder: Path, *lines: str, end: str = "\n") -> Trace:
    path = folder / "t.csv"
    path.write_bytes((end.join(lines) + end).encode())
    return azure.read(path)


def test_rows_become_turns(tmp_path: Path) -> None:
    trace = read(tmp_path, NAMES, FIRST, SECOND)
    assert trace.sessions == len(trace) == 2
    assert trace.column("arrival_s").tolist() == [0.0, 0.0520001]
    assert trace.input_tokens.tolist() == [4808, 3180]
    assert trace.output_tokens.tolist() == [10, 8]
    assert [turn.agent for turn in map(trace.turn, range(2))] == ["main", "main"]
    header = trace.header
    assert (header.format, header.time_unit, header.licence) == ("azure", "100 ns", "CC-BY-4.0")
    assert header.changes == {}
    assert [source.name for source in header.sources] == ["t.csv"]


def test_no_prompt_shares_anything(tmp_path: Path) -> None:
    trace = read(tmp_path, NAMES, FIRST, FIRST)
    assert trace.header.prefix_data == "absent"
    assert trace.blocks == 0
    assert trace.runs(0) == trace.runs(1) == []
    assert trace.ideal_hit_tokens.tolist() == [0, 0]


def test_a_whole_week_keeps_100_ns(tmp_path: Path) -> None:
    week_later = "2023-11-23 18:17:03.9799601,1,1"
    trace = read(tmp_path, NAMES, FIRST, week_later)
    assert trace.column("arrival_s")[1] == 7 * 86400 + 1e-7


@pytest.mark.parametrize(
    ("date", "after_s"),
    [
        ("2024-05-12 00:00:01+00:00", 1.0),
        ("2024-05-12 00:00:00.001163+00:00", 0.001163),
        ("2024-05-12T00:00:00.5Z", 0.5),
        ("2024-05-12 00:00:02", 2.0),
        ("2024-05-12 02:00:03.0000001+02:00", 3.0000001),
        ("2024-05-11 18:30:04.123456789-05:30", 4.123456789),
    ],
)
def test_dates_of_both_years(tmp_path: Path, date: str, after_s: float) -> None:
    trace = read(tmp_path, NAMES, "2024-05-12 00:00:00+00:00,9,9", f"{date},9,9")
    assert trace.column("arrival_s").tolist() == [0.0, after_s]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_columns_may_stand_in_any_order(tmp_path: Path, end: str) -> None:
    lines = [
        "\ufeffGeneratedTokens,TIMESTAMP,ContextTokens",
        '10,"2023-11-16 18:17:03.9799600","4808"',
    ]
    trace = read(tmp_path, *lines, end=end)
    assert (trace.turn(0).input_tokens, trace.turn(0).output_tokens) == (4808, 10)


def test_gzip_and_a_last_line_without_its_end(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(gzip.compress(f"{NAMES}\r\n{FIRST}\r\n{SECOND}".encode()))
    assert len(azure.read(path)) == 2


def test_what_is_mended_is_counted(tmp_path: Path) -> None:
    lines = [SECOND, "", FIRST, "2023-11-16 18:17:05,0,4", "2023-11-16 18:17:06,7,0"]
    trace = read(tmp_path, "", NAMES, *lines)
    assert trace.input_tokens.tolist() == [4808, 3180, 7]
    assert trace.output_tokens.tolist() == [10, 8, 1]
    assert trace.header.changes == {
        "blank_lines_skipped": 1,
        "empty_input_dropped": 1,
        "rows_out_of_order": 1,
        "zero_output_clamped_to_1": 1,
    }


def test_it_is_what_the_builder_makes(tmp_path: Path) -> None:
    """Rows at random, many at one time: the same digest and the same counts."""
    random = np.random.default_rng(0)
    recorded_s = random.integers(0, 40, 500) / 8
    inputs, outputs = random.integers(0, 5, 500), random.integers(0, 5, 500)
    path = tmp_path / "t.csv"
    path.touch()
    header = Header("azure", 64, "floor", "file", "s", "none", changes={"before": 1})
    builder = TraceBuilder(header, ids_field="")
    builder.file(path)
    for row in range(500):
        builder.add(
            row,
            session=row,
            recorded_s=float(recorded_s[row]),
            arrival_s=float(recorded_s[row]),
            input_tokens=int(inputs[row]),
            output_tokens=int(outputs[row]),
            block_ids=[],
        )
    built = builder.build()
    made = single_turns(
        header, path, recorded_s=recorded_s, input_tokens=inputs, output_tokens=outputs
    )
    assert made.table.equals(built.table)
    assert made.header == built.header


BAD_ROWS: dict[str, tuple[str, str]] = {
    "a negative length": (
        "2023-11-16 18:17:04,-5,8",
        "ContextTokens: '-5' is below what is possible. Give 0 to 2147483647 tokens",
    ),
    "a huge length": (
        "2023-11-16 18:17:04,5,2147483648",
        "GeneratedTokens: '2147483648' is above what is possible",
    ),
    "a length of many digits": (
        f"2023-11-16 18:17:04,{'9' * 50},8",
        r"ContextTokens: '9{40}\.\.\.' is above",
    ),
    "no number": ("2023-11-16 18:17:04,many,8", "ContextTokens: 'many' is not a whole number"),
    "NaN": ("2023-11-16 18:17:04,NaN,8", "ContextTokens: 'NaN' is not a whole number"),
    "a fraction": ("2023-11-16 18:17:04,5.0,8", "ContextTokens: '5.0' is not a whole number"),
    "nothing": ("2023-11-16 18:17:04,5,", "GeneratedTokens: nothing is not a whole number"),
    "a time in seconds": ("17.5,5,8", "TIMESTAMP: '17.5' is not a date. Give a date such as 2023"),
    "no such month": ("2023-13-16 18:17:04,5,8", "TIMESTAMP: '2023-13-16 18:17:04' is not a date"),
    "no such day": ("2023-02-30 18:17:04.5,5,8", "TIMESTAMP: '2023-02-30.* is not a date"),
    "no such hour": ("2023-11-16 25:17:04,5,8", "TIMESTAMP: '2023-11-16 25.* is not a date"),
    "no such zone": ("2023-11-16 18:17:04+99:00,5,8", "TIMESTAMP: .*99:00' is not a date"),
    "ten digits": ("2023-11-16 18:17:04.0123456789,5,8", "TIMESTAMP: .* is not a date"),
    "a field too many": (f"{SECOND},1", "4 fields, where the header has 3. Give TIMESTAMP, Con"),
    "a field too few": ("2023-11-16 18:17:04,5", "2 fields, where the header has 3"),
    "blanks": ("  ", "1 fields, where the header has 3"),
    "an open quote": ('"2023-11-16 18:17:04,5,8', "a quote that is not closed in its line"),
    "a line break in a value": (
        '2023-11-16 18:17:04,"5\n",8',
        "ContextTokens: a quote that is not",
    ),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_refused(tmp_path: Path, case: str) -> None:
    row, message = BAD_ROWS[case]
    with pytest.raises(TraceError, match=r"t.csv:4: " + message) as caught:
        read(tmp_path, NAMES, FIRST, "", row, SECOND)
    assert caught.value.line == 4


BAD_HEADERS: dict[str, tuple[str, str]] = {
    "a wrong name": (
        "TIMESTAMP,ContextTokens,OutputTokens",
        "GeneratedTokens: missing; the closest column is 'OutputTokens'. Give a header line with",
    ),
    "no header": (SECOND, "TIMESTAMP: missing. Give a header line with TIMESTAMP, ContextTokens"),
    "one column more": (f"{NAMES},NumImages", "NumImages: unknown column. The known ones are TIM"),
    "a column without a name": (f"{NAMES},", "a column without a name: unknown column"),
    "a column twice": (f"{NAMES},TIMESTAMP", "TIMESTAMP: a column that is here twice"),
    "an open quote": ('"TIMESTAMP,ContextTokens', "header: not a line of CSV"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_a_bad_header_is_refused(tmp_path: Path, case: str) -> None:
    names, message = BAD_HEADERS[case]
    with pytest.raises(TraceError, match=r"t.csv:1: " + message):
        read(tmp_path, names, FIRST)


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "t.csv: empty. Fetch the file again"),
    "only blank lines": (b"\n\r\n", "t.csv: empty"),
    "header only": (NAMES.encode(), "t.csv: no turns"),
    "a header and blank lines": (f"\n{NAMES}\r\n\r\n".encode(), "t.csv: no turns"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
    "UTF-16": (NAMES.encode("utf-16"), "UTF-16 text"),
    "not UTF-8": (f"{NAMES}\n{FIRST}\n".encode() + b"\xe9,1,1\n", "t.csv:3: byte 1 is not UTF-8"),
    "half a line": (f"{NAMES}\n{FIRST}\n2023-11-16 18:1".encode(), "t.csv:3: half a line: .*cut"),
    "half a quote": (f'{NAMES}\n{FIRST}\n"2023-11-16 18:1'.encode(), "t.csv:3: a quote that"),
    "gzip cut off": (
        gzip.compress(f"{NAMES}\n{FIRST}\n".encode() * 9)[:-12],
        "gzip stream is damaged or cut off",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_one_error(tmp_path: Path, case: str) -> None:
    content, message = BAD_FILES[case]
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as caught:
        azure.read(path)
    assert caught.value.do


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("2023-11-16 18:17:04,x,8", "ContextTokens: 'x' is not"),
        ("2023-11-16 18:17:04", "1 fields, where"),
        ('2023-11-16 18:17:04,"8,8', "a quote that is not closed"),
    ],
)
def test_the_line_is_right_far_into_a_file(tmp_path: Path, bad: str, message: str) -> None:
    """Beyond the first batches, which are of a megabyte."""
    rows = [FIRST] * 100_000
    with pytest.raises(TraceError, match=rf"t.csv:90003: {message}"):
        read(tmp_path, NAMES, "", *rows[:90_000], bad, *rows[90_000:])


def test_the_published_trace() -> None:
    path = SHARED / "AzureLLMInferenceTrace_code.csv"
    if not path.exists():
        pytest.skip("../shared is absent: no published traces to compare with")
    trace = azure.read(path)
    assert len(trace) == trace.sessions == 8819
    assert trace.header.changes == {}
    assert (trace.input_tokens.sum(), trace.output_tokens.sum()) == (18059974, 245896)
    assert trace.column("arrival_s")[-1] == pytest.approx(3435.9480560, abs=1e-9)
    assert trace.ideal_hit_token_weighted == 0
