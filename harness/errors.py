"""Every error a person may meet, in one tree.

    HarnessError                 exit code
    |- ConfigError               2   a setting cannot be used; lists the valid choices
    |- InstallError              2   two packages own one import name, or an extra is missing
    |- TraceError                2   file, line, field, what was expected, what to do
    |- ResultError               2   a run directory cannot be read or written
    |- DeadlockError             3   every task waits and nothing can wake them
    '- BackendError              3   one request failed; becomes `Record.error`
       |- ConnectFailed
       |- RequestTimeout
       |- BadStatus
       '- BadStream

A backend's failure is data: the replay writes it into the record and goes on. Anything else
stops the run, and what was gathered is kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

EXIT_GOOD = 0
EXIT_FAILED = 1
"""A conservation law or a gate failed."""
EXIT_BAD_INPUT = 2
EXIT_BACKEND = 3
EXIT_INTERRUPTED = 130


class HarnessError(Exception):
    """The root: carries the exit code its kind ends a run with."""

    exit_code: ClassVar[int] = EXIT_BAD_INPUT


class ConfigError(HarnessError):
    """A setting that cannot be used. The message lists the valid choices."""


class InstallError(HarnessError):
    """The installation cannot serve what was asked. The message is the command that mends it."""


class TraceError(HarnessError):
    """A trace that cannot be replayed as it stands.

    The message reads `file:line: field: problem: do this`; the parts are attributes too.
    `line` is 1-based, None where the fault is the file's as a whole.
    """

    def __init__(
        self,
        problem: str,
        *,
        do: str,
        path: Path | str | None = None,
        line: int | None = None,
        field: str | None = None,
    ) -> None:
        self.problem = problem
        self.do = do
        self.path = path
        self.line = line
        self.field = field
        place = [] if path is None else [str(path)]
        if line is not None:
            place.append(str(line))
        lead = ":".join(place)
        parts = [part for part in (lead, field, problem) if part]
        super().__init__(": ".join(parts) + f". {do[:1].upper()}{do[1:]}")


class ResultError(HarnessError):
    """A run directory that cannot be written, or read back."""


class DeadlockError(HarnessError):
    """All tasks wait and no timer is set: on a virtual clock nothing will ever happen again."""

    exit_code = EXIT_BACKEND


class BackendError(HarnessError):
    """A request the backend did not answer in full."""

    exit_code = EXIT_BACKEND


class ConnectFailed(BackendError):
    """No connection was made, so no request was sent."""


class RequestTimeout(BackendError):
    """The answer was not whole within the time allowed."""


class BadStatus(BackendError):
    """The server answered with an error status."""


class BadStream(BackendError):
    """The answer began and then broke off, or could not be understood."""
