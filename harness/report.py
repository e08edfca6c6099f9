"""What a report is: a class that reads run directories and draws."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.csv

from harness.errors import ResultError
from harness.result import Run, write_table


@dataclass(frozen=True)
class Figure:
    """One picture, what it shows, and the numbers it was drawn from."""

    path: Path
    """A PNG; the same as a PDF lies beside it."""
    title: str
    caption: str
    """Plain text: what to see, over which requests, and what to beware of."""
    numbers: pa.Table
    """The numbers drawn, for the table below the picture; units in the column names."""


class Report(Protocol):
    """Draws from finished runs. Reads nothing but their directories."""

    def render(self, runs: Sequence[Run], out: Path) -> list[Figure]:
        """Write PNGs into `out` and return them. Empty where the runs lack what it needs."""
        ...


def write_numbers(figures: Iterable[Figure]) -> None:
    """The numbers beside each picture, as CSV and as Parquet. Raises `ResultError`."""
    for figure in figures:
        path = figure.path.with_suffix(".csv")
        try:
            pa.csv.write_csv(figure.numbers, path)
        except OSError as error:
            raise ResultError(f"{path} cannot be written: {error}") from error
        write_table(figure.numbers, figure.path.with_suffix(".parquet"))
