"""Faults are raised at the first, or gathered by kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import TraceError
from traces.faults import (
    KINDS_KEPT,
    PLACES_KEPT,
    gathered,
    gathering,
    report,
    require_sound,
    seen,
    sound,
    spared,
)


def fault(
    line: int | None = 1, field: str = "in", do: str = "give 0 to 9", problem: str = ""
) -> TraceError:
    problem = problem or f"bad at {line}"
    return TraceError(problem, do=do, path=Path("a.jsonl"), line=line, field=field)


def meet(error: TraceError) -> None:
    raise error


def test_the_first_fault_is_raised_where_nobody_gathers() -> None:
    with pytest.raises(TraceError, match="bad at 3"), spared():
        raise fault(3)
    with pytest.raises(TraceError, match="bad at 4"):
        report(fault(4), 2, [4, 5])
    assert sound()
    assert not gathered()
    require_sound("a.jsonl")


def test_faults_of_one_field_problem_and_advice_are_one_kind() -> None:
    with gathering() as faults:
        for line, field, do in [
            (1, "requests[0].in", "give 0 to 9"),
            (2, "requests[17].in", "give 0 to 9"),
            (3, "out", "give 0 to 9"),
            (4, "out", "give something else"),
        ]:
            seen()
            with spared():
                raise fault(line, field, do)
        assert not sound()
    kinds = [*faults.kinds.values()]
    assert [(kind.count, kind.lines) for kind in kinds] == [(2, [1, 2]), (1, [3]), (1, [4])]
    assert kinds[0].first.problem == "bad at 1"
    assert (faults.count, faults.rows, faults.full) == (4, 4, False)
    assert sound(), "a new reading begins without faults"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("'abc' is not a time", "'x\\'z y' is not a time"),
        ('"abc" is not a string', '"it\'s" is not a string'),
        ("5 is above what is possible", "1.5e+300 is above what is possible"),
        ("byte 4 is not UTF-8 (0x85)", "byte 17 is not UTF-8 (0xe9)"),
        (f"'{'a' * 39} is unknown", f"'{'b' * 39} is unknown"),
        ('"x" is not a whole number', "null is not a whole number"),
        ("[1, 2, 3] is no run", "[12] is no run"),
        ("waits for itself: 'a' for 'a'", "waits for itself: 'a' for 'b' for 'c' for 'a'"),
        ("itself: 'a' called by 'b'", "itself: 'a' called by 'b' called by 'c'"),
        ("span 00f0 is twice", "span a7 is twice"),
    ],
)
def test_problems_that_differ_in_a_value_are_one_kind(one: str, other: str) -> None:
    with gathering() as faults:
        for problem in (one, other):
            with spared():
                raise fault(problem=problem)
    assert [kind.count for kind in faults.kinds.values()] == [2]


def test_different_problems_of_one_field_are_kinds_of_their_own() -> None:
    problems = ["missing", "-600 is below what is possible", '"abc" is not a whole number']
    with gathering() as faults:
        for problem in [
            *problems,
            "-7 is below what is possible",
            "a turn's end",
            "a turn's begin",
        ]:
            with spared():
                raise fault(problem=problem)
    told = [(kind.first.problem, kind.count) for kind in faults.kinds.values()]
    assert told == [
        *((problems[0], 1), (problems[1], 2), (problems[2], 1)),
        *(("a turn's end", 1), ("a turn's begin", 1)),
    ]


def test_only_the_first_places_are_kept() -> None:
    with gathering() as faults:
        for at in range(1000):
            with spared():
                raise fault(at)
            with spared():
                raise fault(None, f"requests[{at}].out")
        report(fault(5000, do="give less"), 300, range(5000, 5300))
    lines, fields, at_once = faults.kinds.values()
    assert (lines.count, lines.lines) == (1000, [*range(PLACES_KEPT)])
    assert fields.fields == [f"requests[{at}].out" for at in range(PLACES_KEPT)]
    assert (at_once.count, at_once.lines) == (300, [*range(5000, 5000 + PLACES_KEPT)])
    assert faults.count == 2300


def test_endless_kinds_are_counted_and_not_kept() -> None:
    with gathering() as faults:
        for at in range(KINDS_KEPT + 50):
            with spared():
                raise fault(1, "x" * (at + 1))
    assert len(faults.kinds) == KINDS_KEPT
    assert faults.count == KINDS_KEPT + 50


def test_what_is_raised_outside_a_spared_block_is_gathered_and_ends_the_reading() -> None:
    with gathering() as faults:
        with spared():
            raise fault(1)
        meet(fault(2))
    assert [kind.lines for kind in faults.kinds.values()] == [[1, 2]]


def test_an_unsound_reading_ends_without_a_fault_of_its_own() -> None:
    reached = []
    with gathering() as faults:
        with spared():
            raise fault(1)
        with spared():
            require_sound("one file of many")
            reached.append("the rest of that file")
        reached.append("the next file")
        require_sound("all of them")
        reached.append("a trace")
    assert reached == ["the next file"]
    assert faults.count == 1


def test_reading_ends_at_the_limit() -> None:
    line = 0
    with gathering(3) as faults:
        for line in range(1, 100):
            with spared():
                raise fault(line)
    assert line == 3
    assert (faults.count, faults.full) == (3, True)
    with gathering(1) as faults:
        meet(fault(9))
    assert (faults.count, faults.full) == (1, True)


def test_a_fault_holds_no_rows_in_memory() -> None:
    with gathering() as faults, spared():
        try:
            int("x")
        except ValueError as error:
            raise fault() from error
    (kind,) = faults.kinds.values()
    assert kind.first.__traceback__ is None
    assert kind.first.__cause__ is None


def test_another_exception_is_no_fault() -> None:
    with pytest.raises(ZeroDivisionError), gathering(), spared():
        raise ZeroDivisionError
