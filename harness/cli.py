"""The command line. Imports nothing heavy until it knows what is asked."""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime
from importlib import resources
from itertools import pairwise
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
  relaybench goodput backend=pdd          the highest load at which it keeps its promise
  relaybench figures                      run and draw every figure of the PDD report
  relaybench trace check conversation_trace.jsonl  what is wrong with it, or worth knowing
  relaybench trace profile trace=...      what a trace is like: hits, lengths, hits by cache size
  relaybench trace convert trace=... to=x.parquet
  relaybench trace synthesize trace=twin trace.sketch=... to=y.parquet
  relaybench trace --help                 each of these four
  relaybench serve backend=pdd            the simulator behind an OpenAI-compatible port
  relaybench doctor http://HOST:PORT      can this machine, and that server, be measured?
  relaybench refit model=... system=...   the simulator's step times, from measured kernels
"""

_TRACE_HELP = {
    "check": """\
relaybench trace check FILE [NAME=VALUE ...]
  All that is wrong with a trace file, or a folder of them, or what to know before replaying it.
  It is read with trace=NAME, or where none is given, with the reader that fits.

  relaybench trace check conversation_trace.jsonl
  relaybench trace check chats.json trace=sharegpt trace.tokenizer=tokenizer.json
""",
    "profile": """\
relaybench trace profile trace=NAME trace.path=FILE [out=FOLDER] [NAME=VALUE ...]
  What a trace is like, into a new folder: a page, its figures, and a sketch to draw more like it.

  relaybench trace profile trace=mooncake trace.path=conversation_trace.jsonl out=profile
""",
    "convert": """\
relaybench trace convert trace=NAME trace.path=FILE to=NEW [NAME=VALUE ...]
  The trace, after its transforms, in our own form: *.parquet, *.jsonl or *.jsonl.gz.

  relaybench trace convert trace=mooncake trace.path=conversation_trace.jsonl \\
    transform=[anonymise] to=mine.parquet
""",
    "synthesize": """\
relaybench trace synthesize trace=twin|targets|agentic to=NEW [out=FOLDER] [NAME=VALUE ...]
  A generated trace of any size, and in a new folder how near it came to what was asked for.

  relaybench trace synthesize trace=twin trace.sketch=profile/sketch.json \\
    trace.sessions=100000 to=twin.parquet out=fit
