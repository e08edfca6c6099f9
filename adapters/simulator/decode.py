"""A decode pool: continuous batching that jumps from one change of membership to the next.

Every member of the batch emits one token a step. Between two changes nothing is decided, and the
time of m steps has a closed form (the total context grows by the batch size each step), so a
stretch of thousands of steps is one event. The pool keeps one log of when each step ended; the
token times of a request are the slice of the log from the step it joined at. Only where a member
wants to be told of each token as it is emitted is every step an event.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count
from math import ceil, sqrt

import numpy as np
from numpy.typing import NDArray

from adapters.simulator.costs import DecodeCost, KvBytes, require
from adapters.simulator.engine import Engine
from harness.settings import number

_LOG_STEPS = 65_536
_FEW_STEPS = 6
"""Up to so many are written faster one by one."""
_NUMBERS = np.arange(4096, dtype=np.float64)
"""0, 1, 2, ...: most stretches are shorter."""


class Sequence:
    """One request in a decode pool.

    `finished(times_s)` is called when its last token is out, with the time of each token.
    `extra_s` lengthens its first step: the tokens that an extend-decode takes in.
    `emitted(time_s)`, where it is wanted, is called with each token as it is emitted.
    """

    __slots__ = (
        "context",
        "emitted",
        "extra_s",
        "finished",
        "gone",
        "joined_step",
        "left",
        "tokens",
    )

    def __init__(
        self,
        context: int,
        tokens: int,
        finished: Callable[[NDArray[np.float64]], None],
        extra_s: float = 0.0,
        emitted: Callable[[float], None] | None = None,
    ) -> None:
        self.context = context
        self.tokens = tokens
        self.finished = finished
        self.extra_s = extra_s
        self.emitted = emitted
        self.joined_step = -1
        """The pool's step in which it emits its first token; -1 while it waits."""
        self.left: Callable[[NDArray[np.float64]], None] | None = None
        """Set by `release`: called instead of `finished`, with what was emitted."""
        self.gone = False


