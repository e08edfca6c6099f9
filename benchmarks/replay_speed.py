"""How fast a trace is replayed on the virtual clock, and where the time goes.

    python benchmarks/replay_speed.py trace=mooncake trace.path=conversation_trace.jsonl
    python benchmarks/replay_speed.py --per 100000 trace.sessions=50500 backend=pdd

Takes the overrides of `relaybench run`. The same replay is run four times: with a backend that
answers at once and records thrown away, with records written, with the simulator and records
thrown away, and whole. CPU seconds of this process, children and threads included.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from hydra import compose, initialize_config_module

from harness import result
from harness.backend import Answer, Backend, Description, Request, Sample, Served
from harness.clock import VirtualTimeLoop
from harness.job import Job, steady_memory
from harness.record import Record
from harness.replay import Replay
from harness.run import jobs, load_trace


class AtOnce:
    """Answers each request with all its tokens the moment it is asked."""

    async def __aenter__(self) -> Self:
        """Nothing to get ready."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing to close."""

    def describe(self) -> Description:
        """No system at all."""
        return Description("at_once", "unknown")

    async def reset(self) -> None:
        """Nothing is cached."""

    async def generate(self, request: Request, answer: Answer) -> None:
        """The whole answer, now."""
        now_s = asyncio.get_running_loop().time()
        answer.times_s = [now_s] * request.output_tokens
        answer.served = Served(request.input_tokens, request.output_tokens)

    async def scrape(self) -> Sequence[Sample]:
        """No counters."""
        return ()

    async def doubts(self) -> Sequence[str]:
        """None."""
        return ()


def replay(job: Job, backend: Backend, write: Callable[[Record], None]) -> float:
    """CPU seconds of one replay."""

    async def main() -> None:
        async with backend:
            await backend.reset()
            await Replay(job.trace, job.plan, backend, write).run()

    began_s = time.process_time()
    with steady_memory(), asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())
    return time.process_time() - began_s


def replay_to_disk(job: Job, backend: Backend, per: int) -> float:
    """CPU seconds of one replay with its records written; prints a line every `per` requests."""
    began_s = time.process_time()
    with (
        tempfile.TemporaryDirectory() as folder,
        result.RecordWriter(Path(folder)) as writer,
    ):
        done, since_s = 0, time.process_time()

        def write(record: Record) -> None:
            nonlocal done, since_s
            writer.append(record)
            done += 1
            if per and done % per == 0:
                now_s = time.process_time()
                print(f"  {done:>9,} requests: {now_s - since_s:6.1f} s, peak {peak_mb():,.0f} MB")
                since_s = now_s

        replay(job, backend, write)
    return time.process_time() - began_s


def events(backend: Backend) -> float:
    """What the last replay took of the simulator's events."""
    return {each.name: each.value for each in asyncio.run(backend.scrape())}["events_total"]


def peak_mb() -> float:
    """The most memory this process has held, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per", type=int, default=0, help="a line every so many requests")
    parser.add_argument("--whole-only", action="store_true", help="only the whole replay")
    known, overrides = parser.parse_known_args()
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("run", overrides)
    began_s = time.process_time()
    trace = load_trace(config)
    read_s = time.process_time() - began_s
    requests = len(trace)
    print(f"{requests:,} requests, {trace.blocks:,} blocks; peak {peak_mb():,.0f} MB")
    print(f"  {'read or generate':34} {read_s:7.2f} s {1e6 * read_s / requests:8.1f} us/request")
    began_s = time.process_time()
    ideal = trace.ideal_hit_token_weighted
    ideal_s = time.process_time() - began_s
    name = f"ideal hits ({ideal:.1%} of input tokens)"
    print(f"  {name:34} {ideal_s:7.2f} s {1e6 * ideal_s / requests:8.1f} us/request")
    for job in jobs(config, trace, Path("unused")):
        figures: dict[str, float] = {}
        if not known.whole_only:
            figures["replay alone"] = replay(job, AtOnce(), lambda _: None)
            figures["replay, records written"] = replay_to_disk(job, AtOnce(), 0)
            figures["replay, simulator"] = replay(job, job.backend, lambda _: None)
        figures["replay, simulator, records"] = replay_to_disk(job, job.backend, known.per)
        print(f"{job.name}: {events(job.backend) / requests:.1f} simulated events a request")
        for name, cpu_s in figures.items():
            print(
                f"  {name:34} {cpu_s:7.2f} s {1e6 * cpu_s / requests:8.1f} us/request"
                f" {requests / cpu_s:10,.0f} requests/s"
            )
    print(f"peak memory {peak_mb():,.0f} MB")


if __name__ == "__main__":
    main()
