"""One trace of several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module

from harness.errors import ConfigError
from harness.run import load_trace
from harness.stream import Stream
from harness.trace import MAX_BLOCK, Header, Source, Trace
from traces import canonical, combine

MakeTrace = Callable[..., Trace]


def test_copies_have_sessions_and_blocks_of_their_own(make_trace: MakeTrace) -> None:
    twice = combine.replicate(make_trace(), 2, 1.0)
    assert twice.column("recorded_s").tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 6.0]
    assert twice.session.tolist() == [0, 1, 2, 3, 0, 2, 0, 2]
    assert [twice.turn(row).parents for row in range(8)] == [
        (), (), (), (), (0,), (2,), (4,), (5,),
    ]  # fmt: skip
    assert [twice.runs(row) for row in range(8)] == [
        [(0, 2)], [(10, 2)], [(12, 2)], [(22, 2)], [(0, 4)], [(12, 4)], [(0, 5)], [(12, 5)],
    ]  # fmt: skip
    assert twice.turn(3).arrival_s == 1.5
    assert twice.turn(5).delay_s == 1.0
    assert twice.header.changes == {"turns_of_copies_added": 4}


def test_at_one_time_the_original_comes_first(make_trace: MakeTrace) -> None:
    twice = combine.replicate(make_trace(), 2)
    assert twice.session.tolist() == [0, 2, 1, 3, 0, 2, 0, 2]
    once = combine.replicate(make_trace(), 1, 5.0)
    assert once.table.equals(make_trace().table)
    assert once.header == make_trace().header


def test_impossible_copies_are_refused(make_trace: MakeTrace) -> None:
    for copies in (0, 1.5, 2**31):
        with pytest.raises(ConfigError, match=r"copies is .*: give a whole number, 1 to 536870911"):
            combine.replicate(make_trace(), copies)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="shift_s is -1: give a number"):
        combine.replicate(make_trace(), 2, -1)


def test_merged_traces_keep_apart(make_trace: MakeTrace) -> None:
    one, other = make_trace(), make_trace(recorded_s=[0.0, 0.25, 3.0, 9.0])
    both = combine.merge(one, other)
    assert both.column("recorded_s").tolist() == [0.0, 0.0, 0.25, 0.5, 2.0, 3.0, 5.0, 9.0]
    assert both.session.tolist() == [0, 2, 3, 1, 0, 2, 0, 2]
    assert [both.turn(row).parents for row in (4, 5, 6, 7)] == [(0,), (1,), (4,), (5,)]
    assert [both.runs(row) for row in (0, 1, 2, 5)] == [
        [(0, 2)], [(12, 2)], [(22, 2)], [(12, 4)],
    ]  # fmt: skip


def told(header: Header, name: str, licence: str, **fields: Any) -> Header:
    source = Source(f"{name}.csv", "0")
    return replace(header, format=name, licence=licence, sources=(source,), **fields)


def test_a_merged_header_tells_of_both(make_trace: MakeTrace) -> None:
    hand = make_trace().header
    one = make_trace(told(hand, "mooncake", "Apache-2.0", time_unit="ms", changes={"a": 1, "b": 2}))
    other = make_trace(
        told(
            hand, "azure", "CC-BY-4.0", id_scope="file", session_starts="unknown",
            prefix_data="absent", changes={"b": 3},
        )
    )  # fmt: skip
    again = make_trace(
        told(hand, "agentic", "Apache-2.0", id_scope="file", prefix_data="generated")
    )
    both = combine.merge(one, other)
    header = both.header
    assert header.format == "mooncake+azure"
    assert header.licence == "Apache-2.0 and CC-BY-4.0"
    assert (header.id_scope, header.time_unit) == ("global", "ms+s")
    assert (header.session_starts, header.prefix_data) == ("unknown", "recorded")
    assert [source.name for source in header.sources] == ["mooncake.csv", "azure.csv"]
    assert header.changes == {
        "a": 1, "b": 5, "turns_merged_in": 4, "turns_without_prefix_data": 4,
    }  # fmt: skip
    assert [each["format"] for each in header.parameters["merged"]] == ["azure"]
    assert Header.from_json(header.to_json()) == header
    three = combine.merge(both, again).header
    assert three.format == "mooncake+azure+agentic"
    assert three.licence == "Apache-2.0 and CC-BY-4.0"
    assert [each["format"] for each in three.parameters["merged"]] == ["azure", "agentic"]
    assert combine.merge(one, again).header.prefix_data == "generated"
    assert combine.merge(other, again).header.id_scope == "file"


def test_blocks_that_are_not_alike_are_refused(make_trace: MakeTrace) -> None:
    trace = make_trace()
    for header in (
        replace(trace.header, block_tokens=32),
        replace(trace.header, partial_block="ceil"),
    ):
        with pytest.raises(
            ConfigError,
            match=r"the trace's blocks have 64 tokens .floor., the oth.* each trace alone",
        ):
            combine.merge(trace, make_trace(header))
    with pytest.raises(ConfigError, match=r"other is 'b.jsonl': choose a trace"):
        combine.merge(trace, "b.jsonl")


def test_the_advice_names_the_readers_whose_blocks_can_be_chosen(make_trace: MakeTrace) -> None:
    trace = make_trace()
    with pytest.raises(ConfigError, match=r"read by constant, .*, give that one the other's block"):
        combine.merge(trace, make_trace(replace(trace.header, block_tokens=32)))
    folder = Path(__file__).parents[2] / "conf" / "trace"
    taking = {path.stem for path in folder.glob("*.yaml") if "\nblock_tokens: " in path.read_text()}
    assert taking - set(combine.CHOOSING) == {"mooncake", "qwen_bailian"}  # what a hash stands for
    assert set(combine.CHOOSING) <= taking


def test_a_trace_without_blocks_merges_with_any(make_trace: MakeTrace) -> None:
    """As Azure's: it has no blocks that another size would change."""
    bare = make_trace(run_starts=[[]] * 4, run_lengths=[[]] * 4)
    trace = make_trace(replace(bare.header, block_tokens=32, partial_block="ceil"))
    for both in (combine.merge(bare, trace), combine.merge(trace, bare)):
        assert (both.header.block_tokens, both.header.partial_block) == (32, "ceil")
        assert both.ideal_hit_tokens.sum() == trace.ideal_hit_tokens.sum()


