"""The incremental parser of events against one that reads the whole text at once."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.sse import Event, EventParser
from harness.errors import BadStream

LINES = st.one_of(
    st.sampled_from(
        [
            b"",
            b"data",
            b"data:",
            b"data: ",
            b"data:  two spaces",
            b"data: [DONE]",
            b'data: {"choices":[]}',
            b"data: vel\xef\xbfdo",
            b"data: a: b",
            b" data: a field of another name",
            b"DATA: names are in small letters",
            b"datax: y",
            b"event: error",
            b"event:",
            b"event: ping",
            b": a comment",
            b":",
            b"id: 7",
            b"retry: 10",
            b"\xef\xbb\xbf",
            b"\xef\xbb\xbfdata: x",
        ]
    ),
    st.binary(max_size=6).map(lambda raw: re.sub(rb"[\r\n]", b"", raw)),
    st.binary(max_size=6).map(lambda raw: b"data: " + re.sub(rb"[\r\n]", b"", raw)),
)


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    """Lines with any ends, perhaps cut short, perhaps behind a byte-order mark."""
    lines = draw(st.lists(st.tuples(LINES, st.sampled_from([b"\n", b"\r", b"\r\n"])), max_size=25))
    tail = draw(
        st.sampled_from([b"", b"data: half", b"data: half\n", b": half", b"\xef\xbb", b"d"])
    )
    start = draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))
    return start + b"".join(line + end for line, end in lines) + tail


def naive(text: bytes) -> list[Event]:
    """By the letter of the specification, of the whole text."""
    text = text.removeprefix(b"\xef\xbb\xbf")
    lines = re.split(rb"\r\n|\n|\r", text)[:-1]  # what follows the last end is no line yet
    events = []
    name = data = b""
    for line in lines:
        if not line:
            if data:
                events.append(Event(name or b"message", data[:-1]))
            name = data = b""
        elif line[:1] != b":":
            field, _, value = line.partition(b":")
            value = value[1:] if value[:1] == b" " else value
            if field == b"data":
                data += value + b"\n"
            elif field == b"event":
                name = value
    return events


def pieces(text: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def parsed(parts: list[bytes], longest: int = 2**20) -> list[Event]:
    parser = EventParser(longest)
    return [event for part in parts for event in parser.feed(part)]


@given(text=texts(), cuts=st.lists(st.integers(0, 2**16), max_size=12))
def test_however_the_bytes_are_split_the_events_are_those_of_the_whole_text(
    text: bytes, cuts: list[int]
) -> None:
    wanted = naive(text)
    assert parsed([text]) == wanted
    assert parsed(pieces(text, cuts)) == wanted
    assert parsed([text[at : at + 1] for at in range(len(text))]) == wanted


@given(
    data=st.lists(st.binary(min_size=1).map(lambda raw: re.sub(rb"[\r\n]", b"", raw)), max_size=9),
    end=st.sampled_from([b"\n", b"\r", b"\r\n"]),
)
def test_one_event_a_piece_is_that_event_at_once(data: list[bytes], end: bytes) -> None:
    """As servers write, and so the way that is quick."""
    parser = EventParser()
    for each in data:
        assert parser.feed(b"data: " + each + end + end) == [Event(b"message", each)]
        assert not parser.incomplete


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (b"data: a\n\n", [(b"message", b"a")]),
        (b"data:a\r\rdata:b\r\n\r\n", [(b"message", b"a"), (b"message", b"b")]),
        (b"data: a\ndata:  b\n\n", [(b"message", b"a\n b")]),
        (b"event: error\ndata: x\n\ndata: y\n\n", [(b"error", b"x"), (b"message", b"y")]),
        (b"event: error\n\ndata: y\n\n", [(b"message", b"y")]),
        (b": ping\n\n:\n\ndata: y\n\n", [(b"message", b"y")]),
        (b"\xef\xbb\xbfdata: a\n\n", [(b"message", b"a")]),
        (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\n", []),
        (b"data\n\n", [(b"message", b"")]),
        (b"data: a\n", []),
        (b"data: a", []),
        (b"", []),
    ],
)
def test_by_hand(text: bytes, events: list[tuple[bytes, bytes]]) -> None:
    assert parsed([text]) == naive(text) == [Event(*each) for each in events]


@pytest.mark.parametrize(
    ("text", "incomplete"),
    [
        (b"", False),
        (b"data: a\n\n", False),
        (b"data: a\r\n\r", False),
        (b": ping\n", False),
        (b"data: a\n", True),
        (b"da", True),
    ],
)
def test_an_event_that_has_begun_is_incomplete(text: bytes, incomplete: bool) -> None:
    parser = EventParser()
    parser.feed(text)
    assert parser.incomplete == incomplete


@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize("line", [b"data: %s", b": %s", b"event: %s", b"%s"])
def test_a_line_that_does_not_end_is_refused(line: bytes, size: int) -> None:
    text = line % (b"x" * 200)
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    with pytest.raises(BadStream, match="longer than 100 bytes"):
        parsed(parts, longest=100)


def test_lines_that_never_make_an_event_are_refused() -> None:
    with pytest.raises(BadStream, match="longer than 100 bytes"):
        parsed([b"data: x\n"] * 200, longest=100)


def test_events_of_the_longest_length_come_one_after_the_other() -> None:
    parser = EventParser(longest=100)
    for _ in range(50):
        assert parser.feed(b"data: " + b"x" * 47) == []
        assert parser.feed(b"x" * 47 + b"\n\n") == [Event(b"message", b"x" * 94)]
