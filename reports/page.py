"""The page, one HTML file: what came out, whether to believe it, how it was measured.

No script, nothing loaded from elsewhere, and no word of a trace or a server that is not escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from harness import __version__
from harness.metrics import SAMPLE_FLOOR
from harness.record import OK
from harness.report import Figure, Report, write_numbers
from harness.result import Run
from reports.facts import facts, settings, simulated
from reports.headline import Cell, latency_cells, lines
from reports.html import template, write
from reports.palette import colours, labels

PAGE = "report.html"

_ERRORS_SHOWN = 5
_HIT_DRIFT = 0.05
_STRATUM_COLUMNS = ("measured", "ok", "failed")


@dataclass(frozen=True)
class Verdict:
    """Whether one run can be believed, and why not; and what its failed requests said."""

    label: str
    valid: bool
    partial: bool
    reasons: Sequence[str]
    warnings: Sequence[str]
    errors: Sequence[tuple[str, int]]
    """(error, requests), the most frequent first."""

    @property
    def word(self) -> str:
        """`valid`, or what it is instead."""
        if self.partial:
            return "partial"
        return "valid" if self.valid else "not valid"


@dataclass(frozen=True)
class Section:
    """A report on the page: its figures, none where the runs lack what it needs."""

    name: str
    figures: Sequence[Figure]


class Page:
    """Draws each section and sets them, with the tables, into `report.html`."""

    def __init__(self, sections: Mapping[str, Report]) -> None:
        self.sections = sections

    def render(self, runs: Sequence[Run], out: Path) -> Path:
        """Write the figures and the page into the folder `out`; returns the page's path.

        Raises `ResultError` where a run cannot be read or `out` cannot be written.
        """
        names = labels(runs)
        summaries = [run.summary().to_pylist() for run in runs]
        whole = [rows[0] for rows in summaries]
        sections = [Section(name, each.render(runs, out)) for name, each in self.sections.items()]
        for section in sections:
            write_numbers(section.figures)
        html = template("page").render(
            names=names,
            colours=colours(names),
            trace=runs[0].manifest["trace"],
            traces=len({run.manifest["trace"]["digest"] for run in runs}),
            started=str(runs[0].manifest["started"])[:10],
            version=runs[0].manifest["relaybench"],
            simulated=[n for n, run in zip(names, runs, strict=True) if simulated(run)],
            verdicts=[_verdict(*each) for each in zip(names, runs, whole, strict=True)],
            answered=any(row["ok"] for row in whole),
            lines=lines(runs, whole),
            lags=[(row["send_lag_p50_s"], row["send_lag_p99_s"]) for row in whole],
            strata=[_strata(name, rows) for name, rows in zip(names, summaries, strict=True)],
            sections=sections,
            facts=facts(runs),
            details=[
                (name, settings(run.manifest["backend"]["details"]))
                for name, run in zip(names, runs, strict=True)
            ],
        )
        return write(html, out / PAGE)


def _doubts(run: Run, row: Mapping[str, Any]) -> list[str]:
    """What to beware of in a run, beyond what it says itself."""
    doubts = []
    if row["measured"] and not row["p99_supported"]:
        doubts.append(
            f"{row['measured']:,} requests were measured: a P99 needs {SAMPLE_FLOOR[0.99]} to mean "
            "something"
        )
    ideal, served = row["ideal_hit_mean"], row["served_hit_mean"]
    if ideal is not None and served is not None and ideal - served > _HIT_DRIFT:
        doubts.append(
            f"hits served are {100 * (ideal - served):.0f} points below those of an endless cache: "
            "the cache is small, has lost them, or prompts did not meet it"
        )
    if simulated(run) and run.manifest["relaybench"] != __version__:
        doubts.append(
            f"simulated by relaybench {run.manifest['relaybench']}, and this is {__version__}: its "
            "calibration may be out of date"
        )
    return doubts


def _verdict(label: str, run: Run, row: Mapping[str, Any]) -> Verdict:
    validity = run.manifest["validity"]
    records = run.records(["status", "error_class", "error"])
    broken = records.filter(pc.not_equal(records.column("status"), OK))
    kind = pc.if_else(
        pc.is_null(broken.column("error_class")),
        "",
        pc.binary_join_element_wise(broken.column("error_class"), "", ": "),
    )
    said = pc.binary_join_element_wise(kind, broken.column("error"), "").drop_null()
    counts = {each["values"]: each["counts"] for each in said.value_counts().to_pylist()}
    most = sorted(counts.items(), key=lambda each: (-each[1], each[0]))[:_ERRORS_SHOWN]
    return Verdict(
        label,
        bool(validity["valid"]),
        bool(run.manifest["partial"]),
        validity["reasons"],
        [*run.manifest.get("warnings", ()), *_doubts(run, row)],
        most,
    )


def _strata(label: str, rows: list[dict[str, Any]]) -> tuple[str, list[tuple[str, list[Cell]]]]:
    """(run, a row a stratum that has requests: its counts and its TTFT)."""
    return label, [
        (
            row["stratum"],
            [*(Cell(f"{row[name]:,}") for name in _STRATUM_COLUMNS), *latency_cells(row)],
        )
        for row in rows
        if row["scheduled"]
    ]
