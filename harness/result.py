"""A run directory: written while the run goes on, readable at any moment, even after kill -9.

    run.json          configuration, seeds, trace, versions, backend, host, validity and why
    records/          part-00000.parquet ... finished parts; part-00003.arrows the one being written
    summary.parquet   one row for the whole run and one a stratum

A part is an Arrow IPC stream, appended to unbuffered, until it is full or the run ends; then it
becomes Parquet. A stream is readable up to its last whole batch however the process ended, which
an open Parquet file is not.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from harness import metrics
from harness.errors import ConfigError, ResultError
from harness.prices import Prices
from harness.record import SCHEMA, Record, to_batch

MANIFEST = "run.json"
SUMMARY_FILE = "summary.parquet"
RECORDS = "records"

_NEEDED = (
    "backend", "trace", "window", "slo", "prices", "clock", "validity", "partial", "started"
)  # fmt: skip
_BATCH_ROWS = 4_000
_PART_ROWS = 100_000
_FLUSH_S = 0.5


def create(path: Path) -> Path:
    """Make a new run directory. Raises `ConfigError` rather than touch one that exists."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        raise ResultError(f"{path} cannot be made: {error.strerror}") from error
    return path


def refuse_existing(path: Path) -> None:
    """Raise `ConfigError` where a run could not be made, before any work goes into it."""
    if path.exists():
        raise _exists(path)


