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
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from harness.errors import TraceError
from harness.trace import MAX_TOKENS

MAX_BLOCK_ID = 2**64 - 1
"""The largest block id: hashes are unsigned and 64 bits wide."""

MAX_TIME_S = 10 * 365.25 * 86400
"""No trace runs for ten years: a time beyond is one in another unit, or a date."""

_UNIT_S = {"s": 1.0, "ms": 1e-3}

_GZIP = b"\x1f\x8b"
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
    path = Path(path).expanduser()
    if path.exists():
        return path
    names = sorted(each.name for each in path.parent.iterdir()) if path.parent.is_dir() else []
    similar = difflib.get_close_matches(path.name, names)
    if similar:
        do = f"the folder has {', '.join(similar)}: did you mean one of them"
    elif path.parent.is_dir():
        do = "check the name, or fetch the trace first"
    else:
        do = f"its folder {path.parent} does not exist either: check the path"
    raise TraceError("no such file", do=do, path=path)


def locate_file(path: Path | str) -> Path:
    """As `locate`, and a file that can be read from its start more than once."""
    path = locate(path)
    if path.is_dir():
        names = [each.name for each in sorted(path.iterdir()) if each.is_file()]
        held = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")  # noqa: PLR2004 - three names show what is there
        raise TraceError(
            "a folder, where one file is wanted",
            do=f"name one of the files in it: {held}" if names else "name a file; it has none",
            path=path,
        )
    if not path.is_file():
        raise TraceError("not a regular file", do="save it to a file first", path=path)
    return path


@dataclass(frozen=True, slots=True)
class Line:
    """One line of text with its 1-based number."""

    number: int
    text: str
    whole: bool
    """Whether a newline ends it; the last line may do without."""


def read_lines(path: Path) -> Iterator[Line]:
    """Each line of a UTF-8 file, plain or gzip, blank ones too. At least one is not blank."""
    number = 0
    blank = True
    try:
        with closing(_open(path)) as stream:
            for number, raw in enumerate(stream, 1):
                text = _decode(raw, path, number)
                blank = blank and not text.strip()
                yield Line(number, text, whole=raw.endswith(b"\n"))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(
            f"the gzip stream is damaged or cut off after line {number} ({error})",
            do="fetch the file again",
            path=path,
            line=number + 1,
        ) from error
    except OSError as error:
        raise TraceError(
            f"cannot be read ({error.strerror})", do="check its permissions and its disk", path=path
        ) from error
    if blank:
        raise TraceError("empty", do="fetch the file again: it has no rows", path=path)


def _open(path: Path) -> Any:
    """A stream of bytes after any gzip and byte-order mark; refuses what is not text."""
    stream: Any = path.open("rb")
    try:
        if stream.read(len(_GZIP)) == _GZIP:
            stream.close()
            stream = gzip.open(path)  # noqa: SIM115 - closed by read_lines, which it is made for
        else:
            stream.seek(0)
        head = stream.read(len(_LFS))
        _refuse_foreign(head, path)
        stream.seek(len(_UTF8_BOM) if head.startswith(_UTF8_BOM) else 0)
    except BaseException:
        stream.close()
        raise
    return stream


def _refuse_foreign(head: bytes, path: Path) -> None:
    if head == _LFS:
        raise TraceError(
            "a Git LFS pointer, not the file itself", do="run `git lfs pull` there", path=path
        )
    for magic, (what, do) in _FOREIGN.items():
        if head.startswith(magic):
            raise TraceError(f"{what}, where UTF-8 text is wanted", do=do, path=path)


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


def json_rows(path: Path, count: Callable[[str], None]) -> Iterator[Row]:
    """One row a line of JSONL. Blank lines are skipped and counted as `blank_lines_skipped`."""
    for line in read_lines(path):
        if not line.text.strip():
            count("blank_lines_skipped")
            continue
        yield parse(line.text, path, line.number, whole=line.whole)


def parse(text: str, path: Path, line: int | None, *, whole: bool) -> Row:
    """The JSON object in `text`; strict: no NaN, no name twice.

    `line` is its number, None where the text is the whole file. A text that is not `whole` and
    not JSON is taken to be cut off.
    """
    try:
        values = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        at = line or error.lineno
        if not whole and error.pos >= len(text.rstrip()) - 1 or _open_ended(error, text, whole):
            problem, do = "half a line: the file looks cut off", "fetch the file again"
        else:
            problem, do = f"not JSON: {error.msg} at column {error.colno}", "mend or remove the row"
        raise TraceError(problem, do=do, path=path, line=at) from error
    except (ValueError, RecursionError) as error:
        raise TraceError(
            f"not usable JSON: {error}", do="mend or remove the row", path=path, line=line
        ) from error
    if not isinstance(values, dict):
        raise TraceError(
            f"{_kind(values)}, where a JSON object is wanted",
            do='give {"name": value, ...}',
            path=path,
            line=line,
        )
    return Row(values, path, line)
