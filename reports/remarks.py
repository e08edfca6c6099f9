"""What a caption must add about its runs: which are not drawn, and which are not to be trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.result import Run


def remarks(runs: Mapping[str, Run], drawn: Sequence[str], need: str) -> str:
    """Sentences to end a caption with, each with a blank before it; none where all is well.

    `runs` by label; `drawn` the labels of those in the figure; `need` what the others lack, as in
    "left out, without `need`".
    """
    absent = [name for name in runs if name not in drawn]
    partial = [name for name in drawn if runs[name].manifest["partial"]]
    bad = [
        name
        for name in drawn
        if name not in partial and not runs[name].manifest["validity"]["valid"]
    ]
    said = {
        f"Left out, without {need}": absent,
        "Partial, ended before the trace did": partial,
        "Not valid": bad,
    }
    return "".join(f" {what}: {', '.join(names)}." for what, names in said.items() if names)
