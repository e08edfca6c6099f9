"""Where a replay runs: the seam between a job and the processes that do its work.

`Local` replays in this process. Another host hands the work to processes of its own, and gives
back the same: every turn's one record, and an account of who did what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import pyarrow as pa
from omegaconf import DictConfig

from harness.backend import Backend
from harness.pacing import Plan
from harness.record import Record
from harness.replay import Replay
from harness.trace import Trace


@dataclass(frozen=True)
class Work:
    """What a host is given to replay, and where its records go."""

    config: DictConfig
    """As composed, with interpolations as written: another process reads its own environment."""
    name: str
    """The backend's in `config`."""
    trace: Trace
    plan: Plan
    backend: Backend
    """This process's own. The job enters it first, and resets it when the crew is ready."""
    timeout_s: float | None
    write: Callable[[Record], None]
    write_batch: Callable[[pa.RecordBatch], None]
    """Many records at once, of `harness.record.SCHEMA`."""
    say: Callable[[str], None]


@dataclass
class Account:
    """What a crew did besides its records."""

    workers: list[dict[str, Any]] = field(default_factory=list)
    """One a worker, for `run.json`. Empty: this process replayed by itself."""
    cpu_s: float = 0.0
    """CPU time of the workers, beyond this process's."""
    ending: list[str] = field(default_factory=list)
    """Why the replay is not whole: the run is then partial, and not valid."""
    warnings: list[str] = field(default_factory=list)


class Crew(Protocol):
    """Those who replay. An async context manager: when it is entered, they are ready to start."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    async def run(self) -> None:
        """Replay everything. When it returns or raises, every turn has its record."""
        ...

    def account(self) -> Account:
        """As far as it is known now."""
        ...


class Host(Protocol):
    """Chooses who replays."""

    def check(self, backend: str, *, virtual: bool) -> None:
        """Raise `ConfigError` where the backend of that name, on that clock, cannot be asked."""
        ...

    def crew(self, work: Work) -> Crew:
        """Whoever replays it, not ready yet."""
        ...


class Local:
    """This process."""

    def check(self, backend: str, *, virtual: bool) -> None:
        """Every backend on every clock."""

    def crew(self, work: Work) -> Crew:
        """One replay."""
        return _Alone(
            Replay(work.trace, work.plan, work.backend, work.write, timeout_s=work.timeout_s)
        )


class _Alone:
    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    async def run(self) -> None:
        await self._replay.run()

    def account(self) -> Account:
        return Account()
