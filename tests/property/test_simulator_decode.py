"""Jumping decode against the slow and obvious way: every step, every member, every block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, inf, sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from adapters.simulator.costs import Chip, KvBytes
from adapters.simulator.decode import DecodePool, Sequence
from tests.simulated import play

KV = KvBytes(per_token=1000.0)


@dataclass
class Straight:
    """A step takes longer with every token: one line for ever."""

    cards: int = 8
    numbers: dict[str, object] = field(default_factory=dict)

    def prefill_s(self, chunks: object) -> float:
        return 0.0

    def decode(self, batch: float, context: float) -> tuple[float, float, float]:
        return 0.0121 + 0.0031 * sqrt(batch) + 1.7e-6 * context, 1.7e-6 * batch, inf

    def extend_s(self, batch: float, tokens: int, context: int) -> float:
        return tokens * (1.1e-4 + 1e-8 * (context + batch))


@dataclass
class Bent(Straight):
    """Compute holds a step up until memory does: a line up to there, and another after it."""

    def decode(self, batch: float, context: float) -> tuple[float, float, float]:
        compute_s, memory_s, growth_s = 0.0173 + 1e-4 * batch, 0.0131 + 7e-6 * context, 7e-6 * batch
        if memory_s > compute_s:
            return memory_s, growth_s, inf
        return compute_s, 0.0, int((compute_s - memory_s) / growth_s) + 1


@dataclass(frozen=True)
class Asked:
    """One request: when it comes, what it is, and whether it leaves or was promised a place."""

    at_s: float
    context: int
    tokens: int
    extend: int = 0
    leaves_after_s: float | None = None
    promised_before_s: float | None = None


@dataclass(frozen=True)
class Room:
    """A pool's memory."""

    blocks: float = 1e9
    size: int = 16
    state: int = 0
    when_full: str = "preempt"


@dataclass
class Outcome:
    """What became of one request."""

    times_s: list[float] = field(default_factory=list)
    started_s: float | None = None
    preemptions: int = 0
    promised: bool = False
    heard_s: list[float] = field(default_factory=list)


class Stepping:
    """The reference: a scheduler that looks at every member before every step."""

    def __init__(self, asked: list[Asked], chip: Chip, groups: float, room: Room) -> None:
        self.asked, self.chip, self.groups, self.room = asked, chip, groups, room
        self.outcomes = [Outcome() for _ in asked]
        self.context = [each.context for each in asked]
        self.extend = [each.extend for each in asked]
        self.waiting: list[int] = []
        self.members: list[int] = []
        self.leaving: set[int] = set()
        self.reserved = 0
        self.now_s = 0.0
        self.events = sorted(happenings(asked), key=lambda event: event[0])

    def run(self) -> list[Outcome]:
        while True:
            self.happen(lambda time_s: time_s <= self.now_s)
            self.members = [at for at in self.members if at not in self.leaving]
            self.preempt()
            newcomers = self.admit()
            if self.members:
                self.step(newcomers)
            elif self.events:
                self.now_s = self.events[0][0]
            else:
                return self.outcomes

    def happen(self, due: Callable[[float], bool]) -> None:
        while self.events and due(self.events[0][0]):
            _, what, at = self.events.pop(0)
            if what == "promise":
                self.promise(at)
            elif what == "join":
                if self.outcomes[at].promised:
                    self.reserved -= self.wants(self.asked[at].context)
                self.waiting.append(at)
            elif at in self.waiting:
                self.waiting.remove(at)
            else:
                self.leaving.add(at)

    def promise(self, at: int) -> None:
        taken = sum(self.holds(each) for each in self.members)
        taken += sum(self.wants_now(each) for each in self.waiting) + self.reserved
        wanted = self.wants(self.asked[at].context)
        if taken + wanted <= self.room.blocks:
            self.reserved += wanted
            self.outcomes[at].promised = True

    def holds(self, at: int) -> int:
        """Blocks of a member in the next step, or in the one in progress."""
        if self.room.when_full == "reserve":
            return self.wants_now(at)
        return ceil((self.context[at] + 1) / self.room.size) + self.room.state

    def wants(self, tokens: int) -> int:
        return ceil(tokens / self.room.size) + self.room.state + (self.room.when_full == "preempt")

    def wants_now(self, at: int) -> int:
        if self.room.when_full == "reserve":
            return self.wants(self.asked[at].context + self.asked[at].tokens)
        return self.wants(self.context[at])

    def held(self) -> int:
        return sum(self.holds(at) for at in self.members)

    def preempt(self) -> None:
        while len(self.members) > 1 and self.held() + self.reserved > self.room.blocks:
            at = self.members.pop()
            self.waiting.insert(0, at)
            self.extend[at] = self.context[at]
            self.outcomes[at].preemptions += 1

    def admit(self) -> list[int]:
        newcomers = []
        while self.waiting:
            at = self.waiting[0]
            taken = self.held() + self.reserved
            if taken and taken + self.wants_now(at) > self.room.blocks:
                break
            newcomers.append(self.waiting.pop(0))
            self.members.append(at)
            if self.outcomes[at].started_s is None:
                self.outcomes[at].started_s = self.now_s
        return newcomers

    def step(self, newcomers: list[int]) -> None:
        batch = len(self.members)
        share = max(1.0, batch / self.groups)
        context = sum(self.context[at] for at in self.members) / batch * share
        extras_s = [
            self.chip.extend_s(share, self.extend[at], self.context[at] - self.extend[at])
            for at in newcomers
            if self.extend[at] > 1
        ]
        end_s = self.now_s + self.chip.decode(share, context)[0]
        end_s += max([0.0, *extras_s, sum(extras_s) / self.groups])
        self.happen(lambda time_s: time_s < end_s)
        self.now_s = end_s
        for at in list(self.members):
            self.context[at] += 1
            self.outcomes[at].times_s.append(end_s)
            if len(self.outcomes[at].times_s) == self.asked[at].tokens:
                self.members.remove(at)


