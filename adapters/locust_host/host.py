"""The run's side: who is there, who is ready, when all start, their records, and who died.

The processes that it starts hold pipes of its own, and end when those close, however it ends.
"""

from __future__ import annotations

import asyncio
import hmac
import importlib.metadata
import json
import os
import secrets
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from omegaconf import OmegaConf

from adapters.locust_host.wire import SIZES, Message, pack, unpack
from harness import errors
from harness.errors import EXIT_BACKEND, EXIT_FAILED, BackendError, ConfigError, HarnessError
from harness.host import Account, Work
from harness.pacing import Shard
from harness.record import CANCELLED, SCHEMA, UNSENT, Record, blank
from harness.settings import number, whole

_LEAD_S = 0.5
"""From the word to start until the start: time enough to reach every worker."""
_DRAIN_S = 1.0
"""What a dead worker sent may still be under way for so long."""
_STOP_S = 10.0
"""A worker that is told to stop has so long to give back what it has."""
_LEAVE_S = 2.0
_STOPPED = "was stopped"
"""The end of a worker that did as it was told."""
_LATE_S = 0.010
"""A start that is later is worth a warning."""


class WorkerLost(HarnessError):
    """There are not all workers to start with."""

    exit_code = EXIT_FAILED


class WorkerFault(Exception):
    """A fault of ours in a worker, with its traceback."""


@dataclass(frozen=True)
class Locust:
    """`processes` workers on this machine and `workers` that join from others.

    `bind`, `port`: where the master listens (0: a free port). `web_port`: of Locust's live page, on
    this machine only. `wait_s`: how long all workers may take to be ready. `token`: what a worker
    must know to join; None: a new one a run.
    """

    processes: int = 2
    workers: int = 0
    bind: str = "127.0.0.1"
    port: int = 0
    web_port: int | None = None
    wait_s: float = 600.0
    token: str | None = None

    def __post_init__(self) -> None:
        whole("host.processes", self.processes, least=0)
        whole("host.workers", self.workers, least=0)
        if not self.processes + self.workers:
            raise ConfigError("host.processes and host.workers are 0: somebody must replay")
        for name in ("port", "web_port"):
            value = getattr(self, name)
            if value is not None:
                whole(f"host.{name}", value, least=0 if name == "port" else 1)
                number(f"host.{name}", value, most=65535)
        number("host.wait_s", self.wait_s, above=0, most=1e9)

    def check(self, backend: str, *, virtual: bool) -> None:
        """Refuse the virtual clock: it is one process's own."""
        if virtual:
            raise ConfigError(
                f"{backend} runs on a virtual clock, which several processes cannot share. "
                "Choose host=local"
            )

    def crew(self, work: Work) -> _Crew:
        """Master and workers, not yet started."""
        return _Crew(self, work)


@dataclass
class _Worker:
    """What is known of one."""

    number: int
    machine: str
    pid: int
    node: str
    process: Process | None
    """Where this process started it."""
    turns: NDArray[np.int64]
    """Rows of the trace that are its own."""
    ready: bool = False
    clock: tuple[float, float] | None = None
    """s that its clock is ahead of ours, and how far that may be off."""
    skew_s: float | None = None
    cpu_s: float | None = None
    end: str | None = None
    """`whole`, or why it is not; None: it goes on."""
    sent: dict[int, tuple[float | None, float]] = field(default_factory=dict)
    """Turns that it said it had sent, of which there is no record yet: when due, when sent."""

    @property
    def name(self) -> str:
        return f"worker {self.number}" + ("" if self.process else f" on {self.machine}")


