"""Azure's LLM inference traces, 2023 and 2024: CSV, one request a row, times as dates.

Format: https://github.com/Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md and
AzureLLMInferenceDataset2024.md. Columns, in any order: `TIMESTAMP`, when the request came;
`ContextTokens` and `GeneratedTokens`, the lengths of prompt and answer in tokens. Dates have seven
digits after the second in 2023 (100 ns) and no time zone; in 2024 six digits or none, and a zone.

The source has no prefix data and no sessions: each row is a session of one turn, whose prompt
shares nothing with any other, and no claim about hit rates can rest on it.
"""

from __future__ import annotations

import re
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from harness.trace import Header, Trace
from traces.builder import single_turns
from traces.source import locate_file
from traces.table import BLOCK_TOKENS, Rows, csv_rows

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

_DATE = (
    r"^(?P<second>[0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2})"
    r"(?P<fraction>\.[0-9]{1,9})?(?P<zone>Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])?$"
)
_SOME_DATE = "2000-01-01 00:00:00"
_DO = "give a date such as 2023-11-16 18:17:03.9799600 or 2024-05-12 00:00:00.001163+00:00"


def read(path: Path | str) -> Trace:
    """Read one CSV file: arrivals as recorded, exact to 100 ns, from the first as 0.

    A date without a zone is taken as UTC. Raises `TraceError`.
    """
    path = locate_file(path)
    changes: Counter[str] = Counter()
    times_ns, inputs, outputs = [], [], []
    for rows in csv_rows(path, COLUMNS, count=lambda name, rows: changes.update({name: rows})):
        times_ns.append(_nanoseconds(rows, "TIMESTAMP"))
        inputs.append(rows.tokens("ContextTokens"))
        outputs.append(rows.tokens("GeneratedTokens"))
    empty = np.empty(0, np.int64)
    recorded_ns = np.concatenate([empty, *times_ns])
    header = Header(
        format="azure",
        block_tokens=BLOCK_TOKENS,
        partial_block="floor",
        id_scope="file",
        time_unit="100 ns",
        licence="CC-BY-4.0",
        prefix_data="absent",
        changes=changes,
    )
    # A date in seconds has no room for 100 ns in 64 bits; the time since the first has.
    first_ns = recorded_ns.min(initial=np.iinfo(np.int64).max)
    return single_turns(
        header,
        path,
        recorded_s=(recorded_ns - first_ns) / 1e9,
        input_tokens=np.concatenate([empty, *inputs]),
        output_tokens=np.concatenate([empty, *outputs]),
    )


def _nanoseconds(rows: Rows, name: str) -> NDArray[np.int64]:
    """Dates as nanoseconds since 1970 in UTC."""
    looks_right = pc.match_substring_regex(rows.columns[name], _DATE)
    dates = rows.require(looks_right, name, "is not a date", _DO, instead=_SOME_DATE)
    parts = pc.extract_regex(dates, _DATE)
    second, fraction, zone = (parts.field(part) for part in ("second", "fraction", "zone"))
    try:
        moments = second.cast(pa.timestamp("s"))
    except pa.ArrowInvalid:
        good = [_is_date(each) for each in second.to_pylist()]
        rows.require(good, name, "is not a date", _DO)
        moments = pc.if_else(pa.array(good), second, _SOME_DATE).cast(pa.timestamp("s"))
    seconds = moments.cast(pa.int64()).to_numpy()
    digits = pc.ascii_rpad(pc.utf8_replace_slice(fraction, 0, 1, ""), 9, "0")
    nanoseconds = digits.cast(pa.int64()).to_numpy()
    zones = zone.dictionary_encode()
    offsets_s = np.array([_offset_s(each) for each in zones.dictionary.to_pylist()], np.int64)
    seconds = seconds - offsets_s[zones.indices.to_numpy()]
    total: NDArray[np.int64] = seconds * 1_000_000_000 + nanoseconds
    return total


def _is_date(text: str) -> bool:
    try:
        datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError:
        return False
    return True


def _offset_s(zone: str) -> int:
    """How much later than UTC, in seconds, the clocks of a zone are: `+02:00`, `Z` or nothing."""
    match = re.fullmatch(r"([+-])(\d\d):(\d\d)", zone)
    if match is None:
        return 0
    sign, hours, minutes = match.groups()
    return (-1 if sign == "-" else 1) * (int(hours) * 3600 + int(minutes) * 60)
