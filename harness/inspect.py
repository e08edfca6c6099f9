"""What can be done with a trace but replay it: look at it, and write it down."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from harness import result
from harness.errors import EXIT_GOOD, ConfigError
from harness.figures import Booklet, Plate
from harness.plugins import build
from harness.report import write_numbers
from harness.run import describe, load_trace

PROFILE = "profile.json"


def profile(config: DictConfig, say: Callable[[str], None]) -> int:
    """Its figures as JSON, as pictures with their numbers, and on a page, into the folder `out`."""
    out = Path(str(config.out))
    result.refuse_existing(out)
    measure = build(config, "measure", _partial_=True)
    portrait = build(config, "portrait")
    booklet: Booklet = build(config, "booklet")
    trace = load_trace(config)
    say(describe(trace))
    told, capacity = measure(trace)
    result.create(out)
    result.write_json(out / PROFILE, told)
    figures = portrait.render(told, capacity, out)
    write_numbers(figures)
    path = booklet.bind([Plate(trace.header.format, describe(trace), figures, [])], out)
    say(f"Profile: {path}")
    return EXIT_GOOD


def convert(config: DictConfig, say: Callable[[str], None]) -> int:
    """The trace, after its transforms, into our own form at `to`: Parquet or JSONL, by its name."""
    forms = (".parquet", ".jsonl", ".jsonl.gz")
    if not isinstance(config.to, str) or not config.to.endswith(forms):
        raise ConfigError(f"to is {config.to!r}: name a new file that ends in {', '.join(forms)}")
    path = Path(config.to)
    result.refuse_existing(path)
    save: Callable[..., Any] = build(config, "save", _partial_=True)
    trace = load_trace(config)
    save(trace, path)
    say(f"{describe(trace)}\nTrace: {path}; replay it with trace=canonical trace.path={path}")
    return EXIT_GOOD
