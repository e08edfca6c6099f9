"""Load clients side by side, on one server whose send times are known.

    python -m benchmarks.client.compare install --peers ~/peers --python python3.12
    python -m benchmarks.client.compare run --peers ~/peers --out results.json

Run it from the root of the repository, on a machine that does nothing else: the clients share its
cores with the server. Of the peers inference-perf needs Python 3.12; ours runs on the interpreter
that runs this. Every client sends the same load: 50, 100 and 200 requests a second for ten
seconds, evenly spaced, each answered with 64 events of one token, the first after 50 ms and the
others 10 ms apart. `server.c` logs when each request was whole and when each event left; a
client's own records are held against that log. What a row says, the median of the repeats:

* sent in: from the first arrival to one interval past the last; the load's own length if it held.
* CPU us a chunk: user and system time of the client's whole process tree, less that of a run of
  one second at the lowest rate (the median of the repeats, after one that does not count), over
  the chunks that the longer run had more. Start-up, and what a client does once however long it
  runs, cancel out.
* memory: the most that the tree held at once, sampled each second; pages that its processes share
  are counted for each (PSS, which counts them once, stands in the JSON).
* send error: arrival at the server less the due time, the k-th arrival for the k-th due. No client
  says when its schedule began, so zero is its least late request.
* TTFT error: what the client calls TTFT, against first send less arrival at the server. A client
  that takes its stamp before it has a connection, or after it has parsed, shows it here.
* gap error: each time between two chunks, against that between their sends. ITL error: the same of
  a request's mean, for clients that keep no more than that.
* lost: requests that the client does not report, or that the server did not see.
* others: cores that neither the client nor the server used but something else did.
* server late: how late the server's own sends were, P99. It harms nothing, since what it did is
  logged and not what it meant to do, unless it is near the gaps.

Percentiles are exact, nearest rank, of absolute errors.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.client.peers import CLIENTS, OURS, Launch, Load, Seen
from harness.metrics import nearest_rank

CHUNKS, FIRST_US, GAP_US = 64, 50_000, 10_000
_LOG = np.dtype(
    [
        ("key", "S48"),
        ("serial", np.int64),
        ("arrived_ns", np.int64),
        ("arrived_unix_ns", np.int64),
        ("sent_ns", np.int64, (CHUNKS,)),
    ]
)
_QUIET_CORES = 0.1
_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")

Log = NDArray[np.void]


class ClientFailed(Exception):
    """A client that ended badly, with its last words, or that reached nothing."""


@dataclass(frozen=True)
class Usage:
    """What a client's process tree took."""

    wall_s: float
    cpu_s: float
    rss_mb: float
    pss_mb: float


@dataclass(frozen=True)
class Errors:
    """What a client got wrong, ms, and how the run went on the server's side."""

    sent_in_s: float
    send_p50: float
    send_p99: float
    ttft_p50: float
    ttft_p99: float
    gap_p99: float | None
    itl_p99: float
    lost: int
    chunks: int
    server_late_p99: float


@dataclass(frozen=True)
class Outcome(Usage, Errors):
    """One run of one client, or the medians of several."""

    load_average: float
    others_cores: float


