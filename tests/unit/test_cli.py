"""The command line as a person meets it: exit codes, messages, and what it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from harness.result import Run, find_runs

PROJECT = Path(__file__).parents[2]

SMALL = ["trace.sessions=6", "backend=pdd"]


def relaybench(
    *arguments: str, cwd: Path, hash_seed: str = "random"
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    return subprocess.run(
        [sys.executable, "-m", "harness", *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_help_is_quick_and_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['relaybench', '--help']\n"
        "from harness.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'numpy', 'pyarrow', 'pandas', 'hydra', 'omegaconf', 'matplotlib', 'locust'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "relaybench report" in done.stdout


def test_a_run_leaves_its_directory_and_a_page(tmp_path: Path) -> None:
    done = relaybench("run", *SMALL, "out=here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "requests ok; TTFT P50/P90/P99" in done.stdout
    assert (tmp_path / "here" / "report.html").exists()
    assert (tmp_path / "here" / "config.yaml").exists()
    run = Run.open(tmp_path / "here" / "pdd")
    assert run.manifest["validity"] == {"valid": True, "reasons": []}
    assert run.manifest["partial"] is False
    assert run.records().num_rows == run.manifest["trace"]["turns"]
    assert run.summary().to_pylist()[0]["ok"] == run.manifest["counts"]["scheduled"]


def test_the_same_seed_gives_the_same_tables_under_any_hash_seed(tmp_path: Path) -> None:
    tables: list[pa.Table] = []
    for out, seed, hash_seed in (("a", 3, "1"), ("b", 3, "2"), ("c", 4, "1")):
        done = relaybench(
            "run", *SMALL, f"seed={seed}", f"out={out}", cwd=tmp_path, hash_seed=hash_seed
        )
        assert done.returncode == 0, done.stderr
        tables.append(Run.open(tmp_path / out / "pdd").records())
    assert tables[0].equals(tables[1])
    assert not tables[0].equals(tables[2])


def test_a_folder_that_exists_is_refused(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    done = relaybench("run", *SMALL, "out=here", cwd=tmp_path)
    assert done.returncode == 2
    assert "never overwritten" in done.stderr
    assert done.stdout == ""  # found before any work
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["backend=nonesuch"], ["nonesuch", "cross_dc", "in_dc", "pdd"]),
        (["trace=nonesuch"], ["nonesuch", "agentic", "kv_cache_tester", "mooncake"]),
        (["pacing=nonesuch"], ["nonesuch", "closed", "poisson", "recorded", "scaled"]),
        (["transform=[nonesuch]"], ["transform=nonesuch: no such choice", "cap_delays", "shrink"]),
        (["backend=[pdd,nonesuch]"], ["backend=nonesuch: no such choice", "cross_dc, ", "vllm"]),
        (["nonesuch=1"], ["nonesuch"]),
        (["backend.pdd.nonesuch=1"], ["nonesuch"]),
        (["+backend.pdd.nonesuch=1"], ["nonesuch"]),
        (["trace=mooncake"], ["trace.path", "add trace.path="]),
        (["pacing=closed", "pacing.sessions=0"], ["pacing.sessions is 0", "1 or more"]),
        (["backend=[]"], ["no backend is chosen", "backend=pdd"]),
        (["trace=mooncake", "trace.path=absent.jsonl"], ["absent.jsonl"]),
        (["trace.sessions=-1"], ["sessions"]),
        (["seed=one two"], ["seed"]),
        (["seed=x"], ["seed"]),
        (["seed=-1"], ["seed"]),
        (["timeout_s=-1"], ["timeout_s"]),
        (["window.warmup_s=-1"], ["window.warmup_s"]),
        (["timeout_s=abc"], ["timeout_s is 'abc'"]),
        (["timeout_s=inf"], ["timeout_s is inf"]),
        (["pacing=closed", "pacing.sessions=2.5"], ["pacing.sessions is 2.5"]),
        (["transform=cap_delays", "transform.cap_delays.max_s=abc"], ["cap_delays.max_s is 'abc'"]),
        (["transform=first_sessions", "transform.first_sessions.sessions=x"], ["is 'x'"]),
        (["window=null"], ["window is None"]),
        (["page=null"], ["page is None"]),
        (["trace=null"], ["Config group override must be a string"]),
        (["backend.pdd=null"], ["backend.pdd"]),
        (["out=null"], ["out is None"]),
        (["out=7"], ["out is 7"]),
        (["backend.pdd.loop=5"], ["backend.pdd.loop"]),
        (["backend.pdd.loop._target_=builtins.dict"], ["name a loop of harness.clock"]),
    ],
    ids=" ".join,
)
def test_a_bad_setting_is_one_message_and_code_2(
    tmp_path: Path, overrides: list[str], words: list[str]
) -> None:
    done = relaybench("run", "out=here", *overrides, cwd=tmp_path)
    assert done.returncode == 2, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    assert not (tmp_path / "here").exists()


def test_each_job_of_a_sweep_has_its_folder(tmp_path: Path) -> None:
    done = relaybench("run", "-m", *SMALL, "out=here", "seed=1,2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "here").iterdir() if path.is_dir()) == [
        "0",
        "1",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_a_page_is_drawn_again_from_run_directories(tmp_path: Path) -> None:
    assert relaybench("run", *SMALL, "out=here", cwd=tmp_path).returncode == 0
    done = relaybench("report", "here", "--out", "again", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first = (tmp_path / "here" / "ttft.png").read_bytes()
    assert (tmp_path / "again" / "ttft.png").read_bytes() == first
    for kind in ("pdf", "csv", "parquet"):
        names = [tmp_path / folder / f"ttft.{kind}" for folder in ("here", "again")]
        assert names[0].read_bytes() == names[1].read_bytes()
    done = relaybench("report", "here", "report=[hitrate]", "--out", "one", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "one" / "ttft.png").exists()
    done = relaybench("report", "nowhere", "--out", "more", cwd=tmp_path)
    assert done.returncode == 2
    assert "holds no run" in done.stderr
    assert not (tmp_path / "more").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_what_was_gathered_is_kept(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Stopped in the middle, the records on disk are those of the turns that had ended."""
    command = [sys.executable, "-m", "harness", "run", "backend=pdd", "out=here"]
    with subprocess.Popen(
        [*command, "trace.sessions=3000"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as child:  # fmt: skip
        folder = tmp_path / "here" / "pdd" / "records"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not any(folder.glob("part-*")):
            time.sleep(0.05)
        time.sleep(1.0)
        child.send_signal(number)
        _, errors = child.communicate(timeout=60)
        assert child.returncode == code, errors
    run = find_runs(tmp_path / "here")[0]
    records = run.records()
    assert run.manifest["partial"] is True
    assert run.manifest["validity"]["valid"] is False
    assert pc.sum(pc.equal(records.column("status"), "ok")).as_py() > 1000
    if number == signal.SIGINT:
        assert records.num_rows == run.manifest["trace"]["turns"]
        assert run.manifest["validity"]["reasons"][0] == "interrupted"
        assert "Traceback" not in errors.decode()


def test_a_limit_without_limit_is_written_down(tmp_path: Path) -> None:
    done = relaybench(
        "run", *SMALL, "out=here", "backend.pdd.prefill.P.cache_bytes=inf", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    details = Run.open(tmp_path / "here" / "pdd").manifest["backend"]["details"]
    assert details["prefill"]["P"]["cache_bytes"] == "inf"


def test_a_window_that_measures_nothing_is_not_valid(tmp_path: Path) -> None:
    done = relaybench("run", *SMALL, "out=here", "window.warmup_s=1e9", cwd=tmp_path)
    assert done.returncode == 1
    assert "no request was measured" in done.stdout


def test_an_interrupted_sweep_starts_no_other_job(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "harness", "run", "-m", "backend=pdd", "out=here"]
    with subprocess.Popen(
        [*command, "trace.sessions=3000,3001"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as child:  # fmt: skip
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not any(tmp_path.glob("here/0/pdd/records/part-*")):
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
        assert child.returncode == 130, errors
    assert [path.name for path in (tmp_path / "here").iterdir() if path.is_dir()] == ["0"]


@pytest.mark.parametrize("text", ["{}", "[]", '{"backend": 1}'])
def test_a_manifest_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(text)
    done = relaybench("report", "run", "--out", "page", cwd=tmp_path)
    assert done.returncode == 2
    assert "another version wrote it, or something else" in done.stderr
