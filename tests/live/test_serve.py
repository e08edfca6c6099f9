"""The simulator by itself, and behind `relaybench serve` with everything real in between."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

RELAYBENCH = (sys.executable, "-m", "harness")
TRACE = (
    *("trace=agentic", "trace.sessions=10", "transform=[shrink,cap_delays]"),
    *("transform.shrink.block_tokens=2", "transform.cap_delays.max_s=300"),
    *("pacing=scaled", "pacing.speed=2000", "report=[]"),
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of the same system, in the same blocks."""
    command = [*RELAYBENCH, "serve", "backend=in_dc", "server.port=0", "server.block_tokens=2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"on (http://\S+)", line)
        assert found, line
        yield found[1]
        process.terminate()
        assert process.wait(10) == 0


def run(out: Path, *settings: str) -> pd.DataFrame:
    """The records, by turn."""
    command = [*RELAYBENCH, "run", f"out={out}", *TRACE, *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = out.glob("*/records")
    return pd.read_parquet(folder).set_index("turn").sort_index()


def test_a_served_simulation_is_as_fast_as_the_simulation(url: str, tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", "backend=in_dc")
    served = run(tmp_path / "served", "backend=openai", f"backend.openai.url={url}")
    assert len(alone) == len(served) > 200
    ttft_s = [(each["first_token_s"] - each["sent_s"]).quantile(0.5) for each in (alone, served)]
    assert ttft_s[1] == pytest.approx(ttft_s[0], abs=0.005)
    # What it computes and what it hands over agree to the token.
    columns = ["served_input_tokens", "served_output_tokens", "served_hit_tokens"]
    assert (alone[columns] == served[columns]).all().all()
