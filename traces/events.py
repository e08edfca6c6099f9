"""What the readers of event logs share: fields that have company, and calls with begin and end.

A log is not made for replay: it has fields that are not for us, so a reader looks at those it
names and leaves the rest alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from harness.errors import TraceError
from harness.interner import BlockIds
from traces.builder import TraceBuilder
from traces.source import Row, json_document, listing, locate, locate_file, read_text

US = 1_000_000
"""Microseconds in a second."""

MAX_PROMPT = 2**24
"""The longest prompt, in tokens, that a reader makes ids for: no model takes so many."""

_SIGNS = (
    ("mooncake_agentic", ("schema", "hash_id_scope")),
    ("mooncake", ("timestamp", "input_length", "hash_ids")),
    ("dynamo", ("event_type", "event_time_unix_ms")),
    ("dynamo", ("timestamp", "event")),
    ("kv_cache_tester", ("block_size", "requests")),
    ("tracelab", ("session_id", "newly_append_tokens")),
    ("tensorrt_llm", ("trace_id", "events")),
    ("otel", ("spans",)),
)
"""Fields by which a trace of another format is known."""


def need(row: Row, *names: str, reader: str = "") -> None:
    """Refuse a row that lacks one of these fields; others are left alone.

    `reader` is given for what stands at the top of a file: if that is of another format, the error
    names its reader.
    """
    if all(name in row.values for name in names):
        return
    for other, signs in _SIGNS:
        if reader and other != reader and all(sign in row.values for sign in signs):
            raise row.error(
                f"{', '.join(signs)}: a trace of another format", f"read it with trace={other}"
            )
    row.expect(names)


def document(path: Path, reader: str, *names: str) -> Row:
    """The one JSON object that a file is, with these fields."""
    text = read_text(path)
    head, _, rest = text.partition("\n")
    if head.rstrip().endswith("}") and rest.strip():
        # One object a line: not ours, and its first line says whose.
        need(json_document(head, path), *names, reader=reader)
    whole = json_document(text, path)
    need(whole, *names, reader=reader)
    return whole


def nested(row: Row, name: str) -> Row:
    """The object that a field holds."""
    value = row.values[name]
    if not isinstance(value, dict):
        raise row.error("not an object", 'give {"name": value, ...}', name)
    return Row(value, row.path, row.line, ".".join(part for part in (row.within, name) if part))


def nested_or_none(row: Row, name: str) -> Row | None:
    """As `nested`; None where the field is absent or null."""
    return None if row.values.get(name) is None else nested(row, name)


def u64_ids(row: Row, name: str) -> list[int]:
    """A list of block ids that are unsigned 64-bit integers, not strings."""
    ids: list[int] = []
    for each in row.block_ids(name):
        if isinstance(each, str):
            raise row.error(f"{each!r} is a string", "give integers from 0 to 2^64 - 1", name)
        ids.append(each)
    return ids


def unix_us(row: Row, name: str) -> int:
    """An ISO 8601 date and time, in microseconds since 1970; UTC where it names no zone."""
    text = row.text(name)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise row.error(
            f"{text!r} is not a time", "give ISO 8601: 2026-06-01T05:40:20.151Z", name
        ) from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * US + since.microseconds


def files(path: Path | str, *endings: str) -> list[Path]:
    """The file, or all of a folder with such a name, in the order of their names."""
    path = locate(path)
    if not path.is_dir():
        return [locate_file(path)]
    names = sorted(each.name for each in path.iterdir())
    found = [path / name for name in names if name.endswith(endings) and name[0] != "."]
    if not found:
        raise TraceError(
            f"no *{' or *'.join(endings)} in this folder",
            do=f"name a folder of such files; it has {listing(names) or 'nothing'}",
            path=path,
        )
    return [locate_file(each) for each in found]


@dataclass(slots=True, eq=False)
class Call:
    """One request, with its begin and end in microseconds from a zero of the log's."""

    row: Row
    key: Hashable
    session: Hashable
    agent: str
    start_us: int
    end_us: int
    input_tokens: int
    output_tokens: int
    block_ids: BlockIds
    waits_for: list[Call] = field(default_factory=list)

    def add_to(self, builder: TraceBuilder, zero_us: int) -> None:
        """Add it: behind what it waits for by as long as in the recording, else when it began."""
        start_s = (self.start_us - zero_us) / US
        delay_s = None
        if self.waits_for:
            delay_us = self.start_us - max(each.end_us for each in self.waits_for)
            if delay_us < 0:
                builder.count("negative_delay_clamped_to_0")
            delay_s = max(0, delay_us) / US
        builder.add(
            self.key,
            session=self.session,
            parents=[each.key for each in self.waits_for],
            recorded_s=start_s,
            arrival_s=start_s if delay_s is None else None,
            delay_s=delay_s,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            block_ids=self.block_ids,
            agent=self.agent,
            line=self.row.line,
            within=self.row.within,
        )


def wait_in_order(calls: Iterable[Call], slack_us: int = 0) -> None:
    """Let each call wait for those before it that were over when it began.

    Only for the last of them: those that no other of them waits for. Calls that overlap do not
    wait for each other, so what ran side by side does so again. `slack_us` is how much later than
    it was the log may show an end. `calls` are in the order of their begin.
    """
    recent: list[Call] = []
    for call in calls:
        over = [each for each in recent if each.end_us <= call.start_us + slack_us]
        latest_us = max((each.start_us for each in over), default=0)
        call.waits_for += [
            each
            for each in over
            if each.start_us == latest_us or each.end_us > latest_us + slack_us
        ]
        recent = [each for each in recent if each not in over or each in call.waits_for]
        recent.append(call)
