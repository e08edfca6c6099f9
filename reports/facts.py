"""How a run was measured: every setting that decides its numbers, in words, a line each."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.result import Run
from reports.units import DASH, number, percent, seconds

_VIRTUAL = "virtual: times are simulated, nothing was waited for and no hardware was measured"
_WALL = "wall: times are those at which bytes reached this client"
_DIGEST_SHOWN = 16


@dataclass(frozen=True)
class Fact:
    """A line: what it is about, and one text a run, or a single one where all runs agree."""

    name: str
    texts: Sequence[str]


def facts(runs: Sequence[Run]) -> list[Fact]:
    """All lines, in the order in which a reader would ask for them."""
    lines = []
    for name, tell in _TOLD.items():
        texts = [tell(run.manifest) for run in runs]
        lines.append(Fact(name, texts[:1] if len(set(texts)) == 1 else texts))
    return lines


def simulated(run: Run) -> bool:
    """Whether its times come from a virtual clock."""
    return bool(run.manifest["clock"] == "virtual")


def _trace(manifest: Mapping[str, Any]) -> str:
    trace = manifest["trace"]
    return f"{trace['format']}: {trace['turns']:,} requests in {trace['sessions']:,} sessions"


def _ideal(manifest: Mapping[str, Any]) -> str:
    trace = manifest["trace"]
    weighted = percent(trace["ideal_hit_token_weighted"])
    return f"{percent(trace['ideal_hit_mean'])} mean, {weighted} token-weighted"


def _blocks(manifest: Mapping[str, Any]) -> str:
    trace = manifest["trace"]
    last = "has an id" if trace["partial_block"] == "ceil" else "has none"
    return (
        f"{trace['block_tokens']} tokens; a last partial block {last}; "
        f"ids reach as far as the {'file' if trace['id_scope'] == 'file' else 'whole source'}; "
        f"prefix data {trace['prefix_data']}"
    )


def _time(manifest: Mapping[str, Any]) -> str:
    trace = manifest["trace"]
    return f"{trace['time_unit']} in the source; session starts {trace['session_starts']}"


def _sources(manifest: Mapping[str, Any]) -> str:
    sources = manifest["trace"]["sources"]
    if not sources:
        return "generated, no file"
    first = f"{sources[0]['name']} (SHA-256 {sources[0]['sha256'][:_DIGEST_SHOWN]}…)"
    return first if len(sources) == 1 else f"{first} and {len(sources) - 1:,} more files"


def _changes(manifest: Mapping[str, Any]) -> str:
    changes = manifest["trace"]["changes"]
    return "; ".join(f"{name}: {count:,}" for name, count in changes.items()) or "nothing"


def _window(manifest: Mapping[str, Any]) -> str:
    window = manifest["window"]
    steady = window["steady"]
    between = (
        f"between the starts of {percent(steady[0])} and {percent(steady[1])} of the sessions"
        if steady
        else ""
    )
    if not window["warmup_s"] and not window["cooldown_s"]:
        return between or "the whole run"
    first, last = seconds(window["warmup_s"]), seconds(window["cooldown_s"])
    without = f"without turns scheduled in the first {first} and the last {last}"
    return f"{between}, {without}" if between else without


def _prices(manifest: Mapping[str, Any]) -> str:
    sheet = manifest["prices"]
    return f"{sheet['name']}; in {sheet['currency']}, of {sheet['as_of']}; {sheet['source']}"


def _timeout(manifest: Mapping[str, Any]) -> str:
    timeout_s = manifest.get("timeout_s")
    return "none" if timeout_s is None else seconds(timeout_s)


def _tokens(manifest: Mapping[str, Any]) -> str:
    """Wanted, sent and served, for each kind of token."""
    known = (manifest.get("fidelity") or {}).get("tokens", {})
    return (
        "; ".join(
            f"{kind}: "
            + ", ".join(f"{name} {DASH if n is None else number(n)}" for name, n in counts.items())
            for kind, counts in known.items()
        )
        or DASH
    )


def _client(manifest: Mapping[str, Any]) -> str:
    """What the measuring cost, and how far it can be trusted."""
    client = manifest.get("client")
    if not client or manifest["clock"] == "virtual":
        return "cannot be late on a virtual clock"
    return (
        f"sent late by P50 {seconds(client['send_lag_p50_s'])}, P99 "
        f"{seconds(client['send_lag_p99_s'])}; its loop late by P99 "
        f"{seconds(client['loop_lag_p99_s'])}; {client['stamped_by_user']:,} answers stamped by "
        f"itself and not by the kernel; {client['shared_reads']:,} events read together with a "
        f"later one; {percent(client['cpu_share'])} of a core. Rule: {client['rule']}"
    )


def _workers(manifest: Mapping[str, Any]) -> str:
    """Who replayed, and how exactly they started together."""
    workers = manifest.get("workers") or ()
    return (
        "; ".join(
            f"worker {each['worker']}: {each['turns']:,} turns, started "
            f"{seconds(each['start_skew_s'])} after the common start, {each['end']}"
            for each in workers
        )
        or "one process"
    )


def _command(manifest: Mapping[str, Any]) -> str:
    return shlex.join(map(str, manifest.get("command", ()))) or DASH


def _took(manifest: Mapping[str, Any]) -> str:
    ended = manifest["ended"] or "never ended"
    return f"{manifest['started']} to {ended}, {seconds(manifest['wall_s'])} of this machine"


def settings(values: Mapping[str, Any], inside: str = "") -> list[tuple[str, str]]:
    """Nested settings as (dotted name, value), for a table; numbers as a person reads them."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{inside}{key}"
        if isinstance(value, Mapping):
            rows += settings(value, f"{name}.")
        else:
            rows.append((name, _plain(value)))
    return rows


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}" if 0 < abs(value) < 1 else number(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings(values)) or DASH


_TOLD: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "Clock": lambda manifest: _VIRTUAL if manifest["clock"] == "virtual" else _WALL,
    "Trace": _trace,
    "Trace digest": lambda manifest: str(manifest["trace"]["digest"]),
    "Read from": _sources,
    "Dropped or changed on reading": _changes,
    "Ideal hit rate": _ideal,
    "Blocks": _blocks,
    "Time": _time,
    "Licence of the trace": lambda manifest: str(manifest["trace"]["licence"]),
    "Made with": lambda manifest: _listed(manifest["trace"]["parameters"]),
    "Pacing": lambda manifest: _listed(manifest["pacing"]),
    "Seed": lambda manifest: str(manifest["seed"]),
    "Measured window": _window,
    "Time-out": _timeout,
    "Prices": _prices,
    "Tokens of the answered": _tokens,
    "The client": _client,
    "Workers": _workers,
    "Command": _command,
    "Ran": _took,
    "Versions": lambda manifest: _listed(manifest["versions"]),
    "Host": lambda manifest: _listed(manifest["host"]),
}
