"""Locust's worker: its hub in the main thread, the replay on its own loop in a native one.

The hub only carries messages and heartbeats. What takes time, reading the trace and making Arrow
of records, is done in native threads, so that Locust's master never takes it for dead.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import gevent  # type: ignore[import-untyped]
import gevent.event  # type: ignore[import-untyped]
import gevent.queue  # type: ignore[import-untyped]
from locust.env import Environment
from locust.runners import WorkerRunner
from omegaconf import DictConfig, OmegaConf

from adapters.locust_host.wire import TYPE, Message
from harness.backend import Answer, Backend, Request
from harness.clock import Loop
from harness.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_GOOD, EXIT_INTERRUPTED, HarnessError
from harness.job import steady_memory
from harness.pacing import Shard
from harness.record import OK, UNSENT, Record, to_batch
from harness.replay import Replay
from harness.run import answering, load_trace, paced

_FLUSH_S = 0.5
_FLUSH_ROWS = 2_000
_LEAVE_S = 10.0
"""How long an interrupted worker waits for its last words to be heard."""


@dataclass(frozen=True)
class Seat:
    """Where a worker belongs."""

    host: str
    port: int
    token: str
    number: int | None = None
    """Given by the run that started it; None: it comes from elsewhere, and is given one."""


def work(seat: Seat) -> int:
    """Join the run, do its share, and leave. Returns the exit code."""
    if seat.number is not None:
        threading.Thread(target=_die_with_the_run, daemon=True).start()
    else:
        _say(f"joining the run at {seat.host}:{seat.port}")
    try:
        runner = Environment().create_worker_runner(seat.host, seat.port)
    except ConnectionError:
        _say(f"nobody answers at {seat.host}:{seat.port}: is the run there, and its port open?")
        return EXIT_BAD_INPUT
    return _Worker(runner, seat).serve()


def _die_with_the_run() -> None:
    """The run holds the other end of this pipe; the kernel closes it however the run ends."""
    while os.read(0, 1024):
        pass
    os._exit(EXIT_FAILED)


def _say(words: str) -> None:
    print(f"relaybench worker: {words}", file=sys.stderr, flush=True)  # noqa: T201 - for a person


class _Outbox:
    """Messages from any thread, sent in their order by the hub."""

    def __init__(self, runner: WorkerRunner) -> None:
        self._runner = runner
        self._waiting: deque[Message] = deque()
        self._some = gevent.event.Event()
        self._wake = gevent.get_hub().loop.async_()
        self._wake.start(self._some.set)
        gevent.spawn(self._send)

    def put(self, message: Message) -> None:
        self._waiting.append(message)
        self._wake.send()

    def _send(self) -> None:
        while True:
            self._some.wait()
            self._some.clear()
            while self._waiting:
                self._runner.send_message(TYPE, self._waiting.popleft())


class _Worker:
    """The hub's side."""

    def __init__(self, runner: WorkerRunner, seat: Seat) -> None:
        self._runner = runner
        self._seat = seat
        self._outbox = _Outbox(runner)
        self._inbox: gevent.queue.Queue[Message] = gevent.queue.Queue()
        self._share: _Share | None = None
        self._interrupted = False
        runner.register_message(TYPE, self._heard)

    def serve(self) -> int:
        """The exit code."""
        self._outbox.put(
            {
                "kind": "hello",
                "token": self._seat.token,
                "number": self._seat.number,
                "version": importlib.metadata.version("relaybench"),
                "machine": socket.gethostname(),
                "pid": os.getpid(),
            }
        )
        lost = gevent.spawn(self._gone)
        gevent.signal_handler(signal.SIGINT, self._inbox.put, {"kind": "interrupt"})
        code = EXIT_GOOD
        while (message := self._inbox.get())["kind"] != "bye":
            code = self._obey(message) or code
        lost.kill()
        return code or (self._share.code if self._share else EXIT_GOOD)

    def _obey(self, message: Message) -> int:
        if message["kind"] == "interrupt":
            return self._interrupt()
        if message["kind"] == "refused":
            _say(f"the run refuses this worker: {message['words']}")
            self._inbox.put({"kind": "bye"})
            return EXIT_BAD_INPUT
        if message["kind"] == "setup":
            if self._seat.number is None:
                _say(f"this is worker {message['number']} of {message['workers']}")
            self._share = _Share(message, self._outbox.put)
            threading.Thread(target=self._share.work, name="replay", daemon=True).start()
        elif self._share is not None and message["kind"] == "start":
            self._share.start(message["zero_s"])
        elif self._share is not None and message["kind"] == "stop":
            self._share.stop("stopped")
        return EXIT_GOOD

    def _interrupt(self) -> int:
        """By a person at this machine: the first time with last words."""
        if self._share is None or self._interrupted:
            self._inbox.put({"kind": "bye"})
        else:
            _say("interrupted: sending what there is")
            self._interrupted = True
            self._share.stop("interrupted")
            gevent.spawn_later(_LEAVE_S, self._inbox.put, {"kind": "bye"})
        return EXIT_INTERRUPTED

    def _heard(self, environment: Environment, msg: Any, **_: Any) -> None:  # noqa: ARG002 - Locust's
        if msg.data["kind"] == "ping":
            self._runner.send_message(TYPE, {"kind": "pong", "now_s": time.monotonic()})
        else:
            self._inbox.put(msg.data)

    def _gone(self) -> None:
        """Locust gives up on a master that it has not heard of for a minute."""
        self._runner.greenlet.join()
        _say("the run is not heard of any more")
        os._exit(EXIT_FAILED)


