"""Chat logs: conversations as text, in the forms of ShareGPT and of OpenAI's API, without times.

A conversation is an object with its messages in `conversations`, `messages` or `conversation`; a
message has its speaker in `from` or `role` and its text in `value` or `content`. The file is a JSON
list of conversations or JSONL, one a line. Fields that are not named here are left alone.

- Tokens are counted with the tokenizer that is given, each message by itself, without the tokens
  of any chat template: a server's prompts are longer by those.
- Each message of the model is a turn. Its prompt is all messages before it, in a row; its answer is
  as long as the message. A conversation that begins with the model's message (ShareGPT was cut into
  pieces for training) has no prompt there, and the builder drops that turn.
- Blocks are what they are in a server's cache: `block_tokens` tokens and all before them. So two
  conversations share what their token ids share, and no more.
- The source has no times. Every session starts at 0 and the header says so; a turn follows the
  answer before it at once, where a person would have read and typed.
- Ids are not used: ShareGPT has some of them twice. A conversation is its place in the file.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import ConfigError, InstallError, TraceError
from harness.settings import whole
from harness.trace import Header, Trace, file_digest
from traces.builder import TraceBuilder
from traces.events import need
from traces.faults import require_sound, spared
from traces.source import Line, Row, json_document, json_rows, locate_file, read_lines

_MESSAGES = ("conversations", "messages", "conversation")
_SPEAKER = ("from", "role")
_TEXT = ("value", "content")

_MODEL = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard", "function_call"})
_OTHERS = frozenset({"human", "user", "system", "developer", "tool", "function", "observation"})

Count = Callable[[str], None]


def read(path: Path | str, tokenizer: Path | str, block_tokens: int = 16) -> Trace:
    """Read one file: a session a conversation, a turn a message of the model.

    `tokenizer` is a model's `tokenizer.json` on this machine; `block_tokens` the size of the blocks
    that prompts are cut into, of which only whole ones have an id. The text of one conversation is
    held at a time; a list that is written in one line is held whole, up to five times its size.
    Raises `TraceError`, `ConfigError` for a setting, `InstallError` without the extra `text`.
    """
    whole("trace.block_tokens", block_tokens, least=1)
    path = locate_file(path)
    tokens = _Tokens(_located(tokenizer), block_tokens)
    header = Header(
        format="sharegpt",
        block_tokens=block_tokens,
        partial_block="floor",
        id_scope="global",
        time_unit="none",
        licence="unknown",
        session_starts="unknown",
        parameters={"tokenizer": tokens.sha256},
    )
    builder = TraceBuilder(header, ids_field="messages")
    builder.file(path)
    for number, row in enumerate(_conversations(path, builder.count)):
        with spared():
            _add(row, number, tokens, builder)
    require_sound(path)
    return builder.build()


def _located(tokenizer: Path | str) -> Path:
    """The tokenizer's file. Raises `ConfigError` where there is none."""
    try:
        return locate_file(tokenizer)
    except TraceError as error:
        raise _unusable(tokenizer, error.problem) from error


def _unusable(tokenizer: Path | str, problem: object) -> ConfigError:
    return ConfigError(
        f"trace.tokenizer is {tokenizer}, which is not usable ({problem}): give a model's "
        "tokenizer.json, a file on this machine"
    )


