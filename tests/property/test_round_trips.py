"""Any trace comes back from disk as it was, and any file comes in as what was written in it.

Rows are known again by their answers' lengths, which differ. What prompts share is told by brute
force, from the ids as the file has them, and not by the chains under test.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from harness.interner import Interner
from harness.trace import Header, Source, Trace, build_table
from traces import (
    azure,
    burstgpt,
    canonical,
    kv_cache_tester,
    mooncake,
    mooncake_agentic,
    qwen_bailian,
    sharegpt,
)

Ids = tuple[int, ...]

MAX_INT = 2**31 - 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all examples: each writes over the one before."""
    return tmp_path_factory.mktemp("traces")


# ---- what prompts share, by brute force


def expanded(trace: Trace, row: int) -> Ids:
    return tuple(at for start, length in trace.runs(row) for at in range(start, start + length))


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def assert_shared(trace: Trace, prompts: dict[int, Ids]) -> None:
    """`prompts` are the source's ids, by row."""
    mine = {row: expanded(trace, row) for row in prompts}
    for row, ids in prompts.items():
        assert len(mine[row]) == len(ids)
        for other, other_ids in prompts.items():
            assert common(mine[row], mine[other]) == common(ids, other_ids)
    seen: set[Ids] = set()
    for row in sorted(prompts):
        ids = prompts[row]
        fronts = [ids[:blocks] for blocks in range(1, len(ids) + 1)]
        hits = sum(front in seen for front in fronts) * trace.header.block_tokens
        assert trace.ideal_hit_tokens[row] == min(hits, trace.input_tokens[row])
        seen.update(fronts)