def happenings(asked: list[Asked]) -> list[tuple[float, str, int]]:
    """What is done to a pool, in the order of the requests."""
    events = []
    for at, each in enumerate(asked):
        if each.promised_before_s is not None:
            events.append((max(0.0, each.at_s - each.promised_before_s), "promise", at))
        events.append((each.at_s, "join", at))
        if each.leaves_after_s is not None:
            events.append((each.at_s + each.leaves_after_s, "leave", at))
    return events


def checked(pool: DecodePool, room: Room) -> None:
    """Have each plan of the pool looked at, block by block."""
    begin: Callable[[], None] = pool._begin

    def held(steps: int) -> int:
        if room.when_full == "reserve":
            whole = [each.context + each.tokens for each in pool._members]
        else:
            whole = [each.context + pool._step + steps - each.joined_step for each in pool._members]
        return sum(ceil(tokens / room.size) + room.state for tokens in whole)

    def begin_checked() -> None:
        begin()
        steps = pool._plan_steps
        free = room.blocks - pool._reserved
        assert steps >= 1
        assert held(steps) == pool._memory.held(pool._step + steps)
        assert pool.batch == 1 or held(steps) <= free
        assert pool.load * pool.cards >= pool.filled * room.blocks * room.size * (1 - 1e-9)
        end = min(each.joined_step + each.tokens for each in pool._members) - pool._step
        assert steps <= end
        if isinstance(pool.chip, Bent) or pool._live or pool._extending:
            return
        assert steps == end or held(steps + 1) > free

    pool._begin = begin_checked  # type: ignore[method-assign]


def jumping(
    asked: list[Asked], chip: Chip, groups: float, room: Room, listening: frozenset[int]
) -> tuple[list[Outcome], DecodePool]:
    """What a pool makes of it."""
    kv = replace(KV, fixed=room.state * room.size * KV.per_token)
    kv_bytes = room.blocks * room.size * KV.per_token
    pool = DecodePool(groups * chip.cards, kv_bytes, chip, kv, room.size, room.when_full)
    outcomes = [Outcome() for _ in asked]
    ended: dict[int, NDArray[np.float64]] = {}
    sequences = [
        Sequence(
            each.context, each.tokens, partial(ended.__setitem__, at), each.extend,
            outcomes[at].heard_s.append if at in listening else None,
        )
        for at, each in enumerate(asked)
    ]  # fmt: skip

    def promise(at: int) -> None:
        outcomes[at].promised = pool.reserve(asked[at].context)

    def join(at: int) -> None:
        if outcomes[at].promised:
            pool.give_up(asked[at].context)
        pool.join(sequences[at])

    def leave(at: int) -> None:
        if at not in ended:
            pool.release(sequences[at], partial(ended.__setitem__, at))

    does: dict[str, Callable[[int], None]] = {"promise": promise, "join": join, "leave": leave}
    events = [(time_s, partial(does[what], at)) for time_s, what, at in happenings(asked)]
    checked(pool, room)
    play([pool], events)
    assert sorted(ended) == list(range(len(asked)))
    assert (pool.batch, pool.waiting, pool.filled, pool.load) == (0, 0, 0.0, 0.0)
    for at, each in enumerate(sequences):
        outcomes[at].times_s = ended[at].tolist()
        outcomes[at].started_s = each.started_s
        outcomes[at].preemptions = each.preemptions
    return outcomes, pool


