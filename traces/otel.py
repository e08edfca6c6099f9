"""OpenTelemetry spans of model calls: JSON, `{"spans": [...]}`, ISO 8601 times.

Format: https://github.com/kubernetes-sigs/inference-perf, examples/otel/README.md; the attributes
are those of https://opentelemetry.io/docs/specs/semconv/gen-ai/. What is read:

- A span is a model call if its operation is one, it has `gen_ai.input.messages`, or its name begins
  with `chat `. Spans of tools and agents are time between calls; failed calls are dropped.
- A session is what `gen_ai.conversation.id`, `session.id` or `exgentic.session.id` names, else a
  trace id: what has another trace id has nothing to wait for. Sessions of two files are two.
- A call waits for those of its session that were over when it began, as long as it did in the
  recording. Calls that overlap run side by side. This is inference-perf's rule where texts do not
  match, and it holds for a caller's span that is over too; texts are not looked at for it.
- Tokens are `gen_ai.usage.*`; where a span has none they are estimated, as inference-perf does: 4
  characters each.
- There are no hashes. Prompts share the messages at their front that are the same, text for text,
  which is inference-perf's rule too; where in the prompt a message ends is estimated from its
  characters. The ids are made from these lengths, in blocks of `block_tokens` of which only whole
  ones have one. A call without messages shares nothing; if no call has any, the header says that
  there is no prefix data.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import ConfigError
from harness.trace import Header, Trace
from traces.builder import TraceBuilder
from traces.events import (
    MAX_PROMPT,
    Call,
    document,
    files,
    need,
    nested_or_none,
    unix_us,
    wait_in_order,
)
from traces.faults import seen, spared
from traces.source import Row

_OPERATIONS = ("chat", "text_completion", "generate_content")
_SESSIONS = ("gen_ai.conversation.id", "session.id", "exgentic.session.id")
_INPUT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
_OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
_ANSWERS = ("gen_ai.output.messages", "gen_ai.output.text", "gen_ai.completion", "gen_ai.output")
_BEFORE = ("gen_ai.tool.definitions", "gen_ai.system_instructions")
"""What stands in a prompt before its messages."""
_MESSAGES = "gen_ai.input.messages"
_AGENT = "gen_ai.agent.name"
_FAILED = (2, "ERROR", "STATUS_CODE_ERROR")
_CHARACTERS_PER_TOKEN = 4


@dataclass(slots=True)
class _Message:
    """A message behind others: where in its prompts it ends, and what has followed it."""

    tokens: int = 0
    ids: list[int] = field(default_factory=list)
    next: dict[bytes, _Message] = field(default_factory=dict)


class _Part(NamedTuple):
    """A message of a prompt, or what stands before them."""

    key: bytes
    characters: int

    @property
    def tokens(self) -> int:
        return max(1, self.characters // _CHARACTERS_PER_TOKEN)


class _Prompts:
    """All prompts so far, as a tree of messages."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._root = _Message()
        self._ids = 0

    def ids(self, parts: Sequence[_Part], tokens: int) -> list[int]:
        """The blocks of a prompt of so many tokens. It shares those of the messages known."""
        at, known = self._root, 0
        while known < len(parts):
            after = at.next.get(parts[known].key)
            if after is None or after.tokens > tokens:
                break
            at, known = after, known + 1
        start, rest = at.tokens, parts[known:]
        characters, seen = sum(part.characters for part in rest), 0
        for part in rest:
            seen += part.characters
            end = start + (tokens - start) * seen // max(1, characters)
            message = _Message(end, self._grown(at.ids, end))
            # One that this prompt has no room for stays where it ended before.
            at.next.setdefault(part.key, message)
            at = message
        return self._grown(at.ids, tokens)

    def _grown(self, ids: list[int], tokens: int) -> list[int]:
        new = max(0, tokens // self._block_tokens - len(ids))
        self._ids += new
        return [*ids, *range(self._ids - new, self._ids)]


class _Spans:
    """The calls of one file."""

    def __init__(self, path: Path, changes: Counter[str]) -> None:
        self.parts: dict[Call, list[_Part]] = {}
        """The calls with the messages of each."""
        self._changes = changes
        self._path = path
        self._spans: dict[tuple[str, str], Row] = {}
        self._checked: set[tuple[str, str]] = set()
        spans = document(path, "otel", "spans").rows("spans")
        seen(len(spans))
        for span in spans:
            with spared():
                self._note(span)
        for key, span in self._spans.items():
            with spared():
                self._check_parents(key, span)
                self._read(key, span)

    def _note(self, span: Row) -> None:
        need(span, "trace_id", "span_id", "start_time", "end_time")
        key = span.text("trace_id"), span.text("span_id")
        first = self._spans.setdefault(key, span)
        if first is span:
            return
        if first.values != span.values:
            raise span.error(
                f"{key[1]!r} is {first.within} too, with other values",
                "remove one of the two",
                "span_id",
            )
        self._changes["duplicate_span_dropped"] += 1

    def _check_parents(self, key: tuple[str, str], span: Row) -> None:
        """Refuse a span that is inside itself, and note one whose parent is not in the file."""
        inside = {key[1]: None}
        at = span
        while at.values.get("parent_span_id"):
            parent = at.text("parent_span_id")
            if parent in inside:
                self._checked.update((key[0], each) for each in inside)
                raise span.error(
                    f"is inside itself: {' in '.join([*inside, parent])}",
                    "break the cycle",
                    "parent_span_id",
                )
            inside[parent] = None
            found = self._spans.get((key[0], parent))
            if found is None:
                self._changes["parent_span_not_in_file"] += at is span
            if found is None or not self._checked.isdisjoint({key, (key[0], parent)}):
                break
            at = found
        self._checked.add(key)

    def _read(self, key: tuple[str, str], span: Row) -> None:
        start_us, end_us = unix_us(span, "start_time"), unix_us(span, "end_time")
        if end_us < start_us:
            raise span.error(
                f"{span.values['end_time']} is before start_time, {span.values['start_time']}",
                "give a time that is not before the start",
                "end_time",
            )
        has = nested_or_none(span, "attributes") or Row({}, span.path, span.line, span.within)
        name = span.text("name") if span.values.get("name") is not None else ""
        operation = has.values.get("gen_ai.operation.name")
        if not (operation in _OPERATIONS or _MESSAGES in has.values or name.startswith("chat ")):
            self._changes["other_span_dropped"] += 1
            return
        status = nested_or_none(span, "status")
        if status is not None and status.values.get("code") in _FAILED:
            self._changes["failed_call_dropped"] += 1
            return
        parts = _parts(has)
        tokens, output = _count(has, _INPUT), _count(has, _OUTPUT)
        answer = next((each for each in _ANSWERS if has.values.get(each) is not None), None)
        if (tokens is None and parts is None) or (output is None and answer is None):
            self._changes["call_without_tokens_dropped"] += 1
            return
        self._changes["tokens_estimated_from_characters"] += tokens is None or output is None
        if tokens is None:
            tokens = sum(part.tokens for part in parts or [])
        if output is None:
            text = has.values[answer or ""]
            output = _part(b"", text if isinstance(text, str) else json.dumps(text)).tokens
        self._changes["call_without_messages_shares_nothing"] += parts is None
        named = [each for each in _SESSIONS if has.values.get(each) is not None]
        session = has.text(named[0]) if named else key[0]
        agent = "main"
        if has.values.get(_AGENT) is not None:
            agent = has.text(_AGENT)
        call = Call(
            span,
            (self._path.name, *key),
            (self._path.name, session),
            agent,
            start_us,
            end_us,
            tokens,
            output,
            (),
        )
        self.parts[call] = parts or []


def read(path: Path | str, block_tokens: int = 16) -> Trace:
    """Read one file, or all `*.json` of a folder in the order of their names.

    `block_tokens` is the size of the blocks that shared lengths are rounded down to. Raises
    `TraceError`, and `ConfigError` for blocks of less than a token.
    """
    if block_tokens < 1:
        raise ConfigError(f"trace.block_tokens is {block_tokens}: give 1 or more")
    paths = files(path, ".json")
    changes: Counter[str] = Counter()
    spans: dict[Path, _Spans] = {}
    for each in paths:
        with spared():
            spans[each] = _Spans(each, changes)
    starts = (call.start_us for own in spans.values() for call in own.parts)
    zero_us = min(starts, default=0)
    header = Header(
        format="otel",
        block_tokens=block_tokens,
        partial_block="floor",
        id_scope="global",
        time_unit="ISO 8601",
        licence="unknown",
        prefix_data="recorded"
        if any(any(own.parts.values()) for own in spans.values())
        else "absent",
    )
    builder = TraceBuilder(header, ids_field=_MESSAGES)
    prompts = _Prompts(block_tokens)
    for each, own in spans.items():
        builder.file(each)
        calls = sorted(own.parts, key=lambda call: call.start_us)
        sessions: defaultdict[Hashable, list[Call]] = defaultdict(list)
        for call in calls:
            sessions[call.session].append(call)
        for session in sessions.values():
            wait_in_order(session)
        for call in calls:
            call.block_ids = prompts.ids(own.parts[call], call.input_tokens)
            with spared():
                call.add_to(builder, zero_us)
    for change, turns in changes.items():
        if turns:
            builder.count(change, turns)
    return builder.build()


def _parts(has: Row) -> list[_Part] | None:
    """What stands before the messages of a prompt, and they; None where they are not recorded."""
    if has.values.get(_MESSAGES) is None:
        return None
    messages = _json(has, _MESSAGES)
    if not isinstance(messages, list):
        raise has.error("not a list", 'give [{"role": ..., "content": ...}, ...]', _MESSAGES)
    before = "\0".join(json.dumps(has.values[each]) for each in _BEFORE if each in has.values)
    parts = [_part(b"", before)] if before else []
    for at, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise has.error(
                "not a message", 'give {"role": ..., "content": ...}', f"{_MESSAGES}[{at}]"
            )
        said = {name: value for name, value in message.items() if name != "role"}
        content = said.get("content")
        plain = isinstance(content, str) and len(said) == 1
        text = str(content) if plain else json.dumps(said, sort_keys=True)
        parts.append(_part(message["role"].encode(errors="surrogatepass"), text))
    return parts


def _part(role: bytes, text: str) -> _Part:
    return _Part(
        hashlib.sha256(role + b"\0" + text.encode(errors="surrogatepass")).digest(), len(text)
    )


def _json(has: Row, name: str) -> Any:
    """The value of an attribute, which may be JSON in a string."""
    value = has.values[name]
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise has.error(f"not JSON: {error}", "give a list of messages", name) from error


def _count(has: Row, names: tuple[str, ...]) -> int | None:
    """The first of these attributes that is there."""
    name = next((each for each in names if has.values.get(each) is not None), None)
    return None if name is None else has.integer(name, 0, MAX_PROMPT, " tokens")
