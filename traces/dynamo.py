"""Dynamo's request traces: JSONL of events, `dynamo.request.trace.v1`, times in Unix ms.

Format: https://docs.nvidia.com/dynamo/dev/observability/request-traces. A line is an event, or
wraps it as `{"timestamp": ..., "event": {...}}`. What that page leaves open follows Dynamo's own
replay (lib/mocker, loadgen), except where calls overlap:

- A prompt has ceil(input_length / trace_block_size) hashes: unsigned, 64 bits wide, each over its
  block and all before it, so that they mean the same in every file.
- A request began at `request_received_ms` and took `total_time_ms`; its event comes at its end.
- Within a session a request waits for those that were over when it began. (Dynamo's replay puts
  all of a session in a row, also those that ran side by side.)
- The first of a child session waits for the request of its parent that called it, and the request
  that used its answer waits for the child's last. A tool event's `claude` names both. Without one,
  the caller is the last of the parent's requests that was over when the child began, and the user
  is the first that began after the child ended.

What waits, waits from the end of the last of these as long as it did in the recording: the time
that tools took is inside, their events add nothing to it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable
from pathlib import Path

from harness.errors import TraceError
from harness.trace import MAX_TOKENS, Header, Trace
from traces.builder import TraceBuilder
from traces.events import Call, files, need, nested, nested_or_none, u64_ids, wait_in_order
from traces.faults import require_sound, sound, spared
from traces.source import Row, json_rows

SCHEMA = "dynamo.request.trace.v1"

_MS = 1000
"""Microseconds in the source's unit."""
_MAX_MS = 2**53
_SLACK_US = 10 * _MS
"""A client may send the next request before the server has noted the end of the one before."""
_MODES = ("blocking", "background")


class _Tool:
    """A tool event that says which request called a child session, and which used its answer."""

    def __init__(self, row: Row, session: str) -> None:
        need(row, "source_request_id", "execution_mode")
        if row.text("execution_mode") not in _MODES:
            raise row.error("unknown", f"give {' or '.join(_MODES)}", "execution_mode")
        self.row = row
        self.session = session
        self.child = _text_or_none(row, "child_session_id")
        self.source = row.text("source_request_id")
        self.consumer = _text_or_none(row, "consumer_request_id")


