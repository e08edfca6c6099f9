"""Opening a trace file: text, lines and fields, or one `TraceError` that says what is wrong.

Readers get whole lines with their numbers, and rows whose getters check what they return. Gzip is
read whatever the file is called. A wrong name, type or unit is refused here: a reader that guesses
turns them into wrong lengths without a word.
"""

from __future__ import annotations

import difflib
import gzip
import json
import math
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from harness.errors import ConfigError, TraceError
from harness.trace import MAX_TOKENS
from traces.faults import gathered, require_sound, seen, spared

MAX_BLOCK_ID = 2**64 - 1
"""The largest block id: hashes are unsigned and 64 bits wide."""

MAX_TIME_S = 10 * 365.25 * 86400
"""No trace runs for ten years: a time beyond is one in another unit, or a date."""

TimeUnit = Literal["s", "ms"]

_PER_S = {"s": 1, "ms": 1000}
_SHOWN = 40
"""Characters of a value that a message shows."""

_GZIP = b"\x1f\x8b"
_HEAD = 1024
"""Bytes by which a file that is no text is known."""
_UTF8_BOM = b"\xef\xbb\xbf"
_LFS = b"version https://git-lfs"
_FOREIGN = {
    b"\xff\xfe": ("UTF-16 text", "save it as UTF-8"),
    b"\xfe\xff": ("UTF-16 text", "save it as UTF-8"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "unpack it with `zstd -d`"),
    b"\xfd7zXZ": ("compressed with xz", "unpack it with `xz -d`"),
    b"BZh": ("compressed with bzip2", "unpack it with `bzip2 -d`"),
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"PAR1": ("a Parquet file", "read it with trace=canonical"),
}


# ---- files


def locate(path: Path | str) -> Path:
    """The path, which exists; `~` is the home folder. A missing one names its neighbours."""
    if not isinstance(path, str | Path):
        raise ConfigError(f"{path!r} is no path: name a file, in quotes where it is a number")
    path = Path(path).expanduser()
    try:
        if path.exists():
            return path
        folder = path.parent
        names = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else None
    except OSError as error:
        raise _unreadable(error, path) from error
    if names is None:
        do = f"its folder {folder} does not exist either: check the path"
    elif similar := difflib.get_close_matches(path.name, names):
        do = f"its folder has {listing(similar)}: name one of them"
    else:
        do = "check the name, or fetch the trace first"
    raise TraceError("no such file", do=do, path=path)


def _unreadable(error: OSError, path: Path) -> TraceError:
    return TraceError(
        f"cannot be read ({error.strerror})", do="check its permissions and its disk", path=path
    )


def locate_file(path: Path | str) -> Path:
    """As `locate`, and a file that can be read from its start more than once."""
    path = locate(path)
    if path.is_dir():
        names = [each.name for each in sorted(path.iterdir()) if each.is_file()]
        raise TraceError(
            "a folder, where one file is wanted",
            do=f"name one of its files: {listing(names)}" if names else "name a file: it has none",
            path=path,
        )
    if not path.is_file():
        raise TraceError("not a regular file", do="save it to a file first", path=path)
    return path


def listing(names: Sequence[str], most: int = 4) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


_REFUSED: AbstractContextManager[Any, bool] = ExitStack()
"""What lets every fault through."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of text with its 1-based number."""

    number: int
    text: str
    ended: bool
    """Whether a newline ends it; the last line may do without."""


def read_lines(
    path: Path, left_out: AbstractContextManager[Any, bool] = _REFUSED
) -> Iterator[Line]:
    """Each line of a UTF-8 file, plain or gzip, blank ones too. At least one is not blank.

    `left_out` has a say on what becomes of a line that is not UTF-8: refused unless it is spared.
    """
    number = 0
    blank = True
    try:
        with closing(_open_text(path)) as stream:
            for number, raw in enumerate(stream, 1):
                text = None
                with left_out:
                    text = _decode(raw, path, number)
                blank = blank and text is not None and not text.strip()
                if text is not None:
                    yield Line(number, text, ended=raw.endswith(b"\n"))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(
            f"the gzip stream is damaged or cut off after line {number} ({error})",
            do="fetch the file again",
            path=path,
            line=number + 1,
        ) from error
    except OSError as error:
        raise _unreadable(error, path) from error
    if blank:
        raise TraceError("empty", do="fetch the file again: it has no rows", path=path)


