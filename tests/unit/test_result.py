"""A run directory: nothing finished is lost, nothing is overwritten, both forms read alike."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness import result
from harness.errors import ConfigError, ResultError
from harness.record import SCHEMA, Record, to_batch
from tests.unit.test_metrics import record


def rows(count: int, first: int = 0) -> list[Record]:
    return [
        record(turn, gaps_us=np.full(turn % 5, turn, np.int32), route="P-D")
        for turn in range(first, first + count)
    ]


def test_what_was_appended_reads_back_in_order(tmp_path: Path) -> None:
    with result.RecordWriter(tmp_path, part_rows=400) as writer:
        for each in rows(9_000):
            writer.append(each)
    parts = sorted(path.name for path in (tmp_path / "records").iterdir())
    assert parts == [f"part-{at:05d}.parquet" for at in range(len(parts))]
    assert len(parts) > 1
    table = result.Run(tmp_path, {}).records()
    assert table.schema.equals(SCHEMA)
    assert table.column("turn").to_pylist() == list(range(9_000))
    assert table.column("gaps_us")[7].as_py() == [7, 7]
    assert result.Run(tmp_path, {}).records(["turn"]).num_columns == 1


def test_a_missing_value_is_null_and_not_zero(tmp_path: Path) -> None:
    with result.RecordWriter(tmp_path) as writer:
        writer.append(record(0, first_token_s=None, gaps_us=None, served_hit_tokens=None))
    row = result.Run(tmp_path, {}).records().to_pylist()[0]
    assert row["first_token_s"] is row["gaps_us"] is row["served_hit_tokens"] is None


def test_an_idle_run_has_its_records_on_disk_within_a_second(tmp_path: Path) -> None:
    with result.RecordWriter(tmp_path) as writer:
        writer.append(record(0))
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and not result.Run(tmp_path, {}).records().num_rows:
            time.sleep(0.02)
        assert result.Run(tmp_path, {}).records().num_rows == 1


def test_kill_9_loses_nothing_older_than_a_second(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from harness.result import RecordWriter
        from tests.unit.test_metrics import record
        with RecordWriter(Path(sys.argv[1]), part_rows=150) as writer:
            for turn in range(200):
                writer.append(record(turn))
                if turn == 99:
                    time.sleep(0.8)
            time.sleep(1.2)
            print("written", flush=True)
            time.sleep(60)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path.cwd()
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"written\n"
        os.kill(child.pid, signal.SIGKILL)
    assert result.Run(tmp_path, {}).records().column("turn").to_pylist() == list(range(200))


@pytest.mark.parametrize("cut", [1, 9, 400])
def test_a_stream_cut_anywhere_reads_up_to_its_last_whole_batch(tmp_path: Path, cut: int) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        for first in (0, 10):
            writer.write_batch(to_batch(rows(10, first)))
    whole = sink.getvalue().to_pybytes()[:-8]  # without the mark of the end
    (folder / "part-00000.arrows").write_bytes(whole[:-cut])
    assert result.Run(tmp_path, {}).records().num_rows == 10
    (folder / "part-00000.arrows").write_bytes(whole[:cut])
    assert result.Run(tmp_path, {}).records().num_rows == 0
    (folder / "part-00000.arrows").write_bytes(b"")
    assert result.Run(tmp_path, {}).records().num_rows == 0


def test_parquet_wins_where_a_part_was_just_being_finished(tmp_path: Path) -> None:
    with result.RecordWriter(tmp_path) as writer:
        writer.append(record(0))
    (tmp_path / "records" / "part-00000.arrows").write_bytes(b"left over")
    assert result.Run(tmp_path, {}).records().num_rows == 1


def test_a_disk_that_fails_says_so_and_keeps_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise OSError(28, "No space left on device")

    def fill_the_disk() -> None:
        with result.RecordWriter(tmp_path) as writer:
            for each in rows(4_000):
                writer.append(each)
            monkeypatch.setattr(result, "to_batch", fail)
            for each in rows(9_000, 4_000):
                writer.append(each)

    with pytest.raises(ResultError, match="No space left"):
        fill_the_disk()
    assert result.Run(tmp_path, {}).records().num_rows == 4_000


def test_an_existing_folder_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").write_text("x")
    with pytest.raises(ConfigError, match=r"never overwritten\. Choose another folder"):
        result.create(tmp_path / "run")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ResultError, match="cannot be made"):
        result.create(tmp_path / "file" / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["precious"]


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="holds no run"):
        result.find_runs(tmp_path)
    with pytest.raises(ResultError, match=r"has no run\.json"):
        result.Run.open(tmp_path)
    (tmp_path / "run.json").write_text("{half")
    with pytest.raises(ResultError, match="cannot be read"):
        result.Run.open(tmp_path)


def test_records_of_another_version_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    pq.write_table(pa.table({"turn": [1]}), folder / "part-00000.parquet")
    with pytest.raises(ResultError, match=r"another version|cannot be read"):
        result.Run(tmp_path, {}).records()
    (folder / "part-00000.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ResultError, match="cannot be read"):
        result.Run(tmp_path, {}).records()


def test_the_schema_and_the_record_have_the_same_fields() -> None:
    assert tuple(SCHEMA.names) == Record._fields


def test_one_record_is_found_in_whatever_part_it_is(tmp_path: Path) -> None:
    with result.RecordWriter(tmp_path, part_rows=3) as writer:
        for each in rows(8):
            writer.append(each)
    run = result.Run(tmp_path, {})
    for turn in range(8):
        assert run.record(turn, ["status", "turn"]) == {"status": "ok", "turn": turn}
    assert run.record(8, ["status"]) is None
