"""One trace through one backend into one run directory, from `run.json` to the verdict."""

from __future__ import annotations

import asyncio
import functools
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from omegaconf import DictConfig

from harness import fidelity, manifest, metrics, result
from harness.backend import Backend
from harness.clock import VirtualTimeLoop
from harness.errors import (
    EXIT_FAILED,
    EXIT_GOOD,
    EXIT_INTERRUPTED,
    ConfigError,
    HarnessError,
)
from harness.host import Account, Crew, Host, Work
from harness.pacing import Plan
from harness.prices import Prices
from harness.progress import progress
from harness.record import FAILED, Record
from harness.series import Series
from harness.trace import Trace


@dataclass
class Job:
    """Everything one run needs. `run` once."""

    name: str
    path: Path
    trace: Trace
    plan: Plan
    backend: Backend
    loop: functools.partial[asyncio.AbstractEventLoop]
    """Makes the loop that owns time."""
    window: metrics.Window
    slo: metrics.Slo
    prices: Prices
    tolerance: fidelity.Tolerance
    timeout_s: float | None
    scrape_s: float | None
    """How often the backend's own counters are read; None: never."""
    asked: dict[str, Any]
    host: Host
    config: DictConfig
    """All that was composed, for a host that replays elsewhere."""
    cautions: Sequence[str] = ()
    """What to warn of in whatever this job measures on a real server."""
    _account: Account = field(init=False, default_factory=Account)
    _doubts: list[str] = field(init=False, default_factory=list)
    _misses: dict[str, int] = field(init=False, default_factory=dict)
    _manifest: dict[str, Any] = field(init=False)

    def run(self, say: Callable[[str], None]) -> int:
        """The exit code: 0 valid, 1 not valid, 130 interrupted.

        Raises what ended the run early; what was gathered is kept and marked partial.
        """
        result.create(self.path)
        self._begin()
        ending: list[str] = []
        code: int | None = None
        try:
            self._replay(say)
            ending += self._account.ending
        except KeyboardInterrupt:
            ending, code = ["interrupted", *self._account.ending], EXIT_INTERRUPTED
        except BaseException as error:
            with suppress(HarnessError):
                ending = [f"ended by {type(error).__name__}: {error}", *self._account.ending]
                say(self._conclude(ending))
            raise
        self._manifest["partial"] = bool(ending)
        say(self._conclude(ending))
        valid = self._manifest["validity"]["valid"]
        return code if code is not None else EXIT_GOOD if valid else EXIT_FAILED

    def _begin(self) -> None:
        virtual = isinstance(self.loop.func, type) and issubclass(self.loop.func, VirtualTimeLoop)
        self._manifest = {
            **manifest.where(),
            **self.asked,
            "clock": "virtual" if virtual else "wall",
            "workers": [],
            "trace": manifest.replayed(self.trace),
            "window": asdict(self.window),
            "slo": asdict(self.slo),
            "prices": asdict(self.prices),
            "tolerance": asdict(self.tolerance),
            "counts": None,
            "validity": {"valid": False, "reasons": ["the run has not ended"]},
            "warnings": [],
            "partial": True,
            "started": datetime.now(UTC).isoformat(),
            "ended": None,
            "wall_s": None,
        }
        self._describe()
        result.write_manifest(self.path, self._manifest)

    def _replay(self, say: Callable[[str], None]) -> None:
        began_s, cpu_s = time.perf_counter(), time.process_time()
        try:
            self._write_records(say)
        finally:
            self._manifest["workers"] = self._account.workers
            self._manifest["wall_s"] = round(time.perf_counter() - began_s, 3)
            self._cpu_s = time.process_time() - cpu_s + self._account.cpu_s

    def _write_records(self, say: Callable[[str], None]) -> None:
        with (
            result.RecordWriter(self.path) as writer,
            progress(self.name, len(self.trace)) as bar,
        ):

            def write(record: Record) -> None:
                writer.append(record)
                bar.advance()

            def write_batch(batch: pa.RecordBatch) -> None:
                writer.append_batch(batch)
                for _ in range(batch.num_rows):
                    bar.advance()

            work = Work(
                self.config, self.name, self.trace, self.plan, self.backend, self.timeout_s,
                write, write_batch, say,
            )  # fmt: skip
            crew = self.host.crew(work)
            try:
                with steady_memory(), asyncio.Runner(loop_factory=self.loop) as runner:
                    runner.run(self._enter(crew))
            finally:
                self._account = crew.account()

    async def _enter(self, crew: Crew) -> None:
        async with self.backend as backend, crew:
            await backend.reset()
            self._describe()  # now it knows its servers
            self._fits(backend.describe().context_tokens)
            self._manifest["workers"] = crew.account().workers
            result.write_manifest(self.path, self._manifest)
            if self.scrape_s is None:
                await crew.run()
            else:
                await self._watched(crew, Series(backend, self.scrape_s))
            self._doubts += await backend.doubts()
            self._describe()  # and what they counted

    def _describe(self) -> None:
        self._manifest["backend"] = asdict(self.backend.describe()) | {"name": self.name}

    def _fits(self, context_tokens: int | None) -> None:
        """Refuse, before a request is sent, a trace that the server has no room for."""
        if context_tokens is None:
            return
        longest = self.trace.input_tokens.astype(np.int64) + self.trace.output_tokens
        if beyond := int((longest > context_tokens).sum()):
            raise ConfigError(
                f"{beyond:,} of {len(self.trace):,} turns are longer, prompt and answer together, "
                f"than the {context_tokens:,} tokens of {self.name}'s context; the longest has "
                f"{longest.max():,}. Add transform=[within_context] "
                f"transform.within_context.context_tokens={context_tokens}, after shrink where "
                "none would be left: transform=[shrink,within_context]"
            )

    async def _watched(self, crew: Crew, series: Series) -> None:
        try:
            async with series.during():
                await crew.run()
        finally:
            series.write(self.path)
            self._misses = dict(series.misses)
            self._manifest["scrapes"] = {"made": series.scrapes, "missed": self._misses}

    def _conclude(self, reasons: list[str]) -> str:
        """Count, summarise and judge what is on disk; write the verdict. A line for a person."""
        columns = dict.fromkeys(
            [*metrics.COLUMNS, *fidelity.COLUMNS, "turn", "error_class", "error"]
        )
        records = result.Run(self.path, self._manifest).records([*columns])
        counts = metrics.conserve(records, len(self.trace))
        if reasons and not records.num_rows:
            reasons = [*reasons, "no request was sent"]
        else:
            reasons = [*reasons, *counts.broken]
        reasons += [f"{counts.failed} requests failed{_mostly(records)}"] if counts.failed else []
        reasons += [f"{counts.unsent} requests were never sent"] if counts.unsent else []
        self._manifest["fidelity"], off = fidelity.fidelity(records, self.tolerance)
        self._manifest["client"], self._manifest["warnings"] = fidelity.client(
            records, self._cpu_s, self._manifest["wall_s"]
        )
        real = self._manifest["clock"] == "wall"
        self._manifest["warnings"] += [
            *self._account.warnings,
            *(self.cautions if real else ()),
            *self._manifest["backend"]["warnings"],
            *(f"{words} ({n} times)" for words, n in self._misses.items()),
        ]
        reasons += off + self._doubts
        summary = metrics.summarise(records, self.window, self.name, self.slo)
        if records.num_rows and not summary.column("measured")[0].as_py():
            reasons.append("no request was measured: the window leaves out all that were sent")
        result.write_table(summary, self.path / result.SUMMARY_FILE)
        self._manifest["counts"] = {k: v for k, v in asdict(counts).items() if k != "broken"}
        self._manifest["validity"] = {"valid": not reasons, "reasons": reasons}
        self._manifest["ended"] = datetime.now(UTC).isoformat()
        result.write_manifest(self.path, self._manifest)
        line = _headline(self.name, summary.to_pylist()[0], self._manifest["wall_s"])
        line = f"{line}. NOT VALID: {'; '.join(reasons)}" if reasons else line
        return "\n".join([line, *(f"  warning: {each}" for each in self._manifest["warnings"])])