def read_text(path: Path) -> str:
    """A whole UTF-8 file, plain or gzip."""
    return "".join(line.text for line in read_lines(path))


def open_bytes(path: Path) -> Any:
    """A stream of bytes after any gzip."""
    stream = path.open("rb")
    if stream.read(len(_GZIP)) != _GZIP:
        stream.seek(0)
        return stream
    stream.close()
    return gzip.open(path)


def _open_text(path: Path) -> Any:
    """The same after any byte-order mark; refuses what is not text."""
    stream = open_bytes(path)
    try:
        head = stream.read(_HEAD)
        _refuse_foreign(head, path)
        stream.seek(len(_UTF8_BOM) if head.startswith(_UTF8_BOM) else 0)
    except BaseException:
        stream.close()
        raise
    return stream


def _refuse_foreign(head: bytes, path: Path) -> None:
    if head.startswith(_LFS):
        raise TraceError(
            "a Git LFS pointer, not the file itself", do="run `git lfs pull` there", path=path
        )
    for magic, (what, do) in _FOREIGN.items():
        if head.startswith(magic):
            raise TraceError(f"{what}, where UTF-8 text is wanted", do=do, path=path)
    if b"\0" in head:
        do = "unpack it if it is an archive, else export it as text"
        raise TraceError("binary data, where UTF-8 text is wanted", do=do, path=path)


def _decode(raw: bytes, path: Path, number: int) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise TraceError(
            f"byte {error.start + 1} is not UTF-8 (0x{raw[error.start]:02x})",
            do="save the file as UTF-8",
            path=path,
            line=number,
        ) from error


# ---- JSON


def json_rows(path: Path, count: Callable[[str], None], *, again: bool = False) -> Iterator[Row]:
    """One row a line of JSONL, one at least. Blank lines are counted as `blank_lines_skipped`.

    While faults are gathered, lines that are no JSON object are left out; in a second reading of
    the file, `again`, without a word.
    """
    found = False
    left_out = suppress(TraceError) if again and gathered() else spared()
    for line in read_lines(path, left_out):
        if not line.text.strip():
            count("blank_lines_skipped")
            continue
        if not again:
            seen()
        row = None
        with left_out:
            row = _parse(line.text, path, line.number, may_be_cut=not line.ended)
        if row is not None:
            found = True
            yield row
    if not found:
        require_sound(path)


def json_document(text: str, path: Path) -> Row:
    """The one JSON object that a file is, from its text."""
    return _parse(text, path, None, may_be_cut=True)


def _parse(text: str, path: Path, line: int | None, *, may_be_cut: bool) -> Row:
    """The JSON object in `text`; strict: no NaN, no name twice."""
    try:
        values = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        end = len(text.rstrip())
        if may_be_cut and (error.pos >= end or not text[:end].endswith("}")):
            problem, do = "half a line: the file looks cut off here", "fetch the file again"
        else:
            problem, do = f"not JSON: {error.msg} at column {error.colno}", "mend or remove it"
        raise TraceError(problem, do=do, path=path, line=line or error.lineno) from error
    except (ValueError, RecursionError) as error:
        raise TraceError(
            f"not usable JSON: {error}", do="mend or remove it", path=path, line=line
        ) from error
    if not isinstance(values, dict):
        raise TraceError(
            f"{_kind(values)}, where a JSON object is wanted",
            do='give {"name": value, ...}',
            path=path,
            line=line,
        )
    return Row(values, path, line)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is given twice")
    return values


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON, and not a number that can be replayed")


