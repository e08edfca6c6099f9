"""The only replay path: sleep until a turn is due, ask the backend, write a record.

One asyncio program for every backend and both clocks. The turns that are due stand in one heap
behind one timer of the loop; a turn in flight is one task. A turn falls due its delay after the
last of its parents ended, where they ended well; after a failure all that waits for it, directly
or not, is not sent, since no agent could have gone on.

Every turn of the trace gets exactly one record, whatever happens: answered, failed, cancelled by
an interruption, or unsent.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from typing import cast

import numpy as np
from numpy.typing import NDArray

from harness.backend import Answer, Backend, Request
from harness.clock import Loop, early_s
from harness.errors import BackendError, BadStream, RequestTimeout
from harness.pacing import Plan, Shard, first_arrivals
from harness.record import CANCELLED, FAILED, OK, UNSENT, Record, blank
from harness.trace import Trace


class Replay:
    """One pass of a trace, or of a shard of it, through a backend.

    `run` once, on a loop of `harness.clock`; `write` gets each record as it is made.
    """

    def __init__(
        self,
        trace: Trace,
        plan: Plan,
        backend: Backend,
        write: Callable[[Record], None],
        *,
        timeout_s: float | None = None,
        shard: Shard | None = None,
    ) -> None:
        self._trace = trace
        self._plan = plan
        self._backend = backend
        self._write = write
        self._timeout_s = timeout_s
        self._shard = shard
        self._worker = shard.worker if shard else 0
        self._order = shard.order(plan) if shard else plan.order
        mine = np.isin(trace.session, self._order)
        self._recorded: NDArray[np.bool_] = ~mine
        self._left = int(mine.sum())
        self._due: list[tuple[float, int]] = []
        self._armed_s = np.inf
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._closing = False
        self._read_columns()
        self._read_gates()

    def _read_columns(self) -> None:
        """Columns as lists: the replay takes one row at a time, and a list is fastest at that."""
        trace = self._trace
        self._session: list[int] = trace.session.tolist()
        self._turn_index: list[int] = trace.column("turn_index").tolist()
        self._agent: list[str] = trace.column("agent").tolist()
        self._input: list[int] = trace.input_tokens.tolist()
        self._output: list[int] = trace.output_tokens.tolist()
        self._ideal: list[int] = trace.ideal_hit_tokens.tolist()
        self._scheduled: list[float | None] = [None] * len(trace)

    def _read_gates(self) -> None:
        """For each turn how many parents it waits for, and who waits for it."""
        trace, speed = self._trace, self._plan.speed
        offsets, parents = trace.parents()
        counts = np.diff(offsets)
        by_parent = np.argsort(parents, kind="stable")
        self._children: list[int] = np.repeat(np.arange(len(trace)), counts)[by_parent].tolist()
        self._first_child: list[int] = np.searchsorted(
            parents[by_parent], np.arange(len(trace) + 1)
        ).tolist()
        self._waits: list[int] = counts.tolist()
        self._ready_s = [0.0] * len(trace)
        self._delay_s: list[float] = (np.nan_to_num(trace.column("delay_s")) / speed).tolist()
        roots = np.flatnonzero(counts == 0)
        offset_s = trace.column("arrival_s")[roots] - first_arrivals(trace)[trace.session[roots]]
        self._roots: dict[int, list[tuple[float, int]]] = {}
        for session, offset, row in zip(
            trace.session[roots].tolist(), (offset_s / speed).tolist(), roots.tolist(), strict=True
        ):
            self._roots.setdefault(session, []).append((offset, row))
        self._session_left: list[int] = np.bincount(trace.session).tolist()
        starts = self._plan.starts_s
        self._next_sessions = deque(int(s) for s in self._order if np.isnan(starts[s]))

    async def run(self) -> None:
        """Replay everything. Raises what is not a `BackendError`; all records are written first."""
        self._loop = asyncio.get_running_loop()
        owner = cast("Loop", self._loop)  # `harness.run` lets no other in
        self._zero_s = self._shard.zero_s if self._shard else self._loop.time()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._alarm, self._watch = owner.alarm(self._fire), owner.watch()
        for session in self._order.tolist():
            start_s = self._plan.starts_s[session]
            if not np.isnan(start_s):
                self._start_session(session, float(start_s))
        self._arm()
        try:
            if self._left:
                await self._done
        finally:
            await self._wind_up()

    async def _wind_up(self) -> None:
        """Send nothing more, cancel what is in flight and record what was never sent."""
        self._closing = True
        self._alarm.close()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for row in np.flatnonzero(~self._recorded).tolist():
            self._unsent(row, "the run ended first")
        self._watch.stop()

    # ---- the schedule

    def _start_session(self, session: int, start_s: float) -> None:
        for offset_s, row in self._roots[session]:
            self._schedule(row, start_s + offset_s)

    def _schedule(self, row: int, due_s: float) -> None:
        due_s = round(due_s, 9)
        self._scheduled[row] = due_s
        heapq.heappush(self._due, (due_s, row))

    def _arm(self) -> None:
        """One alarm, for the earliest turn due."""
        if self._closing or not self._due or self._due[0][0] >= self._armed_s:
            return
        self._armed_s = self._due[0][0]
        self._alarm.set(self._zero_s + self._armed_s)

    def _fire(self) -> None:
        self._armed_s = np.inf
        now_s = self._loop.time()
        limit_s = now_s - self._zero_s + early_s(now_s)
        due = self._due
        while due and due[0][0] <= limit_s:
            _, row = heapq.heappop(due)
            self._tasks[row] = self._loop.create_task(self._turn(row))
        self._arm()

    def _ended(self, row: int, end_s: float) -> None:
        """A turn ended well: whoever waited for it last is due its delay later."""
        for at in range(self._first_child[row], self._first_child[row + 1]):
            child = self._children[at]
            self._ready_s[child] = max(self._ready_s[child], end_s)
            self._waits[child] -= 1
            if not self._waits[child]:
                self._schedule(child, self._ready_s[child] + self._delay_s[child])
        self._leave(row, end_s)

    def _broke(self, row: int, end_s: float) -> None:
        """A turn failed: all that waits for it will not be sent."""
        orphans = [row]
        while orphans:
            parent = orphans.pop()
            for child in self._children[self._first_child[parent] : self._first_child[parent + 1]]:
                if not self._recorded[child]:
                    self._unsent(child, "an earlier turn of its session failed")
                    self._leave(child, end_s)
                    orphans.append(child)
        self._leave(row, end_s)

    def _leave(self, row: int, end_s: float) -> None:
        """One turn fewer; with the last of a closed loop's session the next session starts."""
        session = self._session[row]
        self._session_left[session] -= 1
        if not self._session_left[session] and self._next_sessions:
            self._start_session(self._next_sessions.popleft(), end_s)
        self._left -= 1
        if not self._left and not self._done.done():
            self._done.set_result(None)

    # ---- one turn

    async def _turn(self, row: int) -> None:
        """Ask, record, and let the turns that wait for this one go on."""
        try:
            await self._attempt(row)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - not a request's failure: it ends the run
            if not self._done.done():
                self._done.set_exception(error)
        finally:
            del self._tasks[row]

    async def _attempt(self, row: int) -> None:
        asked_s = self._loop.time()
        answer = Answer()
        try:
            await self._answer(row, answer)
            end_s = self._record(row, asked_s, answer, OK)
        except BackendError as error:
            self._failed(row, asked_s, answer, error)
        except asyncio.CancelledError:
            if self._closing:
                self._record(row, asked_s, answer, CANCELLED, words="the run was interrupted")
                raise
            # By itself, not for us.
            self._failed(row, asked_s, answer, BadStream("the backend cancelled it"))
        except BaseException as error:
            if not self._recorded[row]:  # else the disk failed, and not the request
                words = f"{type(error).__name__}: {error}"
                self._record(row, asked_s, answer, CANCELLED, words=words)
            raise
        else:
            self._ended(row, end_s)
        self._arm()

    def _failed(self, row: int, asked_s: float, answer: Answer, error: BackendError) -> None:
        self._record(row, asked_s, answer, FAILED, kind=type(error).__name__, words=str(error))
        self._broke(row, self._loop.time() - self._zero_s)

    async def _answer(self, row: int, answer: Answer) -> None:
        request = self._request(row)
        if self._timeout_s is None:
            await self._backend.generate(request, answer)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._backend.generate(request, answer)
        except TimeoutError:
            raise RequestTimeout(f"no whole answer within {self._timeout_s:g} s") from None

    def _request(self, row: int) -> Request:
        return Request(
            row,
            self._session[row],
            self._turn_index[row],
            self._input[row],
            self._output[row],
            self._trace.header.block_tokens,
            self._trace.runs(row),
            self._agent[row],
        )

    # ---- its record

    def _record(
        self,
        row: int,
        asked_s: float,
        answer: Answer,
        status: str,
        *,
        kind: str | None = None,
        words: str | None = None,
    ) -> float:
        """Write the turn's only record. Returns when its last token came, s from the run's zero.

        Raises `BadStream` for an answer that is said to be whole and holds no token.
        """
        zero_s = self._zero_s
        times_s: NDArray[np.float64] = np.asarray(answer.times_s, np.float64)
        if status == OK and not len(times_s):
            raise BadStream("the answer ended without a token")
        sent_s = asked_s if answer.sent_s is None else answer.sent_s
        end_s = float(times_s[-1]) if len(times_s) else self._loop.time()
        first_s = last_s = gaps_us = longest_s = None
        if len(times_s):
            first_s = float(times_s[0]) - zero_s
            last_s = end_s - zero_s
            stamps_us: NDArray[np.int64] = np.rint(times_s * 1e6).astype(np.int64)
            gaps_us = np.minimum(stamps_us[1:] - stamps_us[:-1], _LONGEST_GAP_US).astype(np.int32)
            if len(gaps_us):
                longest_s = float(gaps_us.max()) / 1e6
        served = answer.served
        self._recorded[row] = True
        self._write(
            Record(
                row,
                self._session[row],
                self._turn_index[row],
                self._agent[row],
                self._input[row],
                self._output[row],
                self._ideal[row],
                self._scheduled[row],
                sent_s - zero_s,
                _since(zero_s, answer.first_byte_s),
                first_s,
                _since(zero_s, answer.first_answer_s),
                last_s,
                gaps_us,
                longest_s,
                answer.timed_by if len(times_s) else None,
                answer.clock,
                answer.shared_reads,
                self._watch.worst_s(sent_s, end_s),
                self._worker,
                answer.sent_input_tokens,
                served.input_tokens,
                served.output_tokens,
                served.hit_tokens,
                served.decode_hit_tokens,
                served.evicted_tokens,
                served.elsewhere_tokens,
                served.route,
                _since(zero_s, served.prefill_start_s),
                _since(zero_s, served.prefill_end_s),
                _since(zero_s, served.transfer_start_s),
                _since(zero_s, served.transfer_end_s),
                served.transfer_bytes,
                _since(zero_s, served.decode_start_s),
                served.preemptions,
                served.relay_bytes,
                served.relay_tokens,
                served.handoff,
                served.handoff_bytes,
                _since(zero_s, served.handoff_start_s),
                _since(zero_s, served.handoff_s),
                _clean(answer.finish_reason),
                status,
                kind,
                _clean(words),
            )
        )
        return end_s - zero_s

    def _unsent(self, row: int, words: str) -> None:
        """The record of a turn that was never sent."""
        self._recorded[row] = True
        self._write(
            blank(
                turn=row,
                session=self._session[row],
                turn_index=self._turn_index[row],
                agent=self._agent[row],
                input_tokens=self._input[row],
                output_tokens=self._output[row],
                ideal_hit_tokens=self._ideal[row],
                scheduled_s=self._scheduled[row],
                worker=self._worker,
                status=UNSENT,
                error=words,
            )
        )


_LONGEST_GAP_US = 2**31 - 1
"""Gaps are 32 bits wide: one of more than 35 minutes is kept as 35 minutes."""


def _since(zero_s: float, time_s: float | None) -> float | None:
    return None if time_s is None else time_s - zero_s


def _clean(words: str | None) -> str | None:
    """Half a character in a server's words must not cost anyone's record."""
    return words and words.encode("utf-8", "backslashreplace").decode()
