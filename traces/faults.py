"""Where a reader's complaints go: the first is raised, or all are gathered and told together.

A reader works on a row, a turn, or a file of a folder inside `with spared():`. Where nobody
gathers, that does nothing and the first `TraceError` ends the reading. Inside `gathering()` what is
at fault is left out instead, and reading goes on.

As in a compiler, one stage's faults end the next: what is missing because its row was at fault is
no fault of its own. So a reader looks for orphans and cycles, and makes a trace, only where the
rows were `sound()`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from harness.errors import TraceError

PLACES_KEPT = 10
"""Of a kind of fault: the first places where it was met."""

KINDS_KEPT = 1000
"""A file of another format can have as many kinds as it has rows."""


@dataclass
class Kind:
    """Faults that one mending would end: of one file and field, with one problem and advice."""

    first: TraceError
    count: int = 0
    """How often it was met: once a row, or a value."""
    lines: list[int] = field(default_factory=list)
    """The first `PLACES_KEPT` of their lines, where the format has lines."""
    fields: list[str] = field(default_factory=list)
    """The same of their fields, where it has none: `requests[3].in`."""


class Faults:
    """What was found wrong, by kind, in the order met."""

    def __init__(self, most: int | None = None) -> None:
        self.kinds: dict[tuple[str, ...], Kind] = {}
        """The first `KINDS_KEPT`."""
        self.count = 0
        """How many faults, of any kind."""
        self.rows = 0
        """How many rows were looked at, where the reader says so."""
        self.full = False
        """Whether reading was ended because there were too many."""
        self._most = most

    def add(self, error: TraceError, rows: int = 1, lines: Iterable[int] = ()) -> None:
        """Note a fault of so many rows. Ends the reading when there are too many."""
        self.count += rows
        key = (
            str(error.path or ""),
            _pattern(error.field or ""),
            _problem(error.problem),
            _pattern(error.do),
        )
        kind = self.kinds.get(key)
        if kind is None and len(self.kinds) < KINDS_KEPT:
            # Each holds the frames it came through, and so their rows.
            error.__traceback__ = error.__cause__ = error.__context__ = None
            kind = self.kinds[key] = Kind(error)
        if kind is not None:
            _note(kind, error, rows, lines)
        if self._most is not None and self.count >= self._most:
            self.full = True
            raise _Ended("too many faults", do="mend these first", path=error.path)


def _note(kind: Kind, error: TraceError, rows: int, lines: Iterable[int]) -> None:
    kind.count += rows
    if error.line is None:
        if error.field is not None and len(kind.fields) < PLACES_KEPT:
            kind.fields.append(error.field)
        return
    for line in lines or (error.line,):
        if len(kind.lines) == PLACES_KEPT:
            break
        kind.lines.append(line)


_VALUES = re.compile(
    r"""(?: (?: (?<!\w)'(?:\\.|[^'\\])*' | (?<!\w)"(?:\\.|[^"\\])*"  # in quotes
              | (?<!\w)['"].{38,40}                                # the same, shortened
              | \b(?:null|true|false)\b
              | (?<![\w.+-])[\w.+-]*[0-9][\w.+-]*                  # a number, a time, an id
            ) [][,\s]* )+""",
    re.VERBOSE | re.DOTALL,
)
_CHAIN = re.compile(r"(N (?:\w+ ){1,2})\1+")
"""A cycle, which is as long as it is: `N for N for N`."""


def _problem(text: str) -> str:
    """What a problem says of its kind, and not of one row."""
    return _CHAIN.sub(r"\1", _VALUES.sub("N ", text))


def _pattern(text: str) -> str:
    """What stays the same from row to row."""
    return re.sub(r"[0-9]+", "N", text)


class _Ended(TraceError):
    """The reading ends here, without a trace: why is told by the faults gathered."""


_now: ContextVar[Faults | None] = ContextVar("faults", default=None)


@contextmanager
def gathering(most: int | None = None) -> Iterator[Faults]:
    """Gather the faults of what is read inside; at `most` of them reading ends.

    A `TraceError` that is raised inside all the same, of a file that is unusable as a whole, is
    gathered too.
    """
    faults = Faults(most)
    token = _now.set(faults)
    try:
        yield faults
    except _Ended:
        pass
    except TraceError as error:
        with suppress(_Ended):
            faults.add(error)
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
        faults = _now.get()
        if faults is None or not isinstance(error, TraceError):
            return False
        if isinstance(error, _Ended):
            return not faults.full
        faults.add(error)
        return True


_SPARED = _Spared()


def spared() -> _Spared:
    """A fault inside ends what is inside: the reading too, unless somebody gathers."""
    return _SPARED


def report(error: TraceError, rows: int, lines: Iterable[int]) -> None:
    """A fault of many rows at once: raised, or gathered with their lines."""
    faults = _now.get()
    if faults is None:
        raise error
    faults.add(error, rows, lines)


def seen(rows: int = 1) -> None:
    """So many more rows are looked at: faults are told as so many of these."""
    faults = _now.get()
    if faults is not None:
        faults.rows += rows


def gathered() -> bool:
    """Whether somebody gathers."""
    return _now.get() is not None


def sound() -> bool:
    """Whether nothing was found wrong so far, as far as anybody gathers."""
    faults = _now.get()
    return faults is None or faults.count == 0


def require_sound(path: Path | str | None) -> None:
    """End the reading, or what is spared, here where rows were at fault: they are told instead."""
    if not sound():
        raise _Ended("rows are at fault", do="mend them", path=path)
