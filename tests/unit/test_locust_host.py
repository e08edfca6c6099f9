"""A replay shared out among Locust workers: everyone's records once, whoever dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from adapters.locust_host.host import Locust
from harness.errors import ConfigError
from harness.result import Run
from tests.unit.test_plugins import PROJECT

LIMIT_S = 50.0
WORD = "sesame"
ECHO = """
# @package _global_
our_seed: ${oc.decode:${oc.env:OUR_SEED,1}}
backend:
  echo:
    loop: {_target_: harness.clock.WallLoop}
    _target_: tests.unit.echo.Echo
    first_s: 0.02
    gap_s: 0.0
"""
QUICK = [
    "backend=echo", "host=locust", "out=here", "report=[workload]", "trace.sessions=20",
    "trace.session_rate_per_s=40", "trace.shape.delay_limit_s=0.05", "trace.shape.turns_mean=3",
    "trace.shape.answer_tokens={median: 5, sigma: 0, rare_share: 0}",
]  # fmt: skip
LONG = ["backend.echo.first_s=1", "trace.sessions=24", "trace.session_rate_per_s=4"]
"""Four sessions a second for 6 s, each turn under way for 1 s."""


class Bench(subprocess.Popen[str]):
    """A run in a folder of its own; nothing of it is left."""

    def __init__(self, folder: Path, *overrides: str, **environment: str) -> None:
        (folder / "conf" / "backend").mkdir(parents=True)
        (folder / "conf" / "backend" / "echo.yaml").write_text(ECHO)
        self.run = folder / "here" / "echo"
        super().__init__(
            [sys.executable, "-m", "harness", "run", "--config-dir", "conf", *QUICK, *overrides],
            cwd=folder, env=os.environ | {"PYTHONPATH": str(PROJECT)} | environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    @property
    def manifest(self) -> dict[str, Any]:
        return Run.open(self.run).manifest

    @property
    def records(self) -> pa.Table:
        return Run.open(self.run).records(["turn", "worker", "status", "error", "sent_s"])

    def until_sent(self) -> None:
        """Some records of both workers are on disk."""

        def both() -> bool:
            assert self.poll() is None, self.communicate()
            there = (self.run / "run.json").exists()
            return there and {0, 1} <= {*self.records["worker"].to_pylist()}

        until(both)

    def family(self) -> set[int]:
        """All processes that came of it."""
        found = subprocess.run(
            ["/bin/ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True
        )
        rows = [line.split(maxsplit=2) for line in found.stdout.splitlines()]
        return {
            int(pid) for pid, parent, args in rows
            if int(parent) == self.pid and "adapters.locust_host" in args
        }  # fmt: skip

    def whole(self) -> tuple[int, str, str]:
        """Its exit code and what it said."""
        out, err = self.communicate(timeout=LIMIT_S)
        return self.returncode, out, err


@contextmanager
def bench(folder: Path, *overrides: str, **environment: str) -> Iterator[Bench]:
    run = Bench(folder, *overrides, **environment)
    try:
        yield run
    finally:
        run.kill()
        run.communicate()


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, "it never came to pass"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def once_each(run: Bench) -> bool:
    turns = run.manifest["trace"]["turns"]
    return sorted(run.records["turn"].to_pylist()) == [*range(turns)]


def test_two_workers_record_every_turn_once_and_start_together(tmp_path: Path) -> None:
    with bench(tmp_path) as run:
        code, _, err = run.whole()
        assert code == 0, err
        assert once_each(run)
        workers = run.manifest["workers"]
        counted = run.records["worker"].to_pylist()
        assert [each["worker"] for each in workers] == [0, 1]
        assert [each["turns"] for each in workers] == [counted.count(0), counted.count(1)]
        for each in workers:
            assert each["end"] == "whole"
            assert -0.001 < each["start_skew_s"] < 0.5
            assert each["clock_ahead_s"] == 0, "one machine has one clock"
        assert run.manifest["validity"]["valid"]
        assert err == ""


def test_workers_read_secrets_in_their_own_environment(tmp_path: Path) -> None:
    keyed = [
        "backend.echo._target_=tests.unit.echo.Keyed",
        "+backend.echo.auth={api_key: '${oc.env:OUR_KEY}'}",
    ]
    with bench(tmp_path, *keyed, OUR_KEY="sk-TOPSECRET") as run:
        code, _, err = run.whole()
        assert code == 0, err
        written = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert not any(b"sk-TOPSECRET" in path.read_bytes() for path in written)


def test_a_killed_worker_is_named_and_the_others_records_are_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with bench(tmp_path, *LONG, f"host.web_port={port}") as run:
        run.until_sent()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/stats/requests") as page:
            assert json.load(page)["stats"][-1]["num_requests"] > 0
        os.kill(run.manifest["workers"][1]["pid"], signal.SIGKILL)
        code, out, _ = run.whole()
        assert code == 1
        assert "worker 1 died (killed by signal 9)" in out
        assert once_each(run)
        assert run.manifest["partial"]
        assert run.manifest["validity"]["reasons"][0].startswith("worker 1 died")
        rows = run.records.to_pylist()
        assert {row["status"] for row in rows if row["worker"] == 0} == {"ok"}
        lost = [row for row in rows if row["worker"] == 1 and row["status"] != "ok"]
        assert {row["status"] for row in lost} == {"cancelled", "unsent"}
        for row in lost:
            assert row["error"].startswith("worker 1 died")
            assert (row["sent_s"] is None) == (row["status"] == "unsent")
        summary = Run.open(run.run).summary().to_pylist()[0]
        assert summary["measured"] == run.manifest["counts"]["sent"]


def test_an_interruption_keeps_what_there_is_and_leaves_nobody(tmp_path: Path) -> None:
    with bench(tmp_path, *LONG) as run:
        run.until_sent()
        family = run.family()
        assert len(family) == 3
        run.send_signal(signal.SIGINT)
        code, out, err = run.whole()
        assert code == 130, err
        assert "Traceback" not in err
        assert "What was gathered is kept" in out
        assert once_each(run)
        assert {"ok", "cancelled", "unsent"} == {*run.records["status"].to_pylist()}
        assert run.manifest["partial"]
        assert not any(map(alive, family))


def test_children_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    with bench(tmp_path, *LONG) as run:
        run.until_sent()
        family = run.family()
        run.kill()
        until(lambda: not any(map(alive, family)))
        assert run.records.num_rows > 0


def test_a_worker_of_another_machine_joins_with_the_token_and_the_same_trace(
    tmp_path: Path,
) -> None:
    settings = ["host.processes=1", "host.workers=1", "trace.seed=${our_seed}"]
    with bench(tmp_path, *settings, OUR_SEED="7", RELAYBENCH_TOKEN=WORD) as run:
        assert run.stdout is not None
        line = next(line for line in run.stdout if "--master" in line)
        command = line[line.index("-m") :].split()

        def join(token: str, seed: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, *command], cwd=PROJECT, check=False, text=True,
                env=os.environ | {"RELAYBENCH_TOKEN": token, "OUR_SEED": seed},
                capture_output=True, timeout=LIMIT_S,
            )  # fmt: skip

        stranger, other, good = join("nonsense", "7"), join(WORD, "8"), join(WORD, "7")
        assert stranger.returncode == 2
        assert "its token is wrong" in stranger.stderr
        assert other.returncode == 2
        assert "its trace differs from the run's" in other.stderr
        assert good.returncode == 0, good.stderr
        code, out, err = run.whole()
        assert code == 0, err
        assert "refused worker 1" in out
        assert WORD not in line
        assert once_each(run)
        assert {*run.records["worker"].to_pylist()} == {0, 1}
        assert WORD not in json.dumps(run.manifest)


def test_a_fault_in_a_worker_is_shown_with_its_traceback(tmp_path: Path) -> None:
    with bench(tmp_path, "backend.echo._target_=tests.unit.echo.Faulty") as run:
        code, _, err = run.whole()
        assert code == 1
        assert "ZeroDivisionError" in err
        assert "in generate" in err
        assert once_each(run)
        assert run.manifest["partial"]


def test_a_backend_that_a_worker_cannot_use_is_code_3(tmp_path: Path) -> None:
    with bench(tmp_path, "backend.echo._target_=tests.unit.echo.OnlyHere") as run:
        code, _, err = run.whole()
        assert code == 3
        assert "nobody listens" in err
        assert "Traceback" not in err


def test_the_virtual_clock_is_refused(tmp_path: Path) -> None:
    with bench(tmp_path, "backend.echo.loop._target_=harness.clock.VirtualTimeLoop") as run:
        code, _, err = run.whole()
        assert code == 2
        assert "backend.echo runs on a virtual clock, which several processes cannot share" in err
        assert not run.run.exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"processes": 0}, "somebody must replay"),
        ({"processes": -1}, "host.processes is -1"),
        ({"port": 70000}, "host.port is 70000"),
        ({"web_port": 0}, "host.web_port is 0"),
        ({"wait_s": 0}, "host.wait_s is 0"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Locust(**settings)


def test_locust_is_imported_in_no_other_process() -> None:
    words = "import sys, adapters.locust_host.host, harness.cli, harness.run; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert not {"locust", "gevent", "zmq"} & set(done.stdout.split())
