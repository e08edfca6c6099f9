"""TraceLab's rounds: JSONL, one model call of a coding agent a line, ISO 8601 times.

Format: https://github.com/uw-syfi/TraceLab, README, "Data format". What it says, and what follows:

- `input_tokens_total` = `prefix_tokens` + `newly_append_tokens`: the prefix is what the provider
  read from its cache. So the front of a round's prompt is that of the round before in its session,
  `prefix_tokens` long, and the rest is new. There are no hashes and no blocks: the ids are made
  from these lengths, in blocks of `block_tokens` of which only whole ones have an id.
- That is what a provider's cache held, not what it could have held: where it lost a prefix the
  trace shares less, so ideal hits are a lower bound.
- A prefix may reach past the round before into its answer; the part that is answer is new here
  too, and is shared from the next round on. The first round's prefix was cached by a session that
  the format does not name: it is not shared.
- A round began at its last `user_message` or `tool_result` and ended at its last other event: what
  a tool or a person took is the delay before the next.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

from harness.errors import ConfigError
from harness.trace import Header, Trace
from traces.builder import TraceBuilder
from traces.events import MAX_PROMPT, US, Call, files, need, unix_us
from traces.faults import require_sound, spared
from traces.source import Row, json_rows

_FIELDS = (
    *("session_id", "round_index", "input_tokens_total", "prefix_tokens", "newly_append_tokens"),
    *("output_tokens", "timing_events", "tools"),
)
_INPUTS = frozenset({"user_message", "tool_result"})
_MAX_ROUND = 2**31 - 1


@dataclass(slots=True)
class _Round:
    """One row; times are in microseconds since 1970, None where it has no events."""

    row: Row
    index: int
    start_us: int | None
    end_us: int
    tools_us: int
    """How long the slowest of its tools took."""
    prefix: int
    tokens: int
    output: int


class _Rounds:
    """The rounds of all files, by session."""

    def __init__(self) -> None:
        self.changes: Counter[str] = Counter()
        self.sessions: defaultdict[str, list[_Round]] = defaultdict(list)
        self.ids: dict[Hashable, list[range]] = {}
        """The block ids of a round, in runs: hundreds of thousands of prompts must fit."""

    def read(self, path: Path) -> None:
        for row in json_rows(path, self._count):
            with spared():
                need(row, *_FIELDS, reader="tracelab")
                made = self._round(row)
                self.sessions[row.text("session_id")].append(made)

    def _count(self, change: str) -> None:
        self.changes[change] += 1

    def _round(self, row: Row) -> _Round:
        tokens = row.integer("input_tokens_total", 0, MAX_PROMPT, " tokens")
        prefix = row.tokens("prefix_tokens")
        self.changes["input_tokens_not_their_sum"] += tokens != prefix + row.tokens(
            "newly_append_tokens"
        )
        inputs: list[int] = []
        outputs: list[int] = []
        for event in row.rows("timing_events"):
            need(event, "event_type", "timestamp")
            into = inputs if event.text("event_type") in _INPUTS else outputs
            into.append(unix_us(event, "timestamp"))
        start_us = max(inputs) if inputs else min(outputs, default=None)
        self.changes["begin_estimated_from_first_output"] += bool(outputs) and not inputs
        end_us = max([*inputs, *outputs], default=0)
        # Only the numbers of a row are kept: the published file has 357,161.
        place = Row({}, row.path, row.line)
        return _Round(
            place,
            row.integer("round_index", 0, _MAX_ROUND),
            start_us,
            end_us,
            max(map(_tool_us, row.rows("tools")), default=0),
            prefix,
            tokens,
            row.tokens("output_tokens"),
        )

    def calls(self, block_tokens: int) -> list[Call]:
        """All rounds, each behind the one before in its session, with its `ids` apart."""
        fresh = 0
        calls: list[Call] = []
        starts = (each.start_us for rounds in self.sessions.values() for each in rounds)
        first_us = min((each for each in starts if each is not None), default=0)
        for session, rounds in self.sessions.items():
            rounds.sort(key=lambda each: each.index)
            self._fill_times(rounds, first_us)
            before: Call | None = None
            ids: list[range] = []
            for each in rounds:
                key = (session, each.index)
                if before is not None and before.key == key:
                    with spared():
                        raise each.row.error(
                            f"round {each.index} of session {session!r} is in "
                            f"{before.row.path.name} line {before.row.line} too",
                            "remove one of the two",
                            "round_index",
                        )
                    continue
                ids = _front(ids, self._shared(each, before) // block_tokens)
                new = each.tokens // block_tokens - sum(map(len, ids))
                ids = [*ids, range(fresh, fresh + new)]
                fresh += new
                call = Call(
                    each.row,
                    key,
                    session,
                    "main",
                    each.start_us or 0,
                    each.end_us,
                    each.tokens,
                    each.output,
                    (),
                )
                if before is not None:
                    call.waits_for.append(before)
                self.ids[call.key] = ids
                calls.append(call)
                before = call
        return calls

    def _fill_times(self, rounds: list[_Round], first_us: int) -> None:
        """Give a round without events a time: when the tools of the one before were back."""
        known = (each.start_us for each in rounds if each.start_us is not None)
        if rounds[0].start_us is None:
            self.changes["time_estimated"] += 1
            rounds[0].start_us = rounds[0].end_us = next(known, first_us)
        for before, each in pairwise(rounds):
            if each.start_us is None:
                self.changes["time_estimated"] += 1
                each.start_us = each.end_us = before.end_us + before.tools_us

    def _shared(self, each: _Round, before: Call | None) -> int:
        """Tokens at the front of a round's prompt that the prompt before has too."""
        if before is None:
            self.changes["first_prefix_not_shared"] += each.prefix > 0
            return 0
        context = before.input_tokens + before.output_tokens
        self.changes["prefix_longer_than_context"] += each.prefix > context
        return min(each.prefix, before.input_tokens, each.tokens)


