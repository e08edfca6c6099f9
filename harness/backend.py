"""What answers requests: the seam between the replay and every server, real or simulated.

A backend never reads the wall clock and never writes a record. It is given a request and an
`Answer` to fill as bytes arrive; the replay does the rest. Whoever adds one writes a class with
these methods and one YAML file in the group `backend`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol, Self

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
    evicted_tokens: int | None = None
    """Input tokens not found there that the cache had held once, and lost."""
    elsewhere_tokens: int | None = None
    """Input tokens not found there that another prefill instance held."""
    route: str | None = None
    """Pipeline taken: `P-D`, `P-MD`, `P-RLD-MD`, `P-RLD`."""
    prefill_start_s: float | None = None
    prefill_end_s: float | None = None
    transfer_start_s: float | None = None
    transfer_end_s: float | None = None
    """The last byte of the KV cache reached the node that (mainly) decodes."""
    transfer_bytes: float | None = None
    """KV bytes of the prompt sent to it."""
    decode_start_s: float | None = None
    """It began its first step there."""
    preemptions: int | None = None
    """How often it had to leave a batch for want of memory, and be computed anew."""
    relay_bytes: float | None = None
    """KV bytes of the prompt sent to the relay."""
    relay_tokens: int | None = None
    """Output tokens the relay decoded."""
    handoff: str | None = None
    """How they were handed over: `one-shot`, `catch-up`, `kv`."""
    handoff_bytes: float | None = None
    """Bytes of them sent, as ids or as KV."""
    handoff_start_s: float | None = None
    """When the first of them were sent."""
    handoff_s: float | None = None
    """When the main decode emitted its first token after a relay."""


@dataclass(slots=True)
class Answer:
    """What came back, and when, in s on the loop's clock.

    Filled by the backend as it comes, so that whatever ends a request early, an error or a
    time-out, what had come until then is kept.
    """

    sent_s: float | None = None
    """When the request's first byte was given to the system. None: when it was asked."""
    sent_input_tokens: int | None = None
    """Prompt tokens that were sent, by the client's own count."""
    first_byte_s: float | None = None
    """The first byte of the response, its head included."""
    times_s: Sequence[float] | NDArray[np.float64] = ()
    """When the bytes of each token arrived, ascending; see `timed_by`."""
    first_answer_s: float | None = None
    """The first token that is neither reasoning nor a part of it."""
    timed_by: Literal["token", "event"] = "token"
    """`event`: the server does not say how many tokens an event carries: one time an event."""
    clock: Literal["kernel", "user"] | None = None
    """Who stamped the bytes of a real server: the kernel on receipt, or this process on reading."""
    shared_reads: int = 0
    """Events that were read together with a later one, and so bear its (later) time."""
    finish_reason: str | None = None
    served: Served = field(default_factory=Served)


class Sample(NamedTuple):
    """One of a server's own counters."""

    source: str
    """Who said it: `P http://127.0.0.1:8101`, or `simulator`."""
    name: str
    labels: str
    """As the server wrote them, `engine="0",model_name="tiny"`; empty where it has none."""
    value: float


@dataclass(slots=True)
class Description:
    """What a backend is, for `run.json` and for a reader of the report."""

    name: str
    topology: str
    """`in_dc`, `cross_dc`, `pdd`, or `unknown` for a server that does not say."""
    cards: dict[str, float] = field(default_factory=dict)
    """Cards a role, as `{"P": 40, "D": 48}`; empty where unknown."""
    context_tokens: int | None = None
    """The longest prompt and answer together; None where there is no limit, or none is known."""
    warnings: Sequence[str] = ()
    """What a reader of the results must know of how they were got."""
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

    async def generate(self, request: Request, answer: Answer) -> None:
        """Ask, and fill `answer` until it is whole. Raises `BackendError`. May be cancelled."""
        ...

    async def scrape(self) -> Sequence[Sample]:
        """The server's own counters now; empty where it has none. Raises `BackendError`."""
        ...

    async def doubts(self) -> Sequence[str]:
        """After a replay: reasons why it did not measure what it was meant to. Empty: none."""
        ...
