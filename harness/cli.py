"""The command line. Imports nothing heavy until it knows what is asked."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from harness import __version__
from harness.errors import (
    EXIT_BAD_INPUT,
    EXIT_GOOD,
    EXIT_INTERRUPTED,
    ConfigError,
    HarnessError,
)

_HELP = """\
Replay agent traffic against LLM serving systems and see what it costs them.

  relaybench run                          the shipped workload through in_dc, cross_dc and pdd
  relaybench run backend=pdd seed=7       any setting of the configuration can be overridden
  relaybench run trace=mooncake trace.path=conversation_trace.jsonl
  relaybench run -m pacing=poisson pacing.requests_per_s=5,10,20
  relaybench run --help                   the settings and their choices
  relaybench report runs/...              draw the page again from run directories
"""


def main() -> None:
    """Entry point of the command `relaybench`."""
    sys.exit(_main(sys.argv[1:]))


def _main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="relaybench", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"relaybench {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="{run,report}", required=True)
    commands.add_parser("run", add_help=False)
    report = commands.add_parser("report", help="draw the page again from run directories")
    report.add_argument("runs", nargs="+", type=Path, help="run directories, or folders of them")
    report.add_argument("--out", type=Path, required=True, help="a new folder for the page")
    if arguments[:1] == ["run"]:
        return _guarded(lambda: _run(arguments[1:]))
    chosen = parser.parse_args(arguments)
    return _guarded(lambda: _report(chosen.runs, chosen.out))


def _guarded(work: Callable[[], int]) -> int:
    """The exit code of `work`; a person's mistake is one clear message, never a traceback."""
    try:
        return work()
    except HarnessError as error:
        print(f"relaybench: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(overrides: list[str]) -> int:
    """Hand over to Hydra, which composes the configuration and calls `task` once a job."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises, instead of printing and leaving with 1
    codes: list[int] = []
    composed: list[DictConfig] = []

    def task(config: DictConfig) -> None:
        from harness.run import run

        composed.append(config)
        job = HydraConfig.get()
        number = str(job.job.num) if job.mode == RunMode.MULTIRUN else ""
        codes.append(_guarded(lambda: _explained(lambda: run(config, _out(config, number), _say))))
        if codes[-1] == EXIT_INTERRUPTED:
            raise KeyboardInterrupt  # the rest of a sweep is not wanted either

    sweep = bool({"-m", "--multirun"} & set(overrides))
    if sweep and not any(each.startswith("out=") for each in overrides):
        # One folder for all jobs: the default would look at the clock anew for each.
        overrides = [*overrides, f"out=runs/{datetime.now().astimezone():%Y%m%d-%H%M%S}"]
    sys.argv = ["relaybench", *overrides]
    try:
        hydra.main(version_base="1.3", config_path="pkg://conf", config_name="run")(task)()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if isinstance(error, ValueError) and composed:
            raise  # a fault of ours, not of a setting that Hydra could not compose
        print(f"relaybench: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return max(codes, default=EXIT_GOOD)


def _out(config: Any, job: str) -> Path:
    """Where this job's run goes: a folder in `out` for each of a sweep."""
    if not isinstance(config.out, str) or not config.out:
        raise ConfigError(f"out is {config.out!r}: name a new folder")
    return Path(config.out) / job


def _explained(work: Callable[[], int]) -> int:
    """As `work`, with what the configuration library says about a setting as our own error."""
    from omegaconf.errors import OmegaConfBaseException

    try:
        return work()
    except OmegaConfBaseException as error:
        raise ConfigError(str(error)) from error


def _report(paths: list[Path], out: Path) -> int:
    from hydra import compose, initialize_config_module

    from harness import result
    from harness.plugins import build

    with initialize_config_module("conf", version_base="1.3"):
        config = compose("run")
    runs = [run for path in paths for run in result.find_runs(path)]
    page = build(config, "page")
    _say(f"Report: {page.render(runs, result.create(out))}")
    return EXIT_GOOD


def _say(line: str) -> None:
    print(line, flush=True)
