"""The page: one self-contained HTML file with the headline, the figures and how it was measured.

Nothing is loaded from anywhere and nothing is executed: pictures are data URIs, there is no
script, and every word that comes from a trace, a server or a configuration is escaped.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from jinja2 import Environment, PackageLoader, StrictUndefined

from harness.report import Figure, Report
from harness.result import Run

_MISSING = "–"  # noqa: RUF001 - the dash that stands for no value
_QUANTILES = (50, 90, 99)
_MILLI = 0.1
"""Seconds below which a time is shown in milliseconds."""
_THOUSAND = 1000


class Page:
    """`sections` are reports by name, drawn in their order."""

    def __init__(self, sections: Mapping[str, Report]) -> None:
        self.sections = sections

    def render(self, runs: Sequence[Run], out: Path) -> Path:
        """Write `report.html` and the figures beside it. Returns the page."""
        figures = [f for section in self.sections.values() for f in section.render(runs, out)]
        environment = Environment(
            autoescape=True,
            loader=PackageLoader("reports", "."),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        page = environment.get_template("page.html.j2").render(
            runs=[_card(run) for run in runs],
            figures=[_picture(figure) for figure in figures],
            measured=_measured(runs[0].manifest),
            simulated=any(run.manifest["clock"] == "virtual" for run in runs),
        )
        path = out / "report.html"
        path.write_text(page, encoding="utf-8")
        return path


def _card(run: Run) -> dict[str, Any]:
    """A row of the headline table, in words."""
    row = run.summary().to_pylist()[0]
    manifest = run.manifest
    cards = manifest["backend"]["cards"]
    return {
        "name": run.name,
        "cards": " + ".join(f"{n:g} {role}" for role, n in cards.items()) or _MISSING,
        "valid": manifest["validity"]["valid"],
        "reasons": manifest["validity"]["reasons"],
        "partial": manifest["partial"],
        "ok": f"{row['ok']:,} of {row['scheduled']:,}",
        "failed": row["failed"],
        "unsent": row["unsent"] + row["cancelled"],
        "measured": f"{row['measured']:,}",
        "small": [q for q in (90, 99) if not row[f"p{q}_supported"]],
        "figures": [
            *(_seconds(row[f"ttft_p{q}_s"]) for q in _QUANTILES),
            *(_seconds(row[f"tpot_p{q}_s"]) for q in (50, 99)),
            *(_seconds(row[f"e2e_p{q}_s"]) for q in (50, 99)),
            _number(row["requests_per_s"]),
            _number(row["output_tokens_per_s"]),
            _percent(row["served_hit_mean"]),
            _percent(row["ideal_hit_mean"]),
            _seconds(row["send_lag_p99_s"]),
        ],
        "details": json.dumps(manifest["backend"]["details"], indent=2),
    }


def _measured(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """How: what a reader needs to repeat the run or to doubt it."""
    trace = manifest["trace"]
    sources = ", ".join(f"{s['name']} ({s['sha256'][:12]})" for s in trace["sources"][:3])
    more = len(trace["sources"]) - 3
    changes = ", ".join(f"{name}: {count:,}" for name, count in trace["changes"].items())
    window = manifest["window"]
    return [
        (
            "Trace",
            f"{trace['format']}, {trace['turns']:,} requests, {trace['sessions']:,} sessions",
        ),
        ("Read from", (sources + (f" and {more} more" if more > 0 else "")) or "generated"),
        ("Digest", trace["digest"]),
        ("Licence", trace["licence"]),
        (
            "Blocks",
            (
                f"{trace['block_tokens']} tokens, partial blocks by {trace['partial_block']}, "
                f"ids per {trace['id_scope']}, prefixes {trace['prefix_data']}"
            ),
        ),
        ("Dropped, clamped or estimated", changes or "nothing"),
        (
            "Ideal hit rate",
            (
                f"{trace['ideal_hit_mean']:.1%} mean of requests, "
                f"{trace['ideal_hit_token_weighted']:.1%} of tokens; prompts only"
            ),
        ),
        ("Pacing", json.dumps(manifest["pacing"])),
        ("Left out", f"first {window['warmup_s']:g} s, last {window['cooldown_s']:g} s"),
        ("Seed", str(manifest["seed"])),
        ("Clock", manifest["clock"]),
        ("Command", " ".join(manifest["command"])),
        ("relaybench", manifest["relaybench"]),
        ("Versions", ", ".join(f"{k} {v}" for k, v in manifest["versions"].items())),
        ("Host", ", ".join(str(v) for v in manifest["host"].values())),
    ]


def _picture(figure: Figure) -> dict[str, Any]:
    data = base64.b64encode(figure.path.read_bytes()).decode()
    return {
        "title": figure.title,
        "caption": figure.caption,
        "source": f"data:image/png;base64,{data}",
        "columns": figure.numbers.column_names,
        "rows": _rows(figure.numbers),
    }


def _rows(numbers: pa.Table) -> list[list[str]]:
    return [
        [value if isinstance(value, str) else _number(value) for value in row.values()]
        for row in numbers.to_pylist()
    ]


def _number(value: float | None) -> str:
    if value is None:
        return _MISSING
    if not math.isfinite(value):
        return "failed"
    if isinstance(value, int) or abs(value) >= _THOUSAND:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _seconds(value: float | None) -> str:
    if value is None:
        return _MISSING
    if not math.isfinite(value):
        return "failed"
    if value == 0:
        return "0"
    return f"{1000 * value:.3g} ms" if value < _MILLI else f"{value:.3g} s"


def _percent(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.1%}"