class _Prepared(Replay):
    """A replay that is told its start when it is ready: building one takes its time."""

    def starts_at(self, zero_s: float) -> None:
        self._shard = replace(cast("Shard", self._shard), zero_s=zero_s)

    def due_s(self, turn: int) -> float | None:
        return self._scheduled[turn]


class _Noting:
    """A backend that keeps what it is asked, and when, for a run that may lose this worker."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.asked: deque[tuple[int, float]] = deque()

    async def generate(self, request: Request, answer: Answer) -> None:
        self.asked.append((request.turn, time.monotonic()))
        await self._backend.generate(request, answer)


class _Share:
    """One worker's part of the replay. `work` in a thread of its own, the rest from the hub's."""

    def __init__(self, setup: Message, send: Callable[[Message], None]) -> None:
        self._setup = setup
        self._send = send
        self._rows: deque[Record] = deque()
        self._full: threading.Event
        self._zero: Future[float] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._stopped: str | None = None
        self.code = EXIT_GOOD
        """With which the worker leaves."""

    def start(self, zero_s: float) -> None:
        """All start then, on this machine's clock."""
        self._zero.set_result(zero_s)

    def stop(self, why: str) -> None:
        """Send nothing more, and write down what was under way."""
        self._stopped = self._stopped or why
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # it has just closed
                self._loop.call_soon_threadsafe(self._task.cancel)

    def work(self) -> None:
        """Everything, and whatever ends it."""
        try:
            self._replay()
        except HarnessError as error:
            self.code = error.exit_code
            _say(str(error))
            self._send(
                {
                    "kind": "failed",
                    "error": type(error).__name__,
                    "code": error.exit_code,
                    "words": str(error),
                }
            )
        except asyncio.CancelledError:
            self._send({"kind": "ended", "how": self._stopped})
        except BaseException:  # noqa: BLE001 - a fault of ours, shown here and by the run
            self.code = EXIT_FAILED
            words = traceback.format_exc()
            _say(words)
            self._send({"kind": "broke", "words": words})

    def _replay(self) -> None:
        setup = self._setup
        config = OmegaConf.create(setup["config"])
        assert isinstance(config, DictConfig)  # noqa: S101 - what the run sent
        trace = load_trace(config)
        if trace.digest != setup["digest"]:
            words = f"its trace differs from the run's ({trace.digest[:12]}): copy the same files"
            self._send({"kind": "unfit", "words": words})
            return
        plan = paced(config, trace)
        backend, loop = answering(config, setup["backend"])
        noting = _Noting(backend)
        replay = _Prepared(
            trace, plan, cast("Backend", noting), self._keep,
            timeout_s=config.timeout_s, shard=Shard(setup["number"], setup["workers"], 0.0),
        )  # fmt: skip
        with steady_memory(), asyncio.Runner(loop_factory=loop) as runner:
            runner.run(self._in_step(backend, noting, replay))

    async def _in_step(self, backend: Backend, noting: _Noting, replay: _Prepared) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self._stopped:
            raise asyncio.CancelledError
        async with backend:
            self._send({"kind": "ready"})
            zero_s = await asyncio.wrap_future(self._zero)
            replay.starts_at(zero_s)
            cpu_s = time.process_time()
            teller = _Teller(self._setup["page"], zero_s, noting, replay, self._rows, self._send)
            self._full = teller.full
            bell = cast("Loop", self._loop).alarm(lambda: self._started(zero_s))
            bell.set(zero_s)
            try:
                with teller:
                    await replay.run()
            finally:
                bell.close()
                self._loop = None
                cpu_s = time.process_time() - cpu_s
                self._send({"kind": "spent", "cpu_s": round(cpu_s, 3)})
        self._send({"kind": "ended", "how": "whole"})

    def _started(self, zero_s: float) -> None:
        """Rung by the replay's own kind of timer: as late as its first requests."""
        self._send({"kind": "started", "skew_s": time.monotonic() - zero_s})

    def _keep(self, record: Record) -> None:
        self._rows.append(record)
        if len(self._rows) >= _FLUSH_ROWS:
            self._full.set()


