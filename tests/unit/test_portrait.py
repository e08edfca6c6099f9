"""The pages of `relaybench trace`: a trace in figures, and how near a generated one came."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import StepPatch
from matplotlib.transforms import Bbox

from harness.report import Figure
from harness.trace import Trace
from reports.canvas import canvas, log_axis
from reports.likeness import NAMES, Likeness
from reports.portrait import Portrait, draw_load, draw_quantiles
from tests.unit.conftest import HEADER, MakeTrace
from tests.unit.test_cli import relaybench
from traces.likeness import Fit
from traces.profile import measure
from traces.sketch import samples

Drawn = Mapping[str, Figure]


@pytest.fixture
def draw(tmp_path: Path) -> Callable[[Trace], Drawn]:
    """The figures of a trace, by the names of their files."""

    def render(trace: Trace) -> Drawn:
        measured: Any = measure(trace)
        return {each.path.stem: each for each in Portrait().render(measured, tmp_path)}

    return render


def single(make_trace: MakeTrace, requests: int, **columns: Any) -> Trace:
    """So many sessions of one turn, of two blocks each, of which they share one."""
    count = range(requests)
    told: dict[str, Any] = {
        "session": count,
        "turn_index": [0] * requests,
        "parents": [[]] * requests,
        "recorded_s": [float(at) for at in count],
        "arrival_s": [float(at) for at in count],
        "delay_s": [None] * requests,
        "input_tokens": [128] * requests,
        "output_tokens": [3 + at for at in count],
        "run_starts": [[0, 10 * (at + 1)] for at in count],
        "run_lengths": [[1, 1]] * requests,
        "agent": ["main"] * requests,
    }
    return make_trace(**(told | columns))


def test_every_figure_of_a_trace_that_has_all(
    make_trace: MakeTrace, draw: Callable[[Trace], Drawn]
) -> None:
    drawn = draw(make_trace())
    assert set(drawn) == {"hits", "lengths", "distributions", "capacity", "working_set", "load"}
    assert "turns a session" in drawn["lengths"].numbers.column("of").to_pylist()
    assert "4 requests, 2 sessions. " in drawn["lengths"].caption


def test_a_trace_without_blocks_has_no_working_set(
    make_trace: MakeTrace, draw: Callable[[Trace], Drawn]
) -> None:
    """Shorter than a block, all of them: nothing positive for a log axis."""
    trace = single(
        make_trace, 3, input_tokens=[9, 10, 11], run_starts=[[]] * 3, run_lengths=[[]] * 3
    )
    assert set(draw(trace)) == {"hits", "lengths", "distributions", "load"}


def test_a_trace_of_one_request_has_no_curves(
    make_trace: MakeTrace, draw: Callable[[Trace], Drawn]
) -> None:
    assert set(draw(single(make_trace, 1))) == {"hits", "lengths"}


def test_a_trace_of_one_block_has_no_capacity(
    make_trace: MakeTrace, draw: Callable[[Trace], Drawn]
) -> None:
    """A curve of one point."""
    trace = single(
        make_trace, 3, input_tokens=[64] * 3, run_starts=[[0]] * 3, run_lengths=[[1]] * 3
    )
    assert set(draw(trace)) == {"hits", "lengths", "distributions", "working_set", "load"}


def test_without_prefix_data_no_figure_tells_of_hits(
    make_trace: MakeTrace, draw: Callable[[Trace], Drawn]
) -> None:
    """Also where it has blocks: a transform made them up."""
    header = replace(HEADER, prefix_data="absent")
    drawn = draw(single(make_trace, 3, header=header, input_tokens=[128, 129, 130]))
    assert set(drawn) == {"lengths", "distributions", "load"}
    told = drawn["distributions"].numbers.column("of").unique().to_pylist()
    assert told == ["input_tokens", "output_tokens"]
    assert "No prefix data: " in drawn["lengths"].caption
    recorded = draw(single(make_trace, 3))
    assert "No prefix data" not in recorded["lengths"].caption


def test_turns_are_told_in_words_where_all_sessions_have_one(
    make_trace: MakeTrace, draw: Callable[[Trace], Drawn]
) -> None:
    lengths = draw(single(make_trace, 3))["lengths"]
    assert lengths.numbers.column("of").to_pylist() == ["input tokens", "output tokens"]
    assert "3 sessions: every session has one turn." in lengths.caption


def test_the_last_part_of_the_load_is_drawn_to_its_end(tmp_path: Path) -> None:
    with canvas(tmp_path / "load.png", 7.5, 2) as figure:
        axes = figure.subplots()
        draw_load(axes, np.array([0.0, 2.0, 4.0]), np.array([1, 0, 6]))
    (steps,) = axes.patches
    assert isinstance(steps, StepPatch)
    rates, edges_s, _ = steps.get_data()
    assert rates.tolist() == [0.5, 0, 3]
    assert edges_s.tolist() == [0, 2, 4, 6]


def test_quantiles_that_are_near_can_all_be_read(tmp_path: Path) -> None:
    with canvas(tmp_path / "near.png", 7.5, 2) as figure:
        axes = figure.subplots()
        draw_quantiles(axes, {"turns a session": (17, 17, 18), "delay, s": (0.0, 8.58, 2727.0)})
    texts = [each.get_text() for each in axes.texts]
    assert texts == ["P50 / P90 / P99", "17 / 17 / 18", "0 / 8.58 / 2,727"]
    boxes = [each.get_window_extent() for each in axes.texts]
    assert all(upper.y0 > lower.y1 for upper, lower in pairwise(boxes))
    assert all(box.x0 > axes.bbox.x1 for box in boxes)
    assert max(box.x1 for box in boxes) <= figure.bbox.x1


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (5, 5), (104_000, 104_500), (6, 9), (3, 14), (15, 140), (101_000, 990_000), (2, 81),
        (1, 999), (9_000, 130_000), (1, 1e5), (0.01, 3e4), (1e-3, 1e9), (1e-9, 1e12),
    ],
)  # fmt: skip
@pytest.mark.parametrize("side", ["x", "y"])
def test_a_log_axis_of_any_length_can_be_read(
    low: float, high: float, side: str, tmp_path: Path
) -> None:
    with canvas(tmp_path / "axis.png", 3, 2.4) as figure:
        axes = figure.subplots()
        axes.plot([low, high], [low, high])
        log_axis(axes.xaxis if side == "x" else axes.yaxis)
    labels = seen(figure, side)
    assert len(labels) >= 2, "one number tells no scale"
    assert not any("$" in text for text in labels), "a formula, which we do not set"
    boxes = sorted(labels.values(), key=lambda box: float(getattr(box, f"{side}0")))
    gaps = [getattr(b, f"{side}0") - getattr(a, f"{side}1") for a, b in pairwise(boxes)]
    assert min(gaps) > 0, f"labels in each other's way: {list(labels)}"


def seen(figure: Canvas, side: str) -> Mapping[str, Bbox]:
    """The labels on an axis, of major and minor ticks, and where they are."""
    axis = getattr(figure.axes[0], f"{side}axis")
    low, high = axis.get_view_interval()
    return {
        tick.label1.get_text(): tick.label1.get_window_extent()
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        if low <= tick.get_loc() <= high and tick.label1.get_text()
    }


def test_thousandths_are_not_called_m(tmp_path: Path) -> None:
    """Of seconds that would read as minutes."""
    with canvas(tmp_path / "axis.png", 7, 2.4) as figure:
        axes = figure.subplots()
        axes.plot([0.01, 2e6], [0, 1])
        log_axis(axes.xaxis)
    labels = [float(text) for text in seen(figure, "x") if not text.endswith(("k", "M"))]
    assert labels == [0.01, 0.1, 1, 10, 100]
    assert {"1k", "100k", "1M"} < set(seen(figure, "x"))


def test_a_fit_says_on_how_much_it_was_measured(tmp_path: Path) -> None:
    names = ("input_tokens", "turns")
    table = pa.table(
        {
            "of": names, "values": [1234, 60], "wanted_mean": [9.0, 2.0], "mean": [9.0, 2.0],
            "ks": [0.1, 0.2], "distance": [0.1, 0.2],
        }
    )  # fmt: skip
    line = {"share": [0.0, 1.0], "wanted": [1.0, 2.0], "got": [1.0, 3.0]}
    quantiles = pa.concat_tables(pa.table({"of": [name] * 2, **line}) for name in names)
    (figure,) = Likeness().render(Fit(table, quantiles), tmp_path)
    assert "of what was drawn first: 60 sessions, 1,234 requests." in figure.caption


def test_pages_say_what_they_are_and_what_is_not_known(tmp_path: Path) -> None:
    """From rows without prefix data to their profile, and on to a twin and its fit."""
    rows = [f"2023-11-16 18:17:0{at}.9799600,{900 + at},{10 + at}" for at in range(5)]
    (tmp_path / "t.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    done = relaybench("trace", "profile", "trace=azure", "trace.path=t.csv", "out=p", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    page = (tmp_path / "p" / "index.html").read_text()
    assert "<h1>Profile of a trace: azure</h1>" in page
    assert "No prefix data: " in page
    assert not (tmp_path / "p" / "hits.png").exists()
    assert json.loads((tmp_path / "p" / "profile.json").read_text())["prefix_data"] == "absent"
    asked = ("trace=twin", "trace.sketch=p/sketch.json", "trace.sessions=9", "fit_sessions=7")
    done = relaybench("trace", "synthesize", *asked, "to=t.jsonl", "out=fit", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "fit" / "index.html").read_text()
    assert "<h1>Fit of a synthetic trace: twin</h1>" in page
    assert "7 sessions, 7 requests." in page
    numbers = pq.read_table(tmp_path / "fit" / "likeness.parquet")
    assert np.all(numbers.column("ks").to_numpy() <= 1)


def test_every_distribution_has_a_name_for_people(make_trace: MakeTrace) -> None:
    assert set(samples(make_trace())) <= set(NAMES)
