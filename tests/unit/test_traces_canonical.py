"""The canonical form: what is saved reads back equal, and nothing else is read."""

from __future__ import annotations

import errno
import gzip
import json
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.errors import ConfigError, TraceError
from harness.stream import Stream
from harness.trace import SCHEMA, Header, Source, Trace
from traces import canonical, constant
from traces.faults import gathering

MakeTrace = Callable[..., Trace]
Break = Callable[[pa.Table], pa.Table]

HEADER = Header(
    *("mooncake", 64, "ceil", "global", "ms", "Apache-2.0"),
    sources=(Source("conversation.jsonl", "0" * 64),),
    changes={"rows_out_of_order": 3},
    parameters={"seed": 1, "weights": [0.5, 0.5]},
)


@pytest.mark.parametrize("name", ["trace.parquet", "trace.jsonl", "trace.jsonl.gz"])
def test_a_trace_reads_back_equal(make_trace: MakeTrace, tmp_path: Path, name: str) -> None:
    trace = make_trace(HEADER)
    canonical.save(trace, tmp_path / name)
    again = canonical.read(tmp_path / name)
    assert again.header == HEADER
    assert again.table.equals(trace.table)
    assert again.digest == trace.digest
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_a_form_is_known_by_what_it_holds_and_not_by_its_name(
    make_trace: MakeTrace, tmp_path: Path
) -> None:
    trace = make_trace(HEADER)
    for name in ("trace.parquet", "trace.jsonl", "trace.jsonl.gz"):
        canonical.save(trace, tmp_path / name)
        assert canonical.read((tmp_path / name).rename(tmp_path / "trace")).digest == trace.digest


def test_the_name_says_in_which_form_to_save(make_trace: MakeTrace, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"x\.csv: name a file that ends in \.parquet, \.jsonl"):
        canonical.save(make_trace(), tmp_path / "x.csv")
    assert not list(tmp_path.iterdir())
    canonical.save(make_trace(), tmp_path / "a.jsonl.gz")
    canonical.save(make_trace(), tmp_path / "b.jsonl.gz")
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    canonical.save(make_trace(), tmp_path / "c.jsonl")
    plain = gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes())
    assert plain == (tmp_path / "c.jsonl").read_bytes()


def header_with(old: str, new: str) -> Break:
    def change(table: pa.Table) -> pa.Table:
        text = table.schema.metadata[b"relaybench.header"].decode()
        assert old in text
        return table.replace_schema_metadata({"relaybench.header": text.replace(old, new)})

    return change


def nullable(table: pa.Table) -> pa.Table:
    field = pa.field("session", pa.int32())
    return table.set_column(0, field, pa.array([0, None, 0, 0], pa.int32()))


def two_gates(table: pa.Table) -> pa.Table:
    at = table.schema.get_field_index("delay_s")
    return table.set_column(at, SCHEMA.field(at), pa.array([1.0, None, 1.0, 2.0]))


BROKEN: dict[str, tuple[Break, str]] = {
    "no header": (
        lambda table: table.replace_schema_metadata(),
        "relaybench.header: Parquet without a trace's header",
    ),
    "half a header": (header_with("}", ""), "a header that cannot be understood"),
    "a header without a size": (header_with("block_tokens", "block"), "cannot be understood"),
    "a size in quotes": (header_with("64,", '"64",'), "block_tokens is '64'"),
    "an unknown rule": (header_with('"ceil"', '"round"'), "partial_block is 'round'"),
    "a column less": (
        lambda table: table.drop_columns(["agent"]),
        "agent: missing, not string not null. Give session,",
    ),
    "a column more": (lambda table: table.append_column("x", table["session"]), "columns: .* x"),
    "another type": (
        lambda table: table.set_column(0, "session", table["session"].cast(pa.int64())),
        "session: int64.*, not int32 not null",
    ),
    "a null": (nullable, "session: int32, not int32 not null"),
    "a broken rule": (two_gates, "delay_s|arrival_s: turn 0 .*both arrival_s and delay_s"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_another_table_is_refused(make_trace: MakeTrace, tmp_path: Path, case: str) -> None:
    change, message = BROKEN[case]
    path = tmp_path / "trace.parquet"
    canonical.save(make_trace(HEADER), path)
    pq.write_table(change(pq.read_table(path)), path)
    with pytest.raises(TraceError, match=message) as caught:
        canonical.read(path)
    assert caught.value.path == path
    assert str(caught.value).startswith(str(path))


def test_a_file_cut_off_is_refused(make_trace: MakeTrace, tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    canonical.save(make_trace(), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceError, match="not a whole Parquet file"):
        canonical.read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b'{"timestamp": 0}\n', r":1: relaybench: not a trace in our own form.*trace=mooncake"),
        (b"a,b\n1,2\n", ":1: not JSON"),
    ],
)
def test_another_format_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "trace.parquet"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        canonical.read(path)


