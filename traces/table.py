"""CSV with a header line, for traces of millions of rows that stand for themselves.

`pyarrow.csv` reads it, in batches and as text: 0.1 s a million rows, where the `csv` module, a line
at a time, takes 3. In one thread it tells the line of a row that is too long or short. Its own
conversion errors name no line, so numbers are checked and converted here, a column at a time. When
it fails, the file is read again line by line to find the one at fault.

While faults are gathered, rows of another width are left out, and a value at fault is told and
stands in the column as a harmless one: no trace comes of it.
"""

from __future__ import annotations

import csv
import difflib
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from numpy.typing import NDArray

from harness.errors import TraceError
from harness.trace import MAX_TOKENS
from traces.faults import gathered, report, seen
from traces.source import MAX_TIME_S, Line, open_bytes, read_lines

BLOCK_TOKENS = 64
"""A header has a size of blocks; no prompt of these traces has a block."""

_SHOWN = 40
"""Characters of a value that a message shows."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a file, as text.

    A getter raises a `TraceError` for the first bad value of its column, or reports them all; what
    it returns has one element a row.
    """

    columns: dict[str, pa.StringArray]
    lines: NDArray[np.int64]
    path: Path

    def __len__(self) -> int:
        return len(self.lines)

    def error(self, row: int, problem: str, do: str, field: str) -> TraceError:
        """A fault of one of these rows."""
        line = int(self.lines[row])
        return TraceError(problem, do=do, path=self.path, line=line, field=field)

    def require(
        self, good: Any, name: str, problem: str, do: str, *, instead: str = "0"
    ) -> pa.StringArray:
        """The column, where `good`, of booleans, is true for all: else `problem` is the first's.

        Where all rows that are at fault are reported, they have the value `instead` in it.
        """
        fine = np.asarray(good, bool)
        values = self.columns[name]
        if fine.all():
            return values
        row = int(np.argmin(fine))
        error = self.error(row, f"{self._shown(name, row)} {problem}", do, name)
        report(error, int((~fine).sum()), self.lines[~fine].tolist())
        return pc.if_else(pa.array(fine), values, instead)

    def whole(self, name: str, high: int, unit: str = "") -> NDArray[np.int64]:
        """Whole numbers from 0 to `high`."""
        do = f"give 0 to {high}{unit}"
        rows, values = self, self.columns[name]

        def require(good: pa.BooleanArray, problem: str) -> None:
            nonlocal rows, values
            values = rows.require(good, name, problem, do)
            rows = replace(rows, columns=rows.columns | {name: values})

        require(pc.match_substring_regex(values, r"^-?[0-9]+$"), "is not a whole number")
        require(pc.invert(pc.starts_with(values, "-")), "is below what is possible")
        require(pc.match_substring_regex(values, r"^0*[0-9]{1,18}$"), "is above what is possible")
        numbers: NDArray[np.int64] = values.cast(pa.int64()).to_numpy()
        rows.require(numbers <= high, name, "is above what is possible", do)
        return np.minimum(numbers, high)

    def tokens(self, name: str) -> NDArray[np.int64]:
        """Counts of tokens, 0 or more."""
        return self.whole(name, MAX_TOKENS, " tokens")

    def times_s(self, name: str) -> NDArray[np.float64]:
        """Times or durations in seconds: decimal numbers, 0 or more, under ten years."""
        values = self.require(
            pc.match_substring_regex(self.columns[name], r"^[0-9]+(\.[0-9]*)?$"),
            name,
            "is not a time",
            "give s, finite and 0 or more",
        )
        times_s: NDArray[np.float64] = values.cast(pa.float64()).to_numpy()
        self.require(
            times_s <= MAX_TIME_S,
            name,
            "s is over ten years: the unit is probably wrong",
            "give s from the start of the trace",
        )
        return times_s

    def filled(self, name: str) -> pa.StringArray:
        """Text that is not blank."""
        values = self.columns[name]
        blank = pc.equal(pc.utf8_trim_whitespace(values), "")
        return self.require(pc.invert(blank), name, "is no name", "give one")

    def of_rows(self, kept: NDArray[np.bool_]) -> Rows:
        """Only the rows where `kept` is true."""
        mask = pa.array(kept)
        columns = {name: column.filter(mask) for name, column in self.columns.items()}
        return Rows(columns, self.lines[kept], self.path)

    def _shown(self, name: str, row: int) -> str:
        value = self.columns[name][row].as_py()
        shown = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
        return repr(shown) if shown else "nothing"


# ---- reading


def csv_rows(
    path: Path,
    required: Collection[str],
    optional: Collection[str] = (),
    *,
    count: Callable[[str, int], None],
) -> Iterator[Rows]:
    """The rows of a UTF-8 CSV file, plain or gzip, in batches; columns by name, in any order.

    Lines that are blank or commas alone are skipped and counted as `blank_lines_skipped`. Raises
    `TraceError` for a missing, unknown or repeated column, a row that is longer or shorter than the
    header, a quote that is not closed, and whatever `traces.source.read_lines` refuses. A file that
    ends inside its last number cannot be told from a whole one.
    """
    header, more = _header_line(path)
    names = _names(header, path, required, optional)
    if not more:
        return
    widths = _Widths(path, names, header.number + 1)
    try:
        with (
            open_bytes(path) as stream,
            closing(_reader(stream, header, names, widths.note)) as reader,
        ):
            for batch in reader:
                columns = dict(zip(names, batch.columns, strict=True))
                rows = Rows(columns, widths.lines(len(batch)), path)
                seen(len(rows))
                blank = _blank(rows)
                if blank.any():
                    count("blank_lines_skipped", int(blank.sum()))
                    rows = rows.of_rows(~blank)
                if len(rows):
                    yield rows
    except (pa.ArrowException, UnicodeError, OSError, EOFError, zlib.error) as error:
        widths.report()
        raise _fault(path, widths, error) from error
    except TraceError:
        widths.report()
        raise
    widths.report()


