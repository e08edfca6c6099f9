"""How far a replay is: a bar on a terminal, a plain line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

_LINE_S = 10.0
_DRAW_S = 0.1
"""Between two drawings of the bar: drawing must not cost what it measures."""


class Progress(Protocol):
    """Counts requests that are done."""

    def advance(self) -> None:
        """One more."""
        ...


class _Lines:
    def __init__(self, name: str, total: int) -> None:
        self._name, self._total = name, total
        self._done = 0
        self._next_s = time.monotonic() + _LINE_S

    def advance(self) -> None:
        self._done += 1
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LINE_S
            share = self._done / self._total
            print(  # noqa: T201 - progress for a person, beside the data
                f"{self._name}: {self._done:,} of {self._total:,} requests ({share:.0%})",
                file=sys.stderr,
                flush=True,
            )


@contextmanager
def progress(name: str, total: int) -> Iterator[Progress]:
    """A counter of `total` requests, shown on standard error."""
    if not sys.stderr.isatty():
        yield _Lines(name, total)
        return
    from rich import progress as rich  # noqa: PLC0415 - only a terminal needs it
    from rich.console import Console  # noqa: PLC0415 - as above

    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _Bar(bar, bar.add_task(name, total=total))


class _Bar:
    def __init__(self, bar: Any, task: int) -> None:
        self._bar, self._task = bar, task
        self._since = 0
        self._next_s = 0.0

    def advance(self) -> None:
        self._since += 1
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._bar.advance(self._task, self._since)
            self._since, self._next_s = 0, now_s + _DRAW_S
