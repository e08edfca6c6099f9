"""TensorRT-LLM's execution traces: JSON, the events of one agent run a file, tools timed in ms.

Format: https://github.com/NVIDIA/TensorRT-LLM, examples/scaffolding/trace_replay/README.md and
tensorrt_llm/scaffolding. It has no times and no hashes. What is read follows its replay:

- The events of a branch run one after another: an `assistant` message is a request, a `tool_call`
  a wait of `duration_ms`. A request waits for the one before on its branch and the tools since.
- `parallel_start` opens branches `[..., 0]` to `[..., num_branches - 1]`, which start side by side
  once its own branch is through; `parallel_end` closes those opened last, and waits for them all.
- A prompt is the conversation so far: what came before on the branch, or when the branch was
  opened, and what the messages since have added. System prompts of one `system_prompt_id` are the
  same text, in all files. An answer stays in the conversation without its reasoning.
- `prompt_tokens` is what the server saw, with the chat template and after re-tokenising; where the
  messages add up to another number it holds, and the newest message is taken to be that much
  longer or shorter.

The ids are made from these lengths, in blocks of `block_tokens` of which only whole ones have one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from pathlib import Path

from harness.errors import ConfigError
from harness.trace import Header, Trace
from traces.builder import TraceBuilder
from traces.events import MAX_PROMPT, document, files, need, u64_ids
from traces.faults import seen, spared
from traces.source import Row

_MAX_NUMBER = 2**31 - 1
_MAX_BRANCHES = 2**16
_ROLES = ("system", "user", "tool", "assistant")
_PARALLEL = ("parallel_start", "parallel_end")
_Path = tuple[int, ...]


class _Text:
    """Tokens with an id for each whole block of them; what is appended is new text."""

    def __init__(self, block_tokens: int, fresh: count[int]) -> None:
        self._block_tokens = block_tokens
        self._fresh = fresh
        self.lengths: list[int] = []
        """Tokens of each message."""
        self.ids: list[int] = []

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def copy(self) -> _Text:
        other = _Text(self._block_tokens, self._fresh)
        other.lengths, other.ids = [*self.lengths], [*self.ids]
        return other

    def put(self, at: int | None, tokens: int) -> None:
        """Append a message, or write it in place of message `at`: all after it is new then."""
        if at is None or at >= len(self.lengths):
            self.lengths.append(tokens)
        else:
            del self.ids[sum(self.lengths[:at]) // self._block_tokens :]
            self.lengths[at] = tokens
        self._number()

    def begin_with(self, other: _Text, tokens: int) -> None:
        """Take the first message from a text that others share, which grows if it must."""
        if other.tokens < tokens:
            other.put(None, tokens - other.tokens)
        self.lengths = [tokens]
        self.ids = other.ids[: tokens // self._block_tokens]

    def stretch(self, tokens: int) -> None:
        """Make it so long: the newest messages are shorter or longer than was said."""
        spare = self.tokens - tokens
        for at in reversed(range(len(self.lengths))):
            cut = min(max(0, spare), self.lengths[at])
            self.lengths[at] -= cut
            spare -= cut
        if spare < 0:
            self.lengths = self.lengths or [0]
            self.lengths[-1] -= spare
        del self.ids[tokens // self._block_tokens :]
        self._number()

    def _number(self) -> None:
        new = self.tokens // self._block_tokens - len(self.ids)
        self.ids += [next(self._fresh) for _ in range(new)]


@dataclass(slots=True)
class _Branch:
    """Where a branch is: the requests that its next one waits for, and the tools since."""

    agent: str
    last: tuple[int, ...] = ()
    tools_s: float = 0.0
    texts: dict[int, _Text] = field(default_factory=dict)
    """The conversations, by their id."""


class _Run:
    """One file's events, and the requests that come of them."""

    def __init__(
        self, builder: TraceBuilder, name: str, shared: dict[str, _Text], empty: _Text
    ) -> None:
        self._builder = builder
        self._name = name
        self._shared = shared
        self._empty = empty
        self._branches: dict[_Path, _Branch] = {(): _Branch("main")}
        self._open: list[list[_Path]] = []
        self._starts_s: list[float] = []
        self._lost = False
        self._turns: list[tuple[float, Callable[[], None]]] = []
        self.changes: Counter[str] = Counter()

    def follow(self, events: list[Row]) -> None:
        """Go through the events.

        Where faults are gathered, up to a `parallel_start` or `parallel_end` that is at fault: no
        event behind it has a branch to be on.
        """
        seen(len(events))
        for event in events:
            if self._lost:
                return
            with spared():
                self._event(event)
                continue
            self._lost = event.values.get("event_type") in _PARALLEL

    def _event(self, event: Row) -> None:
        need(event, "event_type")
        kind = event.text("event_type")
        if kind == "message":
            self._message(event, self._branch(event))
        elif kind == "tool_call":
            duration_s = event.time_s_or_none("duration_ms", "ms")
            self.changes["tool_time_unknown_taken_as_0"] += duration_s is None
            self._branch(event).tools_s += duration_s or 0.0
        elif kind == "parallel_start":
            self._fork(event)
        elif kind == "parallel_end":
            self._join(event)
        elif kind == "drop_kv_cache":
            self.changes["drop_kv_cache_dropped"] += 1
        else:
            raise event.error(
                f"{kind!r} is unknown",
                "give message, tool_call, parallel_start, parallel_end or drop_kv_cache",
                "event_type",
            )

    def add(self) -> None:
        """Add the requests in the order of their times: branches follow each other in the file."""
        for _, add in sorted(self._turns, key=lambda turn: turn[0]):
            with spared():
                add()

    def _path(self, event: Row) -> _Path:
        if event.values.get("branch_path") is None:
            return ()
        return tuple(u64_ids(event, "branch_path"))

    def _branch(self, event: Row) -> _Branch:
        path = self._path(event)
        if path not in self._branches:
            raise event.error(
                f"an orphan: no parallel_start has opened branch {list(path)}",
                "add it before this event, or give another branch",
                "branch_path",
            )
        return self._branches[path]

    # ---- branches

    def _fork(self, event: Row) -> None:
        parent, path = self._branch(event), self._path(event)
        children = event.rows("children") if event.values.get("children") is not None else []
        if not children:
            need(event, "num_branches")
        branches = len(children) or event.integer("num_branches", 0, _MAX_BRANCHES)
        opened = [(*path, number) for number in range(branches)]
        for child in opened:
            if child in self._branches:
                raise event.error(
                    f"branch {list(child)} is open already", "close it with parallel_end first"
                )
            self._branches[child] = _Branch(
                "branch " + ".".join(map(str, child)),
                parent.last,
                parent.tools_s,
                {key: text.copy() for key, text in parent.texts.items()},
            )
        self._open.append(opened)
        if children:
            # One task each, all done before the next event: they say no more of their branch.
            for row, child in zip(children, opened, strict=True):
                values = row.values | {"branch_path": list(child)}
                self.follow([Row(values, row.path, row.line, row.within)])
            if not self._lost:
                self._join(event)

    def _join(self, event: Row) -> None:
        if not self._open:
            raise event.error(
                "parallel_end without a parallel_start", "add the start, or drop the end"
            )
        opened = self._open.pop()
        if not opened:
            return
        parent = self._branches[opened[0][:-1]]
        closed = [self._branches.pop(path) for path in opened]
        worked = [branch for branch in closed if branch.last != parent.last]
        if worked:
            parent.last = tuple(dict.fromkeys(chain.from_iterable(each.last for each in worked)))
        waits_s = {branch.tools_s for branch in closed}
        self.changes["unequal_ends_taken_as_longest"] += len(waits_s) > 1
        parent.tools_s = max(waits_s)

    # ---- messages

    def _message(self, event: Row, branch: _Branch) -> None:
        need(event, "conversation_id", "role")
        role = event.text("role")
        if role not in _ROLES:
            raise event.error(f"{role!r} is unknown", f"give {', '.join(_ROLES)}", "role")
        conversation = event.integer("conversation_id", 0, _MAX_NUMBER)
        text = branch.texts.setdefault(conversation, self._empty.copy())
        at = None
        if event.values.get("message_index") is not None:
            at = event.integer("message_index", 0, _MAX_NUMBER)
        if role != "assistant":
            self._context(event, role, text, at, conversation)
        elif event.values.get("completion_tokens") is None:
            self.changes["answer_without_request_kept_as_context"] += 1
            text.put(at, _tokens_or_0(event, "tokens"))
        else:
            self._request(event, branch, text, at)

    def _context(
        self, event: Row, role: str, text: _Text, at: int | None, conversation: int
    ) -> None:
        tokens = _tokens_or_0(event, "tokens")
        self.changes["message_tokens_unknown_taken_as_0"] += event.values.get("tokens") is None
        if role == "system" and not text.lengths:
            key = f"{self._name} {conversation}"
            if event.values.get("system_prompt_id") is not None:
                key = event.text("system_prompt_id")
            text.begin_with(self._shared.setdefault(key, self._empty.copy()), tokens)
        else:
            text.put(at, tokens)

    def _request(self, event: Row, branch: _Branch, text: _Text, at: int | None) -> None:
        output = _tokens_or_0(event, "completion_tokens")
        reasoning = _tokens_or_0(event, "reasoning_tokens")
        if event.values.get("prompt_tokens") is None:
            self.changes["prompt_tokens_taken_from_messages"] += 1
        else:
            tokens = _tokens_or_0(event, "prompt_tokens")
            self.changes["prompt_tokens_not_their_sum"] += tokens != text.tokens
            text.stretch(tokens)
        number = len(self._starts_s)
        start_s = max((self._starts_s[each] for each in branch.last), default=0.0)
        start_s = round(start_s + branch.tools_s, 6)
        delay_s = round(branch.tools_s, 6)
        add = partial(
            self._builder.add,
            (self._name, number),
            session=self._name,
            parents=[(self._name, each) for each in branch.last],
            recorded_s=start_s,
            arrival_s=None if branch.last else delay_s,
            delay_s=delay_s if branch.last else None,
            input_tokens=text.tokens,
            output_tokens=output,
            block_ids=[*text.ids],
            agent=branch.agent,
            within=event.within,
        )
        self._starts_s.append(start_s)
        self._turns.append((start_s, add))
        branch.last, branch.tools_s = (number,), 0.0
        self.changes["reasoning_longer_than_answer"] += reasoning > output
        text.put(at, max(0, output - reasoning))