def read(path: Path | str, block_tokens: int = 64) -> Trace:
    """Read one file, or all `*.jsonl` and `*.jsonl.gz` of a folder as one trace.

    `block_tokens` is the size of the blocks that shared lengths are rounded down to. Raises
    `TraceError`, and `ConfigError` for blocks of less than a token.
    """
    if block_tokens < 1:
        raise ConfigError(f"trace.block_tokens is {block_tokens}: give 1 or more")
    paths = files(path, ".jsonl", ".jsonl.gz")
    rounds = _Rounds()
    for each in paths:
        with spared():
            rounds.read(each)
    header = Header(
        format="tracelab",
        block_tokens=block_tokens,
        partial_block="floor",
        id_scope="global",
        time_unit="ISO 8601",
        licence="CC-BY-4.0",
    )
    builder = TraceBuilder(header, ids_field="prefix_tokens")
    calls = rounds.calls(block_tokens)
    require_sound(path)
    zero_us = min(call.start_us for call in calls)
    # Sessions follow each other in the file, whenever they were.
    calls.sort(key=lambda call: call.start_us)
    for each in paths:
        builder.file(each)
        for call in calls:
            if call.row.path == each:
                call.block_ids = list(chain.from_iterable(rounds.ids.pop(call.key)))
                call.add_to(builder, zero_us)
                call.block_ids = ()
    for change, turns in rounds.changes.items():
        if turns:
            builder.count(change, turns)
    return builder.build()


def _front(ids: list[range], blocks: int) -> list[range]:
    """The runs of the first so many ids."""
    front: list[range] = []
    for run in ids:
        front.append(run[:blocks])
        blocks -= len(front[-1])
        if not blocks:
            break
    return front


def _tool_us(tool: Row) -> int:
    return round((tool.time_s_or_none("tool_wall_latency_ms", "ms") or 0.0) * US)
