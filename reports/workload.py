"""What was replayed, beside real agent traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from harness import metrics
from harness.report import Figure
from harness.result import Run
from reports import palette
from reports.hitrate import shares

_QUANTILES = (50, 90, 99)


class Workload:
    """Hit-rate bins of the trace beside those of `reference`, which says where it is from.

    `reference`: name, and `shares` (7,), `mean`, `above_95` in percent, `input` and `output` tokens
    (P50, P90, P99), `output_under_500` in percent.
    """

    def __init__(self, reference: Mapping[str, Any]) -> None:
        self.reference = reference

    def render(self, runs: Sequence[Run], out: Path) -> list[Figure]:
        """One figure, of the first run: all of a comparison replay one trace."""
        for run in runs:
            records = run.records(["input_tokens", "output_tokens", "ideal_hit_tokens"])
            if records.num_rows:
                return [self._draw(run, records, out)]
        return []

    def _draw(self, run: Run, records: pa.Table, out: Path) -> Figure:
        inputs = metrics.column(records, "input_tokens")
        outputs = metrics.column(records, "output_tokens")
        rates = metrics.column(records, "ideal_hit_tokens") / inputs
        ours = 100 * shares(rates)
        theirs = np.array(self.reference["shares"], float)
        name, other = f"this run ({run.manifest['trace']['format']})", self.reference["name"]
        made = palette.figure(9.0, 3.8)
        axes = made.subplots()
        places = np.arange(len(ours))
        for shift, values, label, colour in ((-0.2, ours, name, "C0"), (0.2, theirs, other, "0.6")):
            bars = axes.bar(places + shift, values, 0.38, label=label, color=colour)
            axes.bar_label(bars, [f"{value:.1f}" for value in values], fontsize=8, padding=2)
        axes.set_xticks(places, metrics.HIT_LABELS)
        axes.set_xlabel("ideal prefix-hit rate of a request")
        axes.set_ylabel("% of requests")
        axes.set_ylim(0, 1.2 * max(ours.max(), theirs.max()))
        axes.set_title("The workload beside real agent sessions")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        return Figure(
            palette.save(made, out / "workload.png"),
            "The workload",
            "Ideal hit rate of the requests replayed (all of the trace), beside "
            f"{other}. {self.reference['note']}",
            self._numbers(name, other, rates, inputs, outputs),
        )

    def _numbers(
        self,
        name: str,
        other: str,
        rates: np.ndarray[Any, np.dtype[np.float64]],
        inputs: np.ndarray[Any, np.dtype[np.float64]],
        outputs: np.ndarray[Any, np.dtype[np.float64]],
    ) -> pa.Table:
        reference = self.reference
        lines: list[tuple[str, float, float]] = [
            ("mean ideal hit rate, %", 100 * float(rates.mean()), reference["mean"]),
            ("requests above 95%, %", 100 * float((rates > metrics.HIT_EDGES[2]).mean()),
             reference["above_95"]),
            ("outputs under 500 tokens, %", 100 * float((outputs < 500).mean()),  # noqa: PLR2004 - the published limit
             reference["output_under_500"]),
        ]  # fmt: skip
        for what, values in (("input", inputs), ("output", outputs)):
            for at, q in enumerate(_QUANTILES):
                rank = metrics.nearest_rank(values, q / 100)
                lines.append((f"{what} P{q}, tokens", rank, reference[what][at]))
        return pa.table(
            {
                "figure": [line[0] for line in lines],
                name: [round(line[1], 1) for line in lines],
                other: [round(float(line[2]), 1) for line in lines],
            }
        )