def test_hits_of_one_are_not_denied_by_turns_without_prefix_data(make_trace: MakeTrace) -> None:
    trace = make_trace()
    none = replace(trace.header, prefix_data="absent")
    bare = make_trace(none, run_starts=[[]] * 4, run_lengths=[[]] * 4)
    for both in (combine.merge(bare, trace), combine.merge(trace, bare)):
        assert both.header.prefix_data == "recorded"
        assert both.header.changes == {"turns_merged_in": 4, "turns_without_prefix_data": 4}
        again = combine.merge(bare, both).header
        assert (again.prefix_data, again.changes["turns_without_prefix_data"]) == ("recorded", 8)
    alone = combine.merge(bare, bare).header
    assert (alone.prefix_data, alone.changes) == ("absent", {"turns_merged_in": 4})
    drawn = make_trace(replace(trace.header, prefix_data="generated"))
    assert combine.merge(trace, drawn).header.prefix_data == "generated"


def test_blocks_of_the_largest_numbers_are_numbered_anew(make_trace: MakeTrace) -> None:
    huge = make_trace(run_starts=[[MAX_BLOCK], [7], [MAX_BLOCK], [MAX_BLOCK]])
    plain = make_trace(run_starts=[[0], [5], [0], [0]])
    for made, same in (
        (combine.replicate(huge, 3, 1.0), combine.replicate(plain, 3, 1.0)),
        (combine.merge(huge, plain), combine.merge(plain, plain)),
    ):
        assert made.table.equals(same.table)


def test_a_stream_is_merged_whole(make_trace: MakeTrace) -> None:
    trace = make_trace()
    stream = Stream(trace.header, iter([trace.table]))
    assert combine.merge(trace, stream).table.equals(combine.merge(trace, trace).table)


def test_the_other_trace_is_chosen_as_any_trace_is(make_trace: MakeTrace, tmp_path: Path) -> None:
    canonical.save(make_trace(), tmp_path / "a.parquet")
    words = [
        "trace=canonical", f"trace.path={tmp_path}/a.parquet", "transform=[merge]",
        "trace@transform.merge.other=constant", "transform.merge.other.requests=3", "seed=5",
    ]  # fmt: skip
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("run", words)
    trace = load_trace(config)
    assert len(trace) == 7
    assert trace.header.format == "hand+constant"
    assert trace.header.parameters["merged"][0]["parameters"]["seed"] == 5
