"""The shipped workload beside the real sessions that it is fitted to.

    python benchmarks/fit_agentic.py --real sessions/
    python benchmarks/fit_agentic.py --seeds 20 trace.sessions=179

`--real` is a folder of kv-cache-tester's session files; without it only what is generated is shown.
Takes the overrides of `relaybench run`. The table is the one in `docs/workload.md`: the mean over
the seeds, and the lowest and the highest of them. The lower part was not aimed at by the fit: it
says how far the model can be trusted beyond what it was given.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
from hydra import compose, initialize_config_module

from harness import metrics
from harness.run import load_trace
from harness.trace import Trace
from traces import kv_cache_tester
from traces.profile import profile

Figures = dict[str, float]

_TRIPLE = ("P50", "P90", "P99")
_LOW, _VERY_LOW = 0.9, 0.5
_TENTHS_BELOW = 100


def fitted(trace: Trace) -> Figures:
    """What the fit aims at; shares in percent."""
    found = profile(trace)
    rates = {"mean": found.ideal_hit_mean, "above 95%": found.above_95}
    rates |= dict(zip(metrics.HIT_LABELS, found.bins, strict=True))
    figures = {f"ideal hit, {name} (%)": 100 * value for name, value in rates.items()}
    for name, values in (
        ("input tokens", found.input_tokens),
        ("output tokens", found.output_tokens),
        ("turns a session", found.turns),
        ("delay (s)", found.delay_s),
    ):
        figures |= {f"{name}, {at}": value for at, value in zip(_TRIPLE, values, strict=True)}
    figures["outputs under 500 tokens (%)"] = 100 * found.outputs_under_500
    return figures


def not_fitted(trace: Trace) -> Figures:
    """What came out by itself; shares in percent."""
    rates = trace.ideal_hit_rates
    offsets, parents = trace.parents()
    chained = np.flatnonzero(np.diff(offsets) == 1)
    grown = trace.input_tokens[chained] - trace.input_tokens[parents[offsets[chained]]].astype(int)
    later = np.diff(offsets) > 0
    second = trace.column("turn_index") == 1
    first = trace.input_tokens[~later]
    figures = {"ideal hit, token-weighted (%)": 100 * trace.ideal_hit_token_weighted}
    figures["second turns hitting under 90% (%)"] = 100 * float((rates[second] < _LOW).mean())
    figures["later turns hitting under 50% (%)"] = 100 * float((rates[later] < _VERY_LOW).mean())
    for name, values in (("first prompt, tokens", first), ("growth a turn, tokens", grown)):
        ranks = (metrics.nearest_rank(values.astype(float), q) for q in metrics.QUANTILES)
        figures |= {f"{name}, {at}": value for at, value in zip(_TRIPLE, ranks, strict=True)}
    figures["turns of sub-agents (%)"] = 100 * float((_agents(trace) != "main").mean())
    figures["longest session, turns"] = float(np.bincount(trace.session).max())
    return figures


def _agents(trace: Trace) -> np.ndarray:
    return np.array(trace.table.column("agent").to_pylist())


def shipped(seed: int, overrides: Sequence[str]) -> Trace:
    """The default workload, with a seed of its own."""
    with initialize_config_module("conf", version_base="1.3"):
        return load_trace(compose("run", [*overrides, f"seed={seed}"]))


def table(real: Trace | None, generated: Sequence[Trace]) -> None:
    """Print both parts, in Markdown."""
    print("| figure | real | generated | over the seeds |\n| --- | --- | --- | --- |")
    for title, measure in (("", fitted), ("*not aimed at by the fit*", not_fitted)):
        if title:
            print(f"| {title} | | | |")
        theirs = measure(real) if real is not None else {}
        ours = [measure(trace) for trace in generated]
        for name in ours[0]:
            values = [figures[name] for figures in ours]
            wanted = _number(theirs[name]) if name in theirs else "-"
            spread = f"{_number(min(values))} to {_number(max(values))}"
            print(f"| {name} | {wanted} | {_number(float(np.mean(values)))} | {spread} |")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= _TENTHS_BELOW else f"{value:.1f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", help="a folder of session files")
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 1 on")
    known, overrides = parser.parse_known_args()
    real = kv_cache_tester.read(known.real) if known.real else None
    generated = [shipped(seed, overrides) for seed in range(1, known.seeds + 1)]
    if real is not None:
        print(f"real: {len(real):,} requests in {real.sessions:,} sessions; ", end="")
    print(f"generated: {len(generated[0]):,} in {generated[0].sessions:,} for the first seed\n")
    table(real, generated)


if __name__ == "__main__":
    main()
