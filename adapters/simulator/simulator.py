"""The backend: requests in, answers out, whatever the topology between."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Many
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from adapters.simulator.decode import Sequence
from adapters.simulator.engine import Engine
from adapters.simulator.network import Flow
from adapters.simulator.prefill import PrefillCluster, Prompt
from harness.backend import Answer, Description, Request, Sample, Served
from harness.errors import BackendError


class Job:
    """One request on its way through the system, and what it holds there now.

    A handle is dropped when it is over, so that no job and handle keep each other alive.
    """

    __slots__ = (
        "answer",
        "emitted",
        "emitted_s",
        "flow",
        "prompt",
        "relay",
        "relay_flow",
        "request",
        "sequence",
        "served",
    )

    def __init__(
        self,
        request: Request,
        answer: asyncio.Future[None],
        served: Served,
        emitted: Callable[[float], None] | None = None,
    ) -> None:
        self.request = request
        self.answer = answer
        """Done when the last token is out, or when nobody waits for it any more."""
        self.served = served
        self.emitted = emitted
        """To be told of each token as it is emitted."""
        self.emitted_s: NDArray[np.float64] = np.empty(0)
        """Times of the tokens from where it has been; those of where it is are to be added."""
        self.prompt: Prompt | None = None
        self.flow: Flow | None = None
        """To the (main) decode."""
        self.sequence: Sequence | None = None
        """There."""
        self.relay_flow: Flow | None = None
        self.relay: Sequence | None = None

    @property
    def listener(self) -> Callable[[float], None] | None:
        """For a sequence that decodes it: passes on each token while someone listens."""
        return None if self.emitted is None else self._tell

    def _tell(self, time_s: float) -> None:
        if self.emitted is not None:
            self.emitted(time_s)


class Simulator(ABC):
    """Any topology that begins with a prefill cluster. Subclasses say what follows."""

    topology: str

    def __init__(self, prefill: PrefillCluster) -> None:
        self.prefill = prefill
        self.engine = Engine()
        self.engine.broke = self._break
        self._asked: dict[int, Job] = {}
        """Those not yet answered."""
        self._requests = 0

    async def __aenter__(self) -> Self:
        """Live on the running loop, cold."""
        self.engine.start(asyncio.get_running_loop())
        self.attach()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop: nothing that is under way goes on."""
        self.engine.stop()

    async def reset(self) -> None:
        """Empty all caches and links. Raises `BackendError` while requests are under way."""
        if busy := {name: value for name, value in self.load().items() if value}:
            raise BackendError(f"requests are under way: {busy}")
        self.engine.stop()
        self.engine.start(asyncio.get_running_loop())
        self.attach()

    async def generate(
        self, request: Request, answer: Answer, emitted: Callable[[float], None] | None = None
    ) -> None:
        """The whole answer at once, when its last token is out; each token has its time.

        `emitted(time_s)` is called with each token as it is emitted, and not once this has ended.
        """
        engine = self.engine
        engine.enter()
        answer.sent_input_tokens = request.input_tokens
        served = answer.served = Served(request.input_tokens)
        job = Job(request, asyncio.get_running_loop().create_future(), served, emitted)
        self._asked[id(job)] = job
        self._requests += 1
        job.prompt = Prompt(request, lambda prompt: self._prefilled(job, prompt))
        self.prefill.submit(job.prompt)
        try:
            await job.answer
            answer.finish_reason = "length"
            served.output_tokens = len(job.emitted_s)
        finally:
            del self._asked[id(job)]
            job.emitted = None
            if not job.answer.done() or job.answer.cancelled():
                engine.enter()
                job.emitted_s = self.so_far(job)
                if job.prompt is not None:
                    job.prompt.gone = True
                self.abandon(job)
            answer.times_s = job.emitted_s
            if len(job.emitted_s):
                answer.first_answer_s = float(job.emitted_s[0])

    def _break(self, error: Exception) -> None:
        """The model itself failed: no answer can be trusted any more."""
        for job in self._asked.values():
            if not job.answer.done():
                job.answer.set_exception(error)

    def _prefilled(self, job: Job, prompt: Prompt) -> None:
        job.prompt = None
        served = job.served
        served.hit_tokens = prompt.hit_tokens
        served.prefill_start_s = prompt.started_s
        served.prefill_end_s = self.engine.now_s
        self.decode(job)

    def attach(self) -> None:
        """Put every part on the engine, empty and cold."""
        self._requests = 0
        self.prefill.attach(self.engine)

    @abstractmethod
    def decode(self, job: Job) -> None:
        """The prompt's KV cache is whole: see that the answer comes, then call `finish`."""

    @abstractmethod
    def so_far(self, job: Job) -> NDArray[np.float64]:
        """When its tokens were emitted, as many as there are by now."""

    @abstractmethod
    def abandon(self, job: Job) -> None:
        """The request was cancelled: free what it holds beyond the prefill."""

    def load(self) -> dict[str, float]:
        """What is under way now, by name; all 0 when idle."""
        return {
            "requests": len(self._asked),
            "prefill_waiting": self.prefill.waiting,
            "prefill_busy_instances": self.prefill.busy,
        }

    def counters(self) -> dict[str, float]:
        """What was done since the last reset, and what the caches hold."""
        return {
            "requests_total": self._requests,
            "prefill_steps_total": self.prefill.steps,
            "prefill_computed_tokens_total": self.prefill.computed_tokens,
            "prefill_cached_blocks": self.prefill.cache.held,
            "prefill_evicted_blocks_total": self.prefill.cache.evicted,
        }

    @abstractmethod
    def describe(self) -> Description:
        """What is simulated."""

    @staticmethod
    def finish(job: Job, times_s: NDArray[np.float64]) -> None:
        """The answer is whole."""
        job.sequence = job.relay = None
        job.emitted_s = times_s
        if not job.answer.done():
            job.answer.set_result(None)

    async def scrape(self) -> Many[Sample]:
        """What is under way, and the counters."""
        now = self.load() | self.counters()
        return [Sample("simulator", name, "", float(value)) for name, value in now.items()]

    async def doubts(self) -> Many[str]:
        """None: it is what it says."""
        return ()


def numbers(part: object) -> dict[str, object]:
    """The settings of a part: its plain public attributes and its cost equations."""
    found: dict[str, object] = {}
    for name, value in vars(part).items():
        if name.startswith("_"):
            continue
        if isinstance(value, bool | int | float | str) or value is None:
            found[name] = value
        elif name in ("cost", "kv"):
            found[name] = vars(value)
    return found
