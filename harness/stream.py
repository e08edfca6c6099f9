"""A trace on its way: rows that are made when they are asked for, so that none need be held."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from harness.trace import SCHEMA, Header, Trace


@dataclass(frozen=True)
class Stream:
    """What a generator gives. It can be read once."""

    header: Header
    tables: Iterator[pa.Table]
    """Of `SCHEMA`, in the order of `recorded_s`; parents are rows of them all together."""
    wanted: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """What its requests are to be like, where that is known: distributions by name, each by its
    quantiles (min, p50, ..., max)."""

    def whole(self) -> Trace:
        """All of it. Raises `TraceError`."""
        return Trace(pa.concat_tables([SCHEMA.empty_table(), *self.tables]), self.header)
