"""How runs are told apart: one label and one colour each, the same on every figure of a page.

Colours are those of Okabe and Ito, distinct to colour-blind eyes (https://jfly.uni-koeln.de/color/).
"""

from __future__ import annotations

import colorsys
import json
from collections import Counter
from collections.abc import Sequence

from harness.result import Run
from reports.facts import settings

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
    """A distinct printable label a run: its name and, where runs share one, how they differ.

    That is the values of the settings in which they do, or their folders' names.
    """
    shared = Counter(run.name for run in runs)
    wanted = [
        run.name if shared[run.name] == 1 else f"{run.name} ({said or _folder(run)})"
        for run, said in zip(runs, _swept(runs), strict=True)
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


def curves(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by system, in the order given: those of one backend with all its settings alike.

    A label is the backend's name and, where there are several of that name, the settings by which
    they differ. For reports that draw a line through runs that differ in their load.
    """
    systems: dict[str, list[Run]] = {}
    details: dict[str, dict[str, str]] = {}
    for run in runs:
        backend = run.manifest["backend"]
        flat = dict(settings(backend["details"])) | dict(settings({"cards": backend["cards"]}))
        key = json.dumps([run.name, flat], sort_keys=True)
        systems.setdefault(key, []).append(run)
        details[key] = flat
    names = Counter(some[0].name for some in systems.values())
    found: dict[str, list[Run]] = {}
    for key, some in systems.items():
        name = some[0].name
        alike = [details[other] for other, each in systems.items() if each[0].name == name]
        label = _short(name if names[name] == 1 else f"{name} ({_differing(details[key], alike)})")
        while label in found:
            label += "'"
        found[label] = some
    return found


def given(run: Run) -> dict[str, str]:
    """The settings that a run was given on its command line, but for the folder to write to."""
    settings_given = (each for each in run.manifest.get("overrides", ()) if "=" in each)
    return {
        name: value
        for name, value in (each.split("=", 1) for each in settings_given)
        if name != "out"
    }


def _differing(mine: dict[str, str], all_of_them: Sequence[dict[str, str]]) -> str:
    """The settings of one in which it differs from others, by the last word of their names."""
    return ", ".join(
        f"{name.rpartition('.')[2]}={value}"
        for name, value in mine.items()
        if any(other.get(name) != value for other in all_of_them)
    )


def _swept(runs: Sequence[Run]) -> list[str]:
    """Of each run the settings it was given in which it differs from others of its name."""
    asked = [given(run) for run in runs]
    return [
        _differing(mine, [o for o, r in zip(asked, runs, strict=True) if r.name == run.name])
        for mine, run in zip(asked, runs, strict=True)
    ]


def _folder(run: Run) -> str:
    return run.path.resolve().parent.name


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
