"""The booklet: every figure on one page, with its caption, its numbers and its runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from harness import __version__
from harness.figures import Plate
from harness.result import Run
from reports.facts import simulated
from reports.html import template, write

INDEX = "index.html"


class Booklet:
    """Binds figures into `index.html`."""

    def bind(self, plates: Sequence[Plate], out: Path, title: str) -> Path:
        """Write the page `title` into the folder `out`; returns its path. Raises `ResultError`."""
        html = template("booklet").render(
            plates=[(plate, provenance(plate.runs)) for plate in plates],
            title=title,
            version=__version__,
            drawn_on=f"{datetime.now(UTC):%Y-%m-%d}",
        )
        return write(html, out / INDEX)


def provenance(runs: Sequence[Run]) -> str:
    """Which runs, of which trace, seed and version, simulated or measured; empty without runs."""
    if not runs:
        return ""
    manifests = [run.manifest for run in runs]
    names = dict.fromkeys(run.name for run in runs)
    traces = dict.fromkeys(
        f"{each['trace']['format']} ({each['trace']['digest'][:12]})" for each in manifests
    )
    seeds = dict.fromkeys(str(each["seed"]) for each in manifests)
    versions = dict.fromkeys(str(each["relaybench"]) for each in manifests)
    how = "simulated" if all(map(simulated, runs)) else "measured"
    several = next(iter(traces)) if len(traces) == 1 else f"{len(traces)} traces"
    return (
        f"{len(runs):,} {how} run{'s' if len(runs) > 1 else ''} of {', '.join(names)}; {several}; "
        f"seed {', '.join(seeds)}; relaybench {', '.join(versions)}."
    )