class _Crew:
    def __init__(self, host: Locust, work: Work) -> None:
        self._host = host
        self._work = work
        self._total = host.processes + host.workers
        self._token = host.token or secrets.token_hex(8)
        self._workers: dict[str, _Worker] = {}
        self._children: dict[int, Process] = {}
        self._master: Process | None = None
        self._link: asyncio.StreamWriter | None = None
        self._port: int | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()
        self._fault: Exception | None = None
        self._recorded = np.zeros(len(work.trace), bool)
        self._ending: list[str] = []
        self._leaving = False

    # ---- life

    async def __aenter__(self) -> Self:
        """Start everyone and wait until all are ready."""
        try:
            await self._open()
            async with asyncio.timeout(self._host.wait_s):
                await self._until(lambda: self._port is not None)
                await self._seat()
                await self._until(lambda: self._count(lambda each: each.ready) == self._total)
                for worker in self._workers.values():
                    await self._send(worker, kind="clock")
                await self._until(lambda: all(each.clock for each in self._workers.values()))
        except TimeoutError:
            there = self._count(lambda each: each.ready)
            await self._close()
            raise WorkerLost(
                f"{there} of {self._total} workers were ready within {self._host.wait_s:g} s"
            ) from None
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close()

    async def _open(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            web = self._host.web_port
            self._master = await self._spawn(
                "master", "--link", str(theirs.fileno()), "--bind", self._host.bind,
                "--port", str(self._host.port), *(["--web-port", str(web)] if web else []),
                link=theirs.fileno(),
            )  # fmt: skip
        reader, self._link = await asyncio.open_connection(sock=ours)
        self._watch(self._listen(reader))
        for seat in range(self._host.processes):
            self._children[seat] = await self._spawn("child")
            self._watch(self._attend(seat))

    async def _spawn(self, *words: str, link: int | None = None) -> Process:
        """A child with this process's import path, in a session of its own: Ctrl-C is ours."""
        return await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "adapters.locust_host", *words,
            stdin=DEVNULL if link else PIPE, pass_fds=(link,) if link else (),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(each or "." for each in sys.path)},
            start_new_session=True,
        )  # fmt: skip

    def _watch(self, work: Any) -> None:
        """Beside the rest. What it raises ends the run."""

        async def watched() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - told by `_until`
                self._fault = self._fault or error
            self._news.set()

        self._tasks.append(asyncio.get_running_loop().create_task(watched()))

    async def _close(self) -> None:
        """Nobody stays, whatever happens here."""
        self._leaving = True
        processes = [*self._children.values(), *([self._master] if self._master else [])]
        try:
            for worker in self._workers.values():
                await self._send(worker, kind="bye")
            async with asyncio.timeout(_LEAVE_S):
                for process in self._children.values():
                    await process.wait()
                await self._tell({"kind": "quit"})
                if self._master:
                    await self._master.wait()
        except TimeoutError:
            pass
        finally:
            for process in processes:
                if process.returncode is None:
                    with suppress(ProcessLookupError):
                        process.kill()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*(each.wait() for each in processes), return_exceptions=True)

    # ---- the run

    async def run(self) -> None:
        """Start all at the same time, and wait for the last."""
        await self._tell({"kind": "running"})
        zero_s = time.monotonic() + _LEAD_S
        for worker in self._workers.values():
            ahead_s, _ = worker.clock or (0.0, 0.0)
            await self._send(worker, kind="start", zero_s=zero_s + ahead_s)
        try:
            await self._until(self._over)
        finally:
            await self._wind_up()

    def _over(self) -> bool:
        return self._count(lambda each: each.end is not None) == len(self._workers)

    async def _wind_up(self) -> None:
        """Whoever goes on stops; every turn gets its record."""
        going = [each for each in self._workers.values() if each.end is None]
        try:
            for worker in going:
                await self._send(worker, kind="stop")
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await self._until(self._over, heed=False)
        finally:
            for worker in going:
                if worker.end is None:
                    self._lose(worker, f"did not stop within {_STOP_S:g} s")
            for worker in self._workers.values():
                self._complete(worker)

    def _complete(self, worker: _Worker) -> None:
        """Records for the turns of which there is none: what is known of them."""
        rows = worker.turns[~self._recorded[worker.turns]].tolist()
        why = worker.end if worker.end != "whole" else "ended, and their records were lost"
        lost = 0
        for row in rows:
            sent = worker.sent.get(row)
            lost += sent is not None
            words = f"{worker.name} {why}"
            words += "" if sent else " before it said whether this was sent"
            self._work.write(_left(self._work, row, worker.number, sent, words))
        self._recorded[worker.turns] = True
        if rows or worker.end not in ("whole", _STOPPED):
            note = f": {lost} of its requests were under way, {len(rows) - lost} are not known sent"
            self._ending.append(f"{worker.name} {why}{note if rows else ''}")

    def account(self) -> Account:
        """Who was there, how exactly they started together, and who did not end well."""
        workers = sorted(self._workers.values(), key=lambda each: each.number)
        late = [each for each in workers if each.skew_s is not None and each.skew_s > _LATE_S]
        return Account(
            workers=[_facts(each) for each in workers],
            cpu_s=sum(each.cpu_s or 0.0 for each in workers),
            ending=list(self._ending),
            warnings=[
                f"{each.name} started {(each.skew_s or 0.0) * 1e3:.1f} ms after the common start"
                for each in late
            ],
        )

    # ---- who is there

    async def _seat(self) -> None:
        """Tell our own workers where the master is, and a person how others join."""
        master = self._host.bind if self._host.bind not in ("", "*", "0.0.0.0", "::") else None  # noqa: S104 - compared
        for seat, process in self._children.items():
            place = {
                "host": master or "127.0.0.1", "port": self._port,
                "token": self._token, "number": seat,
            }  # fmt: skip
            if process.stdin is not None and not process.stdin.is_closing():
                process.stdin.write(json.dumps(place).encode() + b"\n")
        if self._host.workers:
            token = "..." if self._host.token else self._token
            self._work.say(
                f"{self._work.name}: waiting for workers of other machines ({self._host.workers}). "
                "To start one, with the same files and versions:\n"
                f"  RELAYBENCH_TOKEN={token} python -m adapters.locust_host worker "
                f"--master {master or socket.gethostname()}:{self._port}"
            )

    async def _attend(self, seat: int) -> None:
        """A worker of ours has died when its process has, and not before its words are read."""
        process = self._children[seat]
        code = await process.wait()
        if self._leaving:
            return
        await asyncio.sleep(_DRAIN_S)
        words = f"died ({_ended(code)})"
        for worker in self._workers.values():
            if worker.process is process:
                self._lose(worker, words)
                return
        raise WorkerLost(f"worker {seat} {words} before it was ready")

    def _lose(self, worker: _Worker, words: str) -> None:
        if worker.end is not None:
            return
        worker.end = words
        if worker.skew_s is None and not self._leaving:
            self._fault = self._fault or WorkerLost(f"{worker.name} {words} before the start")
        self._work.say(f"{self._work.name}: {worker.name} {words}")
        self._news.set()

    def _hello(self, message: Message) -> str | None:
        """Take a worker in, or say why not."""
        ours = importlib.metadata.version("relaybench")
        if not hmac.compare_digest(str(message["token"]).encode(), self._token.encode()):
            return "its token is wrong: give the run's by RELAYBENCH_TOKEN"
        if message["version"] != ours:
            return f"it is relaybench {message['version']}, and the run is {ours}"
        seat = message["number"]
        taken = {each.number for each in self._workers.values()}
        free = [n for n in range(self._host.processes, self._total) if n not in taken]
        if seat is None and not free:
            return "the run has all its workers"
        mine = free[0] if seat is None else seat
        order = Shard(mine, self._total, 0.0).order(self._work.plan)
        self._workers[message["node"]] = _Worker(
            number=mine, machine=message["machine"], pid=message["pid"], node=message["node"],
            process=None if seat is None else self._children[seat],
            turns=np.flatnonzero(np.isin(self._work.trace.session, order)),
        )  # fmt: skip
        return None

    # ---- what they say

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head, body = SIZES.unpack(await reader.readexactly(SIZES.size))
                message = unpack(await reader.readexactly(head), await reader.readexactly(body))
                try:
                    await self._hear(message)
                except (HarnessError, WorkerFault) as error:  # the others still have their say
                    self._fault = self._fault or error
                self._news.set()
        if not self._leaving:
            if not self._workers:
                raise WorkerLost("Locust's master died before the run began")
            for worker in self._workers.values():
                self._lose(worker, "was cut off: Locust's master died")

    async def _hear(self, message: Message) -> None:
        node, kind = message.get("node"), message["kind"]
        if kind == "hello":
            refusal = self._hello(message)
            if refusal is None:
                await self._set_up(self._workers[message["node"]])
            else:
                self._work.say(f"refused a worker on {message['machine']}: {refusal}")
                await self._tell({"kind": "refused", "node": node, "words": refusal})
        elif kind == "bound":
            self._port = message["port"]
            if message["web"]:
                self._work.say(f"{self._work.name}: live page at {message['web']}")
        elif kind == "failed" and node is None:
            raise ConfigError(f"host: Locust's master {message['words']}")
        elif kind == "stopped":
            self._ending.append("stopped by Locust: from its page, or as no worker was heard of")
            for worker in self._workers.values():
                await self._send(worker, kind="stop")
        elif node in self._workers and self._workers[node].end is None:
            await self._hear_of(self._workers[node], message)

    async def _hear_of(self, worker: _Worker, message: Message) -> None:
        kind = message["kind"]
        if kind == "ready":
            worker.ready = True
        elif kind == "clock":
            ahead_s, error_s = message["ahead_s"], message["error_s"]
            # One machine has one clock: what can be 0 is 0.
            worker.clock = (0.0 if abs(ahead_s) <= error_s else ahead_s, error_s)
        elif kind == "started":
            worker.skew_s = message["skew_s"]
        elif kind == "records":
            self._gather(worker, message)
        elif kind == "spent":
            worker.cpu_s = message["cpu_s"]
        else:
            await self._hear_end(worker, message)

    async def _hear_end(self, worker: _Worker, message: Message) -> None:
        kind = message["kind"]
        if kind == "ended":
            how = message["how"]
            worker.end = how if how == "whole" else f"was {how}"
        elif kind == "missing" and worker.process is None:
            self._lose(worker, f"was not heard of for {message['after_s']} s")
        elif kind == "unfit":
            await self._tell({"kind": "refused", "node": worker.node, "words": message["words"]})
            if worker.process is not None:
                raise ConfigError(f"{worker.name}: {message['words']}")
            del self._workers[worker.node]  # another may take its place
            self._work.say(f"refused {worker.name}: {message['words']}")
        elif kind in ("failed", "broke"):
            worker.end = "failed"
            raise _error(worker, message)

    def _gather(self, worker: _Worker, message: Message) -> None:
        for turn, due_s, sent_s in message["sent"]:
            worker.sent[turn] = due_s, sent_s
        if not message["rows"]:
            return
        batch = pa.ipc.read_record_batch(pa.py_buffer(message["body"]), SCHEMA)
        turns = batch.column(0).to_numpy()
        self._recorded[turns] = True
        for turn in turns.tolist():
            worker.sent.pop(turn, None)
        self._work.write_batch(batch)

    # ---- what they are told

    async def _set_up(self, worker: _Worker) -> None:
        await self._send(
            worker, kind="setup", number=worker.number, workers=self._total,
            config=OmegaConf.to_yaml(self._work.config, resolve=False), backend=self._work.name,
            digest=self._work.trace.digest, page=self._host.web_port is not None,
        )  # fmt: skip

    async def _send(self, worker: _Worker, **message: Any) -> None:
        await self._tell(message | {"node": worker.node})

    async def _tell(self, message: Message) -> None:
        if self._link is None or self._link.is_closing():
            return  # that the master died is heard in `_listen`
        with suppress(ConnectionError):
            self._link.write(pack(message))
            await self._link.drain()

    # ---- waiting

    def _count(self, condition: Callable[[_Worker], bool]) -> int:
        return sum(map(condition, self._workers.values()))

    async def _until(self, condition: Callable[[], bool], *, heed: bool = True) -> None:
        """Wait for news until it holds. Raises what ended the run, where that is heeded."""
        while True:
            if heed and self._fault is not None:
                raise self._fault
            if condition():
                return
            self._news.clear()
            await self._news.wait()


