"""The workload beside real sessions: counted right, and labelled for what it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hydra import compose, initialize_config_module

from harness.errors import ConfigError
from harness.plugins import build
from harness.record import Record
from reports.workload import COLUMNS, Profile, Workload, profile_of
from tests.unit.rundir import make_run, trace
from tests.unit.test_metrics import record, table
from traces import kv_cache_tester


@pytest.fixture(scope="module")
def workload() -> Workload:
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("run")
    made: Workload = build(config, "report.workload")
    return made


def requests() -> list[Record]:
    """Ten: eight of them hit 96%, inputs 100 to 1,000 tokens, outputs 0 to 900 after one."""
    return [
        record(
            turn,
            input_tokens=100 * (turn + 1),
            output_tokens=100 * turn + 1,
            ideal_hit_tokens=0 if turn < 2 else 96 * (turn + 1),
        )
        for turn in range(10)
    ]


def test_the_figures_are_those_of_a_count_by_hand() -> None:
    profile = profile_of(table(*requests()), "mine")
    assert profile.hit_shares == pytest.approx([0.2, 0, 0.8, 0, 0, 0, 0])
    assert profile.hit_mean == pytest.approx(0.768)
    assert profile.above_95 == pytest.approx(0.8)
    assert profile.input_tokens == [500, 900, 1000]
    assert profile.output_tokens == [401, 801, 901]
    assert profile.under_500 == pytest.approx(0.5)


def test_the_numbers_stand_beside_the_real_and_the_published(
    workload: Workload, tmp_path: Path
) -> None:
    (figure,) = workload.render([make_run(tmp_path / "pdd", requests())], tmp_path)
    assert len(figure.numbers.column_names) == 4
    rows = {row["figure"]: list(row.values())[1:] for row in figure.numbers.to_pylist()}
    assert rows["requests above 95%"] == ["80.0%", "74.3%", "70% to 80%"]
    assert rows["ideal hit rate, mean"] == ["76.8%", "90.0%", "90.0%"]
    assert rows["output tokens, P90"] == ["801", "1,132", None]
    assert rows["requests"] == ["10", "3,558", None]
    assert figure.path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({}, "a fit, not a finding"),
        ({"format": "mooncake"}, "Nothing was fitted here"),
        (
            {"format": "burstgpt", "prefix_data": "absent"},
            "no claim about hit rates can rest on it",
        ),
    ],
)
def test_the_caption_says_what_agreement_is_worth(
    workload: Workload, tmp_path: Path, header: dict[str, Any], words: str
) -> None:
    run = make_run(tmp_path / "pdd", requests(), trace=trace(turns=10, **header))
    (figure,) = workload.render([run], tmp_path)
    assert words in figure.caption
    assert "10 requests recorded of 10" in figure.caption


def test_one_figure_a_trace_and_none_without_a_record(workload: Workload, tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / name, requests(), trace=trace(digest=digest))
        for name, digest in (("a", "1"), ("b", "1"), ("c", "2"))
    ]
    assert len(workload.render(runs, tmp_path)) == 2
    assert workload.render([make_run(tmp_path / "none", [])], tmp_path) == []


def test_a_reference_that_is_not_whole_is_refused() -> None:
    with pytest.raises(ConfigError, match="hit_shares needs 7 numbers"):
        Profile("x", 1, [1.0], 0.9, 0.7, [1, 2, 3], [1, 2, 3], 0.5)


def test_the_real_figures_are_what_our_own_reader_counts(
    workload: Workload, tmp_path: Path
) -> None:
    shared = Path(__file__).resolve().parents[3] / "shared" / "traces" / "kv-cache-tester"
    if not shared.exists():
        pytest.skip("the agent sessions of ../shared are absent")
    (packed,) = shared.glob("*.jsonl.gz")
    subprocess.run([sys.executable, shared / "unpack.py", packed, tmp_path], check=True)
    trace = kv_cache_tester.read(str(tmp_path))
    counted = profile_of(
        pa.table({name: getattr(trace, name) for name in COLUMNS}), workload.real.name
    )
    assert counted.requests == workload.real.requests
    assert counted.hit_shares == pytest.approx(list(workload.real.hit_shares), abs=5e-5)
    assert counted.input_tokens == workload.real.input_tokens
    assert counted.output_tokens == workload.real.output_tokens
    for name in ("hit_mean", "above_95", "under_500"):
        assert getattr(counted, name) == pytest.approx(getattr(workload.real, name), abs=5e-5)
