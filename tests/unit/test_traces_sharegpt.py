"""Chat logs: texts into lengths and shared blocks, and what real files have that they should not.

The tokenizer counts words, each word a token, so that every number here is counted by hand.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from harness.errors import ConfigError, InstallError, TraceError
from harness.trace import Trace
from traces import sharegpt
from traces.faults import gathering

WORDS = [*"abcdefghij", "[UNK]", "[BOS]"]

Conversation = dict[str, Any]
Read = Callable[..., Trace]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A word a token. It is told to cut, fill up and mark its texts, as embedders' files are."""
    words = Tokenizer(WordLevel({word: at for at, word in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing("[BOS] $A", special_tokens=[("[BOS]", 11)])
    words.enable_truncation(3)
    words.enable_padding(length=5)
    path = tmp_path / "tokenizer.json"
    words.save(str(path))
    return path


@pytest.fixture
def read(tmp_path: Path, tokenizer: Path) -> Read:
    """The trace of these conversations, as JSONL, in blocks of two tokens."""

    def of(*conversations: Conversation, block_tokens: int = 2) -> Trace:
        path = tmp_path / "chats.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in conversations))
        return sharegpt.read(path, tokenizer, block_tokens)

    return of


def said(*messages: tuple[str, str], **more: Any) -> Conversation:
    """A conversation in ShareGPT's form."""
    return {"conversations": [{"from": by, "value": text} for by, text in messages], **more}


def asked(*messages: tuple[str, Any], **more: Any) -> Conversation:
    """A conversation in the form of OpenAI's API."""
    return {"messages": [{"role": by, "content": content} for by, content in messages], **more}


TWICE = (("human", "a b c"), ("gpt", "d e"), ("human", "f g"), ("gpt", "h"))


def lengths(trace: Trace) -> list[tuple[int, int]]:
    return list(zip(trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True))


def test_each_answer_is_a_turn_behind_all_that_was_said(read: Read) -> None:
    trace = read(said(*TWICE, id="x_0"))
    assert lengths(trace) == [(3, 2), (7, 1)]
    first, second = trace.turn(0), trace.turn(1)
    assert (first.parents, first.arrival_s, first.delay_s, first.recorded_s) == ((), 0, None, 0)
    assert (second.parents, second.arrival_s, second.delay_s) == ((0,), None, 0)
    assert (first.runs, second.runs) == ([(0, 1)], [(0, 3)])
    assert trace.ideal_hit_tokens.tolist() == [0, 2]
    header = trace.header
    assert (header.format, header.session_starts, header.partial_block) == (
        *("sharegpt", "unknown"),
        "floor",
    )
    assert header.changes == {"delay_unknown_taken_as_0": 1}
    assert [each.name for each in header.sources] == ["chats.jsonl"]
    assert len(header.parameters["tokenizer"]) == 64


def test_both_forms_and_all_names_of_speakers_say_the_same(read: Read) -> None:
    openai = asked(("user", "a b c"), ("assistant", "d e"), ("tool", "f g"), ("assistant", "h"))
    wildchat = {"conversation": openai["messages"], "model": "gpt-4"}
    mixed = {
        "conversations": [{"from": "user", "content": "a b c"}, {"role": "bing", "value": "d"}]
    }
    assert read(openai).digest == read(said(*TWICE)).digest == read(wildchat).digest
    assert lengths(read(mixed)) == [(3, 1)]


def test_two_conversations_share_what_their_tokens_share(read: Read) -> None:
    trace = read(
        said(("system", "a b"), ("human", "c d e"), ("gpt", "f")),
        # The same five tokens, cut into messages otherwise, and one more.
        said(("human", "a"), ("human", "b c d e"), ("human", "g"), ("gpt", "f")),
        # Another first block: what follows is the same and is not shared.
        said(("human", "j b c d e g"), ("gpt", "f")),
    )
    assert lengths(trace) == [(5, 1), (6, 1), (6, 1)]
    assert [trace.runs(row) for row in range(3)] == [[(0, 2)], [(0, 3)], [(3, 3)]]
    assert trace.ideal_hit_tokens.tolist() == [0, 4, 0]
    assert trace.session.tolist() == [0, 1, 2]


def test_a_block_that_comes_twice_in_a_prompt_is_two_blocks(read: Read) -> None:
    trace = read(said(("human", "a b a b a b"), ("gpt", "c")))
    assert trace.runs(0) == [(0, 3)]
    assert not trace.header.changes


def test_the_size_of_a_block_is_chosen(read: Read) -> None:
    trace = read(said(*TWICE), block_tokens=3)
    assert [trace.runs(row) for row in range(2)] == [[(0, 1)], [(0, 2)]]
    with pytest.raises(ConfigError, match=r"trace\.block_tokens is 0: give a whole number, 1 or"):
        read(said(*TWICE), block_tokens=0)


def test_an_id_may_come_twice(read: Read) -> None:
    trace = read(said(*TWICE, id="x_0"), said(*TWICE, id="x_0"))
    assert trace.session.tolist() == [0, 0, 1, 1]
    assert trace.ideal_hit_tokens.tolist() == [0, 2, 2, 6]


def test_an_answer_without_a_question_is_dropped_and_stays_in_what_follows(read: Read) -> None:
    trace = read(said(("gpt", "a b"), ("human", "c"), ("gpt", "d")))
    assert lengths(trace) == [(3, 1)]
    assert (trace.turn(0).arrival_s, trace.turn(0).parents) == (0, ())
    assert trace.header.changes == {"delay_unknown_taken_as_0": 1, "empty_input_dropped": 1}


def test_messages_in_a_row_are_one_prompt_and_answers_in_a_row_two_turns(read: Read) -> None:
    trace = read(
        said(("human", "a"), ("human", "b c"), ("gpt", "d"), ("gpt", "e f"), ("human", "g"))
    )
    assert lengths(trace) == [(3, 1), (4, 2)]
    assert trace.header.changes == {
        "delay_unknown_taken_as_0": 1,
        "messages_after_last_answer_dropped": 1,
    }


def test_empty_texts_count_nothing(read: Read) -> None:
    trace = read(said(("system", ""), ("human", "a"), ("gpt", ""), ("human", "  "), ("gpt", "b")))
    assert lengths(trace) == [(1, 1), (1, 1)]
    assert trace.header.changes["zero_output_clamped_to_1"] == 1


def test_conversations_without_an_answer_are_dropped(read: Read) -> None:
    trace = read(said(("human", "a")), said(), said(*TWICE))
    assert len(trace) == 2
    assert trace.header.changes["conversation_without_answer_dropped"] == 2
    with pytest.raises(TraceError, match="no turns"):
        read(said(("human", "a")))


def test_of_content_parts_those_that_are_text_count(read: Read) -> None:
    parts = [
        {"type": "text", "text": "a b"},
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "text", "text": " c"},
    ]
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    chat = asked(("user", parts), ("assistant", "d"), tools=[{"type": "function"}])
    chat["messages"][1:1] = [call]
    trace = read(chat)
    assert lengths(trace) == [(3, 1), (3, 1)]
    assert trace.header.changes == {
        "content_part_not_text_dropped": 1,
        "delay_unknown_taken_as_0": 1,
        "null_content_taken_as_empty": 1,
        "tool_calls_not_in_lengths": 1,
        "tools_not_in_lengths": 1,
        "zero_output_clamped_to_1": 1,
    }


def test_a_system_text_beside_the_messages_comes_first(read: Read) -> None:
    beside = read(said(*TWICE, system="i j"))
    assert beside.digest == read(said(("system", "i j"), *TWICE)).digest
    assert lengths(beside) == [(5, 2), (9, 1)]


def test_half_a_character_is_replaced(read: Read) -> None:
    trace = read(said(("human", "a \ud83d b"), ("gpt", "c")))
    assert lengths(trace) == [(3, 1)]
    assert trace.header.changes == {"half_surrogate_pair_replaced": 1}


# ---- files


def dumped(tmp_path: Path, text: str, name: str = "chats.json") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


CHATS = [said(*TWICE, id='{"[\\'), said(("human", "]}"), ("gpt", "[[")), said(*TWICE)]


@pytest.mark.parametrize("indent", [None, 0, 2])
def test_a_list_is_read_as_jsonl_is(
    read: Read, tokenizer: Path, tmp_path: Path, indent: int | None
) -> None:
    path = dumped(tmp_path, "\n\n " + json.dumps(CHATS, indent=indent) + "\n\n")
    trace = sharegpt.read(path, tokenizer, 2)
    assert len(trace) == 5
    assert trace.digest == read(*CHATS).digest
    packed = tmp_path / "chats.json.gz"
    packed.write_bytes(gzip.compress(b"\xef\xbb\xbf" + json.dumps(CHATS, indent=indent).encode()))
    assert sharegpt.read(packed, tokenizer, 2).digest == trace.digest


GOOD = json.dumps(said(*TWICE))


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (f"[{GOOD},\n{GOOD},\n", 2, "half a list: the file looks cut off here"),
        (f"[{GOOD}\n", 1, "half a list: the file looks cut off here"),
        (f"[{GOOD},\n{GOOD[:-3]}", 2, "half a list: the file looks cut off here"),
        (f"[{GOOD},\n{GOOD[:-9]}", 2, "half a list: the file looks cut off here"),
        (f"[{GOOD}\n{GOOD}]", 2, "nothing, where ',' is wanted"),
        (f"[{GOOD},,\n{GOOD}]", 2, "',,', where ',' is wanted"),
        (f"[,{GOOD}]", 1, "',', where nothing is wanted"),
        (f"[{GOOD},\n]", 2, "',', where nothing is wanted"),
        (f"[{GOOD},\n5]", 2, "',\\\\n5', where nothing is wanted"),
        (f'[{GOOD},\n"hello"]', 2, '"hello", where a conversation is wanted'),
        (f"[{GOOD}]\n[{GOOD}]", 2, "[, where the end of the file is wanted"),
        (f"[{GOOD}]\nmore", 2, "'more', where nothing is wanted"),
        (f"[{GOOD}]]", 1, "], where the end of the file is wanted"),
        (f'[{GOOD},\n{{"conversations": [}}]', 2, "}, where ] is wanted"),
        (f'[{GOOD},\n{{"a": "b\nc"}}]', 2, "a string that does not end in its line"),
        (f'[{GOOD},\n{{"a":\n 01}}]', 3, "not JSON: Expecting ',' delimiter"),
        (f'[{GOOD},\n{{"a": 1, "a": 2}}]', 2, "'a' is given twice"),
        (f"[{GOOD},\n\n[]]", 3, "a list, where a JSON object is wanted"),
        ("[]", None, "no turns"),
        (" \n", None, "empty"),
        ("5", 1, "5, where a JSON object is wanted"),
        ('{"timestamp": 0, "input_length": 1, "hash_ids": []}', 1, "Read it with trace=mooncake"),
    ],
)
def test_what_is_no_list_of_conversations_is_refused(
    tmp_path: Path, tokenizer: Path, text: str, line: int | None, message: str
) -> None:
    path = dumped(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        sharegpt.read(path, tokenizer)
    assert caught.value.line == line
    assert message.replace("\\\\", "\\") in str(caught.value)


@pytest.mark.parametrize(
    ("conversation", "field", "message"),
    [
        ({"id": "x"}, "conversations", "missing"),
        ({"conversations": {}}, "conversations", "not a list"),
        ({"conversations": ["a"]}, "conversations[0]", "not an object"),
        (said(("human", "a"), ("elf", "b")), "conversations[1].from", "'elf' is unknown"),
        ({"messages": [{"role": 5, "content": ""}]}, "messages[0].role", "5 is not a string"),
        ({"conversations": [{"value": "a"}]}, "conversations[0].from", "missing"),
        ({"conversations": [{"from": "gpt"}]}, "conversations[0].value", "missing"),
        (said(("gpt", "a"), system=5), "content", "not text"),
        (asked(("assistant", 5)), "messages[0].content", "not text"),
        (asked(("assistant", [{}])), "messages[0].content[0].type", "missing"),
        (asked(("assistant", [{"type": "text"}])), "messages[0].content[0].text", "missing"),
    ],
)
def test_a_conversation_at_fault_is_named(
    tmp_path: Path, tokenizer: Path, conversation: Conversation, field: str, message: str
) -> None:
    path = dumped(tmp_path, f"{GOOD}\n{json.dumps(conversation)}\n", "chats.jsonl")
    with pytest.raises(TraceError, match=message) as caught:
        sharegpt.read(path, tokenizer)
    assert (caught.value.line, caught.value.field) == (2, field)
    path = dumped(tmp_path, f"[\n\n{GOOD},\n{json.dumps(conversation)}]")
    with pytest.raises(TraceError, match=message) as caught:
        sharegpt.read(path, tokenizer)
    assert (caught.value.line, caught.value.field) == (4, f"[1].{field}")


def test_all_conversations_at_fault_are_gathered(tmp_path: Path, tokenizer: Path) -> None:
    wrong = json.dumps(said(("elf", "a")))
    path = dumped(tmp_path, f'[\n{wrong},\n{GOOD},\n{{"a" 1}},\n{wrong},\n{{"a": NaN}}\n]')
    with gathering() as faults:
        sharegpt.read(path, tokenizer)
    assert sorted(line for each in faults.kinds.values() for line in each.lines) == [2, 4, 5, 6]
    assert faults.count == 4


@pytest.mark.parametrize(("name", "why"), [("gone.json", "no such file"), ("", "a folder, ")])
def test_no_tokenizer_is_refused_by_the_name_of_its_setting(
    tmp_path: Path, name: str, why: str
) -> None:
    (tmp_path / "chats.jsonl").write_text("{}")
    place = tmp_path / name
    words = f"trace.tokenizer is {place}, which is not usable ({why}"
    with pytest.raises(ConfigError, match=rf"^{re.escape(words)}.*give a model's tokenizer\.json"):
        sharegpt.read(tmp_path / "chats.jsonl", place)


def test_another_file_than_a_tokenizer_is_refused(tmp_path: Path, read: Read) -> None:
    read(said(*TWICE))
    with pytest.raises(ConfigError, match=r"trace\.tokenizer is .*chats\.jsonl.*tokenizer\.json"):
        sharegpt.read(tmp_path / "chats.jsonl", tmp_path / "chats.jsonl")


def test_without_the_package_the_message_is_how_to_get_it(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InstallError, match=r"not installed: pip install 'relaybench\[text\]'"):
        read(said(*TWICE))