@contextmanager
def steady_memory() -> Iterator[None]:
    """Keep the garbage collector off what already lives, the trace above all, for a while.

    Its passes over millions of objects would cost a fifth of a simulated replay, and show as
    pauses of tens of milliseconds in a real one.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _headline(name: str, row: dict[str, Any], wall_s: float) -> str:
    ttft = " / ".join(
        "-" if row[f"ttft_p{q}_s"] is None else f"{row[f'ttft_p{q}_s']:.2f}" for q in (50, 90, 99)
    )
    small = "" if row["p99_supported"] else f" (too few for a P99: {row['measured']} requests)"
    return (
        f"{name}: {row['ok']:,} of {row['scheduled']:,} requests ok; TTFT P50/P90/P99 {ttft} s"
        f"{small}; {_rate(row['requests_per_s'], '.2f')} requests/s, "
        f"{_rate(row['output_tokens_per_s'], ',.0f')} output tokens/s; took {wall_s:.1f} s"
    )


def _mostly(records: pa.Table) -> str:
    """The most frequent failure, in words."""
    failed = records.filter(pa.array(metrics.status_is(records, FAILED)))
    kinds = Counter(failed.column("error_class").to_pylist())
    kind, count = kinds.most_common(1)[0]
    said = Counter(failed.column("error").to_pylist()).most_common(1)[0][0]
    return f" ({count} {kind}; most often: {said})"


def _rate(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
