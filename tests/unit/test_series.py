"""Counters over time: written when they change, and no page of theirs can hold up a run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import pyarrow.parquet as pq
import pytest

from adapters.fleet import Fleet
from harness.backend import Backend, Sample
from harness.clock import VirtualTimeLoop
from harness.errors import BackendError
from harness.series import METRICS_FILE, SCHEMA, Series

Scrape = Callable[[], Awaitable[Sequence[Sample]]]
Rows = list[tuple[float, str, float]]


class Scraped:
    """A backend of which nothing but `scrape` is asked."""

    def __init__(self, scrape: Scrape) -> None:
        self.scrape = scrape


def now() -> float:
    return asyncio.get_running_loop().time()


def sample(name: str, value: float, source: str = "P http://h") -> Sample:
    return Sample(source, name, "", value)


def series(scrape: Scrape, every_s: float = 1.0) -> Series:
    return Series(cast("Backend", Scraped(scrape)), every_s)


def during(made: Series, lasts_s: float) -> float:
    """When a run of so many seconds was over, on the virtual clock, from second 100 on."""

    async def main() -> float:
        await asyncio.sleep(100)
        async with made.during():
            await asyncio.sleep(lasts_s)
        return now() - 100

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main())


def rows(made: Series, folder: Path) -> Rows:
    made.write(folder)
    table = pq.read_table(folder / METRICS_FILE)
    assert table.schema.equals(SCHEMA)
    return [(row["time_s"], row["name"], row["value"]) for row in table.to_pylist()]


def test_values_are_written_when_they_change_and_not_again(tmp_path: Path) -> None:
    async def scrape() -> Sequence[Sample]:
        return [sample("steps", (now() - 100) // 2), sample("same", 7.0)]

    made = series(scrape)
    assert during(made, 5.5) == 5.5
    assert rows(made, tmp_path) == [
        (0.0, "steps", 0.0),
        (0.0, "same", 7.0),
        (2.0, "steps", 1.0),
        (4.0, "steps", 2.0),
    ]
    assert (made.scrapes, dict(made.misses)) == (7, {})


def test_the_last_scrape_is_after_the_run(tmp_path: Path) -> None:
    async def scrape() -> Sequence[Sample]:
        return [sample("time", now() - 100)]

    made = series(scrape, every_s=60.0)
    during(made, 61.0)
    assert [time_s for time_s, _, _ in rows(made, tmp_path)] == [0.0, 60.0, 61.0]


def test_one_name_of_two_sources_or_labels_is_two_counters(tmp_path: Path) -> None:
    async def scrape() -> Sequence[Sample]:
        return [
            sample("up", 1.0, "P http://a"),
            sample("up", 1.0, "P http://b"),
            Sample("P http://b", "up", 'engine="0"', 1.0),
        ]

    made = series(scrape)
    during(made, 3.0)
    assert rows(made, tmp_path) == [(0.0, "up", 1.0)] * 3


def test_what_is_not_a_number_is_written_once(tmp_path: Path) -> None:
    """Summaries that have seen nothing say NaN, which is never equal to itself."""

    async def scrape() -> Sequence[Sample]:
        return [sample("p50", math.nan if now() < 103 else 5.0)]

    made = series(scrape)
    during(made, 6.0)
    (first, *others) = rows(made, tmp_path)
    assert (first[0], math.isnan(first[2])) == (0.0, True)
    assert others == [(3.0, "p50", 5.0)]


def test_a_scrape_that_fails_is_a_miss_and_the_next_one_counts(tmp_path: Path) -> None:
    async def scrape() -> Sequence[Sample]:
        if now() in (101, 103):
            raise BackendError("answered 500")
        return [sample("time", now() - 100)]

    made = series(scrape)
    during(made, 3.5)
    assert [time_s for time_s, _, _ in rows(made, tmp_path)] == [0.0, 2.0, 3.5]
    assert (made.scrapes, dict(made.misses)) == (5, {"answered 500": 2})


def test_a_page_that_fails_costs_its_own_samples_only(tmp_path: Path) -> None:
    """Of two servers, the second one's page is broken for a while, and then it is back."""
    broken = {1: httpx.Response(500, text="no"), 2: httpx.Response(200, text="<html>")}
    asked: dict[str, int] = {"a": 0, "b": 0}
    enough = asyncio.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        host = request.url.host
        at, asked[host] = asked[host], asked[host] + 1
        if asked["b"] > 6:  # the sixth answers are taken in
            enough.set()
        if host == "b" and at == 3:
            raise httpx.ConnectError("refused")
        return broken.get(at if host == "b" else 0, httpx.Response(200, text=f"steps {at}\n"))

    fleet = Fleet({"P": ["http://a", "http://b"]})
    made = series(fleet.scrape, every_s=0.02)

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            fleet.start(client)
            async with made.during():
                await enough.wait()

    asyncio.run(main())
    made.write(tmp_path)
    found: dict[str, list[float]] = {}
    for row in pq.read_table(tmp_path / METRICS_FILE).to_pylist():
        found.setdefault(f"{row['source']} {row['name']}", []).append(row["value"])
    one, two = (found[f"P http://{host} steps"] for host in "ab")
    up = found["P http://b up"]
    assert one[:6] == [0, 1, 2, 3, 4, 5]
    assert two[:3] == [0, 4, 5]
    assert up == [1, 0, 1]
    assert set(made.misses) == {"the page of P http://b could not be read"}


@pytest.mark.parametrize(
    ("every_s", "within_s"), [(0.01, 1.0), (0.5, 2.5), (1.0, 5.0), (60.0, 30.0)]
)
def test_a_scrape_that_hangs_holds_up_neither_start_nor_run_nor_end(
    every_s: float, within_s: float, tmp_path: Path
) -> None:
    async def scrape() -> Sequence[Sample]:
        await asyncio.sleep(1e6)
        return []

    made = series(scrape, every_s)
    assert during(made, 100.0) == pytest.approx(100.0 + 2 * within_s)
    assert sum(made.misses.values()) in (made.scrapes, made.scrapes - 1)  # one is cut off
    assert list(made.misses) == [f"not answered within {within_s:g} s"]
    assert rows(made, tmp_path) == []


def test_a_scrape_that_is_slow_delays_the_next_one_only(tmp_path: Path) -> None:
    async def scrape() -> Sequence[Sample]:
        value = now() - 100
        await asyncio.sleep(2.0 if now() == 101 else 0.0)
        return [sample("time", value)]

    made = series(scrape)
    assert during(made, 5.5) == 5.5
    assert [time_s for time_s, _, _ in rows(made, tmp_path)] == [0.0, 1.0, 4.0, 5.0, 5.5]


def test_a_run_that_fails_is_scraped_at_its_end_all_the_same(tmp_path: Path) -> None:
    async def scrape() -> Sequence[Sample]:
        return [sample("time", now())]

    made = series(scrape)

    async def main() -> None:
        async with made.during():
            await asyncio.sleep(0.5)
            raise RuntimeError("of the run")

    with (
        pytest.raises(RuntimeError, match="of the run"),
        asyncio.Runner(loop_factory=VirtualTimeLoop) as runner,
    ):
        runner.run(main())
    assert rows(made, tmp_path) == [(0.0, "time", 0.0), (0.5, "time", 0.5)]


def test_a_backend_without_counters_has_an_empty_series(tmp_path: Path) -> None:
    async def scrape() -> Sequence[Any]:
        return []

    made = series(scrape)
    during(made, 2.0)
    assert rows(made, tmp_path) == []
