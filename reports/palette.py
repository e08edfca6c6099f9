"""One look for all figures: a colour a system, a scale for hit rates, and how a figure is saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import seaborn as sns
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_FIXED = {"in_dc": 7, "cross_dc": 3, "cross_dc_drc": 1, "pdd": 0}
"""Places in seaborn's colour-blind safe palette; the rest go to other systems in their order."""


def colours(names: Sequence[str]) -> dict[str, tuple[float, float, float]]:
    """A colour for each system, the same in every figure; shapes: RGB of 0 to 1."""
    palette = sns.color_palette("colorblind", 10)
    free = [place for place in range(10) if place not in _FIXED.values()]
    others = [name for name in names if name not in _FIXED]
    places = {name: free[at % len(free)] for at, name in enumerate(others)} | _FIXED
    return {name: palette[places[name]] for name in names}


def hit_scale(bins: int) -> list[tuple[float, float, float]]:
    """From the misses (dark red) to full hits (dark blue), as neighbours that can be told apart."""
    return list(sns.color_palette("RdYlBu", bins))


def figure(width: float = 9.0, height: float = 4.4) -> Figure:
    """A figure of its own, tied to no global state."""
    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def save(made: Figure, path: Path) -> Path:
    """A PNG that is the same bytes for the same data."""
    made.savefig(path, dpi=144, metadata={"Software": None})
    return path
