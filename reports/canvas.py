"""A canvas in the house style, and the PNG it becomes: the same bytes for the same data.

Figures are built as objects, without pyplot, so nothing in the process is left changed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib.style
import numpy as np
from matplotlib.axis import Axis, XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from harness.errors import ResultError

INK = "#1F2933"
FAINT = "#6B7785"

_PARTS, _MORE_PARTS = (1, 2, 5), (1, 2, 3, 5)
"""Of a decade: what is labelled of it where there is room, and where there is not one decade."""
_THOUSAND = 1000
_IN_THOUSANDS = EngFormatter(sep="")

_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": FAINT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "font.size": 10,
    "grid.color": "#E3E8ED",
    "hatch.linewidth": 0.8,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # TrueType: text stays text, as journals want it
    "text.color": INK,
    "text.parse_math": False,  # a name with a dollar sign is a name
    "xtick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.color": FAINT,
    "ytick.labelcolor": INK,
}


@contextmanager
def canvas(path: Path, width_in: float, height_in: float) -> Iterator[Figure]:
    """A figure to draw on; it is written to `path`, a PNG, and as a PDF, as the block ends.

    The same drawing gives the same bytes. Raises `ResultError`.
    """
    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(width_in, height_in), dpi=150, layout="constrained")
        yield figure
        try:
            figure.savefig(path, format="png", metadata={"Software": None})
            nobody = dict.fromkeys(("CreationDate", "Creator", "Producer"))
            figure.savefig(path.with_suffix(".pdf"), format="pdf", metadata=nobody)
        except OSError as error:
            raise ResultError(f"{path} cannot be written: {error.strerror}") from error


def log_axis(axis: XAxis | YAxis) -> None:
    """A logarithmic scale: two labels at least, however short it is, and not too many."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(_LogLocator(axis))
    axis.set_major_formatter(_label)
    axis.set_minor_formatter(NullFormatter())


class _LogLocator(LogLocator):
    """Ticks at 1, 2 and 5; decades only, where those are too many; even steps, where too few."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self._room = axis.get_tick_space

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        """The ticks of an axis from `vmin` to `vmax`."""
        low, high = sorted((vmin, vmax))
        if high / low < max(_PARTS):
            return MaxNLocator(5, steps=[*_PARTS, 10]).tick_values(low, high)
        decades = math.log10(high / low)
        if decades < len(_PARTS) - 1 or len(_PARTS) * decades < self._room():
            first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
            parts = _PARTS if decades > 1 else _MORE_PARTS
            return np.outer(10.0 ** np.arange(first, last + 1), parts).ravel().tolist()
        return super().tick_values(low, high)


def _label(value: float, _: float) -> str:
    """`0.05`, `200`, `5k`, `10M`: no `m`, which could be minutes."""
    return f"{value:g}" if value < _THOUSAND else _IN_THOUSANDS.format_data(value)
