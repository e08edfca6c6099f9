"""Every figure that was asked for, from nothing: its sweeps run, then its report draws.

out/
  index.html              all figures with their captions and numbers
  bathtub.png .pdf .csv .parquet ...
  runs/lock_step/0/in_dc  the runs, by sweep and job
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from omegaconf import DictConfig

from harness import result
from harness.errors import EXIT_FAILED, EXIT_GOOD, EXIT_INTERRUPTED, ConfigError
from harness.plugins import build
from harness.report import Figure, Report, write_numbers
from harness.result import Run


@dataclass(frozen=True)
class Plate:
    """What one report drew, from which runs."""

    name: str
    says: str
    """In words: what of it is derived, fitted, held out."""
    figures: Sequence[Figure]
    runs: Sequence[Run]


class Booklet(Protocol):
    """Binds all plates."""

    def bind(self, plates: Sequence[Plate], out: Path, title: str) -> Path:
        """Write them, titled, into the folder `out`; returns the path of what a person opens."""
        ...


def draw(config: DictConfig, sweep: Callable[[list[str]], int], say: Callable[[str], None]) -> int:
    """Run the sweeps that the chosen figures need, each once, and draw. Returns the exit code.

    `sweep` runs `relaybench run` with these arguments. Raises `HarnessError` for bad input. A
    figure whose runs are not all valid is not drawn, nor is one that its report cannot draw: the
    exit code is then 1, and the others are there.
    """
    out = Path(str(config.out))
    chosen = _chosen(config)
    reports = {name: build(config, f"report.{figure.report}") for name, figure in chosen.items()}
    booklet: Booklet = build(config, "booklet")
    needed = dict.fromkeys(each for figure in chosen.values() for each in figure.sweeps)
    result.refuse_existing(out)
    result.create(out)
    codes: dict[str, int] = {}
    for name in needed:
        began_s = time.monotonic()
        launcher = ["hydra/launcher=joblib", f"hydra.launcher.n_jobs={config.processes}"]
        arguments = ["-m", *launcher, f"out={out / 'runs' / name}", "report=[]"]
        codes[name] = sweep([*arguments, *_settings(config.sweeps[name])])
        say(f"{name}: {time.monotonic() - began_s:.0f} s")
        if codes[name] == EXIT_INTERRUPTED:
            return EXIT_INTERRUPTED
    plates, failed = [], False
    for name, figure in chosen.items():
        bad = [each for each in figure.sweeps if codes[each] != EXIT_GOOD]
        runs = [run for each in figure.sweeps for run in _runs(out / "runs" / each)]
        drawn = [] if bad else _draw(reports[name], runs, out)
        if not drawn:
            failed = True
            say(f"{name} NOT DRAWN: {', '.join(bad) or 'its report'} failed")
        plates.append(Plate(name, figure.says, drawn, runs))
    say(f"Figures: {booklet.bind(plates, out, 'Figures')}")
    return EXIT_FAILED if failed else EXIT_GOOD


def _draw(report: Report, runs: Sequence[Run], out: Path) -> list[Figure]:
    figures = report.render(runs, out)
    write_numbers(figures)
    return figures


def _chosen(config: DictConfig) -> Mapping[str, DictConfig]:
    """The figures asked for, all where none is named. Raises `ConfigError`."""
    names: Iterable[str] = config.only or config.figures
    for name in names:
        if name not in config.figures:
            raise ConfigError(f"only names {name!r}: give some of {', '.join(config.figures)}")
        for each in config.figures[name].sweeps:
            if each not in config.sweeps:
                raise ConfigError(f"figures.{name}.sweeps names {each!r}: it is not in sweeps")
    return {name: config.figures[name] for name in names}


def _settings(sweep: Iterable[str | Iterable[str]]) -> list[str]:
    """Those of a sweep; a list among them is one that it shares with others."""
    return [str(each) for some in sweep for each in ([some] if isinstance(some, str) else some)]


def _runs(folder: Path) -> list[Run]:
    """The runs of a sweep, in the order of its jobs."""
    jobs = sorted(
        (each for each in folder.glob("*") if each.name.isdigit()), key=lambda at: int(at.name)
    )
    return [run for job in jobs for run in result.find_runs(job)]
