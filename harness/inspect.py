"""What can be done with a trace but replay it: look at it, and write it down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from harness import result
from harness.errors import EXIT_GOOD, ConfigError
from harness.figures import Booklet, Plate
from harness.plugins import build
from harness.report import write_numbers
from harness.run import describe, load_trace
from harness.settings import whole
from harness.stream import Stream
from harness.trace import Trace

_COMMAND = "inspect"
"""The configuration that all of these commands begin with."""

PROFILE = "profile.json"
SKETCH = "sketch.json"


def check(config: DictConfig, say: Callable[[str], None], *, file: str | None, chosen: bool) -> int:
    """All that is wrong with a trace, or what to know before it is replayed. Returns the exit code.

    `file` is read with the reader that is `chosen`, else with the one that fits it.
    """
    examine: Callable[..., int] = build(config, "check", _partial_=True)
    if file is not None and not chosen:
        readers, untried = _readers(file)
        return examine(readers, file, say, untried=untried)
    name = str(HydraConfig.get().runtime.choices["trace"])
    if file is not None:
        if "path" not in [*config.trace]:  # a value that is missing is not "in" it
            raise ConfigError(f"trace={name} reads no file: leave out {file}")
        config.trace.path = file
    return examine({name: partial(load_trace, config)}, None, say)


def _readers(file: str) -> tuple[dict[str, Callable[[], Trace]], dict[str, list[str]]]:
    """Each choice of the group `trace` that reads a file.

    (The ways to read this one, where no more is needed; what else each of the others needs.)
    """
    loader = GlobalHydra.instance().config_loader()
    asked = list(HydraConfig.get().overrides.task)
    readers: dict[str, Callable[[], Trace]] = {}
    untried: dict[str, list[str]] = {}
    for name in loader.get_group_options("trace"):
        config = loader.load_configuration(_COMMAND, [*asked, f"trace={name}"], RunMode.RUN)
        needed = OmegaConf.missing_keys(config.trace)
        if needed == {"trace.path"}:
            config.trace.path = file
            readers[name] = partial(load_trace, config)
        elif "trace.path" in needed:
            untried[name] = sorted(needed - {"trace.path"})
    return readers, untried


def profile(config: DictConfig, say: Callable[[str], None]) -> int:
    """Its figures as JSON, as pictures with their numbers, and on a page, into the folder `out`."""
    out = Path(str(config.out))
    result.refuse_existing(out)
    measure = build(config, "measure", _partial_=True)
    portrait = build(config, "portrait")
    booklet: Booklet = build(config, "booklet")
    trace = load_trace(config)
    say(describe(trace))
    measured = measure(trace)
    result.create(out)
    result.write_json(out / PROFILE, asdict(measured.profile))
    result.write_json(out / SKETCH, measured.sketch)
    figures = portrait.render(measured, out)
    write_numbers(figures)
    title = f"Profile of a trace: {trace.header.format}"
    path = booklet.bind([Plate(trace.header.format, describe(trace), figures, [])], out, title)
    say(f"Profile: {path}\nA trace like it: trace=twin trace.sketch={out / SKETCH}")
    return EXIT_GOOD


def convert(config: DictConfig, say: Callable[[str], None]) -> int:
    """The trace, after its transforms, into our own form at `to`: Parquet or JSONL, by its name."""
    path = _new_file(config)
    save: Callable[[Trace], int] = build(config, "save", path=path)
    trace = load_trace(config)
    save(trace)
    say(f"{describe(trace)}\nTrace: {path}; replay it with trace=canonical trace.path={path}")
    return EXIT_GOOD


def synthesize(config: DictConfig, say: Callable[[str], None]) -> int:
    """A generated trace into `to`, without holding it, and its fit, on a page, into `out`.

    The fit is that of its first `fit_sessions` sessions, to what the generator was asked for.
    """
    path, out = _new_file(config), Path(str(config.out))
    result.refuse_existing(out)
    whole("fit_sessions", config.fit_sessions, least=1)
    save: Callable[[Stream], int] = build(config, "save", path=path)
    compare = build(config, "compare", _partial_=True)
    likeness = build(config, "likeness")
    booklet: Booklet = build(config, "booklet")
    stream: Stream | Trace = build(config, "trace")
    if not isinstance(stream, Stream):
        raise ConfigError(
            "trace is not one that is drawn session by session: give trace=twin, targets or "
            "agentic, or convert it"
        )
    if config.transform:
        raise ConfigError("transform needs the whole trace: synthesize, then convert with it")
    requests = save(stream)
    say(f"Trace: {requests:,} requests in {path}; replay it with trace=canonical trace.path={path}")
    if not stream.wanted:
        say(f"No fit: {stream.header.format} has no targets to be near to")
        return EXIT_GOOD
    sessions = min(int(config.trace.sessions), config.fit_sessions)
    fit = compare(build(config, "trace", sessions=sessions))
    result.create(out)
    figures = likeness.render(fit, out)
    write_numbers(figures)
    about = f"{requests:,} requests, like {stream.header.format} was asked for"
    title = f"Fit of a synthetic trace: {stream.header.format}"
    page = booklet.bind([Plate(stream.header.format, about, figures, [])], out, title)
    say(f"Fit, of the first {sessions:,} sessions:")
    for row in fit.table.to_pylist():
        say(
            f"  {row['of']}: mean {row['mean']:,.4g}, wanted {row['wanted_mean']:,.4g}; "
            f"KS {row['ks']:.3f}, distance {row['distance']:.1%} of the mean"
        )
    say(f"Fit: {page}")
    return EXIT_GOOD


def _new_file(config: DictConfig) -> Path:
    """What `to` names, which is not there yet, in a folder that is."""
    if not isinstance(config.to, str):
        raise ConfigError(f"to is {config.to!r}: name a new file, as in to=mine.parquet")
    path = Path(config.to).expanduser()
    if path.exists():
        raise ConfigError(f"to is {path}, which exists and is not overwritten: name a new file")
    if not path.parent.is_dir():
        raise ConfigError(f"to is {path}: there is no folder {path.parent}; make it first")
    return path
