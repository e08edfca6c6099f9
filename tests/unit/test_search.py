"""The highest load that keeps a promise: the bisection, and the command around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.result import find_runs
from harness.search import Search
from tests.unit.test_cli import relaybench


def search(low: float = 1.0, high: float = 64.0) -> Search:
    return Search("x", low, high, 0.05)


@pytest.mark.parametrize("limit", [1.0, 1.3, 7.77, 63.9])
def test_the_limit_is_found_to_the_tolerance(limit: float) -> None:
    tried: list[float] = []

    def keeps(value: float) -> bool:
        tried.append(value)
        return value <= limit

    best = search().best(keeps)
    assert best is not None
    assert best <= limit < best * 1.05
    assert len(tried) <= 9  # log2(ln 64 / ln 1.05) and both ends


def test_a_limit_beyond_the_range_is_said() -> None:
    assert search().best(lambda _: True) == 64.0
    assert search().best(lambda _: False) is None


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2, 2), (3, 1)])
def test_an_impossible_range_is_refused(low: float, high: float) -> None:
    with pytest.raises(ConfigError, match=r"search\.(low|high) is"):
        search(low, high)


def test_the_command_runs_until_it_knows(tmp_path: Path) -> None:
    """Each run stays; the last line says what was found, and it is one of them."""
    done = relaybench(
        "goodput", "backend=in_dc", "trace=constant", "trace.requests=300", "slo.ttft_s=2",
        "slo.share=0.9", "search.high=32", "search.tolerance=0.5", "out=here", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout, done.stderr)
    runs = sorted((tmp_path / "here").iterdir())
    kept = {}
    for path in runs:
        (run,) = find_runs(path)
        kept[run.manifest["pacing"]["requests_per_s"]] = (
            run.summary().to_pylist()[0]["slo_share"] >= 0.9
        )
    assert list(kept.values()).count(True) >= 2
    best = max(rate for rate, good in kept.items() if good)
    assert best < min(rate for rate, good in kept.items() if not good) <= best * 1.5
    assert f"at pacing.requests_per_s={best:.6g}. Runs: here" in done.stdout


def test_the_command_is_for_one_backend(tmp_path: Path) -> None:
    done = relaybench("goodput", "backend=[in_dc,pdd]", "out=here", cwd=tmp_path)
    assert done.returncode == 2
    assert "2 backends are chosen: search for one" in done.stderr
    done = relaybench(
        "goodput", "backend=in_dc", "search.low=100", "search.high=200", "trace.sessions=0",
        "out=here", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
