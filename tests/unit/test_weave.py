"""Weaving: blocks numbered, rows sorted, parents named by row, however often rows are taken."""

from __future__ import annotations

import pyarrow as pa

from harness.trace import Header, Trace
from traces.weave import Path, Weaver, cut

HEADER = Header("woven", 64, "floor", "global", "s", "none")


def weave(weaver: Weaver, *, take_between: bool) -> list[pa.Table]:
    """Two sessions of two turns; the second starts before the first's second turn."""
    tables = []
    one: Path = []
    weaver.lay(one, 2)
    first = weaver.add(0, 0, 0.0, 0.0, [], 128, 5, one)
    weaver.lay(one, 1)
    weaver.add(0, 1, 9.0, 4.0, [first], 192, 5, one)
    if take_between:
        tables.append(weaver.take(3.0))
    other = cut(one, 1)
    weaver.lay(other, 3)
    second = weaver.add(1, 0, 3.0, 3.0, [], 256, 5, other)
    weaver.add(1, 1, 12.0, 6.0, [second], 256, 7, other, "helper")
    return [*tables, weaver.take()]


def test_rows_come_in_the_order_they_were_recorded() -> None:
    trace = Trace(pa.concat_tables(weave(Weaver(), take_between=False)), HEADER)
    assert trace.column("recorded_s").tolist() == [0.0, 3.0, 9.0, 12.0]
    assert [trace.turn(row).parents for row in range(4)] == [(), (), (0,), (1,)]
    assert [trace.turn(row).delay_s for row in range(4)] == [None, None, 4.0, 6.0]
    assert trace.column("agent").tolist() == ["main", "main", "main", "helper"]
    assert [trace.runs(row) for row in range(4)] == [
        [(0, 2)],
        [(0, 1), (3, 3)],
        [(0, 3)],
        [(0, 1), (3, 3)],
    ]
    assert trace.ideal_hit_tokens.tolist() == [0, 64, 128, 256]


def test_taking_rows_early_changes_none_of_them() -> None:
    early, late = weave(Weaver(), take_between=True)
    assert (len(early), len(late)) == (1, 3)
    whole = Trace(pa.concat_tables([early, late]), HEADER)
    once = Trace(pa.concat_tables(weave(Weaver(), take_between=False)), HEADER)
    assert whole.digest == once.digest


def test_new_blocks_go_on_where_nothing_came_between() -> None:
    weaver, one, other = Weaver(), [], []  # type: ignore[var-annotated]
    weaver.lay(one, 2)
    weaver.lay(one, 2)
    weaver.lay(other, 1)
    weaver.lay(one, 1)
    weaver.lay(one, 0)
    assert one == [(0, 4), (5, 1)]
    assert other == [(4, 1)]


def test_a_cut_is_the_front() -> None:
    assert cut([(0, 4), (9, 2)], 5) == [(0, 4), (9, 1)]
    assert cut([(0, 4), (9, 2)], 4) == [(0, 4)]
    assert cut([(0, 4)], 9) == [(0, 4)]
    assert cut([(0, 4)], 0) == []
