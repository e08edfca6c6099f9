"""Prompts and answers of other lengths, what they share kept as far as it goes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.errors import ConfigError
from harness.settings import number, whole
from harness.trace import MAX_TOKENS, Trace
from traces.rows import Ints, before_in_prompt, changed, named, numbered, run_columns, runs

_EXACT = 1e-9
"""0.29 of 100 blocks are 28.999999999999996 in binary: so much is forgiven before rounding down."""


def cap_lengths(
    trace: Trace, input_tokens: int | None = None, output_tokens: int | None = None
) -> Trace:
    """No prompt and no answer longer than this; None: as long as it is. A prompt keeps its front.

    The block that the end of a cut prompt falls into counts as a prompt's last partial block does.
    """
    limits = {"input_tokens": input_tokens, "output_tokens": output_tokens}
    if input_tokens is None and output_tokens is None:
        raise ConfigError("transform.cap_lengths: give input_tokens, output_tokens or both")
    columns: dict[str, Any] = {}
    changes = {}
    for name, limit in limits.items():
        if limit is not None:
            whole(f"transform.cap_lengths.{name}", limit, least=1, most=MAX_TOKENS)
            tokens = trace.column(name)
            columns[name] = np.minimum(tokens, limit)
            changes[f"{name.removesuffix('_tokens')}_capped_at_{limit}"] = int(
                (tokens > limit).sum()
            )
    if input_tokens is not None:
        columns |= _fitting(trace, columns["input_tokens"], *runs(trace))
    return named(trace, changed(trace.table, columns), changes)


def scale_lengths(
    trace: Trace,
    input: float | None = None,  # noqa: A002 - the setting's name, beside `output`
    output: float | None = None,
) -> Trace:
    """Prompts and answers by these factors, rounded, 1 token or more; None: as long as they are.

    Blocks keep their size: that at place i of a prompt becomes those from floor(i f) to
    floor((i + 1) f), so a prompt that shared h blocks shares floor(h f): less than a block short of
    f times as much. Hit rates stay to within that, which is much where prompts share a block or
    two: `shrink` makes the blocks smaller instead and loses none. A partial last block (`ceil`)
    scales as a whole one, up to what its prompt has tokens for. Raises `ConfigError` where a length
    would be beyond what a column holds.
    """
    if input is None and output is None:
        raise ConfigError("transform.scale_lengths: give input, output or both")
    columns: dict[str, Any] = {}
    changes = {}
    for name, factor in (("input", input), ("output", output)):
        if factor is None:
            continue
        number(f"transform.scale_lengths.{name}", factor, above=0, most=1e9)
        tokens = np.maximum(np.rint(trace.column(f"{name}_tokens") * factor), 1)
        if tokens.max() > MAX_TOKENS:
            raise ConfigError(
                f"transform.scale_lengths.{name} is {factor:g}: the longest would have "
                f"{tokens.max():,.0f} tokens, give a factor that keeps it within {MAX_TOKENS:,}"
            )
        columns[f"{name}_tokens"] = tokens.astype(np.int64)
        changes[f"{name}_scaled_by_{factor:g}"] = len(trace) if factor != 1 else 0
    if input is not None:
        columns |= _fitting(trace, columns["input_tokens"], *_scaled(*runs(trace), input))
    return named(trace, changed(trace.table, columns), changes)


def _scaled(row: Ints, starts: Ints, lengths: Ints, factor: float) -> tuple[Ints, Ints, Ints]:
    """(row, first id, length) of each run that is left.

    An id implies its history, so each chain begins at one place, in whichever prompt; it becomes a
    chain of its own.
    """
    begins = before_in_prompt(row, lengths)
    scaled = _place(begins + lengths, factor) - _place(begins, factor)
    left = scaled > 0
    row, starts, scaled = row[left], starts[left], scaled[left]
    return row, numbered(row, starts, scaled), scaled


def _place(blocks: Ints, factor: float) -> Ints:
    """Where the block at this place begins among the scaled ones."""
    place: Ints = np.floor(blocks * factor + _EXACT).astype(np.int64)
    return place


def _fitting(
    trace: Trace, input_tokens: NDArray[np.integer], row: Ints, starts: Ints, lengths: Ints
) -> dict[str, Any]:
    """The columns of these runs, cut where prompts of so many tokens end."""
    most = trace.header.blocks(input_tokens.astype(np.int64))
    left = most[row] - before_in_prompt(row, lengths)
    return run_columns(len(trace), row, starts, np.clip(left, 0, lengths))
