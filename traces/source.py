"""Opening trace files, so that each bad one is one `TraceError` that says what to do.

Gzip is read whatever the suffix; a UTF-8 byte-order mark is accepted; lines are numbered from 1.
"""

from __future__ import annotations

import difflib
import gzip
import json
import math
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import TraceError
from harness.trace import MAX_TOKENS

_REFUSED = {
    b"version https://git-lfs": (
        "a Git LFS pointer, not the trace itself",
        "run `git lfs pull` where it came from",
    ),
    b"\xff\xfe": ("UTF-16 text", "convert it to UTF-8"),
    b"\xfe\xff": ("UTF-16 text", "convert it to UTF-8"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "unpack it with `zstd -d`"),
    b"\xfd7zXZ": ("compressed with xz", "unpack it with `xz -d`"),
    b"BZh": ("compressed with bzip2", "unpack it with `bzip2 -d`"),
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"PAR1": ("a Parquet file", "read it with trace=canonical, if relaybench wrote it"),
}
_GZIP = b"\x1f\x8b"
_TEN_YEARS_S = 10 * 365 * 86_400
_MAX_ID = 2**64 - 1
_SHOWN = 40
"""Characters of a bad value in a message."""


def read_bytes(path: Path) -> bytes:
    """The file, decompressed. Raises `TraceError` unless it holds text to read."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise TraceError("no such file", do=_nearby(path), path=path) from None
    except IsADirectoryError:
        raise TraceError("a folder", do="name a file in it", path=path) from None
    except OSError as error:
        raise TraceError(f"cannot be read ({error.strerror})", do="check it", path=path) from error
    if data.startswith(_GZIP):
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            do = "copy it again: it is cut off or damaged"
            raise TraceError(f"gzip, but {error}", do=do, path=path) from error
    if not data.strip():
        raise TraceError("empty", do="copy it again, or name another file", path=path)
    for magic, (what, do) in _REFUSED.items():
        if data.startswith(magic):
            raise TraceError(what, do=do, path=path)
    return data.removeprefix(b"\xef\xbb\xbf")


def _nearby(path: Path) -> str:
    names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    if not names:
        return f"check the path: the folder {path.parent} is not there or empty"
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.4)
    return f"check the path; its folder holds {', '.join(close or sorted(names)[:3])}"


@dataclass(frozen=True)
class Row:
    """One JSON object and where it stands. Its getters check what they return."""

    values: dict[str, Any]
    path: Path
    line: int | None
    place: str = ""
    """Where inside the file, before the field's name: `requests[3].`."""

    def error(self, field: str | None, problem: str, do: str) -> TraceError:
        """The error of one field of this row."""
        name = self.place + field if field else self.place.rstrip(".") or None
        return TraceError(problem, do=do, path=self.path, line=self.line, field=name)

    def only(self, known: Collection[str], hint: str) -> None:
        """Refuse fields that are not known: one that is ignored may change what the others mean."""
        for field in self.values:
            if field not in known:
                close = difflib.get_close_matches(field, known, n=1)
                do = f"rename it {close[0]}?" if close else hint
                raise self.error(field, "an unknown field", do)

    def get(self, field: str) -> Any:
        """The value. Raises where it is missing, naming what might have been meant."""
        if field in self.values:
            return self.values[field]
        close = difflib.get_close_matches(field, self.values, n=1, cutoff=0.5)
        present = ", ".join(self.values) or "nothing"
        do = f"rename {close[0]}?" if close else f"add it; the row has {present}"
        raise self.error(field, "missing", do)

    def count(self, field: str) -> int:
        """A whole number of tokens, 0 or more."""
        value = self.get(field)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(field, f"{_show(value)} is no whole number", "give tokens as a number")
        if not 0 <= value <= MAX_TOKENS:
            raise self.error(field, f"{_show(value)} tokens", f"give 0 to {MAX_TOKENS:,}")
        return value

    def seconds(self, field: str, unit_s: float = 1.0) -> float:
        """A time in `unit_s` seconds, 0 or more, as seconds."""
        value = self.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(field, f"{_show(value)} is no number", "give the time as a number")
        seconds = value * unit_s if abs(value) < _MAX_ID else math.inf
        if not 0 <= seconds <= _TEN_YEARS_S:
            do = f"give 0 or more, counted in units of {unit_s:g} s from the trace's start"
            raise self.error(field, f"{_show(value)} is no time in this trace", do)
        return seconds

    def ids(self, field: str) -> list[int]:
        """Block ids: whole numbers of up to 64 bits."""
        value = self.get(field)
        if not isinstance(value, list):
            raise self.error(field, f"{_show(value)} is no list", "give the ids as a list")
        for each in value:
            if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each <= _MAX_ID:
                do = "give whole numbers from 0 to 2^64 - 1"
                raise self.error(field, f"{_show(each)} is no block id", do)
        return value


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def json_rows(path: Path) -> Iterator[Row]:
    """The objects of a JSON Lines file; blank lines are passed over."""
    lines = read_bytes(path).split(b"\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield Row(_object(line, path, number, last=number == len(lines)), path, number)


def json_file(path: Path) -> Row:
    """The one object of a JSON file."""
    return Row(_object(read_bytes(path), path, None, last=True), path, None)


def _object(data: bytes, path: Path, line: int | None, *, last: bool) -> dict[str, Any]:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 at byte {error.start}"
        raise TraceError(problem, do="convert it to UTF-8", path=path, line=line) from None
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        where = line if line is not None else error.lineno
        cut = last and not text.rstrip().endswith("}")
        do = "copy it again: it looks cut off" if cut else "mend or remove it"
        raise TraceError(f"not JSON ({error.msg})", do=do, path=path, line=where) from None
    except (ValueError, RecursionError) as error:
        raise TraceError(f"not JSON ({error})", do="mend it", path=path, line=line) from None
    if not isinstance(value, dict):
        do = "give an object, {...}"
        raise TraceError(f"{_show(value)} is no object", do=do, path=path, line=line)
    return value


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is no JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {twice!r} stands twice in one object")
    return values