@contextmanager
def server(program: Path, log: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The server's address, while it runs; its log is whole afterwards."""
    command = [str(program), str(log), str(CHUNKS), str(FIRST_US), str(GAP_US)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = int(process.stdout.readline() if process.stdout else 0)
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.send_signal(signal.SIGTERM)


def metered(launch: Launch, output: Path) -> Usage:
    """Run a client to its end, and count every process it started. Raises `ClientFailed`."""
    began_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os._exit(_run_and_reap(launch, output))
    rss_mb = pss_mb = 0.0
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            break
        rss, pss = _memory_mb(pid)
        rss_mb, pss_mb = max(rss_mb, rss), max(pss_mb, pss)
        time.sleep(1)
    if status:
        tail = "".join(output.read_text(encoding="utf-8").splitlines(keepends=True)[-20:])
        raise ClientFailed(f"{' '.join(launch.command)}\n{tail}")
    cpu_s = usage.ru_utime + usage.ru_stime
    return Usage(time.monotonic() - began_s, cpu_s, rss_mb, pss_mb)


def _run_and_reap(launch: Launch, output: Path) -> int:
    """Also wait for processes that outlive their parents, so that their time counts."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with output.open("wb") as file:
        environment = os.environ | launch.environment
        code = subprocess.call(
            launch.command, stdout=file, stderr=subprocess.STDOUT, env=environment
        )
    try:
        while True:
            os.wait()
    except ChildProcessError:
        return min(abs(code), 255)


def _memory_mb(root: int) -> tuple[float, float]:
    """RSS and PSS of what descends from a process, itself left out."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(after_name[1])
    tree = {root}
    while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= more
    total = dict.fromkeys(("Rss:", "Pss:"), 0)
    for pid in tree - {root}:
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
        except OSError:
            continue
        for name, value, *_ in map(str.split, rollup.splitlines()):
            if name in total:
                total[name] += int(value)
    return total["Rss:"] / 1024, total["Pss:"] / 1024


def _busy_s() -> float:
    """CPU seconds that this machine has spent on anything so far."""
    user, nice, system, _, _, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / _TICKS


def wait_for_quiet(patience_s: float) -> None:
    """Until a second passes in which this machine does next to nothing, or patience ends."""
    until_s = time.monotonic() + patience_s
    while time.monotonic() < until_s:
        busy_s = _busy_s()
        time.sleep(1)
        if _busy_s() - busy_s < _QUIET_CORES:
            return


def run_once(name: str, program: Path, peers: Path, rate: int, seconds: int) -> Outcome:
    """One client on a server of its own. Raises `ClientFailed`."""
    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(folder) / "server.log"
        load_average, busy_s = os.getloadavg()[0], _busy_s()
        with server(program, log_path) as (url, process):
            load = Load(url, rate, seconds, CHUNKS, Path(folder), peers)
            launch = CLIENTS[name](load)
            usage = metered(launch, Path(folder) / "output.txt")
            others_s = _busy_s() - busy_s - usage.cpu_s - _cpu_s(process.pid)
        found = errors(np.fromfile(log_path, _LOG), list(launch.read()), load)
    return Outcome(
        **asdict(usage),
        **asdict(found),
        load_average=load_average,
        others_cores=max(0.0, others_s / usage.wall_s),
    )


def _cpu_s(pid: int) -> float:
    after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / _TICKS


def errors(log: Log, seen: Sequence[Seen], load: Load) -> Errors:
    """A client's own account against the server's log. Raises `ClientFailed` if none match."""
    answered = log[log["sent_ns"].all(axis=1)]
    answered = answered[np.argsort(answered["serial"])]
    place = {key: at for at, row in enumerate(answered) for key in _keys(row)}
    matched = [(place[each.key], each) for each in seen if each.key in place]
    if not matched:
        raise ClientFailed(f"{len(answered)} requests answered, {len(seen)} reported, none agree")
    at = np.array([each for each, _ in matched], dtype=int)
    answered = answered[at.min() : at.max() + 1]  # before and after: probes
    at -= at.min()
    sent_ms, arrived_ms = answered["sent_ns"] / 1e6, answered["arrived_ns"] / 1e6
    late_ms = arrived_ms[: len(load.due_s)] - 1e3 * load.due_s[: len(answered)]
    planned_ms = arrived_ms[:, None] + (FIRST_US + GAP_US * np.arange(CHUNKS)) / 1e3
    ttft_ms = np.array([1e3 * each.ttft_s for _, each in matched])
    itl_ms = np.array([1e3 * each.itl_s for _, each in matched])
    gaps_ms = [1e3 * each.gaps_s for _, each in matched if each.gaps_s is not None]
    true_itl_ms = (sent_ms[:, -1] - sent_ms[:, 0]) / (CHUNKS - 1)

    def rank(values: NDArray[np.float64], q: float) -> float:
        return nearest_rank(np.abs(values).ravel(), q)

    send, ttft = late_ms - late_ms.min(), ttft_ms - (sent_ms[:, 0] - arrived_ms)[at]
    return Errors(
        sent_in_s=float(arrived_ms[-1] - arrived_ms[0]) / 1e3 + 1 / load.rate,
        send_p50=rank(send, 0.5),
        send_p99=rank(send, 0.99),
        ttft_p50=rank(ttft, 0.5),
        ttft_p99=rank(ttft, 0.99),
        gap_p99=rank(np.array(gaps_ms) - np.diff(sent_ms)[at], 0.99) if gaps_ms else None,
        itl_p99=rank(itl_ms - true_itl_ms[at], 0.99),
        lost=len(load.due_s) - len(matched),
        chunks=int((log["sent_ns"] > 0).sum()),
        server_late_p99=rank(sent_ms - planned_ms, 0.99),
    )


def _keys(row: np.void) -> tuple[str, str]:
    """What a client may know a request by."""
    return row["key"].decode(), f"cmpl-{row['serial']}"


def version(name: str, peers: Path) -> str:
    """What is installed of a client."""
    python = sys.executable if name == OURS else str(peers / name / "bin" / "python")
    ask = f"import importlib.metadata as m, sys; print(m.version({name!r}), sys.version.split()[0])"
    answer = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    return "{} (Python {})".format(*answer.stdout.split())


def install(names: Sequence[str], peers: Path, python: str) -> None:
    """Put each peer into a virtual environment of its own, as pip resolves it today."""
    for name in names:
        began_s = time.monotonic()
        home = peers / name
        subprocess.run([python, "-m", "venv", "--clear", str(home)], check=True)
        subprocess.run([str(home / "bin" / "pip"), "install", "-q", name], check=True)
        took_s = time.monotonic() - began_s
        print(f"{name} {version(name, peers)}: installed in {took_s:.0f} s", flush=True)


Step = tuple[int, int]
"""Requests a second, and seconds."""


def gather(options: argparse.Namespace, program: Path) -> dict[str, dict[Step, list[Outcome]]]:
    """Every run, client after client and then again, so that a bad minute hits them all."""
    steps: list[Step] = [(rate, options.seconds) for rate in options.rates]
    found: dict[str, dict[Step, list[Outcome]]] = {name: {} for name in options.names}
    for turn, name in itertools.product(range(options.repeats + 1), options.names):
        for step in (start_up(options), *(steps if turn else ())):
            wait_for_quiet(options.patience_s)
            try:
                outcome = run_once(name, program, options.peers, *step)
            except ClientFailed as failed:
                print(f"{name} {step} failed: {failed}", file=sys.stderr, flush=True)
                continue
            print(name, step, outcome, file=sys.stderr, flush=True)
            if turn:  # the first only had the client's files read
                found[name].setdefault(step, []).append(outcome)
    return found


def start_up(options: argparse.Namespace) -> Step:
    """The run whose CPU time is taken off."""
    return min(options.rates), 1


def median(outcomes: Sequence[Outcome]) -> Outcome:
    """Of each figure by itself."""
    figures: dict[str, Any] = {}
    for name in (each.name for each in fields(Outcome)):
        values = [getattr(each, name) for each in outcomes]
        figures[name] = None if None in values else statistics.median_low(values)
    return Outcome(**figures)


def summary(runs: Mapping[Step, Sequence[Outcome]], short: Step) -> dict[int, dict[str, Any]]:
    """By rate: the medians, and the CPU a chunk that they come to."""
    medians = {step: median(outcomes) for step, outcomes in runs.items()}
    found: dict[int, dict[str, Any]] = {}
    if (less := medians.pop(short, None)) is None:
        return found
    for (rate, _), row in medians.items():
        cpu_us_a_chunk = 1e6 * (row.cpu_s - less.cpu_s) / (row.chunks - less.chunks)
        found[rate] = asdict(row) | {"cpu_us_a_chunk": cpu_us_a_chunk, "start_up_s": less.cpu_s}
    return found


def table(summaries: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> str:
    """Markdown, a line a rate and client."""
    columns = {
        "sent in, s": "{sent_in_s:.1f}",
        "CPU us a chunk": "{cpu_us_a_chunk:.0f}",
        "memory, MB": "{rss_mb:,.0f}",
        "send error P50 / P99, ms": "{send_p50:,.2f} / {send_p99:,.2f}",
        "TTFT error P50 / P99, ms": "{ttft_p50:,.2f} / {ttft_p99:,.2f}",
        "gap error P99, ms": "{gap_p99:.2f}",
        "ITL error P99, ms": "{itl_p99:.3f}",
        "lost": "{lost}",
        "others, cores": "{others_cores:.2f}",
        "load average": "{load_average:.1f}",
        "server late P99, ms": "{server_late_p99:.2f}",
    }
    lines = [["requests/s", "client", *columns], ["---"] * (len(columns) + 2)]
    for rate in sorted({rate for rows in summaries.values() for rate in rows}):
        for name, row in ((name, rows[rate]) for name, rows in summaries.items() if rate in rows):
            known = {key: math.nan if value is None else value for key, value in row.items()}
            cells = [shown.format(**known).replace("nan", "-") for shown in columns.values()]
            lines.append([str(rate), name, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def compare(options: argparse.Namespace) -> None:
    """Run all, print the table, write the JSON."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("no C compiler (cc or gcc), and the server must be built")
    versions = {name: version(name, options.peers) for name in options.names}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "server"
        source = Path(__file__).with_name("server.c")
        subprocess.run([compiler, "-O2", "-o", str(program), str(source)], check=True)
        runs = gather(options, program)
    summaries = {name: summary(each, start_up(options)) for name, each in runs.items()}
    print("; ".join(f"{name} {said}" for name, said in versions.items()), end="\n\n")
    print(table(summaries))
    written = {
        name: {
            "version": versions[name],
            "medians": summaries[name],
            "runs": [
                {"rate": rate, "seconds": seconds} | asdict(outcome)
                for (rate, seconds), outcomes in steps.items()
                for outcome in outcomes
            ],
        }
        for name, steps in runs.items()
    }
    load = {"seconds": options.seconds, "chunks": CHUNKS, "first_us": FIRST_US, "gap_us": GAP_US}
    text = json.dumps({"load": load, "clients": written}, indent=2)
    options.out.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Install the peers, or run them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    for what in ("install", "run"):
        command = commands.add_parser(what)
        command.add_argument("names", nargs="*", help=f"of {', '.join(CLIENTS)}; all if none")
        command.add_argument("--peers", type=Path, required=True, help="folder of their venvs")
        if what == "install":
            command.add_argument("--python", default=sys.executable, help="for their venvs")
            continue
        command.add_argument("--rates", type=int, nargs="+", default=[50, 100, 200])
        command.add_argument("--seconds", type=int, default=10)
        command.add_argument("--repeats", type=int, default=3)
        command.add_argument(
            "--patience-s", type=float, default=60, help="wait so long at most for a quiet machine"
        )
        command.add_argument("--out", type=Path, default=Path("client_comparison.json"))
    options = parser.parse_args()
    if unknown := set(options.names) - CLIENTS.keys():
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    options.names = options.names or list(CLIENTS)
    if options.what == "install":
        install([name for name in options.names if name != OURS], options.peers, options.python)
    else:
        compare(options)


if __name__ == "__main__":
    main()