class _Log:
    """The requests of all files, and what their tool events say."""

    def __init__(self) -> None:
        self.changes: Counter[str] = Counter()
        self.calls: list[Call] = []
        self.block_tokens = 0
        self.tools: list[_Tool] = []
        self.sessions: defaultdict[str, list[Call]] = defaultdict(list)
        self.parents: dict[str, Row] = {}
        """The `agent_context` that names a session's parent."""

    def read(self, path: Path) -> None:
        for row in json_rows(path, self._count):
            with spared():
                self._event(nested(row, "event") if "event" in row.values else row)

    def _event(self, event: Row) -> None:
        need(event, "event_type", reader="dynamo")
        kind = event.text("event_type")
        if kind == "request_payload":
            self.changes["request_payload_skipped"] += 1
        elif kind == "request_end":
            self._request(event)
        elif kind in {"tool_end", "tool_error"}:
            self._tool(event)
        elif kind != "tool_start":
            raise event.error(
                f"{kind!r} is unknown",
                "give request_end, request_payload, tool_start, tool_end or tool_error",
                "event_type",
            )

    def _count(self, change: str) -> None:
        self.changes[change] += 1

    def _request(self, event: Row) -> None:
        _check_schema(event)
        need(event, "request")
        request = nested(event, "request")
        need(request, "request_id", "output_tokens", "replay")
        replay = nested(request, "replay")
        need(replay, "trace_block_size", "input_length", "input_sequence_hashes")
        start_us, end_us = self._times_us(event, request)
        tokens = replay.tokens("input_length")
        ids = u64_ids(replay, "input_sequence_hashes")
        size = replay.integer("trace_block_size", 1, MAX_TOKENS, " tokens")
        if size != (self.block_tokens or size):
            raise replay.error(
                f"{size}, where requests before have {self.block_tokens}",
                "read requests of one block size at a time",
                "trace_block_size",
            )
        self.block_tokens = size
        self.changes["fewer_hashes_than_blocks"] += len(ids) < -(-tokens // size)
        if request.values.get("input_tokens") is not None:
            self.changes["input_tokens_not_input_length"] += (
                request.tokens("input_tokens") != tokens
            )
        key = request.text("request_id")
        call = Call(
            replay,
            key,
            ("request", key),
            "main",
            start_us,
            end_us,
            tokens,
            request.tokens("output_tokens"),
            ids,
        )
        context = nested_or_none(event, "agent_context")
        if context is not None:
            self._join_session(call, context)
        self.calls.append(call)

    def _times_us(self, event: Row, request: Row) -> tuple[int, int]:
        """Begin and end. The event's own time stands in for what the request does not say."""
        noted_ms = _unix_ms(event, "event_time_unix_ms")
        start_ms = _unix_ms(request, "request_received_ms")
        took_s = request.time_s_or_none("total_time_ms", "ms")
        took_us = None if took_s is None else round(took_s * 1_000_000)
        if start_ms is None and noted_ms is None:
            raise request.error("missing", "give it in Unix ms", "request_received_ms")
        if start_ms is None:
            self.changes["begin_unknown_taken_from_end"] += 1
            end_us = (noted_ms or 0) * _MS
            return end_us - (took_us or 0), end_us
        start_us = start_ms * _MS
        if took_us is not None:
            return start_us, start_us + took_us
        if noted_ms is None:
            raise request.error("missing", "give it in ms", "total_time_ms")
        if noted_ms < start_ms:
            raise event.error(
                f"{noted_ms} is before request_received_ms, {start_ms}",
                "give the end of the request in Unix ms",
                "event_time_unix_ms",
            )
        return start_us, noted_ms * _MS

    def _join_session(self, call: Call, context: Row) -> None:
        need(context, "session_id")
        session = context.text("session_id")
        parent = _text_or_none(context, "parent_session_id")
        if parent is not None:
            first = self.parents.setdefault(session, context)
            other = first.values["parent_session_id"]
            if other != parent:
                raise context.error(
                    f"{parent!r}, where line {first.line} has {other!r}",
                    "give a session one parent",
                    "parent_session_id",
                )
        self.sessions[session].append(call)

    def _tool(self, event: Row) -> None:
        _check_schema(event)
        need(event, "tool")
        tool = nested(event, "tool")
        need(tool, "tool_call_id", "tool_class")
        start_ms = _unix_ms(tool, "started_at_unix_ms")
        end_ms = _unix_ms(tool, "ended_at_unix_ms")
        tool.time_s_or_none("duration_ms", "ms")
        if start_ms is not None and end_ms is not None and end_ms < start_ms:
            raise tool.error(
                f"{end_ms} is before started_at_unix_ms, {start_ms}",
                "give Unix ms, not before the start",
                "ended_at_unix_ms",
            )
        context = nested_or_none(event, "agent_context")
        if context is None:
            self.changes["tool_event_without_session_dropped"] += 1
            return
        need(context, "session_id")
        self.changes["tool_events_kept_as_delay"] += 1
        claude = nested_or_none(tool, "claude")
        if claude is not None:
            self.tools.append(_Tool(claude, context.text("session_id")))

    # ---- who waits for whom

    def link(self) -> None:
        """Find out. Only where the rows were sound."""
        called = self._called()
        self._check_parents()
        if not sound():
            return
        for calls in self.sessions.values():
            calls.sort(key=lambda call: (call.start_us, call.end_us, str(call.key)))
            wait_in_order(calls, _SLACK_US)
        for depth, session in sorted((len(self._line(each)), each) for each in self.sessions):
            line = self._line(session)
            for call in self.sessions[session]:
                call.session = line[-1]
                call.agent = "main" if depth == 1 else session
            if depth > 1:
                self._call_child(self.sessions[session], line[1], called.get(session))
        loose = len(self.calls) - sum(map(len, self.sessions.values()))
        if self.sessions:
            self.changes["requests_without_session"] += loose

    def _called(self) -> dict[str, _Tool]:
        """The tool event of each child session that has one."""
        by_id = {call.key: call for call in self.calls}
        called: dict[str, _Tool] = {}
        for tool in self.tools:
            with spared():
                self._check_requests(tool, by_id)
                if tool.child is None or tool.child not in self.sessions:
                    continue
                if tool.child in called:
                    raise tool.row.error(
                        f"{tool.child!r} is of line {called[tool.child].row.line} too",
                        "give a child session one tool event",
                        "child_session_id",
                    )
                called[tool.child] = tool
        return called

    def _check_requests(self, tool: _Tool, by_id: dict[Hashable, Call]) -> None:
        for name, request in (
            ("source_request_id", tool.source),
            ("consumer_request_id", tool.consumer),
        ):
            if request is not None and by_id.get(request) not in self.sessions[tool.session]:
                raise tool.row.error(
                    f"{request!r} is no request of session {tool.session!r}",
                    "add the request, or drop the tool event",
                    name,
                )

    def _check_parents(self) -> None:
        """Refuse a session whose parent has no requests."""
        for context in self.parents.values():
            with spared():
                parent = context.values["parent_session_id"]
                if parent not in self.sessions:
                    raise context.error(
                        f"an orphan: session {parent!r} has no requests in the trace",
                        "read all files of the trace: name their folder",
                        "parent_session_id",
                    )

    def _line(self, session: str) -> list[str]:
        """The session, its parent, the parent's parent, up to the one that nobody called."""
        line = [session]
        while (context := self.parents.get(line[-1])) is not None:
            parent = str(context.values["parent_session_id"])
            if parent in line:
                raise context.error(
                    f"waits for itself: {' called by '.join(map(repr, [*line, parent]))}",
                    "break the cycle",
                    "parent_session_id",
                )
            line.append(parent)
        return line

    def _call_child(self, child: list[Call], parent: str, tool: _Tool | None) -> None:
        """Hang a child session between the request that called it and the one that used it."""
        callers = self.sessions[parent]
        waited_for = {each for call in child for each in call.waits_for}
        last = [call for call in child if call not in waited_for]
        for call in child:
            if not call.waits_for:
                self._spawn(call, callers, tool)
        end_us = max(call.end_us for call in child)
        user: Call | None
        if tool is not None:
            user = next((call for call in self.calls if call.key == tool.consumer), None)
        else:
            user = next((call for call in callers if call.start_us + _SLACK_US >= end_us), None)
        if user is not None:
            user.waits_for += last
        elif any(call.start_us > child[0].start_us for call in callers):
            self.changes["background_subagent_not_joined"] += 1

    def _spawn(self, call: Call, callers: list[Call], tool: _Tool | None) -> None:
        over = [each for each in callers if each.end_us <= call.start_us + _SLACK_US]
        source = max(over, key=lambda each: each.end_us, default=callers[0])
        if tool is not None:
            source = next(each for each in callers if each.key == tool.source)
        if source in over:
            call.waits_for.append(source)
        else:
            self.changes["spawned_before_its_caller_ended"] += 1
            call.waits_for += source.waits_for


def read(path: Path | str) -> Trace:
    """Read one file, or all `*.jsonl` and `*.jsonl.gz` of a folder as one trace.

    A session with all its sub-agents is one session of the trace; a request without a session is
    one of its own. A child that its caller did not wait for starts with what the caller waited for.
    Raises `TraceError`.
    """
    paths = files(path, ".jsonl", ".jsonl.gz")
    log = _Log()
    ends = []
    for each in paths:
        with spared():
            log.read(each)
        ends.append(len(log.calls))
    if not log.calls:
        require_sound(path)
        raise TraceError(
            "no request_end in it",
            do="record with DYN_REQUEST_TRACE_RECORDS=request_end,tool",
            path=paths[0],
        )
    header = Header(
        format="dynamo",
        block_tokens=log.block_tokens,
        partial_block="ceil",
        id_scope="global",
        time_unit="ms",
        licence="Apache-2.0",
    )
    builder = TraceBuilder(header, ids_field="input_sequence_hashes")
    if sound():
        log.link()
    zero_us = min(call.start_us for call in log.calls)
    for each, low, high in zip(paths, [0, *ends], ends, strict=False):
        builder.file(each)
        # A request is noted when it ends, so their begins are not in the order of the lines.
        for call in sorted(log.calls[low:high], key=lambda call: call.start_us):
            with spared():
                call.add_to(builder, zero_us)
    for change, turns in log.changes.items():
        if turns:
            builder.count(change, turns)
    return builder.build()


def _check_schema(event: Row) -> None:
    need(event, "schema")
    if event.values["schema"] != SCHEMA:
        raise event.error(f"{event.values['schema']!r} is unknown", f"give {SCHEMA}", "schema")


def _unix_ms(row: Row, name: str) -> int | None:
    if row.values.get(name) is None:
        return None
    return row.integer(name, 0, _MAX_MS, " ms since 1970")


def _text_or_none(row: Row, name: str) -> str | None:
    return None if row.values.get(name) is None else row.text(name)