class _Teller(threading.Thread):
    """Sends records and what was asked, beside the replay, which must not wait for Arrow."""

    def __init__(
        self,
        page: bool,
        zero_s: float,
        noting: _Noting,
        replay: _Prepared,
        rows: deque[Record],
        send: Callable[[Message], None],
    ) -> None:
        super().__init__(name="records", daemon=True)
        self._page = page
        self._zero_s = zero_s
        self._noting = noting
        self._replay = replay
        self._rows = rows
        self._send = send
        self._ending = False
        self.full = threading.Event()
        """There is enough for a message."""

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        """Send the rest."""
        self._ending = True
        self.full.set()
        self.join()

    def run(self) -> None:
        """Every half second, or when there is much."""
        while not self._ending:
            self.full.wait(_FLUSH_S)
            self.full.clear()
            self._tell()
        self._tell()

    def _tell(self) -> None:
        asked = [self._noting.asked.popleft() for _ in range(len(self._noting.asked))]
        rows = [self._rows.popleft() for _ in range(len(self._rows))]
        if not asked and not rows:
            return
        sent = [(turn, self._replay.due_s(turn), at_s - self._zero_s) for turn, at_s in asked]
        message: Message = {"kind": "records", "sent": sent, "rows": len(rows)}
        if rows:
            message["body"] = to_batch(rows).serialize().to_pybytes()
        if self._page:
            message["page"] = [_shown(row) for row in rows if row.status != UNSENT]
        self._send(message)


def _shown(row: Record) -> dict[str, Any]:
    """One request for Locust's page: its latency counts from when it was due, in ms."""
    end_s = row.last_token_s if row.last_token_s is not None else row.sent_s or 0.0
    return {
        "request_type": "turn",
        "name": row.agent,
        "response_time": max(0.0, end_s - (row.scheduled_s or 0.0)) * 1e3,
        "response_length": row.served_output_tokens or 0,
        "exception": None if row.status == OK else row.error_class or row.status,
    }
