"""The canonical form: what is saved reads back equal, and nothing else is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.errors import TraceError
from harness.trace import SCHEMA, Header, Source, Trace
from traces import canonical

MakeTrace = Callable[..., Trace]
Break = Callable[[pa.Table], pa.Table]

HEADER = Header(
    *("mooncake", 64, "ceil", "global", "ms", "Apache-2.0"),
    sources=(Source("conversation.jsonl", "0" * 64),),
    changes={"rows_out_of_order": 3},
    parameters={"seed": 1, "weights": [0.5, 0.5]},
)


def test_a_trace_reads_back_equal(make_trace: MakeTrace, tmp_path: Path) -> None:
    trace = make_trace(HEADER)
    canonical.save(trace, tmp_path / "trace.parquet")
    again = canonical.read(tmp_path / "trace.parquet")
    assert again.header == HEADER
    assert again.table.equals(trace.table)
    assert again.digest == trace.digest
    assert [each.name for each in tmp_path.iterdir()] == ["trace.parquet"]


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


@pytest.mark.parametrize("content", [b"", b'{"timestamp": 0}\n'])
def test_another_format_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.parquet"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"not a whole Parquet file.*trace=mooncake"):
        canonical.read(path)


def test_no_folder_to_save_in(make_trace: MakeTrace, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be written"):
        canonical.save(make_trace(), tmp_path / "nowhere" / "trace.parquet")
