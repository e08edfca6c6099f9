"""A server's own counters over time: scraped beside the replay, written when they change.

`metrics.parquet` has one row for each time a sample's value was new: `time_s` from the run's
zero, so those read before it are negative.
A page that fails or is late costs its own samples and nothing else; `misses` counts them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import isnan
from pathlib import Path

import numpy as np
import pyarrow as pa

from harness import result
from harness.backend import Backend
from harness.errors import BackendError

METRICS_FILE = "metrics.parquet"
_INTERVALS = 5
_SHORTEST_S, _LONGEST_S = 1.0, 30.0

SCHEMA = pa.schema(
    [
        pa.field("time_s", pa.float64(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("labels", pa.string(), nullable=False),
        pa.field("value", pa.float64(), nullable=False),
    ]
)


class Series:
    """Scrapes one backend every `every_s` on a task of its own; `write` when it is over.

    A scrape that takes 5 intervals (but 1 s at least, 30 s at most) is a miss: no server's page may
    hold up a run, its start or its end.
    """

    def __init__(self, backend: Backend, every_s: float) -> None:
        self._backend = backend
        self._every_s = every_s
        self._within_s = min(max(_INTERVALS * every_s, _SHORTEST_S), _LONGEST_S)
        self._zero_s = 0.0
        self._last: dict[tuple[str, str, str], float] = {}
        self._times: list[float] = []
        self._keys: list[tuple[str, str, str]] = []
        self._values: list[float] = []
        self.scrapes = 0
        self.misses: Counter[str] = Counter()
        """Scrapes that failed, by what was said."""

    @asynccontextmanager
    async def during(self) -> AsyncIterator[None]:
        """Scrape at once, again and again meanwhile, and once more at the end."""
        loop = asyncio.get_running_loop()
        await self._scrape()
        self._zero_s = loop.time()
        task = loop.create_task(self._often())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._scrape()

    async def _often(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self._scrape()

    async def _scrape(self) -> None:
        self.scrapes += 1
        now_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._within_s):
                samples = await self._backend.scrape()
        except TimeoutError:
            self.misses[f"not answered within {self._within_s:g} s"] += 1
            return
        except Exception as error:  # noqa: BLE001 - whatever a page does, the run goes on
            known = isinstance(error, BackendError)
            self.misses[str(error) if known else f"{type(error).__name__}: {error}"] += 1
            return
        for source, name, labels, value in samples:
            if name == "up" and not value:
                self.misses[f"the page of {source} could not be read"] += 1
            key = (source, name, labels)
            if not _same(self._last.get(key), value):
                self._last[key] = value
                self._times.append(now_s)
                self._keys.append(key)
                self._values.append(value)

    def write(self, run: Path) -> None:
        """Leave `metrics.parquet` in the run directory. Raises `ResultError`."""
        sources, names, labels = zip(*self._keys, strict=True) if self._keys else ((), (), ())
        columns = [
            pa.array(np.array(self._times, np.float64) - self._zero_s),
            pa.array(sources, pa.string()),
            pa.array(names, pa.string()),
            pa.array(labels, pa.string()),
            pa.array(np.array(self._values, np.float64)),
        ]
        table = pa.Table.from_arrays(columns, schema=SCHEMA)
        result.write_table(table, run / METRICS_FILE)


def _same(before: float | None, now: float) -> bool:
    """Whether nothing has changed. NaN, which summaries without a sample show, is one value."""
    return before == now or (before is not None and isnan(before) and isnan(now))
