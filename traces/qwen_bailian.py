"""Qwen-Bailian's traces: JSONL, one request a line, conversations by parents, times in seconds.

Format: https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon, README.md. `input_length` is
the whole prompt, history and all; `hash_ids` are its blocks of 16 tokens, the last of them partly
filled, valid in their file. `parent_chat_id` is the turn before, or -1 for the first of a
conversation; a session is all that goes back to one first turn, branches too. A parent that is not
in the file (a trace is two hours cut out of many) is counted, and its turn is a first one.
`turn` is checked and not used; `type` is the turn's agent.

A turn waits for its parent. The source does not say when a parent's answer ended, so, as for
kv-cache-tester's sessions without times, the answer is taken to have lasted 0 s: a turn waits, from
the end of its parent's answer in the replay, as long as it came after its parent's *start* in the
recording. Think times are too long by the time the answer took.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from harness.errors import ConfigError
from harness.trace import MAX_TOKENS, Header, Trace
from traces.builder import TraceBuilder
from traces.faults import spared
from traces.source import MAX_BLOCK_ID, Row, json_rows, locate_file

FIELDS = (
    *("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length"),
    *("type", "turn", "hash_ids"),
)

_NO_PARENT = -1


class _Chat(NamedTuple):
    parent: int
    start_s: float
    line: int | None


def read(path: Path | str, block_tokens: int = 16) -> Trace:
    """Read a file: whole prompts; first turns arrive as recorded, others after their parent.

    `block_tokens` is the tokens a hash id stands for. The file is read twice: a parent may stand
    below its child. Raises `TraceError`, and `ConfigError` for blocks of less than a token.
    """
    if block_tokens < 1:
        raise ConfigError(f"trace.block_tokens is {block_tokens}: give 1 or more")
    path = locate_file(path)
    chats = _chats(path)
    firsts = _firsts(chats)
    header = Header(
        format="qwen_bailian",
        block_tokens=block_tokens,
        partial_block="ceil",
        id_scope="file",
        time_unit="s",
        licence="Apache-2.0",
    )
    builder = TraceBuilder(header, ids_field="hash_ids")
    builder.file(path)
    # While faults are gathered, rows that the first reading has left out come again.
    lines = {chat.line for chat in chats.values()}
    for row in json_rows(path, builder.count, again=True):
        if row.line in lines:
            with spared():
                _add(builder, row, chats, firsts)
    return builder.build()


def _add(builder: TraceBuilder, row: Row, chats: dict[int, _Chat], firsts: dict[int, int]) -> None:
    """Add the turn of a request."""
    number: int = row.values["chat_id"]
    chat = chats[number]
    parent = chats.get(chat.parent)
    delay_s = None
    if parent is not None:
        # Rid of what binary fractions add: the source has milliseconds.
        delay_s = round(chat.start_s - parent.start_s, 6)
        builder.count("api_time_unknown_taken_as_0")
        if delay_s < 0:
            builder.count("negative_delay_clamped_to_0")
    elif chat.parent != _NO_PARENT:
        builder.count("parent_not_in_file_made_first_turn")
    builder.add(
        number,
        session=firsts[number],
        parents=[] if parent is None else [chat.parent],
        recorded_s=chat.start_s,
        arrival_s=chat.start_s if parent is None else None,
        delay_s=None if delay_s is None else max(0.0, delay_s),
        input_tokens=row.tokens("input_length"),
        output_tokens=row.tokens("output_length"),
        block_ids=row.block_ids("hash_ids"),
        agent=_type(row),
        line=row.line,
    )


def _chats(path: Path) -> dict[int, _Chat]:
    """Each request's parent and time, by its id."""
    chats: dict[int, _Chat] = {}
    for row in json_rows(path, lambda _: None):
        with spared():
            row.expect(FIELDS)
            number = row.integer("chat_id", 0, MAX_BLOCK_ID)
            if number in chats:
                raise row.error(
                    f"chat {number} is in line {chats[number].line} too",
                    "remove one of the two",
                    "chat_id",
                )
            row.integer("turn", 0, MAX_TOKENS)
            parent = row.integer("parent_chat_id", _NO_PARENT, MAX_BLOCK_ID)
            chats[number] = _Chat(parent, row.time_s("timestamp"), row.line)
    return chats


def _firsts(chats: dict[int, _Chat]) -> dict[int, int]:
    """The first turn that each goes back to. For a cycle, which the builder refuses, any of it."""
    firsts: dict[int, int] = {}
    for number in chats:
        trail = {number: None}
        first = number
        while first not in firsts:
            parent = chats[first].parent
            if parent not in chats or parent in trail:
                break
            trail[parent] = None
            first = parent
        firsts.update(dict.fromkeys(trail, firsts.get(first, first)))
    return firsts


def _type(row: Row) -> str:
    kind = row.text("type")
    if not kind.strip():
        raise row.error(f"{kind!r} is no type", "give one, such as text", "type")
    return kind