""",
}


def main() -> None:
    """Entry point of the command `relaybench`."""
    sys.exit(_main(sys.argv[1:]))


def _main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="relaybench", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"relaybench {__version__}")
    names = ",".join(("report", *_COMMANDS))
    commands = parser.add_subparsers(dest="command", metavar=f"{{{names}}}", required=True)
    for name in _COMMANDS:
        commands.add_parser(name, add_help=False)
    report = commands.add_parser("report", help="draw the page again from run directories")
    report.add_argument(
        "runs", nargs="+", help="run directories or folders of them, and settings: report=[bcr]"
    )
    report.add_argument("--out", type=Path, required=True, help="a new folder for the page")
    if arguments and (work := _COMMANDS.get(arguments[0])):
        return _guarded(lambda: work(arguments[1:]))
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
    """Replay and report, once a job."""

    def work(config: Any) -> int:
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        from harness.run import run

        job = HydraConfig.get()
        number = str(job.job.num) if job.mode == RunMode.MULTIRUN else ""
        return run(config, _out(config, number), _say)

    # As Ctrl-C: what a scheduler ends keeps what was gathered, and says so.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    if _sweeps(overrides) and not any(each.startswith("out=") for each in overrides):
        # One folder for all jobs: the default would look at the clock anew for each.
        overrides = [*overrides, f"out=runs/{datetime.now().astimezone():%Y%m%d-%H%M%S}"]
    return _composed("run", overrides, work)


def _goodput(overrides: list[str]) -> int:
    """Runs, each a command like any other, until the limit is known well enough."""
    # The defaults of this command and of its runs alike; a person's words come later and win.
    asked = ["pacing=poisson", "backend=[pdd]", *overrides]
    code, config = _kept("goodput", asked)
    if config is None:
        return code
    from harness.search import find

    own = ("search.", "out=")
    return _explained(
        lambda: find(config, [each for each in asked if not each.startswith(own)], _run, _say)
    )


def _figures(overrides: list[str]) -> int:
    """Every figure, from its sweeps to the booklet. The sweeps are commands like any other."""
    code, config = _kept("figures", overrides)
    if config is None:
        return code
    from harness.figures import draw

    return _explained(lambda: draw(config, _run, _say))


def _kept(name: str, overrides: list[str]) -> tuple[int, Any]:
    """The configuration of a command that calls others; None, and the exit code, without one."""
    composed: list[Any] = []

    def keep(config: Any) -> int:
        composed.append(config)
        return EXIT_GOOD

    if _sweeps(overrides):
        raise ConfigError(f"{name} runs sweeps of its own: leave out -m")
    code = _composed(name, overrides, keep)
    return code, composed[0] if composed else None


def _trace(arguments: list[str]) -> int:
    """Look at a trace, or write it down."""
    helped = bool({"-h", "--help"} & set(arguments))
    if helped and arguments[0] not in _TRACE_HELP:
        usages = [each.partition("\n\n")[0] for each in _TRACE_HELP.values()]
        _say("\n".join([*usages, "\nExamples: relaybench trace check --help"]))
        return EXIT_GOOD
    if not arguments or arguments[0] not in _TRACE_HELP:
        raise ConfigError(f"trace what? Give {', '.join(_TRACE_HELP)}, and a trace: trace=mooncake")
    kind, overrides = arguments[0], arguments[1:]
    if helped:
        _say(f"{_TRACE_HELP[kind]}\nAll settings: relaybench trace {kind} trace=NAME --cfg job")
        return EXIT_GOOD
    if _sweeps(overrides):
        raise ConfigError("one trace at a time: leave out -m")
    chosen = any(each.startswith("trace=") for each in overrides)
    file = _file(kind, overrides)
    if file is not None:
        overrides.remove(file)
    elif kind == "check" and not chosen:
        raise ConfigError("check which trace? Give a file, or trace=mooncake trace.path=FILE")

    def work(config: Any) -> int:
        from harness import inspect

        if kind == "check":
            return inspect.check(config, _say, file=file, chosen=chosen)
        command: Callable[[Any, Callable[[str], None]], int] = getattr(inspect, kind)
        return command(config, _say)

    return _composed("inspect", overrides, work)


def _file(kind: str, overrides: list[str]) -> str | None:
    """What stands between the settings without a name, and neither is a flag nor its value."""
    files = [
        each
        for before, each in pairwise(["", *overrides])
        if not each.startswith(("-", "~"))
        and not before.startswith("-")
        and ("=" not in each or Path(each).exists())
    ]
    if not files:
        return None
    file = files[0]
    if kind == "synthesize":
        raise ConfigError(f"{file} is no setting: name a generator, as in trace=twin")
    if kind != "check":
        raise ConfigError(
            f"{kind} which trace? Name the reader: trace=mooncake trace.path={file}; "
            f"relaybench trace check {file} says which fits"
        )
    if len(files) > 1:
        raise ConfigError(f"one trace at a time: leave out {' '.join(files[1:])}")
    return file


def _serve(overrides: list[str]) -> int:
    """One simulated system on a port, until interrupted."""

    def work(config: Any) -> int:
        from omegaconf import OmegaConf

        from harness.plugins import build

        names = [*(config.backend or {})]
        if len(names) != 1:
            raise ConfigError(f"{len(names)} backends are chosen: serve one, as in backend=in_dc")
        name = names[0]
        if not str(OmegaConf.select(config, f"backend.{name}.loop._target_")).endswith(
            "VirtualTimeLoop"
        ):
            raise ConfigError(f"{name} is no simulator: serve one, as in backend=in_dc")
        backend = build(config, f"backend.{name}", without=("loop", "scrape_s"))
        build(config, "server").run(name, backend, _say)
        return EXIT_GOOD

    if _sweeps(overrides):
        raise ConfigError("a server is not swept: leave out -m")
    return _composed("serve", overrides, work)


def _doctor(overrides: list[str]) -> int:
    """Look at this machine, this client and, where one is named, a server."""

    def work(config: Any) -> int:
        from harness.plugins import build

        config.salt = config.salt or secrets.token_hex(8)
        names = [*(config.backend or {})]
        if len(names) > 1:
            raise ConfigError(f"{len(names)} backends are chosen: look at one")
        where = [f"backend.{name}" for name in names]
        backends = [build(config, each, without=("loop", "scrape_s")) for each in where]
        code: int = build(config, "doctor").examine(backends[0] if backends else None, _say)
        return code

    urls = [each for each in overrides if each.startswith(("http://", "https://"))]
    if urls:
        rest = [each for each in overrides if each not in urls]
        overrides = ["backend=openai", f"backend.openai.url='{urls[0]}'", *rest]
    elif odd := [each for each in overrides if "=" not in each and not each.startswith("-")]:
        raise ConfigError(f"{odd[0]} is neither a setting nor a URL: give http://HOST:PORT")
    if _sweeps(overrides):
        raise ConfigError("one server at a time: leave out -m")
    return _composed("doctor", overrides, work)


def _refit(overrides: list[str]) -> int:
    """The coefficients of one model on one chip, into a file."""

    def work(config: Any) -> int:
        from harness.plugins import build

        build(config, "refit").run(_say)
        return EXIT_GOOD

    if _sweeps(overrides):
        raise ConfigError("one fit at a time: leave out -m")
    # Its settings by their bare names: `model` and `backend` are groups of the other commands.
    other = ("-", "refit.", "hydra")
    settings = [each if each.startswith(other) else f"refit.{each}" for each in overrides]
    return _composed("refit", settings, work)


def _sweeps(overrides: list[str]) -> bool:
    return bool({"-m", "--multirun"} & set(overrides))


def _composed(name: str, overrides: list[str], work: Callable[[Any], int]) -> int:
    """Hand over to Hydra, which composes the configuration and calls `task` once a job.

    Returns the highest exit code. A sweep's launcher may run its jobs in other processes, so what
    became of them is told by a file.
    """
    import hydra
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises, instead of printing and leaving with 1
    command = ["relaybench", *overrides]
    with tempfile.TemporaryDirectory() as folder:
        ends = Path(folder) / "ends"

        def tell(word: str) -> None:
            with ends.open("a", encoding="utf-8") as file:
                file.write(f"{word}\n")

        def task(config: DictConfig) -> None:
            sys.argv = command  # which another process has not seen
            tell("begun")
            code = _guarded(lambda: _explained(lambda: work(config)))
            tell(str(code))
            if code == EXIT_INTERRUPTED:
                raise KeyboardInterrupt  # the rest of a sweep is not wanted either

        sys.argv = command
        try:
            hydra.main(version_base="1.3", config_path="pkg://conf", config_name=name)(task)()
        except MissingConfigException as error:
            print(f"relaybench: {_no_choice(error)}", file=sys.stderr)
            return EXIT_BAD_INPUT
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            if isinstance(error, ValueError) and ends.exists():
                raise  # a fault of ours, not of a setting that Hydra could not compose
            print(f"relaybench: {error}", file=sys.stderr)
            return EXIT_BAD_INPUT
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        told = ends.read_text(encoding="utf-8").split() if ends.exists() else []
        return max((int(each) for each in told if each != "begun"), default=EXIT_GOOD)


def _no_choice(error: Any) -> str:
    """What can be chosen instead: of a choice in a list, Hydra does not say."""
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    folder = resources.files("conf").joinpath(group)
    if not group or not folder.is_dir():
        return str(error)
    names = (each.name for each in folder.iterdir() if each.name.endswith(".yaml"))
    choices = error.options or sorted(each.removesuffix(".yaml") for each in names)
    return f"{group}={name}: no such choice. Choose from {', '.join(choices)}"


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


def _report(arguments: list[str], out: Path) -> int:
    """The page of these runs. Of the arguments, those with a `=` that are no path are settings."""
    overrides = [each for each in arguments if "=" in each and not Path(each).exists()]
    paths = [Path(each) for each in arguments if each not in overrides]

    def work(config: Any) -> int:
        from harness import result
        from harness.plugins import build

        if not paths:
            raise ConfigError("no run is named: give run directories, or folders of them")
        runs = [run for path in paths for run in result.find_runs(path)]
        page = build(config, "page")
        _say(f"Report: {page.render(runs, result.create(out))}")
        return EXIT_GOOD

    return _composed("run", overrides, work)


def _say(line: str) -> None:
    print(line, flush=True)


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "run": _run,
    "goodput": _goodput,
    "figures": _figures,
    "trace": _trace,
    "serve": _serve,
    "doctor": _doctor,
    "refit": _refit,
}
"""Those whose arguments are Hydra's."""