def _kind(value: Any) -> str:
    """What a JSON value is, for messages."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    shown = json.dumps(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."


def microseconds(time_s: float) -> float:
    """Rid of what binary fractions add, so that ties stay ties: sources have ms, or coarser."""
    return round(time_s, 6) + 0.0  # no -0.0


# ---- fields


@dataclass(frozen=True, slots=True)
class Row:
    """A JSON object and where it stands. A getter raises a `TraceError` that names its field."""

    values: dict[str, Any]
    path: Path
    line: int | None
    within: str = ""
    """The field that holds this object, where it is nested: `requests[3]`"""

    def error(self, problem: str, do: str, field: str = "") -> TraceError:
        """A fault of this row."""
        name = ".".join(part for part in (self.within, field) if part)
        return TraceError(problem, do=do, path=self.path, line=self.line, field=name or None)

    def expect(self, required: Collection[str], optional: Collection[str] = ()) -> None:
        """Refuse the row unless it has all `required` fields, and none but these and `optional`."""
        known = [*required, *optional]
        missing = [name for name in required if name not in self.values]
        unknown = [name for name in self.values if name not in known]
        if missing:
            name = missing[0]
            near = difflib.get_close_matches(name, unknown or list(self.values), 1, cutoff=0.5)
            problem = f"missing; the closest field is {near[0]!r}" if near else "missing"
            raise self.error(problem, f"give {', '.join(known)}", name)
        if unknown:
            raise self.error("unknown field", f"the known ones are {', '.join(known)}", unknown[0])

    def integer(self, name: str, low: int, high: int, unit: str = "") -> int:
        """A whole number from `low` to `high`; neither a boolean nor a string of digits."""
        value = self.values[name]
        if type(value) is not int:
            raise self.error(
                f"{_kind(value)} is not a whole number", f"give {low} to {high}{unit}", name
            )
        if not low <= value <= high:
            raise self.error(
                f"{_kind(value)} is {'below' if value < low else 'above'} what is possible",
                f"give {low} to {high}{unit}",
                name,
            )
        return value

    def tokens(self, name: str) -> int:
        """A count of tokens, 0 or more."""
        return self.integer(name, 0, MAX_TOKENS, " tokens")

    def time_s(self, name: str, unit: TimeUnit = "s") -> float:
        """A time or a duration in seconds, given in `unit`; finite, 0 or more, under ten years."""
        value: int | float = self.values[name]
        if type(value) not in {int, float}:
            raise self.error(f"{_kind(value)} is not a number", f"give {unit}, 0 or more", name)
        if not 0 <= value < math.inf:
            raise self.error(
                f"{_kind(value)} is not a time", f"give {unit}, finite and 0 or more", name
            )
        if value > MAX_TIME_S * _PER_S[unit]:
            raise self.error(
                f"{_kind(value)} {unit} is over ten years: the unit is probably wrong",
                f"give {unit} from the start of the trace",
                name,
            )
        # A division is exact where a product with 0.001 is not: 4500 ms are 4.5 s.
        return value / _PER_S[unit]

    def time_s_or_none(self, name: str, unit: TimeUnit = "s") -> float | None:
        """As `time_s`; None where the field is absent or null."""
        return None if self.values.get(name) is None else self.time_s(name, unit)

    def text(self, name: str) -> str:
        """A string of Unicode characters."""
        value = self.values[name]
        if not isinstance(value, str):
            raise self.error(f"{_kind(value)} is not a string", "give a string", name)
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise self.error("half a surrogate pair", "give whole Unicode characters", name)
        return value

    def block_ids(self, name: str) -> list[int] | list[str]:
        """A list of block ids: unsigned 64-bit integers, or strings."""
        values = self._list(name)
        kinds = set(map(type, values))
        if kinds <= {int}:
            if values and (min(values) < 0 or max(values) > MAX_BLOCK_ID):
                at = next(at for at, value in enumerate(values) if not 0 <= value <= MAX_BLOCK_ID)
            else:
                return values
        elif kinds == {str}:
            return values
        else:
            first = type(values[0]) if type(values[0]) in {int, str} else int
            at = next(at for at, value in enumerate(values) if type(value) is not first)
        raise self.error(
            f"{_kind(values[at])} is not a block id",
            f"give integers from 0 to {MAX_BLOCK_ID}, or strings",
            f"{name}[{at}]",
        )

    def rows(self, name: str) -> list[Row]:
        """A list of objects; while faults are gathered, without those that are none."""
        rows = []
        for at, value in enumerate(self._list(name)):
            with spared():
                if not isinstance(value, dict):
                    raise self.error(
                        f"{_kind(value)} is not an object",
                        'give {"name": value, ...}',
                        f"{name}[{at}]",
                    )
                within = ".".join(part for part in (self.within, f"{name}[{at}]") if part)
                rows.append(Row(value, self.path, self.line, within))
        return rows

    def _list(self, name: str) -> list[Any]:
        value = self.values[name]
        if not isinstance(value, list):
            raise self.error(f"{_kind(value)} is not a list", "give a list", name)
        return value
