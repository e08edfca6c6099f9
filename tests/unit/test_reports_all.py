"""Every report takes every odd run: it draws, or says that it has nothing to draw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_module

from harness import result
from harness.plugins import build
from harness.record import Record
from harness.report import Report
from harness.result import Run
from tests.unit.rundir import make_run
from tests.unit.test_metrics import record

REPORTS = sorted(path.stem for path in (Path(__file__).parents[2] / "conf/report").glob("*.yaml"))


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("run", [f"report=[{','.join(REPORTS)}]"])
    return {name: build(config, f"report.{name}") for name in REPORTS}


def relayed(turn: int, **values: Any) -> Record:
    """With all that a simulator says."""
    parts = {
        "route": "P-RLD-MD",
        "prefill_start_s": turn + 0.1,
        "prefill_end_s": turn + 0.5,
        "transfer_start_s": turn + 0.5,
        "transfer_end_s": turn + 1.2,
        "transfer_bytes": 1e6,
        "decode_hit_tokens": 800,
        "decode_start_s": turn + 1.3,
        "relay_bytes": 1e6,
        "relay_tokens": 3,
        "handoff": "one-shot",
        "handoff_bytes": 45.0,
        "handoff_start_s": turn + 1.3,
        "handoff_s": turn + 1.4,
        "gaps_us": np.full(10, 100_000, np.int32),
        "timed_by": "token",
        "ideal_hit_tokens": 500,
    }
    return record(turn, **(parts | values))


def failed(turn: int) -> Record:
    return record(
        turn, status="failed", error="x", error_class="BadStatus", first_token_s=None,
        last_token_s=None, served_hit_tokens=None, served_input_tokens=None,
        served_output_tokens=None,
    )  # fmt: skip


ODD = {
    "no request": [],
    "one request": [relayed(0)],
    "one of a server that says little": [record(0, served_hit_tokens=None)],
    "none answered": [failed(turn) for turn in range(3)],
    "most failed": [relayed(0), *(failed(turn) for turn in range(1, 9))],
    "none sent": [
        record(turn, status="unsent", sent_s=None, first_token_s=None, last_token_s=None)
        for turn in range(3)
    ],
    "no cached_tokens": [relayed(turn, served_hit_tokens=None) for turn in range(5)],
    "one token each": [relayed(turn, served_output_tokens=1, gaps_us=None) for turn in range(5)],
}


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("odd", ODD)
def test_an_odd_run_is_drawn_or_not_and_never_breaks(
    reports: dict[str, Report], name: str, odd: str, tmp_path: Path
) -> None:
    """Alone, and beside another of the same kind and one that is whole."""
    rows = ODD[odd]
    alone = make_run(tmp_path / "a" / "pdd", rows)
    again = make_run(tmp_path / "b" / "pdd", rows, overrides=["seed=2"])
    whole = make_run(tmp_path / "in_dc", [relayed(turn) for turn in range(8)])
    for at, runs in enumerate(([alone], [alone, again], [whole, alone])):
        out = tmp_path / f"out{at}"
        out.mkdir()
        for figure in reports[name].render(runs, out):
            assert figure.path.stat().st_size > 1000
            assert len(figure.caption) > 20
            assert figure.numbers.num_rows > 0


@pytest.mark.parametrize("name", REPORTS)
def test_a_run_that_is_being_written_is_read_as_far_as_it_is(
    reports: dict[str, Report], name: str, tmp_path: Path
) -> None:
    """Neither summary nor whole parts, as after kill -9."""
    path = tmp_path / "pdd"
    rows = [relayed(turn) for turn in range(6)]
    make_run(path, rows, summarised=False, partial=True)
    (part,) = (path / result.RECORDS).glob("*.parquet")
    table = pq.read_table(part)
    part.unlink()

    with pa.OSFile(str(part.with_suffix(".arrows")), "wb") as sink:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        sink.write(b"\xff\xff\xff\xff half a batch")
    reports[name].render([Run.open(path)], tmp_path)
    manifest = json.loads((path / "run.json").read_text())
    assert manifest["partial"] is True