def _exists(path: Path) -> ConfigError:
    return ConfigError(f"{path} exists, and is never overwritten. Choose another folder (out)")


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Replace `run.json` in one step, so that it is whole at any moment."""
    write_json(path / MANIFEST, manifest)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file in one step; what is not finite stands in it as words. Raises `ResultError`."""
    try:
        fresh = path.with_name(f"{path.name}.new")
        text = json.dumps(_finite(values), indent=2, allow_nan=False)
        fresh.write_text(text + "\n", encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        raise ResultError(f"{path} cannot be written: {error.strerror}") from error


def _finite(value: Any) -> Any:
    """The same, with infinity and NaN as words: JSON has no numbers for them."""
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_text(path: Path, text: str) -> None:
    """A small file of words. Raises `ResultError`."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ResultError(f"{path} cannot be written: {error.strerror}") from error


def write_table(table: pa.Table, path: Path) -> None:
    """Write a Parquet file in one step. Raises `ResultError`."""
    _replace_parquet(iter(table.to_batches()), table.schema, path)


def _replace_parquet(batches: Iterator[pa.RecordBatch], schema: pa.Schema, path: Path) -> None:
    fresh = path.with_name(path.name + ".new")
    text = [field.name for field in schema if pa.types.is_string(field.type)]
    gaps = {"gaps_us.list.element": "BYTE_STREAM_SPLIT"} if "gaps_us" in schema.names else None
    try:
        with pq.ParquetWriter(
            fresh, schema, compression="zstd", use_dictionary=text, column_encoding=gaps
        ) as writer:
            for batch in batches:
                writer.write_batch(batch)
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise ResultError(f"{path} cannot be written: {error}") from error


class RecordWriter:
    """Appends records from the replay's thread; a thread of its own flushes every half second.

    `append` raises `ResultError` once the disk has failed; what was written before is kept.
    """

    def __init__(self, run: Path, *, part_rows: int = _PART_ROWS) -> None:
        self._folder = run / RECORDS
        self._part_rows = part_rows
        self._rows: deque[Record] = deque()
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._error: ResultError | None = None
        self._part = 0
        self._in_part = 0
        self._file: Any = None
        self._stream: Any = None
        self._thread = threading.Thread(target=self._flush_often, name="records", daemon=True)

    def __enter__(self) -> Self:
        try:
            self._folder.mkdir()
        except OSError as error:
            raise ResultError(f"{self._folder} cannot be made: {error.strerror}") from error
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ending.set()
        self._thread.join()
        self._flush()
        with self._lock:
            if self._error is None:
                self._guard(self._finish_part)
            elif self._file is not None:
                self._file.close()
        if self._error is not None and kind is None:
            raise self._error

    def append(self, record: Record) -> None:
        """Keep one record. It is on disk within half a second."""
        if self._error is not None:
            raise self._error
        self._rows.append(record)
        if len(self._rows) >= _BATCH_ROWS:
            self._flush()

    def append_batch(self, batch: pa.RecordBatch) -> None:
        """Keep records that came as Arrow, of `SCHEMA`. They are on disk when this returns."""
        with self._lock:
            if self._error is None:
                self._guard(lambda: self._write(batch))
        if self._error is not None:
            raise self._error

    def _flush_often(self) -> None:
        while not self._ending.wait(_FLUSH_S):
            self._flush()

    def _flush(self) -> None:
        """Write what has gathered: called from both threads."""
        with self._lock:
            count = len(self._rows)
            if not count or self._error is not None:
                return
            self._guard(lambda: self._write(to_batch(list(itertools.islice(self._rows, count)))))
            if self._error is None:
                for _ in range(count):
                    self._rows.popleft()

    def _guard(self, write: Any) -> None:
        try:
            write()
        except ResultError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - whatever it is, the replay must hear of it
            self._error = ResultError(
                f"{self._folder} cannot be written any more: {error}. What was written is kept"
            )

    def _write(self, batch: pa.RecordBatch) -> None:
        if self._stream is None:
            self._file = self._part_path("arrows").open("xb", buffering=0)
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            self._stream = pa.ipc.new_stream(self._file, SCHEMA, options=options)
        self._stream.write_batch(batch)
        self._in_part += batch.num_rows
        if self._in_part >= self._part_rows:
            self._finish_part()

    def _finish_part(self) -> None:
        """Turn the stream into Parquet; until that is whole the stream stays."""
        if self._stream is None:
            return
        self._stream.close()
        self._file.close()
        self._stream = self._file = None
        stream = self._part_path("arrows")
        with pa.memory_map(str(stream)) as source:
            reader = pa.ipc.open_stream(source)
            _replace_parquet(iter(reader), SCHEMA, self._part_path("parquet"))
        stream.unlink()
        self._part += 1
        self._in_part = 0

    def _part_path(self, kind: str) -> Path:
        return self._folder / f"part-{self._part:05d}.{kind}"


@dataclass(frozen=True)
class Run:
    """A run directory, to read."""

    path: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Raises `ResultError` where there is no readable run."""
        path = Path(path)
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ResultError(f"{path} is not a run: it has no {MANIFEST}") from None
        except (OSError, ValueError) as error:
            raise ResultError(f"{path / MANIFEST} cannot be read: {error}") from error
        missing = [key for key in _NEEDED if not isinstance(manifest, dict) or key not in manifest]
        if missing:
            raise ResultError(
                f"{path / MANIFEST} lacks {', '.join(missing)}: another version wrote it, or "
                "something else. Replay it with this one"
            )
        return cls(path, manifest)

    @property
    def name(self) -> str:
        """The backend's name in the configuration: `in_dc`, `cross_dc`, `pdd`."""
        return str(self.manifest["backend"]["name"])

    @property
    def window(self) -> metrics.Window:
        """Which of its requests count."""
        return metrics.Window(**self.manifest["window"])

    @property
    def slo(self) -> metrics.Slo:
        """What was promised."""
        return metrics.Slo(**self.manifest["slo"])

    @property
    def prices(self) -> Prices:
        """What its cards and tokens were priced at."""
        return Prices(**self.manifest["prices"])

    def record(self, turn: int, columns: list[str]) -> dict[str, Any] | None:
        """Of one turn's record these columns, read part by part; None where there is none."""
        schema = pa.schema([SCHEMA.field(name) for name in dict.fromkeys(["turn", *columns])])
        for part in _parts(self.path / RECORDS):
            table = _read_part(part, schema)
            found = table.filter(pc.equal(table.column("turn"), turn))
            if found.num_rows:
                return dict(found.select(columns).to_pylist()[0])
        return None

    def records(self, columns: list[str] | None = None) -> pa.Table:
        """All records gathered, finished parts and the one being written, in the order written.

        Token gaps are large: name `columns` to leave them out. Raises `ResultError` for a file of
        another schema.
        """
        schema = SCHEMA if columns is None else pa.schema([SCHEMA.field(name) for name in columns])
        tables = [schema.empty_table()]
        tables += [_read_part(part, schema) for part in _parts(self.path / RECORDS)]
        return pa.concat_tables(tables)

    def summary(self) -> pa.Table:
        """Of schema `harness.metrics.SUMMARY`; of a run that was killed, worked out anew.

        Raises `ResultError` where it cannot be read.
        """
        path = self.path / SUMMARY_FILE
        if not path.exists():
            records = self.records(metrics.COLUMNS)
            return metrics.summarise(records, self.window, self.name, self.slo)
        try:
            return pq.read_table(path)
        except (OSError, pa.ArrowException) as error:
            raise ResultError(f"{path} cannot be read: {error}") from error


def find_runs(path: Path) -> list[Run]:
    """The run at `path`, or those directly inside it, in the order they were started."""
    if (path / MANIFEST).exists():
        return [Run.open(path)]
    runs = [Run.open(each.parent) for each in sorted(path.glob(f"*/{MANIFEST}"))]
    if not runs:
        raise ResultError(f"{path} holds no run: there is no {MANIFEST} in it or one level below")
    return sorted(runs, key=lambda run: str(run.manifest["started"]))


def _parts(folder: Path) -> list[Path]:
    """One file a part: Parquet where it is whole, else the stream."""
    parts = {path.stem: path for path in sorted(folder.glob("part-*.arrows"))}
    parts |= {path.stem: path for path in sorted(folder.glob("part-*.parquet"))}
    return [parts[stem] for stem in sorted(parts)]


def _read_part(path: Path, schema: pa.Schema) -> pa.Table:
    if not path.exists():  # a run that goes on has just made it Parquet
        path = path.with_suffix(".parquet")
    try:
        if path.suffix == ".parquet":
            table = pq.read_table(path, columns=schema.names)
        else:
            table = pa.Table.from_batches(_whole_batches(path), SCHEMA).select(schema.names)
    except (OSError, pa.ArrowException) as error:
        raise ResultError(f"{path} cannot be read: {error}") from error
    if not table.schema.equals(schema):
        raise ResultError(
            f"{path} has the columns of another version. Read it with the version in {MANIFEST}"
        )
    return table


def _whole_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """The batches of a stream up to where it was cut off."""
    if not path.stat().st_size:
        return
    with pa.memory_map(str(path)) as source:
        try:
            yield from pa.ipc.open_stream(source)
        except (pa.ArrowInvalid, OSError):
            return