def test_no_folder_to_save_in(make_trace: MakeTrace, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be written"):
        canonical.save(make_trace(), tmp_path / "nowhere" / "trace.parquet")


def breaking_off(trace: Trace, error: BaseException) -> Stream:
    def tables() -> Iterator[pa.Table]:
        yield trace.table
        raise error

    return Stream(trace.header, tables())


@pytest.mark.parametrize("name", ["trace.parquet", "trace.jsonl", "trace.jsonl.gz"])
def test_nothing_half_written_stays(make_trace: MakeTrace, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    canonical.save(make_trace(), path)
    before = path.read_bytes()
    for error in (ConfigError("no such draw"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            canonical.save(breaking_off(make_trace(), error), path)
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(TraceError, match=r"No space left on device.*a folder that .* has room"):
        canonical.save(breaking_off(make_trace(), full), path)
    assert [each.name for each in tmp_path.iterdir()] == [name]
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["trace.parquet", "trace.jsonl", "trace.jsonl.gz"])
def test_a_disk_that_fills_is_one_message(tmp_path: Path, name: str) -> None:
    """A file may grow to so many bytes here: what writes more meets an error of the system's."""
    trace = constant.generate(
        requests=9_000, seed=1, requests_per_s=4.0, input_tokens=640, output_tokens=8,
        hits=[0.5], weights=[1], block_tokens=64,
    )  # fmt: skip
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, hard))
    try:
        with pytest.raises(TraceError, match=r"cannot be written .*File too large"):
            canonical.save(trace, tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_left_is_written_over(make_trace: MakeTrace, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl.new").write_text("half a li")
    canonical.save(make_trace(), tmp_path / "trace.jsonl")
    assert canonical.read(tmp_path / "trace.jsonl").digest == make_trace().digest
    assert [each.name for each in tmp_path.iterdir()] == ["trace.jsonl"]


# ---- JSONL


FIRST = {
    "relaybench": {
        "format": "mine",
        "block_tokens": 64,
        "partial_block": "floor",
        "id_scope": "file",
        "time_unit": "s",
        "licence": "none",
    }
}
TURN = {
    "session": 0,
    "turn_index": 0,
    "parents": [],
    "recorded_s": 0.0,
    "arrival_s": 0.0,
    "input_tokens": 128,
    "output_tokens": 20,
    "runs": [[0, 2]],
    "agent": "main",
}
LATER = {
    "session": 0,
    "turn_index": 1,
    "parents": [0],
    "recorded_s": 4.5,
    "delay_s": 1.5,
    "input_tokens": 192,
    "output_tokens": 30,
    "runs": [[0, 3]],
    "agent": "\u2028 sub",
}


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_trace_written_by_hand(tmp_path: Path) -> None:
    trace = canonical.read(written(tmp_path / "mine.jsonl", FIRST, TURN, LATER))
    assert trace.header == Header("mine", 64, "floor", "file", "s", "none")
    first, later = trace.turn(0), trace.turn(1)
    assert (first.parents, first.arrival_s, first.delay_s) == ((), 0.0, None)
    assert (later.parents, later.arrival_s, later.delay_s) == ((0,), None, 1.5)
    assert (later.recorded_s, later.input_tokens, later.output_tokens) == (4.5, 192, 30)
    assert (later.runs, later.agent) == ([(0, 3)], "\u2028 sub")
    assert trace.ideal_hit_tokens.tolist() == [0, 128]


def test_what_is_written_is_one_turn_a_line(make_trace: MakeTrace, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    canonical.save(make_trace(HEADER, recorded_s=[0.0, 0.1 + 0.2, 2.0, 5.0]), path)
    first, *rows = path.read_text().splitlines()
    assert json.loads(first) == {"relaybench": json.loads(HEADER.to_json())}
    assert json.loads(rows[1])["recorded_s"] == 0.30000000000000004
    assert json.loads(rows[3]) == {
        "session": 0,
        "turn_index": 2,
        "parents": [2],
        "recorded_s": 5.0,
        "delay_s": 2.0,
        "input_tokens": 320,
        "output_tokens": 3,
        "runs": [[0, 5]],
        "agent": "main",
    }


def test_blank_lines_are_counted_and_lines_stay_right(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n\n".join(json.dumps(each) for each in (FIRST, TURN, LATER)))
    assert canonical.read(path).header.changes == {"blank_lines_skipped": 2}
    wrong = {**LATER, "recorded_s": -1.0}
    path.write_text("\n\n".join(json.dumps(each) for each in (FIRST, TURN, wrong)))
    with pytest.raises(TraceError, match="earlier than the row before it") as caught:
        canonical.read(path)
    assert (caught.value.path, caught.value.line, caught.value.field) == (path, 5, "recorded_s")


def changed(**values: Any) -> dict[str, Any]:
    return {"relaybench": {**FIRST["relaybench"], **values}}


@pytest.mark.parametrize(
    ("rows", "line", "field", "message"),
    [
        ([changed(block_tokens="64")], 1, "relaybench", "block_tokens is '64'"),
        ([changed(partial_block="round")], 1, "relaybench", "partial_block is 'round'"),
        ([changed(colour="red")], 1, "relaybench", "unexpected keyword argument 'colour'"),
        ([changed(changes={"a": "b"})], 1, "relaybench", "changes is"),
        ([changed(changes=[])], 1, "relaybench", r"changes is \[\]"),
        ([changed(sources=[{"name": 1, "sha256": ""}])], 1, "relaybench", "sources is"),
        ([{"relaybench": 5}], 1, "relaybench", "cannot be understood"),
        ([FIRST], None, None, "no turns"),
        ([FIRST, {**TURN, "colour": 1}], 2, "colour", "unknown field"),
        ([FIRST, {**TURN, "session": "0"}], 2, "session", "not a whole number"),
        ([FIRST, {**TURN, "recorded_s": "0"}], 2, "recorded_s", "'0' is not a time"),
        ([FIRST, {**TURN, "arrival_s": True}], 2, "arrival_s", "True is not a time"),
        ([FIRST, {**TURN, "arrival_s": 10**400}], 2, "arrival_s", "is not a time"),
        ([FIRST, {**TURN, "parents": [0.5]}], 2, "parents", "not a list of whole numbers"),
        ([FIRST, {**TURN, "runs": {}}], 2, "runs", "not a list"),
        ([FIRST, {**TURN, "runs": [[0, 2, 3]]}], 2, r"runs[0]", "is no run"),
        ([FIRST, {**TURN, "runs": [[0, 2**40]]}], 2, r"runs[0]", "is no run"),
        ([FIRST, {**TURN, "runs": [[0, -1]]}], 2, r"runs[0]", "not a list of whole numbers"),
        ([FIRST, {**TURN, "runs": [0, 2]}], 2, r"runs[0]", "not a list of whole numbers"),
        ([FIRST, TURN, {**LATER, "parents": [7]}], 3, "parents", "an orphan"),
        ([FIRST, {**TURN, "delay_s": 1}], 2, "arrival_s", "both arrival_s and delay_s"),
        ([FIRST, {**TURN, "arrival_s": None}], 2, "arrival_s", "neither arrival_s nor delay_s"),
    ],
)
def test_a_line_at_fault_is_named(
    tmp_path: Path, rows: list[dict[str, Any]], line: int | None, field: str, message: str
) -> None:
    path = written(tmp_path / "mine.jsonl", *rows)
    with pytest.raises(TraceError, match=message) as caught:
        canonical.read(path)
    assert (caught.value.path, caught.value.line, caught.value.field) == (path, line, field)


def test_all_rows_at_fault_are_gathered(tmp_path: Path) -> None:
    rows = [{**TURN, "session": "x"}, TURN, {**TURN, "session": None}, {**TURN, "runs": 1}]
    with gathering() as faults:
        canonical.read(written(tmp_path / "mine.jsonl", FIRST, *rows))
    assert [each.lines for each in faults.kinds.values()] == [[2, 4], [5]]
    assert faults.count == 3


def test_many_rows_are_read_in_pieces(make_trace: MakeTrace, tmp_path: Path) -> None:
    rows = 40_000
    path = tmp_path / "long.jsonl"
    trace = make_trace(
        replace(HEADER, session_starts="unknown"),
        session=range(rows), turn_index=[0] * rows, parents=[[]] * rows,
        recorded_s=[row / 7 for row in range(rows)], arrival_s=[row / 3 for row in range(rows)],
        delay_s=[None] * rows, input_tokens=[64] * rows, output_tokens=[1] * rows,
        run_starts=[[row] for row in range(rows)], run_lengths=[[1]] * rows, agent=["é"] * rows,
    )  # fmt: skip
    canonical.save(trace, path)
    assert canonical.read(path).digest == trace.digest
