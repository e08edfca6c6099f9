"""Where a reader's complaints go: the first is raised, or all are gathered and told together.

A reader works on a row, or a turn, inside `with spared():`. Where nobody gathers, that does nothing
and the first `TraceError` ends the reading. Inside `gathering()` the row at fault is left out
instead, and reading goes on.

As in a compiler, one stage's faults end the next: what is missing because its row was at fault is
no fault of its own. So a reader looks for orphans and cycles, and makes a trace, only where the
rows were `sound()`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from harness.errors import TraceError

LINES_KEPT = 10
"""Of a kind of fault: the first lines where it was met."""


@dataclass
class Kind:
    """Faults that one mending would end: of one file, one field, and with one advice."""

    first: TraceError
    count: int = 0
    """How many rows have it."""
    lines: list[int] = field(default_factory=list)
    """The first `LINES_KEPT` of their lines, where the format has lines."""


class Faults:
    """What was found wrong, by kind, in the order met."""

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self.kinds: dict[tuple[Path | str | None, str, str], Kind] = {}
        self.count = 0

    def add(self, error: TraceError, rows: int = 1, lines: Iterator[int] | None = None) -> None:
        """Note a fault of so many rows. Raises `TooManyFaults` at the limit."""
        key = (error.path, _pattern(error.field or ""), _pattern(error.do))
        kind = self.kinds.setdefault(key, Kind(error))
        kind.count += rows
        self.count += rows
        for line in lines or ([] if error.line is None else [error.line]):
            if len(kind.lines) == LINES_KEPT:
                break
            kind.lines.append(line)
        if self.most is not None and self.count >= self.most:
            raise TooManyFaults


class TooManyFaults(Exception):
    """The limit of a `Faults` is reached; the reading was ended."""


def _pattern(text: str) -> str:
    """What stays the same from row to row."""
    return re.sub(r"[0-9]+", "N", text)


_now: ContextVar[Faults | None] = ContextVar("faults", default=None)


@contextmanager
def gathering(most: int | None = None) -> Iterator[Faults]:
    """Gather the faults of what is read inside; at most so many, then reading ends early.

    What is inside may still raise a `TraceError`: of a file that is unusable as a whole, or of a
    trace that cannot be made of rows some of which were at fault. It is gathered too.
    """
    faults = Faults(most)
    token = _now.set(faults)
    try:
        yield faults
    except TraceError as error:
        if not isinstance(error, _Unsound):
            faults.count += 1
            key = (error.path, error.field or "", error.do)
            kind = faults.kinds.setdefault(key, Kind(error))
            kind.count += 1
            kind.lines += [error.line] if error.line is not None else []
    except TooManyFaults:
        pass
    finally:
        _now.reset(token)


class _Spared:
    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is None or not isinstance(error, TraceError):
            return False
        faults = _now.get()
        if faults is None:
            return False
        faults.add(error)
        return True


_SPARED = _Spared()


def spared() -> _Spared:
    """A fault inside ends what is inside: the reading too, unless somebody gathers."""
    return _SPARED


def report(error: TraceError, rows: int, lines: Iterator[int]) -> None:
    """A fault of many rows at once: raised, or gathered with their lines."""
    faults = _now.get()
    if faults is None:
        raise error
    faults.add(error, rows, lines)


def sound() -> bool:
    """Whether nothing was found wrong so far, as far as anybody gathers."""
    faults = _now.get()
    return faults is None or faults.count == 0


class _Unsound(TraceError):
    """No trace: rows of it were at fault, each of which is told."""


def require_sound(path: Path | str | None) -> None:
    """End the reading here where rows were at fault: they are told instead."""
    if not sound():
        raise _Unsound("rows are at fault", do="mend them", path=path)