def read(path: Path | str, block_tokens: int = 32) -> Trace:
    """Read one run, or all `*.trace.json` of a folder in the order of their names.

    There are no times: sessions start at 0 and the header says `session_starts="unknown"`; what is
    known of a delay is the tools' part of it. `recorded_s` orders the turns of a run as if answers
    took no time. `block_tokens` is the size of the blocks that lengths are rounded down to. Raises
    `TraceError`, and `ConfigError` for blocks of less than a token.
    """
    if block_tokens < 1:
        raise ConfigError(f"trace.block_tokens is {block_tokens}: give 1 or more")
    header = Header(
        format="tensorrt_llm",
        block_tokens=block_tokens,
        partial_block="floor",
        id_scope="global",
        time_unit="ms",
        licence="Apache-2.0",
        session_starts="unknown",
    )
    builder = TraceBuilder(header, ids_field="prompt_tokens")
    empty = _Text(block_tokens, count())
    shared: dict[str, _Text] = {}
    names: dict[str, Path] = {}
    for each in files(path, ".trace.json"):
        with spared():
            whole = document(each, "tensorrt_llm", "trace_id", "events")
            name = whole.text("trace_id")
            if name in names:
                raise whole.error(
                    f"{name!r} is of {names[name].name} too", "remove one of the two", "trace_id"
                )
            names[name] = each
            builder.file(each)
            run = _Run(builder, name, shared, empty)
            run.follow(whole.rows("events"))
            run.add()
            for change, turns in run.changes.items():
                if turns:
                    builder.count(change, turns)
    return builder.build()


def _tokens_or_0(event: Row, name: str) -> int:
    return 0 if event.values.get(name) is None else event.integer(name, 0, MAX_PROMPT, " tokens")
