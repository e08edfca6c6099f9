"""A whole run against Dynamo's frontend with a prefill and a decode worker, and one that dies.

Runs where RELAYBENCH_LIVE_DYNAMO names a folder that `stack.py install dynamo` has filled.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from tests.live import stack

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def servers() -> Iterator[stack.Servers]:
    folder = os.environ.get("RELAYBENCH_LIVE_DYNAMO")
    if not folder:
        pytest.skip("RELAYBENCH_LIVE_DYNAMO names no folder with Dynamo installed")
    with stack.up("dynamo", Path(folder)) as servers:
        yield servers


def command(out: Path, *more: str) -> list[str]:
    return [sys.executable, str(HERE / "replay.py"), "--out", str(out), *more]


def test_hits_are_served_as_wanted_and_both_roles_took_every_request(
    servers: stack.Servers, tmp_path: Path
) -> None:
    done = subprocess.run(
        command(tmp_path / "run", "--sessions", "4", "--speed", "400"),
        env=os.environ | servers.environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT SHOWN" not in done.stdout
    run = tmp_path / "run" / "dynamo"
    counted = json.loads((run / "run.json").read_text())["backend"]["details"]["pd_counters"]
    records = pd.read_parquet(run / "records", columns=["status", "route"])
    assert counted["P requests"] >= len(records)
    assert counted["D requests"] >= len(records)
    assert set(records["route"]) == {"P-D"}
    series = pd.read_parquet(run / "metrics.parquet")
    assert {source[:2] for source in series["source"]} == {"P ", "D "}
    assert (series[series["name"] == "up"]["value"] == 1).all()


def test_every_report_takes_a_real_servers_runs(servers: stack.Servers, tmp_path: Path) -> None:
    """As those of a simulator: what can be known is drawn, and of the rest it is said."""
    for at, speed in enumerate(("200", "400")):
        done = subprocess.run(
            command(
                tmp_path / str(at), "--sessions", "3", "--speed", speed,
                "backend.dynamo.cards={P: 1, D: 1}",
            ),
            env=os.environ | servers.environment(),
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    known = sorted(path.stem for path in (HERE.parents[1] / "conf" / "report").glob("*.yaml"))
    done = subprocess.run(
        [
            sys.executable, "-m", "harness", "report", "0", "1", f"report=[{','.join(known)}]",
            "--out", "page",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page = tmp_path / "page"
    drawn = {path.stem for path in page.glob("*.png")}
    assert {"workload", "ttft", "hitrate", "bcr", "compare"} <= drawn
    assert not {"transfer", "timeline", "handoff", "stability", "bathtub"} & drawn
    assert (page / "report.html").read_text().count("Nothing to draw") == 5


def test_a_decode_worker_killed_under_load_shows_in_the_run(
    servers: stack.Servers, tmp_path: Path
) -> None:
    """The last test of the file: the stack is of no use after it."""
    running = subprocess.Popen(
        command(tmp_path / "run", "--sessions", "6", "--speed", "50", "timeout_s=10"),
        env=os.environ | servers.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    records = tmp_path / "run" / "dynamo" / "records"
    deadline_s = time.monotonic() + 60
    while not list(records.glob("*.arrows")) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    time.sleep(1)
    os.kill(servers.pids["decode"], signal.SIGKILL)
    said, _ = running.communicate(timeout=200)
    assert running.returncode == 1, said
    manifest = json.loads((records.parent / "run.json").read_text())
    assert not manifest["validity"]["valid"]
    ended = pd.read_parquet(records, columns=["status", "error_class"])
    assert manifest["counts"]["scheduled"] == len(ended)
    assert (ended["status"] == "ok").any(), said
    assert (ended["status"] == "failed").any(), said
    failed = ended[ended["status"] == "failed"]["error_class"]
    assert set(failed) <= {"BadStream", "BadStatus", "RequestTimeout", "ConnectFailed"}
