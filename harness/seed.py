"""One seed for everything: each part of a run draws from a stream of its own."""

from __future__ import annotations

import zlib

import numpy as np


def stream(seed: int, name: str) -> np.random.Generator:
    """The random numbers of the part called `name`: the same whatever other parts draw."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])