# ---- our own form


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@st.composite
def headers(draw: st.DrawFn) -> Header:
    return Header(
        format=draw(st.text()),
        block_tokens=draw(st.integers(1, 512)),
        partial_block=draw(st.sampled_from(["floor", "ceil"])),
        id_scope=draw(st.sampled_from(["file", "global"])),
        time_unit=draw(st.text()),
        licence=draw(st.text()),
        session_starts=draw(st.sampled_from(["recorded", "unknown"])),
        prefix_data=draw(st.sampled_from(["recorded", "generated", "absent"])),
        sources=tuple(draw(st.lists(st.builds(Source, st.text(), st.text()), max_size=2))),
        changes=draw(st.dictionaries(st.text(), st.integers(), max_size=3)),
        parameters=draw(st.dictionaries(st.text(), JSON, max_size=3)),
    )


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Sessions whose turns wait for each other in any order of rows, and prompts that branch."""
    header = draw(headers())
    rows = draw(st.integers(1, 8))

    def each(values: st.SearchStrategy[Any], *, unique: bool = False) -> list[Any]:
        return draw(st.lists(values, min_size=rows, max_size=rows, unique=unique))

    numbers = each(st.integers(0, 2))
    dense = {number: at for at, number in enumerate(dict.fromkeys(numbers))}
    order = draw(st.permutations(range(rows)))
    parents: list[list[int]] = [[] for _ in range(rows)]
    for at, row in enumerate(order):
        before = [other for other in order[:at] if numbers[other] == numbers[row]]
        if before:
            parents[row] = draw(st.lists(st.sampled_from(before), unique=True))
    interner = Interner()
    runs = [interner.runs(ids) for ids in each(st.lists(st.integers(0, 2), max_size=6))]
    blocks = [sum(lengths) for _, lengths in runs]
    missing = 1 - header.block_tokens if header.partial_block == "ceil" else 0
    inputs = [
        max(1, count * header.block_tokens + draw(st.integers(missing if count else 1, 700)))
        for count in blocks
    ]
    waits = each(st.floats(0, allow_infinity=False))
    columns = {
        "session": [dense[number] for number in numbers],
        "turn_index": each(st.integers(-MAX_INT - 1, MAX_INT), unique=True),
        "parents": parents,
        "recorded_s": sorted(each(st.floats(-1e300, 1e300))),
        "arrival_s": [None if parents[row] else waits[row] for row in range(rows)],
        "delay_s": [waits[row] if parents[row] else None for row in range(rows)],
        "input_tokens": inputs,
        "output_tokens": each(st.integers(1, MAX_INT)),
        "run_starts": [starts for starts, _ in runs],
        "run_lengths": [lengths for _, lengths in runs],
        "agent": each(st.text()),
    }
    return Trace(build_table(columns), header)


@pytest.mark.parametrize("form", ["parquet", "jsonl", "jsonl.gz"])
@settings(deadline=None)
@given(trace=traces())
def test_what_is_saved_reads_back_equal(folder: Path, form: str, trace: Trace) -> None:
    path = folder / f"trace.{form}"
    canonical.save(trace, path)
    again = canonical.read(path)
    assert again.header == trace.header
    assert again.digest == trace.digest
    assert again.table.equals(trace.table)


# ---- other formats


@dataclass(frozen=True)
class Ask:
    """A request of any format: its time from the first, its ids, and what is beyond them."""

    at_ms: int
    ids: Ids
    partial: int
    output: int
    before: int | None
    """Of a conversation: the request that it goes on from."""
    gap_ms: int

    def input_tokens(self, block_tokens: int, partial: int) -> int:
        """With so many tokens fewer than its blocks could hold; 1 at least."""
        return max(1, len(self.ids) * block_tokens - partial % block_tokens)

    @property
    def of_whole_blocks(self) -> int:
        """Blocks of 64, and what is over."""
        return max(1, len(self.ids) * 64 + self.partial % 64)


TREES = st.lists(st.sampled_from([0, 1, 2**64 - 1]), max_size=5).map(tuple)


@st.composite
def asks(draw: st.DrawFn, ids: st.SearchStrategy[Ids] = TREES) -> list[Ask]:
    """In the order of a file, which need not be that of time."""
    count = draw(st.integers(1, 7))
    outputs = draw(st.lists(st.integers(1, 9999), min_size=count, max_size=count, unique=True))
    return [
        Ask(
            at_ms=draw(st.integers(0, 10**8)),
            ids=draw(ids),
            partial=draw(st.integers(0, 10**6)),
            output=output,
            before=draw(st.none() | st.integers(0, at - 1)) if at else None,
            gap_ms=draw(st.integers(0, 10**7)),
        )
        for at, output in enumerate(outputs)
    ]


def matched(trace: Trace, written: Sequence[Ask]) -> Iterator[tuple[Ask, int]]:
    """Each request and its row."""
    rows = {output: row for row, output in enumerate(trace.output_tokens.tolist())}
    assert len(trace) == len(rows) == len(written)
    return ((ask, rows[ask.output]) for ask in written)


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@settings(deadline=None)
@given(written=asks(), block_tokens=st.integers(1, 512))
def test_mooncake(folder: Path, written: list[Ask], block_tokens: int) -> None:
    lengths = {ask: ask.input_tokens(block_tokens, ask.partial) for ask in written}
    path = write_lines(
        folder / "mooncake.jsonl",
        [
            {
                "timestamp": ask.at_ms,
                "input_length": lengths[ask],
                "output_length": ask.output,
                "hash_ids": ask.ids,
            }
            for ask in written
        ],
    )
    trace = mooncake.read(path, block_tokens)
    first_ms = min(ask.at_ms for ask in written)
    for ask, row in matched(trace, written):
        turn = trace.turn(row)
        assert turn.input_tokens == lengths[ask]
        assert turn.arrival_s == turn.recorded_s == pytest.approx((ask.at_ms - first_ms) / 1000)
    assert_shared(trace, {row: ask.ids for ask, row in matched(trace, written)})


@settings(deadline=None)
@given(written=asks(), data=st.data())
def test_qwen_bailian(folder: Path, written: list[Ask], data: st.DataObject) -> None:
    at_ms: list[int] = []
    firsts: list[int] = []
    for at, ask in enumerate(written):
        root = ask.before is None
        at_ms.append(ask.at_ms if ask.before is None else at_ms[ask.before] + ask.gap_ms)
        firsts.append(at if root else firsts[ask.before or 0])
    lines = [
        {
            "chat_id": at,
            "parent_chat_id": -1 if ask.before is None else ask.before,
            "timestamp": at_ms[at] / 1000,
            "input_length": ask.input_tokens(16, ask.partial),
            "output_length": ask.output,
            "type": "text",
            "turn": 1,
            "hash_ids": ask.ids,
        }
        for at, ask in enumerate(written)
    ]
    path = write_lines(folder / "qwen.jsonl", data.draw(st.permutations(lines)))
    trace = qwen_bailian.read(path)
    rows = dict(matched(trace, written))
    for at, ask in enumerate(written):
        turn = trace.turn(rows[ask])
        assert turn.input_tokens == ask.input_tokens(16, ask.partial)
        assert turn.recorded_s == pytest.approx((at_ms[at] - min(at_ms)) / 1000)
        if ask.before is None:
            assert (turn.parents, turn.arrival_s) == ((), turn.recorded_s)
        else:
            assert turn.parents == (rows[written[ask.before]],)
            assert turn.delay_s == ask.gap_ms / 1000
        same = [firsts[other] == firsts[at] for other in range(len(written))]
        assert same == [trace.session[rows[other]] == turn.session for other in written]
    assert_shared(trace, {row: ask.ids for ask, row in rows.items()})


@settings(deadline=None)
@given(sessions=st.lists(asks(), min_size=1, max_size=3))
def test_kv_cache_tester(folder: Path, sessions: list[list[Ask]]) -> None:
    for old in folder.glob("*.json"):
        old.unlink()
    for number, written in enumerate(sessions):
        at_ms = 0
        requests = []
        for ask in written:
            requests.append(
                {
                    "t": at_ms / 1000,
                    "type": "n",
                    "in": ask.of_whole_blocks,
                    "out": ask.output,
                    "hash_ids": ask.ids,
                    "api_time": ask.partial / 1000,
                }
            )
            at_ms += ask.partial + ask.gap_ms
        document = {
            "id": str(number),
            "block_size": 64,
            "hash_id_scope": "local",
            "requests": requests,
        }
        (folder / f"{number}.json").write_text(json.dumps(document))
    trace = kv_cache_tester.read(folder)
    assert trace.sessions == len(sessions)
    for session, written in zip(trace.by_session(), sessions, strict=True):
        turns = dict(zip(written, session.turns, strict=True))
        at_ms = 0
        for ask in written:
            turn = turns[ask]
            assert (turn.input_tokens, turn.output_tokens) == (ask.of_whole_blocks, ask.output)
            assert turn.recorded_s == pytest.approx(at_ms / 1000, abs=1e-6)
            at_ms += ask.partial + ask.gap_ms
        assert (turns[written[0]].parents, turns[written[0]].arrival_s) == ((), 0)
        for before, ask in pairwise(written):
            assert turns[ask].parents == (turns[before].row,)
            assert turns[ask].delay_s == pytest.approx(before.gap_ms / 1000, abs=1e-6)
    # Ids are local to a file: those of two sessions never meet.
    assert_shared(
        trace,
        {
            turn.row: tuple(each + (session.session << 64) for each in ask.ids)
            for session, written in zip(trace.by_session(), sessions, strict=True)
            for turn, ask in zip(session.turns, written, strict=True)
        },
    )


@settings(deadline=None)
@given(written=asks(), block_tokens=st.integers(1, 512), data=st.data())
def test_mooncake_agentic(
    folder: Path, written: list[Ask], block_tokens: int, data: st.DataObject
) -> None:
    waits = [
        data.draw(st.lists(st.integers(0, at - 1), unique=True)) if at else []
        for at in range(len(written))
    ]
    start_ms: list[int] = []
    for ask, before in zip(written, waits, strict=True):
        ends = [start_ms[other] + written[other].partial for other in before]
        start_ms.append(max(ends) + ask.gap_ms if ends else ask.at_ms)
    lines = [
        {
            "request_id": str(at),
            "play_id": "one",
            "session_id": "main",
            "input_length": ask.input_tokens(block_tokens, ask.partial),
            "output_length": ask.output,
            "hash_ids": ask.ids,
            "not_before_ms": 0 if waits[at] else ask.at_ms,
            "recorded_api_time_ms": ask.partial,
            "dependencies": [
                {"request_id": str(other), "trigger": "completion", "delay_ms": ask.gap_ms}
                for other in waits[at]
            ],
        }
        for at, ask in enumerate(written)
    ]
    first = {"schema": "dynamo.agentic_mooncake", "version": 2, "hash_id_scope": "local"}
    path = write_lines(
        folder / "agentic.jsonl",
        [{**first, "block_size": block_tokens}, *data.draw(st.permutations(lines))],
    )
    trace = mooncake_agentic.read(path)
    rows = dict(matched(trace, written))
    for at, ask in enumerate(written):
        turn = trace.turn(rows[ask])
        assert turn.input_tokens == ask.input_tokens(block_tokens, ask.partial)
        start_s = (start_ms[at] - min(start_ms)) / 1000
        assert turn.recorded_s == pytest.approx(start_s, abs=1e-5)
        assert sorted(turn.parents) == sorted(rows[written[other]] for other in waits[at])
        gate = (None, ask.gap_ms / 1000) if waits[at] else (pytest.approx(start_s, abs=1e-5), None)
        assert (turn.arrival_s, turn.delay_s) == gate
    assert_shared(trace, {row: ask.ids for ask, row in rows.items()})


NO_IDS = asks(st.just(()))


@settings(deadline=None)
@given(written=NO_IDS, digits=st.sampled_from([0, 3, 6, 7]), zone=st.sampled_from(["", "+05:30"]))
def test_azure(folder: Path, written: list[Ask], digits: int, zone: str) -> None:
    """With so many digits after the second, of which the source's clock had seven."""
    tick = 10 ** (7 - digits)
    ticks = [(ask.at_ms * 10_000 + ask.partial % 10_000) // tick * tick for ask in written]
    with (folder / "azure.csv").open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        for ask, at in zip(written, ticks, strict=True):
            seconds, rest = divmod(at, 10**7)
            date = str(datetime(2023, 11, 16, 23) + timedelta(seconds=seconds))  # noqa: DTZ001 - as they have it
            fraction = f".{rest:07d}"[: digits + 1] if digits else ""
            rows.writerow([date + fraction + zone, ask.gap_ms + 1, ask.output])
    trace = azure.read(folder / "azure.csv")
    for at, (ask, row) in zip(ticks, matched(trace, written), strict=True):
        turn = trace.turn(row)
        assert turn.arrival_s == turn.recorded_s == (at - min(ticks)) / 10**7
        assert (turn.input_tokens, turn.runs) == (ask.gap_ms + 1, [])
    assert (trace.sessions, trace.blocks) == (len(written), 0)


@settings(deadline=None)
@given(written=NO_IDS, log=st.lists(st.sampled_from(burstgpt.LOG_TYPES), min_size=7))
def test_burstgpt(folder: Path, written: list[Ask], log: list[str]) -> None:
    with (folder / "burstgpt.csv").open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(burstgpt.COLUMNS)
        for ask, kind in zip(written, log, strict=False):
            inputs = ask.gap_ms + 1
            rows.writerow(
                [ask.at_ms / 1000, "ChatGPT", inputs, ask.output, inputs + ask.output, kind]
            )
    trace = burstgpt.read(folder / "burstgpt.csv")
    first_s = min(ask.at_ms for ask in written) / 1000
    for kind, (ask, row) in zip(log, matched(trace, written), strict=False):
        turn = trace.turn(row)
        assert turn.arrival_s == turn.recorded_s == ask.at_ms / 1000 - first_s
        assert (turn.input_tokens, turn.agent, turn.runs) == (ask.gap_ms + 1, kind, [])
    assert (trace.sessions, trace.blocks) == (len(written), 0)


# ---- chats


WORDS = "abc"


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Path:
    """A word a token."""
    words = Tokenizer(WordLevel({word: at for at, word in enumerate(WORDS)}, "a"))
    words.pre_tokenizer = Whitespace()
    words.save(str(folder / "words"))
    return folder / "words"


MESSAGES = st.lists(
    st.tuples(st.sampled_from(["human", "gpt"]), st.text(WORDS, max_size=6)), max_size=6
)


@settings(deadline=None)
@given(chats=st.lists(MESSAGES, max_size=4), block_tokens=st.integers(1, 4), indent=st.booleans())
def test_sharegpt(
    folder: Path,
    tokenizer: Path,
    chats: list[list[tuple[str, str]]],
    block_tokens: int,
    indent: bool,
) -> None:
    chats = [[("human", "abc"), ("gpt", "a")], *chats]
    path = folder / "chats"
    as_json = [
        {"conversations": [{"from": by, "value": " ".join(text)} for by, text in chat]}
        for chat in chats
    ]
    path.write_text(json.dumps(as_json, indent=2 if indent else None))
    trace = sharegpt.read(path, tokenizer, block_tokens)
    wanted: list[tuple[int, int, tuple[int, ...]]] = []
    prompts: dict[int, Ids] = {}
    for chat in chats:
        said = ""
        in_session = 0
        for by, text in chat:
            if by == "gpt" and said:
                whole = len(said) // block_tokens
                # A block and all before it, as one number.
                prompts[len(wanted)] = tuple(
                    int.from_bytes(said[: (at + 1) * block_tokens].encode()) for at in range(whole)
                )
                parents = (len(wanted) - 1,) if in_session else ()
                wanted.append((len(said), max(1, len(text)), parents))
                in_session += 1
            said += text
    turns = [trace.turn(row) for row in range(len(trace))]
    assert [(turn.input_tokens, turn.output_tokens, turn.parents) for turn in turns] == wanted
    assert {turn.recorded_s for turn in turns} == {0}
    assert {turn.delay_s for turn in turns if turn.parents} <= {0}
    assert_shared(trace, prompts)
