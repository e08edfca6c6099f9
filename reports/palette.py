"""How runs are told apart: one label and one colour each, the same on every figure of a page.

Colours are those of Okabe and Ito, distinct to colour-blind eyes (https://jfly.uni-koeln.de/color/).
"""

from __future__ import annotations

import colorsys
from collections import Counter
from collections.abc import Sequence

from harness.result import Run

TOPOLOGY_COLOURS = {
    "in_dc": "#0072B2",
    "cross_dc": "#D55E00",
    "cross_dc_drc": "#E69F00",
    "pdd": "#009E73",
}

HIT_COLOURS = ("#440154", "#433D84", "#2D708E", "#1F968B", "#4BBF6D", "#A5DB36", "#FDE725")
"""Seven steps of viridis, ascending hit rate: dark is what the system must compute and move."""

_OTHER_COLOURS = ("#CC79A7", "#56B4E9", "#6A3D9A", "#5D5D5D")
_GOLDEN_TURN = 0.618034
_LONGEST_LABEL = 32


def labels(runs: Sequence[Run]) -> list[str]:
    """A distinct printable label a run: its name, and its folder's where two runs share a name."""
    shared = Counter(run.name for run in runs)
    wanted = [
        run.name if shared[run.name] == 1 else f"{run.name} ({run.path.resolve().parent.name})"
        for run in runs
    ]
    given: list[str] = []
    for label in map(_short, wanted):
        count = 1
        distinct = label
        while distinct in given:
            count += 1
            distinct = f"{label} #{count}"
        given.append(distinct)
    return given


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour a label. Known topologies keep theirs; others take the next free one, in order."""
    given = {name: TOPOLOGY_COLOURS[name] for name in names if name in TOPOLOGY_COLOURS}
    others = [name for name in names if name not in given]
    return given | {name: _other(at) for at, name in enumerate(others)}


def _other(at: int) -> str:
    if at < len(_OTHER_COLOURS):
        return _OTHER_COLOURS[at]
    rgb = colorsys.hls_to_rgb((at * _GOLDEN_TURN) % 1, 0.4, 0.55)
    return "#" + "".join(f"{round(255 * part):02X}" for part in rgb)


def _short(label: str) -> str:
    """Without what no font draws, and not so long that it pushes a figure aside."""
    printable = "".join(each if each.isprintable() else "?" for each in label)
    if len(printable) <= _LONGEST_LABEL:
        return printable
    half = _LONGEST_LABEL // 2
    return f"{printable[: half - 1]}…{printable[-half:]}"
