"""A canvas in the house style, and the PNG it becomes: the same bytes for the same data.

Figures are built as objects, without pyplot, so nothing in the process is left changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib.style
from matplotlib.figure import Figure

from harness.errors import ResultError

INK = "#1F2933"
FAINT = "#6B7785"

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
