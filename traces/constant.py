"""Requests that are all alike but for their prefix hits: the input of a sweep over hit rates.

Each is a session of its own, of one turn, and begins with a front of one common prefix; the rest of
its prompt is new. The first request lays the whole prefix, and the others come when it has had time
to be cached.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from harness import settings
from harness.errors import ConfigError
from harness.trace import MAX_TOKENS, Header, Trace, build_table

_PREFIX_FIRST_S = 60.0


def generate(
    *,
    requests: int,
    seed: int,
    requests_per_s: float,
    input_tokens: int,
    output_tokens: int,
    hits: Sequence[float],
    weights: Sequence[float],
    block_tokens: int,
) -> Trace:
    """So many requests, arriving as a Poisson process after the first. Raises `ConfigError`.

    `hits`: the shares of a prompt that are in the prefix, rounded to whole blocks; each request
    draws one, in proportion to `weights`.
    """
    settings.whole("trace.requests", requests, least=2)
    settings.whole("trace.seed", seed, least=0)
    settings.number("trace.requests_per_s", requests_per_s, above=0, most=1e9)
    settings.whole("trace.block_tokens", block_tokens, least=1)
    settings.whole("trace.input_tokens", input_tokens, least=block_tokens)
    settings.whole("trace.output_tokens", output_tokens, least=1)
    for name, tokens in (("input_tokens", input_tokens), ("output_tokens", output_tokens)):
        settings.number(f"trace.{name}", tokens, most=MAX_TOKENS)
    if not hits or len(hits) != len(weights):
        raise ConfigError(f"trace.weights is {weights}: give one for each of trace.hits {hits}")
    for hit, weight in zip(hits, weights, strict=True):
        settings.number("trace.hits", hit, least=0, most=1)
        settings.number("trace.weights", weight, above=0, most=1e9)
    random = np.random.default_rng([seed, 0])
    blocks = input_tokens // block_tokens
    shares = np.array(weights, float) / sum(weights)
    held = np.rint(random.choice(np.array(hits, float), requests, p=shares) * blocks).astype(int)
    held[0] = round(max(hits) * blocks)
    starts, lengths, ends = _runs(held, blocks)
    arrivals_s = _PREFIX_FIRST_S + np.cumsum(random.exponential(1 / requests_per_s, requests))
    arrivals_s[0] = 0.0
    none = np.zeros(requests + 1, np.int32)
    columns = {
        "session": np.arange(requests, dtype=np.int32),
        "turn_index": np.zeros(requests, np.int32),
        "parents": pa.ListArray.from_arrays(pa.array(none), pa.array([], pa.int64())),
        "recorded_s": arrivals_s,
        "arrival_s": arrivals_s,
        "delay_s": pa.nulls(requests, pa.float64()),
        "input_tokens": np.full(requests, input_tokens, np.int32),
        "output_tokens": np.full(requests, output_tokens, np.int32),
        "run_starts": pa.ListArray.from_arrays(ends, pa.array(starts, pa.int64())),
        "run_lengths": pa.ListArray.from_arrays(ends, pa.array(lengths, pa.int32())),
        "agent": pa.repeat("main", requests),
    }
    parameters = {
        "requests": requests,
        "seed": seed,
        "requests_per_s": requests_per_s,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "hits": list(hits),
        "weights": list(weights),
    }
    header = Header(
        "constant", block_tokens, "floor", "global", "s", "Apache-2.0 (generated)",
        prefix_data="generated", parameters=parameters,
    )  # fmt: skip
    return Trace(build_table(columns), header)


def _runs(held: np.ndarray, blocks: int) -> tuple[list[int], list[int], pa.Array]:
    """Starts and lengths of the runs of all prompts, and where each prompt's end."""
    starts: list[int] = []
    lengths: list[int] = []
    ends = [0]
    following = blocks  # behind the first prompt, prefix and all
    for at, prefix in enumerate(held.tolist()):
        if at == 0:
            starts.append(0)
            lengths.append(blocks)
        else:
            if prefix:
                starts.append(0)
                lengths.append(prefix)
            if prefix < blocks:
                starts.append(following)
                lengths.append(blocks - prefix)
                following += blocks - prefix
        ends.append(len(starts))
    return starts, lengths, pa.array(ends, pa.int32())
