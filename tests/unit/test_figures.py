"""`relaybench figures`: from nothing to every picture, and what a bad run does to it."""

from __future__ import annotations

from pathlib import Path

from harness.result import find_runs
from tests.unit.test_cli import relaybench

SMALL = "'trace.sessions=4','backend=in_dc'"


def test_a_figure_is_run_and_drawn(tmp_path: Path) -> None:
    """Two jobs side by side, in other processes; all four kinds of file, and the page."""
    done = relaybench(
        "figures", "only=[ttft]", f"sweeps.headline=[{SMALL},'seed=1,2']", "out=here",
        "processes=2", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    out = tmp_path / "here"
    assert all((out / f"ttft.{kind}").stat().st_size for kind in ("png", "pdf", "csv", "parquet"))
    assert not (out / "hitrate.png").exists()
    runs = [find_runs(out / "runs" / "headline" / job)[0] for job in ("0", "1")]
    assert [run.manifest["seed"] for run in runs] == [1, 2]
    assert runs[0].manifest["command"][:3] == ["relaybench", "run", "-m"]
    page = (out / "index.html").read_text()
    assert "2 simulated runs of in_dc; 2 traces; seed 1, 2; relaybench" in page
    assert "in_dc (seed=1)" in (out / "ttft.csv").read_text()


def test_a_figure_of_bad_runs_is_not_drawn(tmp_path: Path) -> None:
    """A run in another process that is not valid is not lost on the way home."""
    done = relaybench(
        "figures", "only=[ttft]", f"sweeps.headline=[{SMALL},'timeout_s=1,null']", "out=here",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "ttft NOT DRAWN: headline failed" in done.stdout
    assert not (tmp_path / "here" / "ttft.png").exists()
    assert "Not drawn:" in (tmp_path / "here" / "index.html").read_text()


def test_the_exit_code_of_a_sweep_is_its_worst_jobs(tmp_path: Path) -> None:
    both = ["run", "-m", "trace.sessions=4", "backend=in_dc", "report=[]"]
    parallel = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    for at, extra in enumerate(([], parallel)):
        for setting, code in (("timeout_s=null,1", 1), ("trace.sessions=4,-1", 2)):
            out = f"out={tmp_path}/{at}{code}"
            done = relaybench(*both, *extra, setting, out, cwd=tmp_path)
            assert done.returncode == code, (done.stdout, done.stderr)


def test_a_figure_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    done = relaybench("figures", "only=[nope]", "out=here", cwd=tmp_path)
    assert done.returncode == 2
    assert "only names 'nope': give some of hitrate" in done.stderr
    done = relaybench(
        "figures", "only=[ttft]", "figures.ttft.sweeps=[gone]", "out=here", cwd=tmp_path
    )
    assert done.returncode == 2
    assert "figures.ttft.sweeps names 'gone'" in done.stderr
    assert not (tmp_path / "here").exists()
    (tmp_path / "here").mkdir()
    done = relaybench("figures", "only=[ttft]", "out=here", cwd=tmp_path)
    assert done.returncode == 2
    assert "never overwritten" in done.stderr
