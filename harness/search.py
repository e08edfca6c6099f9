"""The highest load at which a system keeps its promise, by bisection over whole runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

from omegaconf import DictConfig

from harness import result
from harness.errors import EXIT_FAILED, EXIT_GOOD, ConfigError
from harness.plugins import build
from harness.result import Run
from harness.settings import number


@dataclass(frozen=True)
class Search:
    """Over the numeric setting `setting` from `low` to `high`, by halves of its logarithm.

    Ends when what keeps the promise and what does not are within a factor of 1 + `tolerance`.
    """

    setting: str
    low: float
    high: float
    tolerance: float

    def __post_init__(self) -> None:
        number("search.low", self.low, above=0, most=1e12)
        number("search.high", self.high, above=self.low, most=1e12)
        number("search.tolerance", self.tolerance, above=0, most=10)

    def best(self, keeps: Callable[[float], bool]) -> float | None:
        """The highest value found that keeps it; None where not even `low` does."""
        if not keeps(self.low):
            return None
        low, high = self.low, self.high
        if keeps(high):
            return high
        while high > low * (1 + self.tolerance):
            middle = sqrt(low * high)
            low, high = (middle, high) if keeps(middle) else (low, middle)
        return low


class _Stop(Exception):
    """A run ended with a code that ends the search."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


def find(
    config: DictConfig,
    asked: list[str],
    run: Callable[[list[str]], int],
    say: Callable[[str], None],
) -> int:
    """Run and run again, each in a folder of its own in `config.out`; returns the exit code.

    `run` is `relaybench run` with these arguments, of which `asked` are the person's. A run that is
    not valid does not keep the promise; one that is bad input ends the search with its code.
    """
    search: Search = build(config, "search")
    names = [*(config.backend or {})]
    if len(names) != 1:
        raise ConfigError(f"{len(names)} backends are chosen: search for one, as in backend=pdd")
    out = Path(str(config.out))
    result.refuse_existing(out)
    result.create(out)
    goodput: dict[float, float] = {}

    def keeps(value: float) -> bool:
        path = out / str(len(goodput))
        code = run([*asked, f"{search.setting}={value:.6g}", f"out={path}", "report=[]"])
        if code not in (EXIT_GOOD, EXIT_FAILED):
            raise _Stop(code)
        done = Run.open(path / names[0])
        row = done.summary().to_pylist()[0]
        goodput[value] = row["goodput_requests_per_s"] or 0.0
        kept = code == EXIT_GOOD and (row["slo_share"] or 0.0) >= done.slo.share
        word, share = "keeps" if kept else "does not keep", row["slo_share"] or 0.0
        say(f"{search.setting}={value:.6g}: {word} {done.slo.words} ({100 * share:.2f}%)")
        return kept

    try:
        best = search.best(keeps)
    except _Stop as stop:
        return stop.code
    if best is None:
        say(f"Not even {search.setting}={search.low:g} keeps it: lower search.low")
        return EXIT_FAILED
    reached = "" if best < search.high else "; the limit was not reached: raise search.high"
    say(
        f"Goodput of {names[0]}: {goodput[best]:.4g} requests/s at {search.setting}={best:.6g}"
        f"{reached}. Runs: {out}"
    )
    return EXIT_GOOD
