"""Server-sent events: a pure incremental parser of bytes.

However the bytes are split, the events are the same (a property test). It follows the WHATWG
specification: lines end in LF, CR or CRLF; a comment starts with a colon; the `data` lines of one
event are joined by LF; an event without data, or without its blank line at the end, is none. Bytes
stay bytes: whether they are UTF-8 is for whoever reads the data to say.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.errors import BadStream

_BOM = b"\xef\xbb\xbf"
_LONGEST = 32 * 2**20


class Event(NamedTuple):
    """One event. `name` is `message` where the server gives none."""

    name: bytes
    data: bytes


class EventParser:
    """Feed it bytes as they come; it gives back the events that they complete."""

    def __init__(self, longest: int = _LONGEST) -> None:
        self._longest = longest
        self._started = False
        self._rest: list[bytes] = []
        """The front of a line that has not ended, in pieces: joined once, however many they are."""
        self._skip_lf = False
        """The last line ended in CR, at the end of what was fed: an LF may belong to it."""
        self._name = b""
        self._data: list[bytes] = []
        self._held = 0
        """Bytes of the event so far: its data lines, and the line that has not ended."""
        self._in_rest = 0

    @property
    def incomplete(self) -> bool:
        """Whether an event has begun and not ended."""
        return bool(self._rest or self._data)

    def feed(self, data: bytes) -> list[Event]:
        """The events completed. Raises `BadStream` for one longer than allowed."""
        fresh = self._started and not (self._rest or self._data or self._name or self._skip_lf)
        one_line = data[:6] == b"data: " and data[-1:] == b"\n" and b"\r" not in data
        if fresh and one_line and data.find(b"\n") == len(data) - 2:
            return [Event(b"message", data[6:-2])]  # nearly always
        return self._slow(data)

    def _slow(self, data: bytes) -> list[Event]:
        if self._skip_lf and data:
            self._skip_lf = False
            if data[:1] == b"\n":
                data = data[1:]
        if not self._started:
            data = b"".join((*self._rest, data))
            self._rest.clear()
            if _BOM.startswith(data) and len(data) < len(_BOM):
                self._rest += [data] if data else []
                return []
            self._started = True
            data = data.removeprefix(_BOM)
        if b"\r" in data:
            self._skip_lf = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        events: list[Event] = []
        if b"\n" in data:
            first, *lines, data = data.split(b"\n")
            self._rest.append(first)
            lines.insert(0, b"".join(self._rest))
            self._rest.clear()
            self._held -= self._in_rest
            self._in_rest = 0
            for line in lines:
                self._line(line, events)
        if data:
            self._rest.append(data)
            self._in_rest += len(data)
            self._hold(len(data))
        return events

    def _hold(self, more: int) -> None:
        self._held += more
        if self._held > self._longest:
            raise BadStream(f"an event of the stream is longer than {self._longest:,} bytes")

    def _line(self, line: bytes, events: list[Event]) -> None:
        if not line:
            if self._data:
                events.append(Event(self._name or b"message", b"\n".join(self._data)))
            self._name, self._data, self._held = b"", [], 0
            return
        field, colon, value = line.partition(b":")
        value = value.removeprefix(b" ") if colon else b""
        if field == b"data":
            self._data.append(value)
            self._hold(len(value) + 1)
        elif field == b"event":
            self._name = value
