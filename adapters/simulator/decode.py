"""A decode pool: continuous batching that jumps from one change of membership to the next.

Every member of the batch emits one token a step. Between two changes nothing is decided, and the
time of m steps has a closed form (the cached tokens, and with them a step's time, grow evenly), so
a stretch of thousands of steps is one event. The pool keeps one log of when each step ended; the
token times of a request are the slice of the log from the step it joined at. Only where a member
wants to be told of each token as it is emitted is every step an event.

Memory fills as members decode. How many blocks they hold in a step to come is known from one count
of where in a block they stand, so a stretch ends with the last step that fits, and not before.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from math import ceil, sqrt

import numpy as np
from numpy.typing import NDArray

from adapters.simulator.costs import Chip, KvBytes, require
from adapters.simulator.engine import Engine
from harness.settings import number, whole

_LOG_STEPS = 65_536
_FEW_STEPS = 6
"""Up to so many are written faster one by one."""
_NUMBERS = np.arange(4096, dtype=np.float64)
"""0, 1, 2, ...: most stretches are shorter."""
_NO_TIMES: NDArray[np.float64] = np.empty(0)


class Sequence:
    """One request in a decode pool.

    `context`: its tokens in the KV cache as its first step begins, the `extend` tokens included
    that this step takes in at once: handed over as ids, or lost to a preemption (0: none).
    `finished(times_s)` is called when its last token is out, with the time of each token.
    `emitted(time_s)`, where it is wanted, is called with each token as it is emitted.
    `silent`: what it emits is no output (a batch of a catch-up handoff), and counted apart.
    """

    __slots__ = (
        "context",
        "emitted",
        "extend",
        "finished",
        "joined_step",
        "left",
        "preemptions",
        "silent",
        "started_s",
        "times_s",
        "tokens",
    )

    def __init__(
        self,
        context: int,
        tokens: int,
        finished: Callable[[NDArray[np.float64]], None],
        extend: int = 0,
        emitted: Callable[[float], None] | None = None,
        silent: bool = False,
    ) -> None:
        self.context = context
        self.tokens = tokens
        """Still to be emitted when it joins."""
        self.finished = finished
        self.extend = extend
        self.emitted = emitted
        self.silent = silent
        self.started_s: float | None = None
        """When its first step began."""
        self.preemptions = 0
        """How often it has lost its place."""
        self.times_s = _NO_TIMES
        """When it emitted its tokens in the stays that so ended."""
        self.joined_step = -1
        """The pool's step in which it emits its first token; -1 outside of the batch."""
        self.left: Callable[[NDArray[np.float64]], None] | None = None
        """Set by `release`: called instead of `finished`, with what was emitted."""