class DecodePool:
    """`cards` cards in lock-step groups of 8 over which the batch is spread evenly.

    `speed`: how many times as fast as the card that `cost` is for. `kv_bytes`: memory for the KV
    caches of running requests; one is admitted when its prompt and whole answer fit, first come
    first served.
    """

    GROUP = 8
    """Cards a group: what the cost fits are for."""

    def __init__(
        self, cards: float, kv_bytes: float, cost: DecodeCost, kv: KvBytes, speed: float = 1.0
    ) -> None:
        require(isinstance(cost, DecodeCost), "decode.cost", cost, "a model's decode cost")
        require(isinstance(kv, KvBytes), "decode.kv", kv, "a model's KV bytes")
        number("decode.cards", cards, above=0, most=1e9)
        number("decode.kv_bytes", kv_bytes, above=0)
        number("decode.speed", speed, above=0, most=1e9)
        self.cards = cards
        self.kv_bytes = kv_bytes
        self.cost = cost
        self.kv = kv
        self.speed = speed

    def attach(self, engine: Engine) -> None:
        """Live on this engine, empty."""
        self._engine = engine
        self._groups = self.cards / self.GROUP
        self._kv_tokens = self.kv_bytes / self.kv.per_token
        self._state_tokens = ceil(self.kv.fixed / self.kv.per_token)
        """The window state of a request, in tokens that would fill as much memory."""
        self._held_tokens = 0
        self._reserved_tokens = 0
        self._waiting: deque[Sequence] = deque()
        self._joining: list[Sequence] = []
        self._leaving: list[Sequence] = []
        self._ends: list[tuple[int, int, Sequence]] = []
        self._numbers = count()
        self._batch = 0
        self._context = 0
        self._step = 0
        """Steps done since the pool was made."""
        self._log = np.empty(_LOG_STEPS)
        self._log_from = 0
        """The step whose end stands first in the log."""
        self._oldest: deque[Sequence] = deque()
        self._running = False
        self._plan = 0
        self._plan_steps = 0
        self._start_s = 0.0
        self._first_s = 0.0
        self._growth_s = 0.0
        self._newcomers: list[Sequence] = []
        """Those that have joined and not yet done a step."""
        self._live: dict[Sequence, Callable[[float], None]] = {}
        """Those to be told of each token, in the order they joined."""
        self.emitted_tokens = 0

    @property
    def batch(self) -> int:
        """Requests decoding now."""
        return self._batch

    @property
    def waiting(self) -> int:
        """Requests that wait for memory."""
        return len(self._waiting)

    def reserve(self, tokens: int) -> bool:
        """Keep room for a request that will come, if there is room for it now."""
        wanted = self._held_tokens + self._reserved_tokens + tokens + self._state_tokens
        if self._waiting or wanted > self._kv_tokens:
            return False
        self._reserved_tokens += tokens + self._state_tokens
        return True

    def give_up(self, tokens: int) -> None:
        """Undo a reservation: the request comes now, or never."""
        self._reserved_tokens -= tokens + self._state_tokens

    def join(self, sequence: Sequence) -> None:
        """Queue a request; it joins at the end of the step in progress once its KV fits."""
        self._waiting.append(sequence)
        self._welcome()

    def release(self, sequence: Sequence, left: Callable[[NDArray[np.float64]], None]) -> None:
        """Let a request go at the end of the step in progress; `left(times_s)` is then called.

        The times are those of the tokens it emitted here: none where it had not begun.
        """
        sequence.left = left
        if sequence.joined_step < 0:
            sequence.gone = True
            if sequence in self._joining:
                self._joining.remove(sequence)
                self._held_tokens -= self._needs(sequence)
            left(np.empty(0))
            self._welcome()
            return
        self._leaving.append(sequence)
        self._cut_short()

    def so_far(self, sequence: Sequence) -> NDArray[np.float64]:
        """When it emitted the tokens that it has emitted by now; it is not gone yet."""
        if sequence.joined_step < 0:
            return np.empty(0)
        now_s = self._engine.now_s
        steps = min(self._plan_steps, self._steps_begun(now_s))
        if steps and self._end_s(steps) > now_s:
            steps -= 1
        under_way = [self._end_s(step) for step in range(1, steps + 1)]
        return np.concatenate((self._times(sequence), under_way))

    def _welcome(self) -> None:
        """Admit who fits, and end the stretch for them."""
        self._admit()
        if self._joining:
            self._cut_short()

    def _admit(self) -> None:
        """Let those who wait into memory while it lasts; they join at the next boundary.

        One that would not even fit an empty pool has it to itself.
        """
        while self._waiting:
            head = self._waiting[0]
            if not head.gone:
                tokens = self._needs(head)
                if self._held_tokens and self._held_tokens + tokens > self._kv_tokens:
                    return
                self._held_tokens += tokens
                self._joining.append(head)
            self._waiting.popleft()

    def _needs(self, sequence: Sequence) -> int:
        """The memory it holds from its admission on: prompt, whole answer, window state."""
        return sequence.context + sequence.tokens + self._state_tokens

    # ---- steps

    def _cut_short(self) -> None:
        """Membership will change: end the stretch at the step in progress."""
        now_s = self._engine.now_s
        if not self._running:
            self._running = True
            self._engine.at(now_s, self._change, self._new_plan(0))
            return
        if not self._plan_steps:
            return  # a change of this very moment is on its way
        steps = self._steps_begun(now_s)
        if steps < self._plan_steps:
            self._engine.at(self._end_s(steps), self._change, self._new_plan(steps))

    def _new_plan(self, steps: int) -> int:
        self._plan += 1
        self._plan_steps = steps
        return self._plan

    def _end_s(self, steps: int) -> float:
        """When the stretch's step number `steps` ends."""
        return ((steps - 1) * (0.5 * self._growth_s) + self._first_s) * steps + self._start_s

    def _steps_begun(self, now_s: float) -> int:
        """The steps of this stretch that are done or in progress at `now_s`.

        The positive root of steps * first + growth * steps * (steps - 1) / 2 = now - start, in the
        form that does not cancel where the growth is tiny, then made exact.
        """
        since_s = now_s - self._start_s
        half = self._first_s - 0.5 * self._growth_s
        root = 2 * since_s / (half + sqrt(half * half + 2 * self._growth_s * since_s))
        steps = max(0, int(root) - 1)
        while self._end_s(steps) < now_s:
            steps += 1
        return steps

    def _change(self, plan: int) -> None:
        """A stretch has ended: note its steps, let members go and in, and begin the next."""
        if plan != self._plan:
            return
        self._note(self._plan_steps)
        if self._live and self._plan_steps:
            self._tell()
        self._let_go()
        self._let_in()
        if self._batch:
            self._begin()
        else:
            self._running = False

    def _note(self, steps: int) -> None:
        """Write the ends of the stretch's steps into the log."""
        if not steps:
            return
        at = self._step - self._log_from
        if at + steps > len(self._log):
            at = self._make_room(steps)
        if steps <= _FEW_STEPS:
            for step in range(steps):
                self._log[at + step] = self._end_s(step + 1)
        else:
            self._write_ends(self._log[at : at + steps])
        self._newcomers.clear()
        self._step += steps
        self._context += steps * self._batch
        self.emitted_tokens += steps * self._batch

    def _tell(self) -> None:
        """The one step of this stretch is done: say so to those who want to know.

        The newest first: whoever passes it on takes time, and first tokens are watched most.
        """
        now_s = self._engine.now_s
        for emitted in reversed(self._live.values()):
            emitted(now_s)

    def _write_ends(self, ends_s: NDArray[np.float64]) -> None:
        """`_end_s` of steps 1, 2, ..., to the last bit."""
        steps = len(ends_s)
        numbers = _NUMBERS if steps < len(_NUMBERS) else np.arange(steps + 1, dtype=np.float64)
        np.multiply(numbers[:steps], 0.5 * self._growth_s, out=ends_s)
        ends_s += self._first_s
        ends_s *= numbers[1 : steps + 1]
        ends_s += self._start_s

    def _make_room(self, steps: int) -> int:
        """Drop from the log what no member needs. Returns where the next step goes."""
        keep_from = self._oldest[0].joined_step if self._oldest else self._step
        kept = self._log[keep_from - self._log_from : self._step - self._log_from]
        size = max(_LOG_STEPS, 2 * (len(kept) + steps))
        log = np.empty(size)
        log[: len(kept)] = kept
        self._log, self._log_from = log, keep_from
        return len(kept)

    def _times(self, sequence: Sequence) -> NDArray[np.float64]:
        low = sequence.joined_step - self._log_from
        return self._log[low : self._step - self._log_from].copy()

    def _let_go(self) -> None:
        ends, step = self._ends, self._step
        done: list[tuple[Callable[[NDArray[np.float64]], None], NDArray[np.float64]]] = []
        while ends and (ends[0][0] <= step or ends[0][2].gone):
            sequence = heapq.heappop(ends)[2]
            if not sequence.gone:
                done.append((sequence.finished, self._remove(sequence)))
        for sequence in self._leaving:
            if not sequence.gone:
                assert sequence.left is not None  # noqa: S101 - `release` sets it
                done.append((sequence.left, self._remove(sequence)))
        self._leaving.clear()
        for call, times_s in done:
            call(times_s)

    def _remove(self, sequence: Sequence) -> NDArray[np.float64]:
        sequence.gone = True
        self._live.pop(sequence, None)
        self._batch -= 1
        self._context -= sequence.context + self._step - sequence.joined_step
        self._held_tokens -= self._needs(sequence)
        times_s = self._times(sequence)
        while self._oldest and self._oldest[0].gone:
            self._oldest.popleft()
        return times_s

    def _let_in(self) -> None:
        """Newcomers join; what they hand over lengthens the next step."""
        self._admit()
        for sequence in self._joining:
            sequence.joined_step = self._step
            heapq.heappush(
                self._ends, (self._step + sequence.tokens, next(self._numbers), sequence)
            )
            self._oldest.append(sequence)
            if sequence.emitted is not None:
                self._live[sequence] = sequence.emitted
            self._batch += 1
            self._context += sequence.context
        self._newcomers += self._joining
        self._joining.clear()

    def _extra_s(self) -> float:
        """What newcomers' extended steps add to the step to come.

        Groups are in lock-step, so they all take as long as the group with most to do: the
        longest of the extras, or their even share where there are more of them than groups.
        """
        extras_s = [each.extra_s for each in self._newcomers if each.extra_s and not each.gone]
        if not extras_s:
            return 0.0
        return max(*extras_s, sum(extras_s) / self._groups) / self.speed

    def _begin(self) -> None:
        """Plan the stretch up to the next member's end.

        It is of one step where newcomers' extra lengthens that one, or a member wants each.
        """
        batch = self._batch
        share = max(1.0, batch / self._groups)
        context_s = self.cost.d2_s * share / batch / self.speed
        self._start_s = self._engine.now_s
        self._first_s = self.cost.batch_s(share) / self.speed + context_s * self._context
        extra_s = self._extra_s()
        self._first_s += extra_s
        self._growth_s = context_s * batch
        ends = self._ends
        while ends[0][2].gone:
            heapq.heappop(ends)
        steps = 1 if extra_s or self._live else ends[0][0] - self._step
        self._engine.at(self._end_s(steps), self._change, self._new_plan(steps))
