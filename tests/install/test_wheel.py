"""The wheel, installed by itself, runs from a folder that is not the project."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
ELSEWHERE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*build, str(PROJECT)], check=True, capture_output=True)
    return next(folder.glob("relaybench-*.whl"))


def test_the_wheel_holds_the_configuration_and_nothing_of_ours_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert packages == {"harness", "traces", "adapters", "reports", "conf"}
    shipped = {name for name in names if name.startswith("conf/") and name.endswith(".yaml")}
    ours = {str(path.relative_to(PROJECT)) for path in (PROJECT / "conf").rglob("*.yaml")}
    assert shipped == ours


@pytest.mark.slow
def test_the_wheel_runs_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    """Its dependencies are those of this environment; the project itself is the wheel's."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install: list[Path | str] = [
        python,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        wheel,
    ]
    subprocess.run(install, check=True, capture_output=True)
    theirs = next((tmp_path / "venv").glob("lib/*/site-packages"))
    (theirs / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = tmp_path / "elsewhere"
    where.mkdir()
    source = subprocess.run(
        [python, "-c", "import harness; print(harness.__file__)"],
        cwd=where, env=ELSEWHERE, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert source.stdout.startswith(str(theirs))
    program = tmp_path / "venv" / "bin" / "relaybench"
    command: list[Path | str] = [program, "run", "trace.sessions=10", "out=here"]
    done = subprocess.run(
        command, cwd=where, env=ELSEWHERE, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (where / "here" / "report.html").stat().st_size > 10_000
    assert [path.name for path in where.iterdir()] == ["here"]
