"""Bad files: each is one TraceError that names the file, the line, the field and what to do."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness.errors import TraceError
from traces.source import Row, json_document, json_rows, locate_file, read_text

GOOD = b'{"a": 1}\n{"a": 2}\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def values(path: Path) -> list[Any]:
    return [row.values["a"] for row in json_rows(locate_file(path), Counter[str]().update)]


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "trace.jsonl: empty. Fetch the file again"),
    "only blank lines": (b"\n \n", "empty"),
    "LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "Git LFS pointer.*Run `git lfs pull`",
    ),
    "UTF-16": (GOOD.decode().encode("utf-16"), "UTF-16 text.*Save it as UTF-8"),
    "zip": (b"PK\x03\x04rest", "a zip archive"),
    "zstd": (b"\x28\xb5\x2f\xfdrest", "zstd.*Unpack it with `zstd -d`"),
    "Parquet": (b"PAR1rest", "Parquet.*trace=canonical"),
    "not UTF-8": (GOOD + b'{"a": "\xe9"}\n', r"trace.jsonl:3: byte 8 is not UTF-8 \(0xe9\)"),
    "gzip cut off": (gzip.compress(GOOD * 50)[:-12], "gzip stream is damaged or cut off"),
    "gzip damaged": (gzip.compress(GOOD)[:12] + b"\xff" * 20, "gzip stream is damaged"),
    "half a line": (GOOD + b'{"a": 3, "b": [1, 2', "trace.jsonl:3: half a line.*cut off"),
    "half a string": (GOOD + b'{"a": 3, "b": "xy', "trace.jsonl:3: half a line.*cut off"),
    "half a literal": (GOOD + b'{"a": tru', "trace.jsonl:3: half a line.*cut off"),
    "not JSON": (b"{'a': 1}\n" + GOOD, "trace.jsonl:1: not JSON.* at column 2"),
    "two objects in a line": (b'{"a": 1} {"a": 2}\n', "trace.jsonl:1: not JSON: Extra data"),
    "NaN": (b'{"a": NaN}\n', "trace.jsonl:1: .*NaN"),
    "infinite": (b'{"a": -Infinity}\n', "trace.jsonl:1: .*-Infinity"),
    "a name twice": (b'{"a": 1, "a": 2}\n', "trace.jsonl:1: .*'a' is given twice"),
    "too many digits": (b'{"a": ' + b"1" * 5000 + b"}\n", "trace.jsonl:1: not usable JSON"),
    "too deep": (b'{"a":' + b"[" * 99999 + b"\n", "trace.jsonl:1: not usable JSON"),
    "a list": (b"[1, 2]\n", "trace.jsonl:1: a list, where a JSON object is wanted"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_one_error(path: Path, case: str) -> None:
    content, message = BAD_FILES[case]
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as caught:
        values(path)
    assert caught.value.path == path
    assert caught.value.do


def test_a_missing_file_names_its_neighbours(path: Path) -> None:
    path.write_bytes(GOOD)
    with pytest.raises(TraceError, match=r"no such file. Its folder has trace.jsonl"):
        locate_file(path.with_name("traces.jsonl"))
    with pytest.raises(TraceError, match="fetch the trace first"):
        locate_file(path.with_name("quite different"))
    with pytest.raises(TraceError, match=r"Its folder .*nowhere does not exist either"):
        locate_file(path.parent / "nowhere" / "trace.jsonl")


def test_a_folder_names_its_files(path: Path) -> None:
    with pytest.raises(TraceError, match=r"a folder.* it has none"):
        locate_file(path.parent)
    for at in range(6):
        path.with_name(f"{at}.jsonl").touch()
    with pytest.raises(TraceError, match=r"0.jsonl, 1.jsonl, 2.jsonl, 3.jsonl and 2 more"):
        locate_file(path.parent)


@pytest.mark.parametrize(
    "content",
    [
        GOOD,
        GOOD[:-1],
        GOOD.replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + GOOD,
        gzip.compress(GOOD),
        gzip.compress(b"\xef\xbb\xbf" + GOOD[:-1]),
    ],
    ids=["plain", "no last newline", "CRLF", "BOM", "gzip", "gzip and BOM"],
)
def test_good_files_read_the_same(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert values(path) == [1, 2]


def test_blank_lines_are_counted_and_keep_the_numbers(path: Path) -> None:
    path.write_bytes(b'{"a": 1}\n\n  \n{"a": 2}\n')
    changes: list[str] = []
    assert [row.line for row in json_rows(path, changes.append)] == [1, 4]
    assert changes == ["blank_lines_skipped"] * 2


def test_a_document_names_the_line_of_its_fault(path: Path) -> None:
    path.write_text('{\n"a": 1\n"b": 2}\n')
    with pytest.raises(TraceError, match=r"trace.jsonl:3: not JSON: Expecting ',' delimiter"):
        json_document(read_text(path), path)
    path.write_text('{"a": [{"b": 1},\n{"b": 2}')
    with pytest.raises(TraceError, match=r"trace.jsonl:2: half a line"):
        json_document(read_text(path), path)


def row(**fields: Any) -> Row:
    return Row(fields, Path("trace.jsonl"), 7)


BAD_FIELDS: dict[str, tuple[str, Any, str]] = {
    "a boolean count": ("tokens", True, "true is not a whole number"),
    "a string of digits": ("tokens", "12", '"12" is not a whole number'),
    "a fraction": ("tokens", 1.5, "1.5 is not a whole number"),
    "a null count": ("tokens", None, "null is not a whole number"),
    "a negative count": ("tokens", -1, "-1 is below what is possible"),
    "a huge count": ("tokens", 2**31, "2147483648 is above.*0 to 2147483647 tokens"),
    "a boolean time": ("time_s", False, "false is not a number"),
    "a time as a string": ("time_s", "0", '"0" is not a number'),
    "a negative time": ("time_s", -0.5, "-0.5 is not a time"),
    "an infinite time": ("time_s", float("inf"), "Infinity is not a time"),
    "no time": ("time_s", float("nan"), "NaN is not a time"),
    "a date in ms": ("time_s", 1.7e12, ".*over ten years: the unit is probably wrong"),
    "a time beyond floats": ("time_s", 10**400, ".*over ten years"),
    "an object for a name": ("text", {}, "an object is not a string"),
    "half a character": ("text", "\ud83d", "half a surrogate pair"),
    "ids not in a list": ("block_ids", "12", '"12" is not a list'),
    "a negative id": ("block_ids", [1, -1], r"\[1\]: -1 is not a block id"),
    "an id of 65 bits": ("block_ids", [2**64], r"\[0\]: 18446744073709551616 is not"),
    "a boolean id": ("block_ids", [1, True], r"\[1\]: true is not a block id"),
    "a fraction as an id": ("block_ids", [1.0], r"\[0\]: 1.0 is not a block id"),
    "ids of two kinds": ("block_ids", ["a", 1], r"\[1\]: 1 is not a block id"),
    "rows not objects": ("rows", [{}, 1], r"\[1\]: 1 is not an object"),
}


@pytest.mark.parametrize("case", BAD_FIELDS)
def test_a_bad_field_is_named(case: str) -> None:
    getter, value, message = BAD_FIELDS[case]
    with pytest.raises(TraceError, match=r"trace.jsonl:7: field(: )?" + message):
        getattr(row(field=value), getter)("field")


def test_good_fields_come_back() -> None:
    assert row(a=0).tokens("a") == 0
    assert row(a=4500).time_s("a", "ms") == 4.5
    assert row(a=None).time_s_or_none("a") is None
    assert row().time_s_or_none("a") is None
    assert row(a=[0, 2**64 - 1]).block_ids("a") == [0, 2**64 - 1]
    assert row(a=["f00", "ba4"]).block_ids("a") == ["f00", "ba4"]
    assert row(a=[]).block_ids("a") == []


def test_a_missing_field_names_the_closest() -> None:
    with pytest.raises(TraceError, match=r"output_length: missing.*is 'output_tokens'.*input_l"):
        row(input_length=1, output_tokens=2).expect(["input_length", "output_length"])
    with pytest.raises(TraceError, match=r"output_length: missing. Give output_length"):
        row(x=1).expect(["output_length"])


def test_an_unknown_field_lists_the_known() -> None:
    with pytest.raises(TraceError, match=r"c: unknown field. The known ones are a, b"):
        row(a=1, c=2).expect(["a"], ["b"])


def test_a_nested_field_has_its_whole_name() -> None:
    outer = row(requests=[{"in": -1}])
    with pytest.raises(TraceError, match=r"trace.jsonl:7: requests\[0\].in: -1"):
        outer.rows("requests")[0].tokens("in")