class _Growing:
    """Blocks of members that take one when they need it.

    A member that joins after step j holds ceil((context + s - j) / size) blocks in step s. With
    context - 1 - j = size f + r that is f + 1 + s // size, and one more if r >= size - s % size.
    """

    def __init__(self, size: int, state: int) -> None:
        self._size = size
        self._state = state
        self._members = 0
        self._floors = 0
        self._at = [0] * size
        """How many members have each r."""

    def room(self, context: int, _: int) -> int:
        """What must be free to admit a sequence: the blocks it has, and one to grow."""
        return -(-context // self._size) + 1 + self._state

    def count(self, sequence: Sequence, members: int) -> None:
        """Count a member in (1) that has just joined, or out (-1)."""
        floor, rest = divmod(sequence.context - 1 - sequence.joined_step, self._size)
        self._members += members
        self._floors += members * floor
        self._at[rest] += members

    def held(self, step: int) -> int:
        """Blocks that the members hold in a step to come."""
        turns, into = divmod(step, self._size)
        each = turns + 1 + self._state
        return self._floors + self._members * each + sum(self._at[self._size - into :])

    def fits(self, step: int, blocks: float) -> bool:
        """Whether `held(step)` is no more than so many; seen at a glance where it is far less."""
        at_most = self._floors + self._members * (step // self._size + 2 + self._state)
        return at_most <= blocks or self.held(step) <= blocks


class _Whole:
    """Blocks of members that take those of their whole answer as they join."""

    def __init__(self, size: int, state: int) -> None:
        self._size = size
        self._state = state
        self._held = 0

    def room(self, context: int, answer: int) -> int:
        """What must be free to admit a sequence: all that it will ever hold."""
        return -(-(context + answer) // self._size) + self._state

    def count(self, sequence: Sequence, members: int) -> None:
        """Count a member in (1) that has just joined, or out (-1)."""
        self._held += members * self.room(sequence.context, sequence.tokens)

    def held(self, _: int) -> int:
        """Blocks that the members hold in any step."""
        return self._held

    def fits(self, _: int, blocks: float) -> bool:
        """Whether `held` is no more than so many."""
        return self._held <= blocks


_MEMORIES: dict[str, type[_Growing | _Whole]] = {"preempt": _Growing, "reserve": _Whole}


class DecodePool:
    """`cards` cards in lock-step instances of `chip`, over which the batch is spread evenly.

    Fewer cards than an instance has are taken as that part of one. `kv_bytes`: memory for the KV
    caches of running requests, in blocks of `block_tokens` tokens; the window state of a request
    takes whole blocks too. Admission is first come first served, and one that is alone may hold
    more than there is. `when_full` says what happens as answers grow:

    - "preempt", as vLLM and SGLang do: a request is admitted when its context and one more block
      fit. When the next step does not, the youngest goes back to the front of the queue, with the
      tokens it has emitted; readmitted, it computes its whole context again in one extended step.
    - "reserve": it is admitted when its prompt and whole answer fit. No scheduler can do that, for
      none knows the length of an answer in advance: an upper bound of what memory allows.
    """

    def __init__(
        self,
        cards: float,
        kv_bytes: float,
        chip: Chip,
        kv: KvBytes,
        block_tokens: int = 64,
        when_full: str = "preempt",
    ) -> None:
        require(isinstance(chip, Chip), "decode.chip", chip, "a chip's step times")
        require(isinstance(kv, KvBytes), "decode.kv", kv, "a model's KV bytes")
        number("decode.cards", cards, above=0, most=1e9)
        number("decode.kv_bytes", kv_bytes, above=0, most=1e18)
        whole("decode.block_tokens", block_tokens, least=1, most=1_000_000)
        require(when_full in _MEMORIES, "decode.when_full", when_full, " or ".join(_MEMORIES))
        self.cards = cards
        self.kv_bytes = kv_bytes
        self.chip = chip
        self.kv = kv
        self.block_tokens = block_tokens
        self.when_full = when_full

    def attach(self, engine: Engine) -> None:
        """Live on this engine, empty."""
        self._engine = engine
        self._groups = self.cards / self.chip.cards
        self._blocks = self.kv.blocks(self.kv_bytes, self.block_tokens)
        state = ceil(self.kv.blocks(self.kv.fixed, self.block_tokens))
        self._memory = _MEMORIES[self.when_full](self.block_tokens, state)
        self._reserved = 0
        """Blocks promised."""
        self._waiting: OrderedDict[Sequence, int] = OrderedDict()
        """The queue, with the blocks that must be free for each."""
        self._wanted = 0
        """Those blocks in sum."""
        self._members: dict[Sequence, None] = {}
        """The batch, in the order of admission."""
        self._leaving: list[Sequence] = []
        self._ends: list[tuple[int, int, Sequence]] = []
        """Heap of the members' last steps, and of some who have left before."""
        self._numbers = count()
        self._context = 0
        """Tokens cached after a step: this, and the batch times the number of the step."""
        self._step = 0
        """Steps done since the pool was made."""
        self._log = np.empty(_LOG_STEPS)
        self._log_from = 0
        """The step whose end stands first in the log."""
        self._running = False
        self._plan = 0
        self._plan_steps = 0
        self._start_s = 0.0
        self._first_s = 0.0
        self._growth_s = 0.0
        self._extending: list[Sequence] = []
        """Those whose extended step is the one to come."""
        self._live: dict[Sequence, Callable[[float], None]] = {}
        """Those to be told of each token, in the order they joined."""
        self._silent = 0
        """Members that are."""
        self.emitted_tokens = 0
        self.silent_tokens = 0
        self.preemptions = 0

    @property
    def batch(self) -> int:
        """Requests decoding now."""
        return len(self._members)

    @property
    def waiting(self) -> int:
        """Requests that wait for memory, or for the end of the step in progress."""
        return len(self._waiting)

    @property
    def filled(self) -> float:
        """The share of the memory that is held or reserved; above 1 only where one is alone."""
        return (self._held() + self._reserved) / self._blocks

    @property
    def load(self) -> float:
        """Tokens whose memory is held, reserved or waited for, per card, in whole blocks."""
        return (self._held() + self._reserved + self._wanted) * self.block_tokens / self.cards

    @property
    def step_s(self) -> float:
        """What a step of this batch takes now; where it is idle, that of one empty sequence."""
        return self._line(self._step + self._begun())[0]

    def reserve(self, tokens: int) -> bool:
        """Keep room for a request that will come, if there is room for it now.

        `tokens`: of its context and, where memory is reserved for whole answers, of its answer.
        """
        blocks = self._memory.room(tokens, 0)
        if self._held() + self._reserved + self._wanted + blocks > self._blocks:
            return False
        self._reserved += blocks
        if not self._memory.fits(self._step + self._plan_steps, self._free()):
            self._cut_short()
        return True

    def give_up(self, tokens: int) -> None:
        """Undo a reservation: the request comes now, or never."""
        self._reserved -= self._memory.room(tokens, 0)
        if self._waiting:
            self._cut_short()

    def join(self, sequence: Sequence) -> None:
        """Queue a request; it joins at the end of the step in progress once its KV fits."""
        self._queue(sequence)
        if len(self._waiting) == 1:  # or else the head waits for memory, and all behind it
            self._cut_short()

    def release(self, sequence: Sequence, left: Callable[[NDArray[np.float64]], None]) -> None:
        """Let a request go at the end of the step in progress; `left(times_s)` is then called.

        The times are those of the tokens it emitted here: none where it had not begun. Should its
        last token be out by then, `finished` is called as ever.
        """
        if sequence.joined_step >= 0:
            sequence.left = left
            self._leaving.append(sequence)
            self._cut_short()
        else:
            self._wanted -= self._waiting.pop(sequence)
            left(self.so_far(sequence))
            if self._waiting:
                self._cut_short()

    def so_far(self, sequence: Sequence) -> NDArray[np.float64]:
        """When it emitted the tokens that it has emitted by now; it is not gone yet."""
        if sequence.joined_step < 0:
            return sequence.times_s
        steps = self._begun()
        if steps and self._end_s(steps) > self._engine.now_s:
            steps -= 1
        under_way = np.empty(steps)
        self._write_ends(under_way)
        return np.concatenate((sequence.times_s, self._stay(sequence), under_way))

    # ---- memory

    def _held(self) -> int:
        """Blocks held in the step in progress, or in that about to begin."""
        return self._memory.held(self._step + max(1, self._begun()))

    def _free(self) -> float:
        """Blocks that are not promised."""
        return self._blocks - self._reserved

    def _queue(self, sequence: Sequence) -> None:
        blocks = self._memory.room(sequence.context, sequence.tokens)
        self._waiting[sequence] = blocks
        self._wanted += blocks

    def _has_room(self) -> bool:
        """Whether the head of the queue fits in the next step, or has the pool to itself."""
        blocks = next(iter(self._waiting.values()))
        alone = not self._members and not self._reserved
        return alone or self._memory.fits(self._step + 1, self._free() - blocks)

    def _preempt(self) -> None:
        """Send the youngest back to the queue, until the next step fits or one is left."""
        while len(self._members) > 1 and not self._memory.fits(self._step + 1, self._free()):
            sequence = next(reversed(self._members))
            emitted = self._step - sequence.joined_step
            sequence.times_s = self._remove(sequence)
            sequence.preemptions += 1
            sequence.tokens -= emitted
            sequence.extend = sequence.context = sequence.context + emitted
            self._queue(sequence)
            self._waiting.move_to_end(sequence, last=False)
            self.preemptions += 1

    # ---- steps

    def _cut_short(self) -> None:
        """Membership may change: end the stretch at the step in progress."""
        if not self._running:
            self._running = True
            self._engine.at(self._engine.now_s, self._change, self._new_plan(0))
        elif (steps := self._begun()) < self._plan_steps:
            self._engine.at(self._end_s(steps), self._change, self._new_plan(steps))

    def _new_plan(self, steps: int) -> int:
        self._plan += 1
        self._plan_steps = steps
        return self._plan

    def _end_s(self, steps: int) -> float:
        """When the stretch's step number `steps` ends."""
        return ((steps - 1) * (0.5 * self._growth_s) + self._first_s) * steps + self._start_s

    def _begun(self) -> int:
        """The steps of this stretch that are done or in progress.

        The positive root of steps * first + growth * steps * (steps - 1) / 2 = now - start, in the
        form that does not cancel where the growth is tiny, then made exact.
        """
        if not self._plan_steps:
            return 0  # no stretch, or a change of this very moment is on its way
        now_s = self._engine.now_s
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
        if self._plan_steps:
            self._note()
            if self._live:
                self._tell()
        while self._leaving or (self._ends and self._ends[0][0] <= self._step):
            self._let_go()
        self._let_in()
        if self._members:
            self._begin()
        else:
            self._running = False

    def _note(self) -> None:
        """Write the ends of the stretch's steps into the log."""
        steps, self._plan_steps = self._plan_steps, 0
        at = self._step - self._log_from
        if at + steps > len(self._log):
            at = self._make_room(steps)
        if steps <= _FEW_STEPS:
            for step in range(steps):
                self._log[at + step] = self._end_s(step + 1)
        else:
            self._write_ends(self._log[at : at + steps])
        self._extending.clear()
        self._step += steps
        self.emitted_tokens += steps * (len(self._members) - self._silent)
        self.silent_tokens += steps * self._silent

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
        oldest = next(iter(self._members), None)
        keep_from = self._step if oldest is None else oldest.joined_step
        kept = self._log[keep_from - self._log_from : self._step - self._log_from]
        size = max(_LOG_STEPS, 2 * (len(kept) + steps))
        log = np.empty(size)
        log[: len(kept)] = kept
        self._log, self._log_from = log, keep_from
        return len(kept)

    def _stay(self, sequence: Sequence) -> NDArray[np.float64]:
        """The token times of a member since it joined."""
        low = sequence.joined_step - self._log_from
        return self._log[low : self._step - self._log_from].copy()

    def _let_go(self) -> None:
        """Let those go who are done or released. Whom they tell may release others."""
        gone: list[tuple[Callable[[NDArray[np.float64]], None], NDArray[np.float64]]] = []
        ends, step = self._ends, self._step
        while ends and ends[0][0] <= step:
            end, _, sequence = heapq.heappop(ends)
            if end == sequence.joined_step + sequence.tokens:
                gone.append((sequence.finished, self._remove(sequence)))
        for sequence in self._leaving:
            if sequence.joined_step >= 0:
                assert sequence.left is not None  # noqa: S101 - `release` sets it
                gone.append((sequence.left, self._remove(sequence)))
        self._leaving.clear()
        for call, times_s in gone:
            call(times_s)

    def _remove(self, sequence: Sequence) -> NDArray[np.float64]:
        """Take a member out of the batch. Returns the times of its tokens."""
        stay_s = self._stay(sequence)
        del self._members[sequence]
        self._live.pop(sequence, None)
        self._silent -= sequence.silent
        self._context -= sequence.context - sequence.joined_step
        self._memory.count(sequence, -1)
        sequence.joined_step = -1
        return np.concatenate((sequence.times_s, stay_s)) if sequence.preemptions else stay_s

    def _let_in(self) -> None:
        """Admit those who wait while there is room."""
        while self._waiting and self._has_room():
            sequence, blocks = self._waiting.popitem(last=False)
            self._wanted -= blocks
            sequence.joined_step = self._step
            if sequence.started_s is None:
                sequence.started_s = self._engine.now_s
            self._members[sequence] = None
            if sequence.emitted is not None:
                self._live[sequence] = sequence.emitted
            if sequence.extend > 1:
                self._extending.append(sequence)
            self._silent += sequence.silent
            self._context += sequence.context - self._step
            self._memory.count(sequence, 1)
            last = self._step + sequence.tokens
            heapq.heappush(self._ends, (last, next(self._numbers), sequence))

    def _share(self) -> float:
        """The batch of one instance."""
        return max(1.0, len(self._members) / self._groups)

    def _line(self, step: int) -> tuple[float, float, float]:
        """`Chip.decode` of the steps after this one."""
        batch = len(self._members)
        if not batch:
            return self.chip.decode(1.0, 0.0)
        share = self._share()
        return self.chip.decode(share, (self._context + batch * step) * share / batch)

    def _extra_s(self) -> float:
        """What newcomers' extended steps add to the step to come.

        Instances are in lock-step, so they all take as long as the one with most to do: the
        longest of the extras, or their even share where there are more of them than instances.
        """
        share = self._share()
        extras_s = [
            self.chip.extend_s(share, each.extend, each.context - each.extend)
            for each in self._extending
            if each.joined_step >= 0
        ]
        return max(0.0, *extras_s, sum(extras_s) / self._groups)

    def _begin(self) -> None:
        """Plan the stretch up to the next member's end, while its line and the memory hold.

        It is of one step where newcomers' extra lengthens that one, or a member wants each.
        """
        step, ends = self._step, self._ends
        while ends[0][0] != ends[0][2].joined_step + ends[0][2].tokens:
            heapq.heappop(ends)
        self._start_s = self._engine.now_s
        self._first_s, self._growth_s, line_steps = self._line(step)
        if self._live or self._extending:
            steps = 1
            self._first_s += self._extra_s()
        else:
            steps = int(min(ends[0][0] - step, line_steps))
        memory, free = self._memory, self._free()
        if len(self._members) > 1 and not memory.fits(step + steps, free):
            steps = bisect_right(range(step + 1, step + steps + 1), free, key=memory.held)
            if not steps:
                self._preempt()
                self._begin()
                return
        self._engine.at(self._end_s(steps), self._change, self._new_plan(steps))
