"""The bars of time to first token: their numbers, and what they say where not to be trusted."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure as Canvas

from harness.metrics import Window, summarise
from harness.record import Record
from reports.ttft import Ttft, _draw
from tests.unit.rundir import make_run
from tests.unit.test_metrics import record, table

PNG = b"\x89PNG\r\n\x1a\n"


def after(*ttft_s: float) -> list[Record]:
    return [
        record(turn, first_token_s=turn + each, last_token_s=turn + each + 1)
        for turn, each in enumerate(ttft_s)
    ]


def failed(turn: int) -> Record:
    return record(
        turn, status="failed", error="BadStatus: 500", first_token_s=None, last_token_s=None
    )


def words(*requests: list[Record]) -> list[str]:
    """What stands on the bars, one list of records a run, in the order drawn."""
    rows = [
        summarise(table(*each), Window(), f"r{at}").to_pylist()[0]
        for at, each in enumerate(requests)
    ]
    axes = Canvas().subplots()
    _draw(axes, [row["backend"] for row in rows], rows)
    return [text.get_text() for text in axes.texts]


def test_the_table_holds_percentiles_worked_out_by_hand(tmp_path: Path) -> None:
    fast = make_run(tmp_path / "in_dc", after(*np.arange(1, 101) / 10))
    slow = make_run(tmp_path / "cross_dc", after(*np.arange(1, 101) / 5))
    (figure,) = Ttft().render([fast, slow], tmp_path)
    rows = figure.numbers.to_pylist()
    assert [row["run"] for row in rows] == ["in_dc", "cross_dc"]
    assert [row["measured"] for row in rows] == [100, 100]
    for row, scale in zip(rows, (1, 2), strict=True):
        drawn = [row[f"ttft_{p}_s"] for p in ("p50", "p90", "p99")]
        assert drawn == pytest.approx([5.0 * scale, 9.0 * scale, 9.9 * scale])
    assert rows[0]["p90_supported"]
    assert not rows[0]["p99_supported"]
    assert "P99 662" in figure.caption
    assert figure.path.read_bytes().startswith(PNG)


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "pdd", after(1, 2, 3))
    pictures = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (figure,) = Ttft().render([run], tmp_path / name)
        pictures.append(figure.path.read_bytes())
    assert pictures[0] == pictures[1]


def test_too_few_samples_are_said_on_the_bar() -> None:
    assert words(after(*[1.0] * 70)) == ["1.00 s", "1.00 s", "1.00 s\nn too small"]


def test_a_percentile_of_failures_is_infinite_and_hatched() -> None:
    axes = Canvas().subplots()
    requests = [*after(*[1.0] * 600), *(failed(600 + at) for at in range(100))]
    row = summarise(table(*requests), Window(), "x").to_pylist()[0]
    _draw(axes, ["x"], [row])
    bars = list(axes.containers[0])
    assert [text.get_text() for text in axes.texts] == ["1.00 s", "inf", "inf"]
    assert [bar.get_hatch() for bar in bars] == [None, "///", "///"]
    assert bars[1].get_height() == axes.get_ylim()[1]


@pytest.mark.parametrize(("slowest_s", "scale"), [(19.0, "linear"), (21.0, "log")])
def test_the_axis_is_logarithmic_where_bars_differ_by_more_than_twenty(
    slowest_s: float, scale: str
) -> None:
    axes = Canvas().subplots()
    row = summarise(table(*after(1.0, 1.0, slowest_s)), Window(), "x").to_pylist()[0]
    _draw(axes, ["x"], [row])
    assert axes.get_yscale() == scale
    assert f"({scale} scale)" in axes.get_ylabel()


def test_a_run_of_nothing_is_written_as_such_beside_one_of_something() -> None:
    unsent = record(0, status="unsent", sent_s=None, first_token_s=None, last_token_s=None)
    assert words([unsent], after(1.0))[:3] == ["no request"] * 3


def test_all_failed_is_drawn_and_nothing_sent_is_not(tmp_path: Path) -> None:
    lost = make_run(tmp_path / "lost", [failed(0), failed(1)])
    (figure,) = Ttft().render([lost], tmp_path)
    assert figure.numbers.column("ttft_p50_s").to_pylist() == [math.inf]
    assert "infinite" in figure.caption
    assert Ttft().render([make_run(tmp_path / "none", [])], tmp_path) == []


def test_a_killed_run_without_a_summary_is_summed_up_from_its_records(tmp_path: Path) -> None:
    run = make_run(tmp_path / "pdd", after(1, 2, 3), summarised=False)
    (figure,) = Ttft().render([run], tmp_path)
    assert figure.numbers.column("ttft_p50_s").to_pylist() == [2.0]


def test_a_name_is_never_read_as_a_formula(tmp_path: Path) -> None:
    run = make_run(tmp_path / r"$\frac{", after(1.0))
    (figure,) = Ttft().render([run], tmp_path)
    assert figure.numbers.column("run").to_pylist() == [r"$\frac{"]
