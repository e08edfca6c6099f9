"""How near what was drawn is to what was asked for: a fit, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from harness.stream import Stream
from traces import sketch
from traces.spread import Floats, Spread

_SHOWN = np.linspace(0, 1, 201)
_LEAST = 1000
"""So many places of a distribution are looked at where it has fewer values."""


@dataclass(frozen=True)
class Fit:
    """Tables."""

    table: pa.Table
    """A row a distribution: `of` (a name of `sketch.samples`), `values` (how many were drawn),
    `wanted_mean` and `mean`; `ks`, the greatest difference of the two distribution functions
    (Kolmogorov-Smirnov); `distance`, the mean difference of values of one rank (the first
    Wasserstein distance) over the wanted mean."""
    quantiles: pa.Table
    """`of`, `share`, `wanted`, `got`."""


def compare(stream: Stream) -> Fit:
    """All requests of a stream beside what it says that they are to be like."""
    wanted = {name: Spread.of(each, name) for name, each in stream.wanted.items()}
    found = sketch.samples(stream.whole()) if wanted else {}
    told = [name for name in wanted if len(found[name])]
    rows = [
        {"of": name, "values": len(found[name]), **distances(wanted[name], found[name])}
        for name in told
    ]
    quantiles = [
        {"of": name, "share": share, "wanted": value, "got": got}
        for name in told
        for share, value, got in zip(
            _SHOWN.tolist(),
            wanted[name].at(_SHOWN).tolist(),
            np.quantile(found[name], _SHOWN).tolist(),
            strict=True,
        )
    ]
    return Fit(pa.Table.from_pylist(rows, _SCHEMA), pa.Table.from_pylist(quantiles, _QUANTILES))


_SCHEMA = pa.schema(
    [
        ("of", pa.string()),
        ("values", pa.int64()),
        *((name, pa.float64()) for name in ("wanted_mean", "mean", "ks", "distance")),
    ]
)
_QUANTILES = pa.schema(
    [("of", pa.string()), *((name, pa.float64()) for name in ("share", "wanted", "got"))]
)


def distances(wanted: Spread, values: Floats) -> Mapping[str, Any]:
    """`wanted_mean`, `mean`, `ks` and `distance` of `compare`."""
    ranked = np.sort(values)
    places = max(_LEAST, len(ranked))
    shares = (np.arange(places) + 0.5) / places
    quantiles = wanted.at(shares)
    if np.all(values == np.rint(values)):
        quantiles = np.rint(quantiles)  # what is counted is drawn so
    got = ranked[(shares * len(ranked)).astype(np.int64)]
    mean = wanted.mean
    apart = float(np.abs(quantiles - got).mean())
    return {
        "wanted_mean": mean,
        "mean": float(values.mean()),
        "ks": _ks(quantiles, ranked),
        "distance": apart / mean if mean else (0.0 if apart == 0 else float("inf")),
    }


def _ks(wanted: Floats, ranked: Floats) -> float:
    """Between two samples in order."""
    at = np.concatenate([wanted, ranked])
    theirs = np.searchsorted(wanted, at, side="right") / len(wanted)
    ours = np.searchsorted(ranked, at, side="right") / len(ranked)
    return float(np.abs(theirs - ours).max())
