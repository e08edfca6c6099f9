"""One command's work: a trace through each backend chosen, then the page.

out/
  config.yaml        what was asked, as composed
  in_dc/ pdd/ ...    one run directory a backend
  *.png report.html
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from omegaconf import DictConfig, OmegaConf

from harness import manifest, metrics, result
from harness.backend import Backend
from harness.clock import VirtualTimeLoop, WallLoop
from harness.errors import EXIT_GOOD, EXIT_INTERRUPTED, ConfigError
from harness.fidelity import Tolerance
from harness.host import Host
from harness.job import Job
from harness.pacing import Pacing, Plan
from harness.plugins import apply, build
from harness.prices import Prices
from harness.seed import stream
from harness.settings import number, whole
from harness.stream import Stream
from harness.trace import Trace


def run(config: DictConfig, out: Path, say: Callable[[str], None]) -> int:
    """Replay and report; returns the exit code. Raises `HarnessError` for bad input.

    An interruption keeps what was gathered, marks that run partial, draws no page and returns 130.
    """
    _check(config)
    result.refuse_existing(out)
    written = manifest.without_secrets(OmegaConf.to_yaml(config, resolve=False))
    cautions = [] if config.salt is None else [_SALT_GIVEN]
    config.salt = config.salt or secrets.token_hex(8)
    trace = load_trace(config)
    say(describe(trace))
    todo = jobs(config, trace, out, cautions)
    page = build(config, "page")
    result.create(out)
    result.write_text(out / "config.yaml", written)
    code = EXIT_GOOD
    for job in todo:
        code = max(code, job.run(say))
        if code == EXIT_INTERRUPTED:
            say(f"What was gathered is kept. To draw it: relaybench report {out} --out NEW_FOLDER")
            return code
    say(f"Report: {page.render([result.Run.open(job.path) for job in todo], out)}")
    return code


def load_trace(config: DictConfig) -> Trace:
    """The trace that the configuration names, after its transforms."""
    built: Trace | Stream = build(config, "trace")
    trace = built.whole() if isinstance(built, Stream) else built
    for name in config.transform or {}:
        where = f"transform.{name}"
        trace = apply(build(config, where), trace, where)
    return trace


def headline(trace: Trace) -> str:
    """One line for a person."""
    size = f"Trace {trace.header.format}: {len(trace):,} requests in {trace.sessions:,} sessions"
    if trace.header.prefix_data == "absent":
        return f"{size}; no prefix data, so no hit rates"
    ideal = trace.ideal_hit_rates
    return (
        f"{size}; ideal hit rate {ideal.mean():.1%} mean, "
        f"{trace.ideal_hit_token_weighted:.1%} token-weighted, "
        f"{(ideal > metrics.HIT_EDGES[2]).mean():.1%} of requests above 95%"
    )


def describe(trace: Trace) -> str:
    """The same, with what was dropped or changed on the way in."""
    line = headline(trace)
    changes = ", ".join(f"{name} {count:,}" for name, count in trace.header.changes.items())
    return f"{line}. Changed on reading: {changes}" if changes else line


def _check(config: DictConfig) -> None:
    """The settings that no `_target_` takes."""
    whole("seed", config.seed, least=0)
    if config.timeout_s is not None:
        number("timeout_s", config.timeout_s, above=0, most=1e9)
    if not config.backend:
        raise ConfigError("no backend is chosen: add backend=pdd, or backend=[in_dc,cross_dc,pdd]")


_SALT_GIVEN = (
    "the salt was set by hand: where a cache was not flushed, this run may have met what another "
    "run of that salt left in it"
)


def jobs(config: DictConfig, trace: Trace, out: Path, cautions: Sequence[str] = ()) -> list[Job]:
    """One a backend, all built before the first runs, so that a bad setting costs no run."""
    plan = paced(config, trace)
    window: metrics.Window = build(config, "window")
    slo: metrics.Slo = build(config, "slo")
    prices: Prices = build(config, "prices")
    tolerance: Tolerance = build(config, "tolerance")
    host: Host = build(config, "host")
    asked = manifest.asked(config)
    built = []
    for name in config.backend:
        where = f"backend.{name}"
        backend, loop = answering(config, name)
        host.check(where, virtual=issubclass(cast("type", loop.func), VirtualTimeLoop))
        scrape_s = config.backend[name].get("scrape_s")
        if scrape_s is not None:
            number(f"{where}.scrape_s", scrape_s, least=1e-3, most=1e9)
        built.append(
            Job(
                name=str(name),
                path=out / str(name),
                trace=trace,
                plan=plan,
                backend=backend,
                loop=loop,
                window=window,
                slo=slo,
                prices=prices,
                tolerance=tolerance,
                timeout_s=config.timeout_s,
                scrape_s=scrape_s,
                asked=asked,
                host=host,
                config=config,
                cautions=cautions,
            )
        )
    return built


def paced(config: DictConfig, trace: Trace) -> Plan:
    """When each session starts: the same in every process that asks."""
    pacing: Pacing = build(config, "pacing")
    return pacing.plan(trace, stream(config.seed, "pacing"))


def answering(
    config: DictConfig, name: str
) -> tuple[Backend, functools.partial[asyncio.AbstractEventLoop]]:
    """The backend of that name, and what makes the loop that it runs on."""
    where = f"backend.{name}"
    entry = config.backend[name]
    if not isinstance(entry, DictConfig) or not isinstance(entry.get("loop"), DictConfig):
        raise ConfigError(f"{where}.loop is missing: name the loop that owns time")
    loop = build(config, f"{where}.loop", _partial_=True)
    if not (isinstance(loop.func, type) and issubclass(loop.func, VirtualTimeLoop | WallLoop)):
        raise ConfigError(f"{where}.loop is {loop.func!r}: name a loop of harness.clock")
    return build(config, where, without=("loop", "scrape_s")), loop
