"""Can this machine measure, and can that server be measured: `relaybench doctor`.

The machine: file descriptors, the kernel's stamps, the alarm. The client: against our own server in
a process beside this one, which writes into each event when it wrote it. The server, where one is
named: reach, API, counts, streaming, cold start, counters, and whether disaggregation is on.
"""

from __future__ import annotations

import asyncio
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from adapters.completion import Completion
from adapters.openai import OpenAI
from adapters.prompts import Tokens
from harness.backend import Answer, Backend, Request
from harness.clock import WallLoop
from harness.errors import EXIT_BACKEND, EXIT_GOOD, BackendError, ConfigError, HarnessError
from harness.metrics import nearest_rank
from harness.pacing import Recorded
from harness.record import OK, Record
from harness.replay import Replay
from harness.settings import number, whole
from harness.trace import Header, Trace, build_table

Grade = Literal["ok", "warn", "FAIL"]
_DESCRIPTORS = 4096
_ALARMS = 100
_ALARM_S = 0.005
_ALARM_LATE_S = 0.001
_ARRIVAL_S = 0.001
_SEND_S = 0.005
_START_S = 60.0
_PROMPT_TOKENS = 256
_ANSWER_TOKENS = 16


class Doctor:
    """`self_test`: a load of `requests_per_s` for `lasts_s`, each answer of `answer_tokens`."""

    def __init__(
        self, self_test: bool, requests_per_s: float, lasts_s: float, answer_tokens: int
    ) -> None:
        number("doctor.requests_per_s", requests_per_s, above=0, most=1e5)
        number("doctor.lasts_s", lasts_s, above=0, most=3600)
        whole("doctor.answer_tokens", answer_tokens, least=2)
        if not isinstance(self_test, bool):
            raise ConfigError(f"doctor.self_test is {self_test!r}: give true or false")
        self.self_test = self_test
        self.requests = max(1, round(requests_per_s * lasts_s))
        self.requests_per_s = requests_per_s
        self.answer_tokens = answer_tokens
        self._failed = False

    def examine(self, backend: Backend | None, say: Callable[[str], None]) -> int:
        """Say what was found, a line each; returns the exit code: 3 where anything failed."""
        if backend is not None and not isinstance(backend, OpenAI):
            raise ConfigError("this backend is no server: give a URL, or one of openai, vllm, ...")
        self._say = say
        self._descriptors()
        with asyncio.Runner(loop_factory=WallLoop) as runner:
            runner.run(self._alarm())
            if self.self_test:
                with _our_server() as url:
                    runner.run(self._client(url))
            if backend is not None:
                runner.run(self._server(backend))
        return EXIT_BACKEND if self._failed else EXIT_GOOD

    def _note(self, grade: Grade, what: str, words: str) -> None:
        self._failed |= grade == "FAIL"
        self._say(f"{grade:<4}  {what:<14} {words}")

    # ---- the machine

    def _descriptors(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        words = f"{soft:,} may be open, so about as many requests under way (limit {hard:,})"
        if soft < _DESCRIPTORS:
            self._note("warn", "descriptors", f"{words}; raise it: ulimit -n {hard}")
        else:
            self._note("ok", "descriptors", words)

    async def _alarm(self) -> None:
        """How late the schedule's own timer is on this machine, now."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, WallLoop)  # noqa: S101 - `examine` made it
        late: list[float] = []
        done = asyncio.Event()
        due_s = loop.time() + _ALARM_S

        def ring() -> None:
            nonlocal due_s
            late.append(loop.time() - due_s)
            if len(late) == _ALARMS:
                done.set()
                return
            due_s = loop.time() + _ALARM_S
            alarm.set(due_s)

        alarm = loop.alarm(ring)
        alarm.set(due_s)
        await done.wait()
        alarm.close()
        words = f"late by {_spread(np.array(late))} with nothing else to do"
        good = nearest_rank(np.array(late), 0.99) <= _ALARM_LATE_S
        self._note("ok" if good else "warn", "clock", words + ("" if good else _BUSY))

    # ---- the client

    async def _client(self, url: str) -> None:
        """A known load on our own server: what this client adds to every figure."""
        trace = _load(self.requests, self.requests_per_s, self.answer_tokens)
        records: list[Record] = []
        async with Known(url=url, salt="doctor", prompts=Tokens()) as server:
            plan = Recorded().plan(trace, np.random.default_rng(0))
            began_s = time.process_time()
            await Replay(trace, plan, server, records.append, timeout_s=_START_S).run()
            cpu_s = time.process_time() - began_s
            errors_s = np.array(server.errors_s)
        good = [record for record in records if record.status == OK]
        if len(good) < len(records):
            said = next(record.error for record in records if record.status != OK)
            self._note("FAIL", "client", f"{len(records) - len(good)} self-test requests: {said}")
            return
        lag_s = np.array([(r.sent_s or 0.0) - (r.scheduled_s or 0.0) for r in good])
        by = {record.stamped_by for record in good}
        shared = sum(record.shared_reads for record in good) / len(errors_s)
        self._note(
            "ok" if by == {"kernel"} else "warn",
            "stamps",
            "the kernel stamps what comes over plain TCP"
            if by == {"kernel"}
            else "this process stamps what it reads: its own lateness is in every latency",
        )
        words = (
            f"{len(good)} requests at {self.requests_per_s:g}/s x {self.answer_tokens} events: "
            f"sent late by {_spread(lag_s)}; events stamped late by {_spread(errors_s)}, "
            f"{shared:.1%} read together with a later one; "
            f"{1e6 * cpu_s / len(errors_s):.0f} us of CPU an event"
        )
        late = nearest_rank(lag_s, 0.99) > _SEND_S or nearest_rank(errors_s, 0.99) > _ARRIVAL_S
        self._note("warn" if late else "ok", "client", words + (_BUSY if late else ""))

    # ---- the server

    async def _server(self, backend: Backend) -> None:
        try:
            async with backend:
                await self._asked(backend)
        except HarnessError as error:
            self._note("FAIL", "server", f"{type(error).__name__}: {error}")

    async def _asked(self, backend: Backend) -> None:
        about = backend.describe()
        details = {"context_tokens": about.context_tokens, **about.details}
        known = {k: details[k] for k in ("model", "context_tokens", "versions") if details.get(k)}
        self._note("ok", "reach", f"{details.get('url')}: {_listed(known)}")
        await backend.reset()
        cold = str(backend.describe().details.get("cold_start"))
        self._note("ok" if "proven" in cold and "not" not in cold else "warn", "cold start", cold)
        first, again = Answer(), Answer()
        request = Request(2**32 - 9, -1, 0, _PROMPT_TOKENS, _ANSWER_TOKENS, 1, [], "doctor")
        await backend.generate(request, first)
        await backend.generate(request, again)
        self._counts(first)
        self._streaming(first)
        self._hits(again)
        samples = await backend.scrape()
        up = {each.source: each.value for each in samples if each.name == "up"}
        if up and all(up.values()):
            self._note("ok", "metrics", f"{len(samples):,} samples of {', '.join(up)}")
        elif up:
            down = ", ".join(source for source, value in up.items() if not value)
            self._note("FAIL", "metrics", f"no page of {down}")
        else:
            self._note("warn", "metrics", "no page is named: set servers or metrics, by role")
        self._disaggregated(await backend.doubts(), backend.describe().details)

    def _counts(self, answer: Answer) -> None:
        served = answer.served
        asked = (answer.sent_input_tokens, _ANSWER_TOKENS)
        got = (served.input_tokens, served.output_tokens)
        if None in got:
            self._note("warn", "counts", "no usage is reported: tokens cannot be checked")
        elif got == asked:
            self._note("ok", "counts", f"{got[0]} tokens in and {got[1]} out, as asked")
        else:
            self._note("FAIL", "counts", f"(in, out) asked {asked}, served {got}")

    def _streaming(self, answer: Answer) -> None:
        times_s = np.asarray(answer.times_s, np.float64)
        moments = len(np.unique(times_s))
        words = (
            f"{moments} moments for {len(times_s)} {answer.timed_by}s, stamped by {answer.clock}"
        )
        if moments == 1:
            words += ": the answer came at once, so there is no time per token to measure"
        self._note("ok" if moments > 1 else "warn", "streaming", words)

    def _hits(self, answer: Answer) -> None:
        hits = answer.served.hit_tokens
        if hits is None:
            words = "cached tokens are not reported (vLLM: --enable-prompt-tokens-details)"
        else:
            words = f"a prompt sent twice had {hits} of {_PROMPT_TOKENS} tokens cached"
        self._note("ok" if hits else "warn", "hits", words)

    def _disaggregated(self, doubts: Any, details: Mapping[str, Any]) -> None:
        counted = details.get("pd_counters")
        if doubts:
            self._note("FAIL", "disaggregation", "; ".join(doubts))
        elif counted:
            self._note("ok", "disaggregation", _listed(counted))
        else:
            self._note("warn", "disaggregation", "not looked for: name P and D in servers")


_BUSY = ". This machine is too busy, or too small, to measure finer than that"


class Known(OpenAI):
    """Our own server, which says of each event when it was written."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, extra={"relaybench_stamps": True})
        self.errors_s: list[float] = []

    def reading(self, answer: Answer) -> Completion:
        """With the server's stamps."""
        return _Compared(answer, self.errors_s)


class _Compared(Completion):
    def __init__(self, answer: Answer, errors_s: list[float]) -> None:
        super().__init__(answer)
        self._errors_s = errors_s

    def understand(self, payload: Mapping[str, Any], time_s: float, read: int) -> None:
        super().understand(payload, time_s, read)
        sent_s = (payload.get("relaybench") or {}).get("sent_s")
        if sent_s is not None:
            self._errors_s.append(time_s - sent_s)


def _load(requests: int, requests_per_s: float, answer_tokens: int) -> Trace:
    """Single turns, evenly spaced."""
    at_s = (np.arange(requests) / requests_per_s).tolist()
    rows: dict[str, Any] = {
        "session": list(range(requests)),
        "turn_index": [0] * requests,
        "parents": [[]] * requests,
        "recorded_s": at_s,
        "arrival_s": at_s,
        "delay_s": [None] * requests,
        "input_tokens": [_PROMPT_TOKENS] * requests,
        "output_tokens": [answer_tokens] * requests,
        "run_starts": [[]] * requests,
        "run_lengths": [[]] * requests,
        "agent": ["doctor"] * requests,
    }
    return Trace(build_table(rows), Header("doctor", 64, "floor", "file", "s", "-"))


@contextmanager
def _our_server() -> Iterator[str]:
    """`relaybench serve` in a process of its own; its URL."""
    command = [sys.executable, "-m", "harness", "serve", "backend=in_dc", "server.port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own
        give_up = threading.Timer(_START_S, process.kill)
        give_up.start()
        try:
            assert process.stdout is not None  # noqa: S101 - it is a pipe
            found = re.search(r"on (http://\S+)", process.stdout.readline())
            if found is None:
                raise BackendError("our own server did not start")
            give_up.cancel()
            yield found[1]
        finally:
            give_up.cancel()
            process.terminate()


def _spread(values_s: NDArray[np.float64]) -> str:
    p50, p99 = (1e3 * nearest_rank(values_s, q) for q in (0.5, 0.99))
    return f"P50 {p50:.2f}, P99 {p99:.2f} ms"


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {', '.join(map(str, value.values())) if isinstance(value, Mapping) else value}"
        for name, value in values.items()
    )
