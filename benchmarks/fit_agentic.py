"""The shipped workload beside the real sessions it is fitted to.

    python benchmarks/fit_agentic.py --real sessions/ --seeds 5

`--real` is a folder of kv-cache-tester session files: those of at most 50 turns and 128K tokens are
what the fit is to. Prints a Markdown table: real, then the mean and the range over the seeds.
"""

from __future__ import annotations

import argparse

import numpy as np
from hydra import compose, initialize_config_module
from numpy.typing import NDArray

from harness.metrics import HIT_LABELS
from harness.run import load_trace
from traces import kv_cache_tester
from traces.profile import Profile, profile


def lines(found: Profile) -> dict[str, float]:
    """The figures of one profile by name."""
    triples = {
        "input tokens": found.input_tokens,
        "output tokens": found.output_tokens,
        "turns a session": found.turns,
        "delay before a turn, s": found.delay_s,
    }
    return {
        "mean ideal hit, %": 100 * found.ideal_hit_mean,
        "token-weighted ideal hit, %": 100 * found.ideal_hit_token_weighted,
        "requests above 95%, %": 100 * found.above_95,
        **{f"hit {n}, %": 100 * s for n, s in zip(HIT_LABELS, found.bins, strict=True)},
        "outputs under 500 tokens, %": 100 * found.outputs_under_500,
        **{
            f"{name} P{q}": value
            for name, values in triples.items()
            for q, value in zip((50, 90, 99), values, strict=True)
        },
    }


def _ends(values: NDArray[np.float64]) -> tuple[float, float]:
    return float(values.min()), float(values.max())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", required=True, help="folder of session files")
    parser.add_argument("--seeds", type=int, default=5)
    known = parser.parse_args()
    real = lines(profile(kv_cache_tester.read(known.real)))
    with initialize_config_module("conf", version_base="1.3"):
        drawn = [
            lines(profile(load_trace(compose("run", [f"seed={seed}"]))))
            for seed in range(1, known.seeds + 1)
        ]
    print("| figure | real | generated, mean | lowest | highest |")
    print("| --- | --- | --- | --- | --- |")
    for name, value in real.items():
        ours = np.array([each[name] for each in drawn])
        print("|", name, *(f"| {each:,.1f}" for each in (value, ours.mean(), *_ends(ours))), "|")


if __name__ == "__main__":
    main()
