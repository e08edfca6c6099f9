"""From turns to a trace: numbering, order, drops, and every fault of the graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.errors import TraceError
from harness.trace import Header, Trace
from traces.builder import TraceBuilder
from traces.faults import gathering, spared

FLOOR = Header("hand", 64, "floor", "global", "s", "none")


@pytest.fixture
def builder(tmp_path: Path) -> TraceBuilder:
    return on_file(tmp_path, FLOOR)


def on_file(folder: Path, header: Header) -> TraceBuilder:
    path = folder / "hand.jsonl"
    path.write_text("anything")
    builder = TraceBuilder(header, ids_field="ids")
    builder.file(path)
    return builder


def add(builder: TraceBuilder, key: str, at_s: float = 0.0, **given: Any) -> None:
    """A turn of 128 tokens on line 9, a root unless it has parents."""
    gate = {"delay_s": 1.0} if given.get("parents") else {"arrival_s": at_s}
    turn: dict[str, Any] = {
        "session": "s",
        "recorded_s": at_s,
        "input_tokens": 128,
        "output_tokens": 5,
        "block_ids": [],
        "line": 9,
    }
    builder.add(key, **(turn | gate | given))


def by_output(trace: Trace, tokens: int) -> Any:
    """The one turn with so many output tokens."""
    return trace.turn(trace.output_tokens.tolist().index(tokens))


def test_a_key_twice(builder: TraceBuilder) -> None:
    add(builder, "a", line=2)
    with pytest.raises(
        TraceError, match=r"hand.jsonl:9: turn 'a' is here twice, first in hand.jsonl line 2"
    ):
        add(builder, "a")


def test_an_orphan(builder: TraceBuilder) -> None:
    add(builder, "a", parents=["gone"])
    with pytest.raises(TraceError, match=r"hand.jsonl:9: an orphan: its parent 'gone'"):
        builder.build()


def test_a_cycle(builder: TraceBuilder) -> None:
    add(builder, "root")
    add(builder, "a", parents=["root", "c"])
    add(builder, "b", parents=["a"])
    add(builder, "c", parents=["b"])
    with pytest.raises(TraceError, match=r"hand.jsonl:9: waits for itself: ") as caught:
        builder.build()
    assert caught.value.problem.removeprefix("waits for itself: ") in {
        "'a' after 'c' after 'b' after 'a'",
        "'b' after 'a' after 'c' after 'b'",
        "'c' after 'b' after 'a' after 'c'",
    }


def test_a_turn_that_waits_for_itself(builder: TraceBuilder) -> None:
    add(builder, "a", parents=["a"])
    with pytest.raises(TraceError, match="waits for itself: 'a' after 'a'"):
        builder.build()


def test_every_orphan_is_gathered(builder: TraceBuilder) -> None:
    add(builder, "a", line=1)
    add(builder, "b", parents=["gone", "a"], line=2)
    add(builder, "c", parents=["b"], line=3)
    add(builder, "d", parents=["lost"], line=4)
    with gathering() as faults:
        builder.build()
    (kind,) = faults.kinds.values()
    assert (kind.count, kind.lines) == (2, [2, 4])


def test_each_cycle_is_gathered_once(builder: TraceBuilder) -> None:
    add(builder, "root", line=1)
    add(builder, "a", parents=["root", "b"], line=2)
    add(builder, "b", parents=["a"], line=3)
    add(builder, "behind", parents=["b"], line=4)
    add(builder, "alone", parents=["alone"], line=5)
    with gathering() as faults:
        builder.build()
    (kind,) = faults.kinds.values()
    assert kind.count == 2
    assert set(kind.lines) in ({2, 5}, {3, 5})


def test_no_more_cycles_are_looked_for_than_are_told(builder: TraceBuilder) -> None:
    for at in range(30):
        add(builder, f"{at}", parents=[f"{at}"], line=at + 1)
    with gathering() as faults:
        builder.build()
    assert faults.count == 10


def test_what_is_missing_for_a_fault_is_none_of_its_own(builder: TraceBuilder) -> None:
    with gathering() as faults:
        with spared():
            add(builder, "a", block_ids=[1, 2, 3], line=1)
        add(builder, "b", parents=["a"], line=2)
        builder.build()
    (kind,) = faults.kinds.values()
    assert (kind.first.field, kind.lines) == ("ids", [1])


@pytest.mark.parametrize(
    ("gates", "message"),
    [
        ({"arrival_s": 0.0, "delay_s": 1.0}, "two gates"),
        ({"arrival_s": 0.0, "parents": ["a"], "delay_s": None}, "two gates"),
        ({"arrival_s": None}, "no gate"),
        ({"arrival_s": None, "delay_s": 1.0}, "no gate"),
        ({"parents": ["a"], "delay_s": None}, "no gate"),
    ],
)
def test_gates(builder: TraceBuilder, gates: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=f"hand.jsonl:9: {message}"):
        add(builder, "b", **gates)


@pytest.mark.parametrize(("rule", "room"), [("floor", 2), ("ceil", 3)])
def test_more_ids_than_the_input_holds(tmp_path: Path, rule: Any, room: int) -> None:
    builder = on_file(tmp_path, Header("hand", 64, rule, "global", "s", "none"))
    add(builder, "a", input_tokens=191, block_ids=range(room))
    add(builder, "b", input_tokens=191, block_ids=range(room - 1))
    with pytest.raises(
        TraceError,
        match=f"hand.jsonl:9: ids: {room + 1} block ids, but 191 .* {room} blocks of 64 .{rule}",
    ):
        add(builder, "c", input_tokens=191, block_ids=range(room + 1))
    assert builder.build().runs(0) == [(0, room)]


def test_nothing_added(builder: TraceBuilder) -> None:
    with pytest.raises(TraceError, match=r"hand.jsonl: no turns"):
        builder.build()


def test_no_output_becomes_one_token(builder: TraceBuilder) -> None:
    add(builder, "a", output_tokens=0)
    add(builder, "b")
    trace = builder.build()
    assert trace.output_tokens.tolist() == [1, 5]
    assert trace.header.changes == {"zero_output_clamped_to_1": 1}


def test_an_id_twice_in_a_prompt_is_two_blocks(builder: TraceBuilder) -> None:
    add(builder, "a", block_ids=[7, 7])
    trace = builder.build()
    assert trace.runs(0) == [(0, 2)]
    assert trace.header.changes == {"repeated_block_id_told_apart": 1}


def test_turns_are_sorted_and_start_at_zero(builder: TraceBuilder) -> None:
    add(builder, "late", 30.0, output_tokens=30)
    add(builder, "first", 10.0, output_tokens=10)
    add(builder, "tie", 30.0, output_tokens=31, session="t")
    trace = builder.build()
    assert trace.output_tokens.tolist() == [10, 30, 31]
    assert trace.column("recorded_s").tolist() == [0.0, 20.0, 20.0]
    assert trace.column("arrival_s").tolist() == [0.0, 20.0, 20.0]
    assert trace.column("turn_index").tolist() == [0, 1, 0]
    assert trace.header.changes == {"rows_out_of_order": 1}


def test_parents_may_come_later_in_the_file(builder: TraceBuilder) -> None:
    add(builder, "child", 5.0, parents=["root"], output_tokens=2)
    add(builder, "root", 0.0)
    trace = builder.build()
    assert trace.turn(1).parents == (0,)
    assert trace.turn(1).delay_s == 1.0


def test_an_empty_prompt_is_dropped_and_its_children_adopted(builder: TraceBuilder) -> None:
    add(builder, "root")
    add(builder, "empty", 1.0, parents=["root"], input_tokens=0, delay_s=2.0)
    add(builder, "empty too", 2.0, parents=["empty"], input_tokens=0, delay_s=4.0)
    add(builder, "child", 9.0, parents=["empty too", "root"], delay_s=1.0, output_tokens=9)
    trace = builder.build()
    assert len(trace) == 2
    assert trace.turn(1).parents == (0,)
    assert trace.turn(1).delay_s == 7.0
    assert trace.header.changes == {"empty_input_dropped": 2}


def test_a_child_of_an_empty_root_becomes_a_root(builder: TraceBuilder) -> None:
    add(builder, "empty", 3.0, input_tokens=0)
    add(builder, "child", 10.0, parents=["empty"], delay_s=4.0)
    trace = builder.build()
    assert trace.turn(0).parents == ()
    assert (trace.turn(0).recorded_s, trace.turn(0).arrival_s) == (7.0, 4.0)


def test_a_session_left_empty_has_no_number(builder: TraceBuilder) -> None:
    add(builder, "empty", input_tokens=0, session="gone")
    add(builder, "a", session="stays")
    assert builder.build().sessions == 1


@pytest.mark.parametrize(("scope", "hit"), [("file", 0), ("global", 128)])
def test_ids_reach_as_far_as_their_scope(tmp_path: Path, scope: Any, hit: int) -> None:
    builder = on_file(tmp_path, Header("hand", 64, "floor", scope, "s", "none"))
    add(builder, "a", block_ids=[1, 2])
    other = tmp_path / "other.jsonl"
    other.write_text("something else")
    builder.file(other)
    add(builder, "b", block_ids=[1, 2])
    trace = builder.build()
    assert trace.ideal_hit_tokens.tolist() == [0, hit]
    assert [source.name for source in trace.header.sources] == ["hand.jsonl", "other.jsonl"]
    assert "rows_out_of_order" not in trace.header.changes