def _error(worker: _Worker, message: Message) -> Exception:
    """What a worker failed with, as if it had happened here."""
    words = f"{worker.name}: {message['words']}"
    if message["kind"] == "broke":
        return WorkerFault(words)
    if message["code"] != EXIT_BACKEND:
        return ConfigError(words)
    kind = getattr(errors, message["error"], BackendError)
    return kind(words) if issubclass(kind, BackendError) else BackendError(words)


def _ended(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _facts(worker: _Worker) -> dict[str, Any]:
    """For `run.json`."""
    ahead_s, error_s = worker.clock or (None, None)
    return {
        "worker": worker.number,
        "machine": worker.machine,
        "pid": worker.pid,
        "turns": len(worker.turns),
        "start_skew_s": worker.skew_s,
        "clock_ahead_s": ahead_s,
        "clock_error_s": error_s,
        "cpu_s": worker.cpu_s,
        "end": worker.end,
    }


def _left(
    work: Work, row: int, worker: int, sent: tuple[float | None, float] | None, words: str
) -> Record:
    """The record of a turn whose worker left none."""
    trace = work.trace
    due_s, sent_s = sent or (None, None)
    return blank(
        turn=row,
        session=int(trace.session[row]),
        turn_index=int(trace.column("turn_index")[row]),
        agent=str(trace.column("agent")[row]),
        input_tokens=int(trace.input_tokens[row]),
        output_tokens=int(trace.output_tokens[row]),
        ideal_hit_tokens=int(trace.ideal_hit_tokens[row]),
        scheduled_s=due_s,
        sent_s=sent_s,
        worker=worker,
        status=UNSENT if sent_s is None else CANCELLED,
        error=words,
    )
