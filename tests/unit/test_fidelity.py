"""Wanted against sent against served, and the client, on records made by hand."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from harness.errors import ConfigError
from harness.fidelity import COLUMNS, Tolerance, client, fidelity
from harness.record import SCHEMA, Record
from tests.unit.test_metrics import record, table


def answered(turn: int = 0, **values: Any) -> Record:
    """1,000 tokens asked and served, 960 of them from the cache, 11 answered: all as wanted."""
    row: dict[str, Any] = {"sent_input_tokens": 1000, "served_hit_tokens": 960}
    row |= {"stamped_by": "kernel", "loop_lag_s": 0.001}
    return record(turn, **row | values)


def judged(*records: Record, **tolerance: Any) -> tuple[dict[str, Any], list[str]]:
    return fidelity(table(*records).select(COLUMNS), Tolerance(**tolerance))


def watched(*records: Record, cpu_s: float = 1.0, lasted_s: float = 4.0) -> Any:
    return client(table(*records).select(COLUMNS), cpu_s, lasted_s)


def test_a_run_that_was_served_as_wanted_is_valid() -> None:
    facts, reasons = judged(*[answered(turn) for turn in range(4)], hit_tokens=0)
    assert reasons == []
    assert facts == {
        "tokens": {
            "input": {"wanted": 4000, "sent": 4000, "served": 4000},
            "output": {"wanted": 44, "served": 44},
            "hit": {"wanted": 3840, "served": 3840},
        },
        "off": {
            "sent input": 0,
            "served input": 0,
            "served output": 0,
            "served hit": 0,
            "impossible hit": 0,
        },
    }


@pytest.mark.parametrize(
    ("values", "off"),
    [
        ({"sent_input_tokens": 1011}, "sent input"),
        ({"sent_input_tokens": 989}, "sent input"),
        ({"served_input_tokens": 1011}, "served input"),
        ({"served_output_tokens": 9}, "served output"),
        ({"served_output_tokens": 13}, "served output"),
        ({"ideal_hit_tokens": 700, "served_hit_tokens": 957}, "impossible hit"),
    ],
)
def test_more_than_the_tolerance_is_a_reason_by_its_name(values: dict[str, int], off: str) -> None:
    facts, reasons = judged(answered(0), answered(1, **values))
    assert {name for name, count in facts["off"].items() if count} == {off}
    assert reasons == [
        f"1 of 2 answered requests are off in {off} tokens by more than the tolerance"
    ]


@pytest.mark.parametrize(
    "values",
    [
        {"sent_input_tokens": 1010},
        {"served_input_tokens": 990},
        {"served_output_tokens": 12},  # one token, however short the answer
        {"served_output_tokens": 10},
        {"sent_input_tokens": None},
        {"served_input_tokens": None},
        {"served_output_tokens": None},
        {"served_hit_tokens": None},
        {"served_hit_tokens": 0},  # a real cache is not infinite
    ],
)
def test_what_is_within_the_tolerance_or_not_known_is_no_reason(
    values: dict[str, int | None],
) -> None:
    assert judged(answered(0), answered(1, **values))[1] == []


def test_a_sum_of_which_a_part_is_not_known_is_not_known() -> None:
    facts, _ = judged(answered(0), answered(1, served_hit_tokens=None, served_output_tokens=None))
    assert facts["tokens"]["hit"] == {"wanted": 1920, "served": None}
    assert facts["tokens"]["output"] == {"wanted": 22, "served": None}
    assert facts["tokens"]["input"]["served"] == 2000


@pytest.mark.parametrize(("hits", "off"), [(944, 0), (943, 1), (976, 0), (977, 1), (None, 0)])
def test_hits_are_held_to_the_ideal_where_that_is_asked(hits: int | None, off: int) -> None:
    facts, reasons = judged(answered(served_hit_tokens=hits), hit_tokens=16)
    assert facts["off"]["served hit"] == len(reasons) == off
    assert "served hit" not in judged(answered(served_hit_tokens=hits))[0]["off"]


def test_hits_beyond_the_ideal_are_a_template_up_to_a_point() -> None:
    """A warm cache, or prompts that an unknown-word token makes the same, hits far more."""
    template = answered(ideal_hit_tokens=700, served_hit_tokens=956)
    assert judged(template)[1] == []
    assert "impossible hit" not in judged(template, hit_excess_tokens=None)[0]["off"]


@pytest.mark.parametrize(("bad", "valid"), [(1, True), (2, True), (3, False)])
def test_a_share_of_requests_may_be_off(bad: int, valid: bool) -> None:
    records = [answered(turn, sent_input_tokens=900) for turn in range(bad)]
    records += [answered(turn) for turn in range(bad, 200)]
    facts, reasons = judged(*records)
    assert facts["off"]["sent input"] == bad
    assert (reasons == []) == valid


@pytest.mark.parametrize("status", ["failed", "cancelled", "unsent"])
def test_only_what_was_answered_is_judged(status: str) -> None:
    other = answered(1, status=status, sent_input_tokens=1, served_input_tokens=None)
    facts, reasons = judged(answered(0), other)
    assert facts["tokens"]["input"] == {"wanted": 1000, "sent": 1000, "served": 1000}
    assert reasons == []


def test_a_run_without_an_answer_is_off_in_nothing() -> None:
    for records in (table(answered(status="failed")), SCHEMA.empty_table()):
        facts, reasons = fidelity(records, Tolerance(hit_tokens=0))
        assert facts["tokens"]["input"] == {"wanted": 0, "sent": 0, "served": 0}
        assert reasons == []


@pytest.mark.parametrize(
    "values",
    [{"input_share": -0.1}, {"output_share": "x"}, {"requests_share": None}, {"hit_tokens": -1}],
)
def test_a_tolerance_that_cannot_be_used_is_refused_by_its_name(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"tolerance.{next(iter(values))}"):
        Tolerance(**values)


# ---- the client


def test_a_client_that_kept_up_has_no_warning() -> None:
    records = [answered(turn, sent_s=turn + 0.002, shared_reads=1) for turn in range(10)]
    facts, warnings = watched(*records)
    assert warnings == []
    assert facts.pop("rule").startswith("the client was the bottleneck if")
    assert facts == {
        "send_lag_p50_s": pytest.approx(0.002),
        "send_lag_p99_s": pytest.approx(0.002),
        "loop_lag_p50_s": 0.001,
        "loop_lag_p99_s": 0.001,
        "stamped_by_user": 0,
        "shared_reads": 10,
        "cpu_s": 1.0,
        "cpu_share": 0.25,
    }


@pytest.mark.parametrize(
    ("lag_s", "ttft_s", "late"),
    [
        (0.009, 0.02, False),  # below 10 ms: nobody minds
        (0.011, 0.02, True),
        (0.011, 1.0, False),  # below 5% of the median TTFT
        (0.049, 1.0, False),
        (0.051, 1.0, True),
    ],
)
def test_sending_late_is_a_warning_where_it_matters(
    lag_s: float, ttft_s: float, late: bool
) -> None:
    records = [answered(turn, first_token_s=turn + ttft_s) for turn in range(96)]
    records += [
        answered(turn, sent_s=turn + lag_s, first_token_s=turn + ttft_s) for turn in range(96, 101)
    ]
    _, warnings = watched(*records)
    assert ["5 of 101 requests were sent more than" in each for each in warnings] == [True] * late


def test_a_hiccup_is_no_warning() -> None:
    records = [answered(turn, sent_s=turn + 5.0) for turn in range(4)]
    assert watched(*records)[1] == []


@pytest.mark.parametrize(
    ("stamped_by", "lag_s", "warned"),
    [("user", 0.011, True), ("user", 0.009, False), ("kernel", 5.0, False), (None, 5.0, False)],
)
def test_a_late_loop_is_a_warning_where_it_stamped_the_bytes(
    stamped_by: str | None, lag_s: float, warned: bool
) -> None:
    records = [answered(turn, stamped_by=stamped_by, loop_lag_s=lag_s) for turn in range(5)]
    _, warnings = watched(*records)
    assert ["its loop was" in each for each in warnings] == [True] * warned


def test_what_was_never_sent_says_nothing_of_the_client() -> None:
    unsent = answered(1, status="unsent", sent_s=None, loop_lag_s=None, first_token_s=None)
    failed = answered(2, status="failed", first_token_s=None, shared_reads=2)
    facts, warnings = watched(answered(0), unsent, failed)
    assert (facts["send_lag_p99_s"], facts["shared_reads"], warnings) == (0.0, 2, [])


@pytest.mark.parametrize(
    "records", [SCHEMA.empty_table(), table(answered(status="unsent", sent_s=None))]
)
def test_a_run_that_sent_nothing_has_a_client_all_the_same(records: pa.Table) -> None:
    facts, warnings = client(records, 1.0, 0.0)
    assert (facts["send_lag_p50_s"], facts["loop_lag_p99_s"], facts["cpu_share"]) == (None,) * 3
    assert (facts["stamped_by_user"], facts["shared_reads"], warnings) == (0, 0, [])
