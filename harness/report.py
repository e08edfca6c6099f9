"""What a report is: a class that reads run directories and draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from harness.result import Run


@dataclass(frozen=True)
class Figure:
    """One picture, what it shows, and the numbers it was drawn from."""

    path: Path
    """A PNG."""
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
