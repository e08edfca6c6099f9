"""BurstGPT: CSV, one request a row, times in seconds.

Format: https://github.com/HPMLL/BurstGPT, README.md. Columns, in any order: `Timestamp`, seconds
from midnight of the first day; `Model`; `Request tokens`, `Response tokens` and their sum `Total
tokens`; `Log Type`, by which a person's request in a conversation is told from a program's. The
third file (release v2.0) has two more: `Session ID`, blank where there is none, and `Elapsed time`,
the seconds an answer took.

The source has no prefix data: each row is a session of one turn, whose prompt shares nothing with
any other, and no claim about hit rates can rest on it. So a `Session ID` joins no turns; the header
counts the rows that have one. A response of 0 tokens is how the source marks a request that failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from harness.errors import ConfigError
from harness.trace import MAX_TOKENS, Header, Trace
from traces.builder import single_turns
from traces.source import locate_file
from traces.table import BLOCK_TOKENS, Rows, csv_rows

COLUMNS = (
    *("Timestamp", "Model", "Request tokens", "Response tokens"),
    *("Total tokens", "Log Type"),
)
OPTIONAL = ("Session ID", "Elapsed time")
LOG_TYPES = ("Conversation log", "API log")


def read(path: Path | str, failures: Literal["drop", "keep"] = "drop") -> Trace:
    """Read one CSV file of any release: arrivals as recorded, from the first as 0.

    `failures` says what becomes of requests that failed: left out, as in the source's files
    `without_fails`, or kept and asked for an answer of one token. `Log Type` is the turn's agent.
    Raises `TraceError`, and `ConfigError` for another word.
    """
    if failures not in {"drop", "keep"}:
        raise ConfigError(f"trace.failures is {failures!r}: give drop or keep")
    path = locate_file(path)
    changes: Counter[str] = Counter()

    def count(change: str, rows: int) -> None:
        if rows:
            changes[change] += rows

    times_s, inputs, outputs, agents = [], [], [], []
    for rows in csv_rows(path, COLUMNS, OPTIONAL, count=count):
        prompts, answers = _checked(rows, count)
        kept = np.ones(len(rows), bool)
        if failures == "drop":
            kept = answers > 0
            count("failed_request_dropped", int((~kept).sum()))
        times_s.append(rows.times_s("Timestamp")[kept])
        inputs.append(prompts[kept])
        outputs.append(answers[kept])
        agents.append(rows.columns["Log Type"].filter(pa.array(kept)))
    header = Header(
        format="burstgpt",
        block_tokens=BLOCK_TOKENS,
        partial_block="floor",
        id_scope="file",
        time_unit="s",
        licence="CC-BY-4.0",
        prefix_data="absent",
        changes=changes,
    )
    empty = np.empty(0, np.int64)
    return single_turns(
        header,
        path,
        recorded_s=np.concatenate([np.empty(0, np.float64), *times_s]),
        input_tokens=np.concatenate([empty, *inputs]),
        output_tokens=np.concatenate([empty, *outputs]),
        agents=pa.concat_arrays([pa.array([], pa.string()), *agents]),
    )


def _checked(
    rows: Rows, count: Callable[[str, int], None]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Prompts and answers, in tokens. Refuses or counts what the trace does not keep."""
    rows.filled("Model")
    rows.require(
        pc.is_in(rows.columns["Log Type"], value_set=pa.array(LOG_TYPES)),
        "Log Type",
        "is unknown",
        f"give {' or '.join(LOG_TYPES)}",
    )
    total = rows.whole("Total tokens", 2 * MAX_TOKENS, " tokens")
    prompts, answers = rows.tokens("Request tokens"), rows.tokens("Response tokens")
    count("total_tokens_is_not_the_sum", int((total != prompts + answers).sum()))
    if "Elapsed time" in rows.columns:
        given = pc.not_equal(rows.columns["Elapsed time"], "").to_numpy(zero_copy_only=False)
        rows.of_rows(given).times_s("Elapsed time")
    if "Session ID" in rows.columns:
        count("session_id_not_used", pc.sum(pc.not_equal(rows.columns["Session ID"], "")).as_py())
    return prompts, answers
