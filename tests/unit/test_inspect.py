"""`relaybench trace`: what a trace is like, and one form of it for all."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from harness.trace import Trace
from tests.simulated import configured
from tests.unit.test_cli import relaybench
from traces import canonical
from traces.profile import measure

SMALL = ("trace.sessions=12",)


@pytest.fixture(scope="module")
def trace() -> Trace:
    from harness.run import load_trace  # noqa: PLC0415 - heavy, and only here

    return load_trace(configured(*SMALL))


def test_a_profile_is_figures_pictures_and_a_page(trace: Trace, tmp_path: Path) -> None:
    done = relaybench("trace", "profile", *SMALL, "out=here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "here"
    told = json.loads((out / "profile.json").read_text())
    assert told["requests"] == len(trace)
    assert told["ideal_hit_token_weighted"] == trace.ideal_hit_token_weighted
    assert sum(told["bins"]) == pytest.approx(1)
    capacity = pq.read_table(out / "capacity.parquet").to_pylist()
    assert capacity[-1]["hit_share"] == trace.ideal_hit_token_weighted
    assert [row["hit_share"] for row in capacity] == sorted(row["hit_share"] for row in capacity)
    page = (out / "index.html").read_text()
    assert page.count("<figure>") == 3
    assert "Trace agentic:" in page
    again = relaybench("trace", "profile", *SMALL, "out=here", cwd=tmp_path)
    assert again.returncode == 2
    assert "never overwritten" in again.stderr


def test_a_trace_of_one_turn_sessions_has_no_delays(trace: Trace) -> None:
    told, capacity = measure(trace)
    assert told["within_session_share"] > 0.5
    assert told["enough_tokens"] <= capacity.column("capacity_tokens")[-1].as_py()
    assert told["starts_variation"] > 0


@pytest.mark.parametrize("name", ["mine.parquet", "mine.jsonl", "mine.jsonl.gz"])
def test_a_converted_trace_is_the_same(trace: Trace, tmp_path: Path, name: str) -> None:
    done = relaybench("trace", "convert", *SMALL, f"to={name}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert canonical.read(tmp_path / name).digest == trace.digest


def test_a_converted_trace_can_be_run(tmp_path: Path) -> None:
    done = relaybench("trace", "convert", *SMALL, "to=mine.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = relaybench(
        "run", "trace=canonical", "trace.path=mine.jsonl", "backend=in_dc", "report=[]",
        "out=run", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_an_anonymous_trace_names_nobody(tmp_path: Path) -> None:
    done = relaybench(
        "trace", "convert", *SMALL, "transform=[anonymise]", "to=mine.parquet", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    data = (tmp_path / "mine.parquet").read_bytes()
    assert b"edited_share" not in data, "a setting of the generator"
    agents = set(canonical.read(tmp_path / "mine.parquet").table.column("agent").to_pylist())
    assert all(each.startswith("agent ") for each in agents)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "trace what? Give profile or convert"),
        (["paint"], "trace what? Give profile or convert"),
        (["convert"], "to is None: name a new file that ends in .parquet, .jsonl"),
        (["convert", "to=x.csv"], "to is 'x.csv'"),
        (["profile", "-m"], "one trace at a time"),
        (["profile", "trace=mooncake", "trace.path=nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_done_is_refused(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = relaybench("trace", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