def _add(row: Row, number: int, tokens: _Tokens, builder: TraceBuilder) -> None:
    """Add the turns of a conversation."""
    messages = _messages(row)
    by_model = [_by_model(each) for each in messages]
    if not any(by_model):
        builder.count("conversation_without_answer_dropped")
        return
    if row.values.get("tools"):
        builder.count("tools_not_in_lengths")
    texts = [_text(each, builder.count) for each in messages]
    lengths, blocks = tokens.measure(texts)
    input_tokens = 0
    turn = 0
    for message, answers, length in zip(messages, by_model, lengths, strict=True):
        if answers:
            if turn:
                builder.count("delay_unknown_taken_as_0")
            builder.add(
                (number, turn),
                session=number,
                parents=[(number, turn - 1)] if turn else [],
                recorded_s=0.0,
                arrival_s=None if turn else 0.0,
                delay_s=0.0 if turn else None,
                input_tokens=input_tokens,
                output_tokens=length,
                block_ids=blocks[: input_tokens // tokens.block_tokens],
                line=message.line,
                within=message.within,
            )
            turn += 1
        input_tokens += length
    if not by_model[-1]:
        builder.count("messages_after_last_answer_dropped")


# ---- messages


def _messages(row: Row) -> list[Row]:
    """What was said, in order; a `system` text beside the messages comes first."""
    name = next((each for each in _MESSAGES if each in row.values), _MESSAGES[0])
    need(row, name, reader="sharegpt")
    messages = row.rows(name)
    if row.values.get("system"):
        system = {"role": "system", "content": row.values["system"]}
        messages.insert(0, Row(system, row.path, row.line, row.within))
    return messages


def _by_model(message: Row) -> bool:
    """Whether the model said it: then it is a turn's answer."""
    name = _given(message, _SPEAKER)
    speaker = message.text(name)
    if speaker not in _MODEL | _OTHERS:
        known = ", ".join([*sorted(_MODEL), *sorted(_OTHERS)])
        raise message.error(f"{speaker!r:.40} is unknown", f"give one of {known}", name)
    return speaker in _MODEL


def _text(message: Row, count: Count) -> str:
    """What was said. Of a list of content parts, those that are text."""
    if message.values.get("tool_calls"):
        count("tool_calls_not_in_lengths")
    name = _given(message, _TEXT)
    value = message.values[name]
    if value is None:
        count("null_content_taken_as_empty")
        return ""
    if isinstance(value, list):
        return "".join(_part(each, count) for each in message.rows(name))
    if not isinstance(value, str):
        raise message.error("not text", "give a string, or a list of content parts", name)
    return _whole_characters(value, count)


def _part(part: Row, count: Count) -> str:
    need(part, "type")
    if part.text("type") not in {"text", "input_text", "output_text"}:
        count("content_part_not_text_dropped")
        return ""
    need(part, "text")
    value = part.values["text"]
    return _whole_characters(value if isinstance(value, str) else part.text("text"), count)


def _given(row: Row, names: tuple[str, str]) -> str:
    """Which of two names the row has."""
    if names[1] in row.values:
        return names[1]
    need(row, names[0])
    return names[0]


def _whole_characters(text: str, count: Count) -> str:
    """The text with a replacement character for each half of one: texts were cut anywhere."""
    try:
        text.encode()
    except UnicodeEncodeError:
        count("half_surrogate_pair_replaced")
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


# ---- tokens


class _Tokens:
    """A tokenizer and the size of a block.

    Raises `InstallError` without the package `tokenizers`, `ConfigError` for another kind of file.
    """

    def __init__(self, path: Path, block_tokens: int) -> None:
        try:
            tokenizers = importlib.import_module("tokenizers")
        except ImportError as error:
            raise InstallError(
                "tokenizers, which counts a chat's tokens, is not installed: "
                "pip install 'relaybench[text]'"
            ) from error
        self.block_tokens = block_tokens
        self.sha256 = file_digest(path).sha256
        self._path = path
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise _unusable(self._path, error) from error
        # A file may say that texts are to be cut to a length, or filled up to it.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def measure(self, texts: list[str]) -> tuple[list[int], list[int]]:
        """(tokens of each text, ids of the whole blocks of all texts in a row).

        An id is a 64-bit hash of a block and all before it.
        """
        try:
            encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:
            # Such as a word that is unknown, where the vocabulary has no token for that.
            raise _unusable(self._path, error) from error
        ids = [np.array(each.ids, "<u4") for each in encoded]
        data = np.concatenate(ids).tobytes()
        size = 4 * self.block_tokens
        blocks = []
        digest = b""
        for end in range(size, len(data) + 1, size):
            digest = blake2b(digest + data[end - size : end], digest_size=8).digest()
            blocks.append(int.from_bytes(digest, "little"))
        return [len(each) for each in ids], blocks


# ---- files


def _conversations(path: Path, count: Count) -> Iterator[Row]:
    """The objects of a JSON list or of JSONL, each with the line where it begins."""
    first = next((line.text.lstrip()[:1] for line in read_lines(path) if line.text.strip()), "")
    if first != "[":
        yield from json_rows(path, count)
        return
    elements = _List(path)
    for line in read_lines(path):
        yield from elements.of(line)
    elements.end()


_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|["\[\]{}]')
"""A string, or what opens or closes; a quote by itself is a string that its line does not end."""

_CLOSE = {"{": "}", "[": "]"}


class _List:
    """A JSON list, line by line: a string of JSON has no line breaks, so a line has whole ones."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: list[str] = []
        """What closes each object and list that is open; the first is the whole."""
        self._held: list[str] = []
        """The text since the last element's begin or end, of lines before this."""
        self._line = 0
        self._first = 0
        """The line where the element begins."""
        self._found = 0
        self._ended = False

    def of(self, line: Line) -> Iterator[Row]:
        """The elements that end in the next line."""
        self._line = line.number
        at = 0
        for token in _TOKEN.finditer(line.text):
            mark = token.group()
            depth = len(self._open)
            if mark in _CLOSE:
                if depth <= 1:
                    self._begin(mark, self._take(line.text[at : token.start()]))
                    at = token.end() if depth == 0 else token.start()
                    self._first = line.number
                self._open.append(_CLOSE[mark])
            elif mark in "]}":
                self._close(mark)
                if depth <= 2:  # noqa: PLR2004 - an element in the list, or the list, ends
                    taken = self._take(line.text[at : token.end()])
                    at = token.end()
                    if depth == 1:
                        self._check(taken[:-1], "")
                        self._ended = True
                    elif (row := self._row(taken)) is not None:
                        yield row
            elif mark == '"':
                raise self._open_string(line)
            elif depth <= 1:
                raise self._error(f"{mark:.40}, where a conversation is wanted", "remove it")
        self._held.append(line.text[at:])

    def end(self) -> None:
        """No more lines."""
        if self._open:
            raise self._cut_off()
        self._check("".join(self._held), "")

    def _take(self, text: str) -> str:
        taken = "".join([*self._held, text])
        self._held.clear()
        return taken

    def _close(self, mark: str) -> None:
        wanted = self._open.pop() if self._open else "the end of the file"
        if mark != wanted:
            raise self._error(f"{mark}, where {wanted} is wanted", "mend or fetch the file again")

    def _begin(self, mark: str, before: str) -> None:
        if self._ended:
            raise self._error(f"{mark}, where the end of the file is wanted", "give one list")
        self._check(before, "," if self._found else "")

    def _check(self, between: str, wanted: str) -> None:
        """Refuse what stands between two elements but a comma, and all that is behind the list."""
        found = between.strip()
        if found != wanted:
            shown = f"{found!r:.40}" if found else "nothing"
            raise self._error(
                f"{shown}, where {repr(wanted) if wanted else 'nothing'} is wanted",
                "give one list of conversations: [{...}, {...}]",
            )

    def _row(self, text: str) -> Row | None:
        """The element, or None where it is at fault and faults are gathered."""
        number = self._found
        self._found += 1
        with spared():
            try:
                values = json_document(text, self._path).values
            except TraceError as error:
                line = self._first + (error.line or 1) - 1
                raise TraceError(error.problem, do=error.do, path=self._path, line=line) from error
            return Row(values, self._path, self._first, f"[{number}]")
        return None

    def _open_string(self, line: Line) -> TraceError:
        if not line.ended:
            return self._cut_off()
        return self._error("a string that does not end in its line", "close it")

    def _cut_off(self) -> TraceError:
        return self._error("half a list: the file looks cut off here", "fetch the file again")

    def _error(self, problem: str, do: str) -> TraceError:
        return TraceError(problem, do=do, path=self._path, line=self._line)