class _Widths:
    """The rows that are longer or shorter than the header. `line` is the line of the first row.

    The first of them ends the reading, unless faults are gathered.
    """

    def __init__(self, path: Path, names: list[str], line: int) -> None:
        self._path = path
        self._names = names
        self._line = line
        self._sparing = gathered()  # Arrow's thread, which calls `note`, does not know
        self._skipped: dict[int, int] = {}
        """How many fields there are in each line left out."""
        self.last: dict[int, int] = {}
        """The same of the line that ended the reading."""

    def note(self, row: Any) -> str:
        """What becomes of such a row. One with a quote may be a piece of another."""
        skip = self._sparing and '"' not in row.text
        (self._skipped if skip else self.last)[row.number] = row.actual_columns
        return "skip" if skip else "error"

    def lines(self, rows: int) -> NDArray[np.int64]:
        """The lines of the next so many rows."""
        most = rows + len(self._skipped)
        numbers = np.arange(self._line, self._line + most, dtype=np.int64)
        numbers = numbers[~np.isin(numbers, list(self._skipped))][:rows]
        self._line = int(numbers[-1]) + 1 if rows else self._line
        return numbers

    def report(self) -> None:
        """Tell of those left out."""
        if not self._skipped:
            return
        seen(len(self._skipped))
        told = 0
        for line in read_lines(self._path):
            if line.number in self._skipped:
                told += 1
                report(self.error(line, self._skipped[line.number]), 1, [line.number])
        if told < len(self._skipped):
            # To Arrow a carriage return by itself ends a line, so it counts more of them.
            error = TraceError(
                "carriage returns inside lines", do="end lines with newlines", path=self._path
            )
            report(error, len(self._skipped) - told, [])

    def error(self, line: Line, width: int) -> TraceError:
        """The fault of a line of so many fields."""
        if width < len(self._names) and not line.ended:
            problem, do = "half a line: the file looks cut off here", "fetch the file again"
        else:
            problem = f"{width} fields, where the header has {len(self._names)}"
            do = f"give {', '.join(self._names)}"
        return TraceError(problem, do=do, path=self._path, line=line.number)


def _reader(stream: Any, header: Line, names: list[str], keep_fault: Callable[[Any], str]) -> Any:
    return pyarrow.csv.open_csv(
        stream,
        read_options=pyarrow.csv.ReadOptions(
            use_threads=False,
            skip_rows=header.number,
            column_names=names,
            # By this name Arrow has all text decoded first. Else it hands a row that is no UTF-8 to
            # `keep_fault`, fails to, and prints that.
            encoding="utf-8-sig",
        ),
        parse_options=pyarrow.csv.ParseOptions(
            ignore_empty_lines=False, invalid_row_handler=keep_fault
        ),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
        ),
    )


def _header_line(path: Path) -> tuple[Line, bool]:
    """The first line that is not blank, and whether more follow; refuses what is no text."""
    lines = read_lines(path)
    header = next(line for line in lines if line.text.strip())
    return header, next(lines, None) is not None


def _names(
    header: Line, path: Path, required: Collection[str], optional: Collection[str]
) -> list[str]:
    """The columns, by the header line."""

    def error(problem: str, do: str, field: str | None = None) -> TraceError:
        return TraceError(problem, do=do, path=path, line=header.number, field=field)

    wanted = ", ".join(required)
    known = [*required, *optional]
    try:
        names = next(csv.reader([header.text], strict=True))
    except csv.Error as fault:
        raise error(f"not a line of CSV ({fault})", f"give {wanted}", "header") from fault
    missing = [name for name in required if name not in names]
    unknown = [name for name in names if name not in known]
    if missing:
        near = difflib.get_close_matches(missing[0], unknown or names, 1, cutoff=0.5)
        problem = f"missing; the closest column is {near[0]!r}" if near else "missing"
        raise error(problem, f"give a header line with {wanted}", missing[0])
    if unknown:
        do = f"the known ones are {', '.join(known)}"
        raise error("unknown column", do, unknown[0] or "a column without a name")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise error("a column that is here twice", "remove one of the two", twice)
    return names


def _blank(rows: Rows) -> NDArray[np.bool_]:
    """Which rows have no value at all. Refuses a value that goes on in the next line."""
    blank = np.ones(len(rows), bool)
    for name, column in rows.columns.items():
        broken = pc.match_substring_regex(column, "[\r\n]").to_numpy(zero_copy_only=False)
        if broken.any():
            raise _open_quote(rows.path, int(rows.lines[int(np.argmax(broken))]), name)
        blank &= pc.equal(column, "").to_numpy(zero_copy_only=False)
    return blank


def _open_quote(path: Path, line: int, field: str | None = None) -> TraceError:
    return TraceError(
        "a quote that is not closed in its line",
        do="close or remove it",
        path=path,
        line=line,
        field=field,
    )


def _fault(path: Path, widths: _Widths, error: Exception) -> TraceError:
    """What is wrong with a file that did not parse."""
    for line in read_lines(path):
        if line.text.count('"') % 2:
            return _open_quote(path, line.number)
        if line.number in widths.last:
            return widths.error(line, widths.last[line.number])
    return TraceError(f"not usable CSV ({error})", do="mend or fetch the file again", path=path)
