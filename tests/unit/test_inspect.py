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
from traces.sketch import VERSION

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
    assert page.count("<figure>") == 6
    assert "Trace agentic:" in page
    again = relaybench("trace", "profile", *SMALL, "out=here", cwd=tmp_path)
    assert again.returncode == 2
    assert "never overwritten" in again.stderr


def test_a_profile_says_where_hits_come_from(trace: Trace) -> None:
    measured = measure(trace)
    told = measured.profile
    assert told.within_session_share > 0.5
    assert told.enough_tokens <= measured.capacity.column("capacity_tokens")[-1].as_py()
    assert told.starts_variation > 0
    assert measured.load.column("sessions").to_pylist()[0] >= 1
    assert sum(measured.load.column("sessions").to_pylist()) == trace.sessions


def test_a_profile_draws_a_twin_and_its_fit_is_told(tmp_path: Path) -> None:
    done = relaybench("trace", "profile", "trace.sessions=150", "out=here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    asked = ("trace=twin", "trace.sketch=here/sketch.json", "trace.sessions=60", "to=twin.parquet")
    done = relaybench("trace", "synthesize", *asked, "out=fit", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    twin = canonical.read(tmp_path / "twin.parquet")
    assert twin.sessions == 60
    assert f"Trace: {len(twin):,} requests" in done.stdout
    assert "\nFit, of the first 60 sessions:\n  input_tokens: mean " in done.stdout
    fit = {
        row["of"]: row for row in pq.read_table(tmp_path / "fit" / "likeness.parquet").to_pylist()
    }
    assert fit["input_tokens"]["values"] == len(twin)
    assert fit["input_tokens"]["mean"] == pytest.approx(twin.input_tokens.mean())
    assert fit["turns"]["values"] == 60
    assert (tmp_path / "fit" / "index.html").read_text().count("<figure>") == 1
    told = json.loads((tmp_path / "here" / "sketch.json").read_text())
    assert told["relaybench_sketch"] == VERSION
    assert twin.header.parameters == {"source": "agentic", "sessions": 60, "seed": 1}


def test_what_is_synthesised_is_what_a_run_replays(trace: Trace, tmp_path: Path) -> None:
    asked = ("trace=agentic", *SMALL, "to=mine.jsonl", "out=fit")
    done = relaybench("trace", "synthesize", *asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert canonical.read(tmp_path / "mine.jsonl").digest == trace.digest
    assert not (tmp_path / "fit").exists()
    assert "No fit: agentic has no targets to be near to" in done.stdout


@pytest.mark.parametrize("name", ["mine.parquet", "mine.jsonl", "mine.jsonl.gz"])
def test_a_converted_trace_is_the_same(trace: Trace, tmp_path: Path, name: str) -> None:
    done = relaybench("trace", "convert", *SMALL, f"to={name}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert canonical.read(tmp_path / name).digest == trace.digest


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("mine")
    done = relaybench("trace", "convert", *SMALL, "to=mine.jsonl", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "relaybench: to is mine.jsonl, which exists and is not overwritten: name a new file\n"
    )
    assert (tmp_path / "mine.jsonl").read_text() == "mine"


def test_a_converted_trace_without_prefixes_has_no_hit_rates(tmp_path: Path) -> None:
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-12 00:00:01,9,9\n"
    (tmp_path / "a.csv").write_text(rows)
    asked = ("trace=azure", "trace.path=a.csv", "to=mine.jsonl")
    done = relaybench("trace", "convert", *asked, cwd=tmp_path)
    assert done.stdout.startswith(
        "Trace azure: 1 requests in 1 sessions; no prefix data, so no hit rates\n"
    )


@pytest.mark.parametrize("kind", ["check", "profile", "convert", "synthesize"])
def test_help_is_a_few_lines_with_an_example(kind: str, tmp_path: Path) -> None:
    done = relaybench("trace", kind, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith(f"relaybench trace {kind} ")
    assert f"\n  relaybench trace {kind} " in done.stdout
    assert len(done.stdout.splitlines()) < 12
    assert done.stderr == ""
    whole = relaybench("trace", "--help", cwd=tmp_path)
    assert whole.returncode == 0
    assert done.stdout.partition("\n\n")[0] in whole.stdout


def test_settings_are_shown_on_request(tmp_path: Path) -> None:
    done = relaybench("trace", "profile", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fit_sessions: 2000" in done.stdout


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
        ([], "trace what? Give check, profile, convert, synthesize"),
        (["paint"], "trace what? Give check, profile, convert, synthesize"),
        (["convert"], "to is None: name a new file, as in to=mine.parquet"),
        (
            ["convert", "trace=mooncake", "trace.path=nowhere.jsonl", "to=x.csv"],
            "x.csv: name a file that ends in .parquet, .jsonl, .jsonl.gz",
        ),
        (["synthesize", "to=gone/x.parquet"], "to is gone/x.parquet: there is no folder gone"),
        (
            ["profile", "gone.jsonl"],
            "profile which trace? Name the reader: trace=mooncake trace.path=gone.jsonl; ",
        ),
        (["convert", "to=x.parquet", "gone.jsonl"], "relaybench trace check gone.jsonl says which"),
        (["synthesize", "gone.json", "to=x.parquet"], "name a generator, as in trace=twin"),
        (["profile", "transform=[no]"], "transform=no: no such choice. Choose from anonymise, "),
        (["profile", "trace=twin", "trace.sketch=7"], "7 is no path: name a file"),
        (["profile", "-m"], "one trace at a time"),
        (
            ["synthesize", "trace=constant", "to=x.parquet"],
            "not one that is drawn session by session",
        ),
        (["synthesize", "transform=[shrink]", "to=x.parquet"], "transform needs the whole trace"),
        (["synthesize", "fit_sessions=0", "to=x.parquet"], "fit_sessions is 0"),
        (["synthesize", "trace=twin", "to=x.parquet"], "trace.sketch has no value"),
        (["synthesize", "trace=twin", "trace.sketch=no.json", "to=x.parquet"], "no.json"),
        (["profile", "trace=mooncake", "trace.path=nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_done_is_refused(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = relaybench("trace", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
