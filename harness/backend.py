"""What answers requests: the seam between the replay and every server, real or simulated.

A backend never reads the wall clock and never writes a record. It is given requests, and gives
back chunks that say when their bytes arrived; the replay does the rest. Whoever adds one writes a
class with these five methods and one YAML file in the group `backend`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from harness.prefix import Runs


@dataclass(slots=True)
class Request:
    """One turn, ready to be asked. Tokens are whole numbers; `runs` are the prompt's block ids."""

    turn: int
    """Row of the trace."""
    session: int
    turn_index: int
    """Which turn of its session, from 0."""
    input_tokens: int
    output_tokens: int
    block_tokens: int
    """Tokens a block: `runs` cover the front of the prompt."""
    runs: Runs
    agent: str


@dataclass(slots=True)
class Served:
    """What the server says it did. None: it did not say. Times in s on the loop's clock."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    hit_tokens: int | None = None
    """Input tokens found in the cache of the node that prefilled."""
    decode_hit_tokens: int | None = None
    """Input tokens that the node that decoded held already, and so did not have to be sent."""
    route: str | None = None
    """Pipeline taken: `P-D`, `P-MD`, `P-RLD-MD`."""
    prefill_start_s: float | None = None
    prefill_end_s: float | None = None
    transfer_start_s: float | None = None
    transfer_end_s: float | None = None
    """The last byte of the KV cache reached the node that (mainly) decodes."""
    transfer_bytes: float | None = None
    """KV bytes sent to it."""
    handoff_s: float | None = None
    """When the main decode emitted its first token after a relay."""
    relay_tokens: int | None = None
    """Output tokens the relay decoded."""


@dataclass(slots=True)
class Chunk:
    """A piece of an answer: some tokens, or the server's closing account, or both."""

    times_s: Sequence[float] | NDArray[np.float64] = ()
    """When each token's bytes arrived, ascending, on the loop's clock.
    Where a server does not say how many tokens an event carries, one time for the event."""
    answer: bool = True
    """False for reasoning tokens, which are not yet an answer."""
    served: Served | None = None


@dataclass(slots=True)
class Description:
    """What a backend is, for `run.json` and for a reader of the report."""

    name: str
    topology: str
    """`in_dc`, `cross_dc`, `pdd`, or `unknown` for a server that does not say."""
    cards: dict[str, float] = field(default_factory=dict)
    """Cards a role, as `{"P": 40, "D": 48}`; empty where unknown."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Anything else that decides its behaviour, JSON-able: coefficients, links, versions."""


class Backend(Protocol):
    """An async context manager that answers requests."""

    async def __aenter__(self) -> Self:
        """Get ready on the running loop. Raises `BackendError` if it cannot be used."""
        ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def describe(self) -> Description:
        """What is being measured. May be called at any time."""
        ...

    async def reset(self) -> None:
        """Empty every cache and prove it. Raises `BackendError` where that cannot be proven."""
        ...

    def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """The answer, as it arrives. Raises `BackendError`. Closed early, it is cancelled."""
        ...

    async def scrape(self) -> Mapping[str, float]:
        """The server's own counters now, by name; empty where it has none."""
        ...