def alike(got: list[Outcome], wanted: list[Outcome]) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert len(a.times_s) == len(b.times_s)
        np.testing.assert_allclose(a.times_s, b.times_s, rtol=1e-9)
        assert a.started_s == (None if b.started_s is None else pytest.approx(b.started_s))
        assert (a.preemptions, a.promised) == (b.preemptions, b.promised)


@st.composite
def requests(draw: Any, *, most: int = 20) -> list[Asked]:
    asked = []
    for _ in range(draw(st.integers(1, most))):
        context = draw(st.integers(1, 400))
        asked.append(
            Asked(
                draw(st.floats(0, 3)),
                context,
                draw(st.integers(1, 80)),
                draw(st.sampled_from([0, 0, 1, 40])) if context > 40 else 0,
                draw(st.sampled_from([None, None, 0.0, 0.1, 1.0]) | st.floats(0, 4)),
                draw(st.none() | st.floats(0, 1)),
            )
        )
    return asked


chips = st.sampled_from([Straight(), Bent(), Bent(cards=4)])
shares = st.sampled_from([0.375, 1.0, 6.0])
rooms = st.builds(
    Room,
    st.integers(2, 90),
    st.sampled_from([1, 5, 16, 64]),
    st.sampled_from([0, 0, 3]),
    st.sampled_from(["preempt", "preempt", "reserve"]),
)


@settings(deadline=None, max_examples=200)
@given(requests(), chips, shares, rooms, st.frozensets(st.integers(0, 19), max_size=3))
def test_jumping_gives_the_tokens_of_stepping(
    asked: list[Asked], chip: Chip, groups: float, room: Room, listening: frozenset[int]
) -> None:
    got, pool = jumping(asked, chip, groups, room, listening)
    alike(got, Stepping(asked, chip, groups, room).run())
    assert pool.emitted_tokens == sum(len(each.times_s) for each in got)
    assert pool.preemptions == sum(each.preemptions for each in got)
    assert pool.silent_tokens == 0
    for at, (ask, each) in enumerate(zip(asked, got, strict=True)):
        assert (np.diff(each.times_s, prepend=ask.at_s) > 0).all()
        assert len(each.times_s) == ask.tokens or ask.leaves_after_s is not None
        assert each.heard_s == (each.times_s if at in listening else [])
        if ask.leaves_after_s is not None:
            # It may stay for the step in progress when it was released, and no longer.
            assert sum(time_s > ask.at_s + ask.leaves_after_s for time_s in each.times_s) <= 1


@settings(deadline=None, max_examples=30)
@given(requests(), chips, rooms)
def test_who_listens_changes_nothing(asked: list[Asked], chip: Chip, room: Room) -> None:
    """Beyond the last bits of a float: a stretch is cut into single steps."""
    alone, _ = jumping(asked, chip, 1.0, room, frozenset())
    heard, _ = jumping(asked, chip, 1.0, room, frozenset(range(0, len(asked), 2)))
    alike(heard, alone)


@pytest.mark.parametrize("when_full", ["preempt", "reserve"])
@pytest.mark.parametrize("chip", [Straight(), Bent()])
def test_a_crowded_pool_is_that_of_stepping(chip: Chip, when_full: str) -> None:
    """Long after its start, and with more waiting than fit."""
    rng = np.random.default_rng(7)
    asked = [
        Asked(float(at_s), int(context), int(tokens), leaves_after_s=leaves)
        for at_s, context, tokens, leaves in zip(
            np.cumsum(rng.exponential(0.06, 400)),
            rng.integers(1, 300, 400),
            rng.geometric(1 / 90, 400),
            [1.5 if each else None for each in rng.random(400) < 0.25],
            strict=True,
        )
    ]
    room = Room(150, 16, 1, when_full)
    got, pool = jumping(asked, chip, 1.0, room, frozenset())
    alike(got, Stepping(asked, chip, 1.0, room).run())
    assert pool.preemptions > 100 or when_full == "reserve"


@settings(deadline=None)
@given(st.lists(st.floats(0, 3), min_size=2, max_size=20), st.integers(1, 60), rooms)
def test_equals_finish_in_the_order_they_came_in(
    arrivals: list[float], tokens: int, room: Room
) -> None:
    asked = [Asked(at_s, 100, tokens) for at_s in sorted(arrivals)]
    got, _ = jumping(asked, Straight(), 1.0, room, frozenset())
    ends = [each.times_s[-1] for each in got if not each.preemptions]
    assert ends == sorted(ends)
