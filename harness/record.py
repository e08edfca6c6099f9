"""One row a turn: `Record`, and the Arrow schema it is written in. The single truth about a run.

All times are seconds since the run's zero, on the loop's clock; null means "did not happen" or
"cannot be known", never 0. Status is one of

    ok         the whole answer came
    failed     the backend failed it; `error` says how
    cancelled  sent, but the run was interrupted before the answer was whole
    unsent     never sent: the run ended first, or an earlier turn of its session failed
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

OK, FAILED, CANCELLED, UNSENT = "ok", "failed", "cancelled", "unsent"
STATUSES = (OK, FAILED, CANCELLED, UNSENT)


class Record(NamedTuple):
    """What was wanted, what was sent, what was served, and when."""

    turn: int
    """Row of the trace."""
    session: int
    turn_index: int
    agent: str
    input_tokens: int
    """Wanted by the trace; so is `output_tokens`."""
    output_tokens: int
    ideal_hit_tokens: int
    """Input tokens an infinite cache would have held, in the order of the trace."""
    scheduled_s: float | None
    """When it was due; null where its parents never ended."""
    sent_s: float | None
    """When its first byte was given to the system under test."""
    first_byte_s: float | None
    """Of the response, its head included."""
    first_token_s: float | None
    """Any token, reasoning included."""
    first_answer_s: float | None
    """The first token that is not reasoning."""
    last_token_s: float | None
    gaps_us: NDArray[np.int32] | None
    """Microseconds from one token to the next, 2^31 - 1 at most: (served output tokens - 1,). Where
    `timed_by` is `event`, from one event of the stream to the next: (events - 1,)."""
    longest_gap_s: float | None
    """The longest of them."""
    timed_by: str | None
    stamped_by: str | None
    """`kernel` (bytes stamped on receipt) or `user` (on reading); null on a virtual clock."""
    shared_reads: int
    """Events read together with a later one, and so a little late."""
    loop_lag_s: float | None
    """The worst lateness of the client's own event loop while this request was under way."""
    worker: int
    """Which of the client's workers replayed it, from 0."""
    sent_input_tokens: int | None
    """Prompt tokens sent, by the client's own count."""
    served_input_tokens: int | None
    served_output_tokens: int | None
    served_hit_tokens: int | None
    decode_hit_tokens: int | None
    evicted_tokens: int | None
    elsewhere_tokens: int | None
    route: str | None
    prefill_start_s: float | None
    prefill_end_s: float | None
    transfer_start_s: float | None
    transfer_end_s: float | None
    transfer_bytes: float | None
    """Null ends of a transfer that has bytes: the answer was whole (at the relay) before it was."""
    decode_start_s: float | None
    preemptions: int | None
    relay_bytes: float | None
    relay_tokens: int | None
    handoff: str | None
    handoff_bytes: float | None
    handoff_start_s: float | None
    handoff_s: float | None
    finish_reason: str | None
    status: str
    error_class: str | None
    """`ConnectFailed`, `RequestTimeout`, `BadStatus`, `BadStream`, ...; null unless failed."""
    error: str | None


def blank(**known: Any) -> Record:
    """A record of which only this much is known: all else is null, or 0 where it may not be."""
    values: dict[str, Any] = dict.fromkeys(Record._fields)
    return Record(**(values | {"shared_reads": 0, "worker": 0} | known))


_i32, _i64, _f64, _text = pa.int32(), pa.int64(), pa.float64(), pa.string()

SCHEMA = pa.schema(
    [
        pa.field("turn", _i64, nullable=False),
        pa.field("session", _i32, nullable=False),
        pa.field("turn_index", _i32, nullable=False),
        pa.field("agent", _text, nullable=False),
        pa.field("input_tokens", _i32, nullable=False),
        pa.field("output_tokens", _i32, nullable=False),
        pa.field("ideal_hit_tokens", _i32, nullable=False),
        pa.field("scheduled_s", _f64),
        pa.field("sent_s", _f64),
        pa.field("first_byte_s", _f64),
        pa.field("first_token_s", _f64),
        pa.field("first_answer_s", _f64),
        pa.field("last_token_s", _f64),
        pa.field("gaps_us", pa.list_(_i32)),
        pa.field("longest_gap_s", _f64),
        pa.field("timed_by", _text),
        pa.field("stamped_by", _text),
        pa.field("shared_reads", _i32, nullable=False),
        pa.field("loop_lag_s", _f64),
        pa.field("worker", _i32, nullable=False),
        pa.field("sent_input_tokens", _i32),
        pa.field("served_input_tokens", _i32),
        pa.field("served_output_tokens", _i32),
        pa.field("served_hit_tokens", _i32),
        pa.field("decode_hit_tokens", _i32),
        pa.field("evicted_tokens", _i32),
        pa.field("elsewhere_tokens", _i32),
        pa.field("route", _text),
        pa.field("prefill_start_s", _f64),
        pa.field("prefill_end_s", _f64),
        pa.field("transfer_start_s", _f64),
        pa.field("transfer_end_s", _f64),
        pa.field("transfer_bytes", _f64),
        pa.field("decode_start_s", _f64),
        pa.field("preemptions", _i32),
        pa.field("relay_bytes", _f64),
        pa.field("relay_tokens", _i32),
        pa.field("handoff", _text),
        pa.field("handoff_bytes", _f64),
        pa.field("handoff_start_s", _f64),
        pa.field("handoff_s", _f64),
        pa.field("finish_reason", _text),
        pa.field("status", _text, nullable=False),
        pa.field("error_class", _text),
        pa.field("error", _text),
    ]
)


def to_batch(records: list[Record]) -> pa.RecordBatch:
    """The rows as one Arrow batch of `SCHEMA`, in the order given."""
    columns = list(zip(*records, strict=True)) if records else [()] * len(SCHEMA)
    arrays = [
        _gap_lists(column) if field.name == "gaps_us" else pa.array(column, field.type)
        for field, column in zip(SCHEMA, columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _gap_lists(column: tuple[NDArray[np.int32] | None, ...]) -> pa.ListArray:
    """Arrays into one list column without touching a value in Python."""
    lengths = np.array([0 if gaps is None else len(gaps) for gaps in column], dtype=np.int64)
    offsets = np.zeros(len(column) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    present = [gaps for gaps in column if gaps is not None]
    values = np.concatenate(present) if present else np.empty(0, np.int32)
    missing = np.array([gaps is None for gaps in column], dtype=bool)
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(values, pa.int32()), mask=pa.array(missing)
    )
