"""`relaybench trace check`: what is wrong with a trace file, or what to know before replaying it.

Where no reader is chosen, each is tried until it meets `TRIED` faults, and the file is read with
the one that has the fewest for the rows it looked at. A run never guesses so: there the reader is
named.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType

import numpy as np

from harness.errors import EXIT_BAD_INPUT, EXIT_GOOD, ConfigError, HarnessError, TraceError
from harness.run import headline
from harness.trace import Trace
from traces.faults import PLACES_KEPT, Faults, Kind, gathering
from traces.rows import runs
from traces.source import listing, locate, open_bytes
from traces.starts import clock_tick_s

Read = Callable[[], Trace]
Say = Callable[[str], None]

TRIED = 20
"""So many faults end an attempt to read a file."""

_KINDS_SHOWN = 20
_FITS = 0.5
"""A reader that met `TRIED` faults still fits where at most so many of the rows were at fault."""
_NEAREST = 3
"""So many different complaints are told of the readers that do not fit."""
_HEAD = 65_536
"""Bytes in which a file's names are looked for."""
_LONG_DELAY_S = 3600
_LONG_PROMPT = 131_072
"""The context of many models, in tokens."""
_DENSE_PER_S = 300
"""More sessions do not start in a second, on average: a service of that size has no such trace."""
_DENSE_SESSIONS = 100
"""So many are needed for an average."""


def check(
    readers: Mapping[str, Read],
    path: str | None,
    say: Say,
    *,
    untried: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> int:
    """Tell what is wrong, or what to know. Returns the exit code.

    `readers` are the ways to read it, by name: more than one to find out which fits the file at
    `path`; `untried` those that cannot be tried, with the settings that they lack. Raises
    `ConfigError` where none fits, and `TraceError` where there is no such file, or one that is no
    text to any of them.
    """
    if path is None:
        ((name, read),) = readers.items()
        attempt = _attempt(name, read)
    else:
        attempt = _recognised(readers, path, untried)
        say(f"Read as {attempt.name}; trace=NAME chooses another reader")
    if attempt.trace is None:
        _tell(attempt.faults, say)
        say("What reading changes, and what to know before a replay, is told once these are mended")
        return EXIT_BAD_INPUT
    say(f"{headline(attempt.trace)}\nNo faults.")
    _list("Changed on reading:", _changes(attempt.trace), say)
    _list("Before you replay it:", _cautions(attempt.trace), say)
    return EXIT_GOOD


def _list(title: str, lines: Iterator[str], say: Say) -> None:
    found = [f"\n  {line}" for line in lines]
    if found:
        say(title + "".join(found))


# ---- reading


@dataclass(frozen=True)
class _Attempt:
    name: str
    faults: Faults
    trace: Trace | None
    """None where there were faults."""
    refused: HarnessError | None = None
    """Why the reader cannot be used at all."""

    @property
    def share(self) -> float:
        """Faults for each row looked at."""
        if self.faults.rows:
            return self.faults.count / self.faults.rows
        return 0.0 if self.trace is not None else 1.0

    @property
    def fits(self) -> bool:
        return self.share <= _FITS or (self.share < 1 and not self.faults.full)

    @property
    def first(self) -> HarnessError:
        """Why it does not fit."""
        return self.refused or next(iter(self.faults.kinds.values())).first


def _attempt(name: str, read: Read, most: int | None = None) -> _Attempt:
    trace = None
    with gathering(most) as faults:
        trace = read()
    return _Attempt(name, faults, None if faults.count else trace)


def _recognised(
    readers: Mapping[str, Read], path: str, untried: Mapping[str, Collection[str]]
) -> _Attempt:
    """The attempt with the reader that fits best, without a limit of faults."""
    locate(path)
    attempts = []
    for name, read in readers.items():
        try:
            attempts.append(_attempt(name, read, TRIED))
        except HarnessError as error:
            attempts.append(_Attempt(name, Faults(), None, error))
    attempts.sort(key=lambda each: each.share)
    fitting = [each for each in attempts if each.fits]
    best = [each for each in fitting if each.share == fitting[0].share]
    if len(best) == 1:
        return _attempt(best[0].name, readers[best[0].name]) if best[0].faults.full else best[0]
    if best:
        names = " and ".join(each.name for each in best)
        raise ConfigError(f"{path}: {names} fit equally well: choose one with trace=NAME")
    if len({str(each.first) for each in attempts}) == 1:
        raise attempts[0].first  # of the file, whatever it is to hold
    raise _unrecognised(path, attempts, untried)


def _unrecognised(
    path: str, attempts: list[_Attempt], untried: Mapping[str, Collection[str]]
) -> ConfigError:
    """What the readers say that came nearest, and which were not tried."""
    names = _names(path)

    def distance(each: _Attempt) -> tuple[float, ...]:
        """Few faults, asking for names that the file has, at a field, and having seen rows."""
        do, field = (
            (each.first.do, each.first.field) if isinstance(each.first, TraceError) else ("", None)
        )
        known = sum(re.search(rf"\b{re.escape(name)}\b", do) is not None for name in names)
        return each.share, -known, field is None, -each.faults.rows

    complaints: dict[str, list[str]] = {}
    for each in sorted(attempts, key=distance):
        complaints.setdefault(_complaint(each.first), []).append(each.name)
    lines = [f"{path}: no reader fits: choose one with trace=NAME. The nearest:"]
    lines += [f"  {listing(who)}: {what}" for what, who in islice(complaints.items(), _NEAREST)]
    lines += [
        f"Not tried: {name}, which needs {', '.join(lacks)}" for name, lacks in untried.items()
    ]
    lines += [advice for signs, advice in _SIGNS if names.issuperset(signs)]
    return ConfigError("\n".join(dict.fromkeys(lines)))


_CHAT = "This looks like a chat log: give trace=sharegpt trace.tokenizer=tokenizer.json"
_SESSIONS = (
    "Mooncake's rows with a session_id need trace=mooncake, and trace.turns=whole where a row is "
    "the whole prompt, or trace.turns=added where it is what the turn adds"
)
_SIGNS = (
    (("conversations",), _CHAT),
    (("messages",), _CHAT),
    (("session_id", "hash_ids"), _SESSIONS),
)
"""Names by which a file is known that needs more settings than its path."""


def _names(path: str) -> set[str]:
    """The names of JSON's fields, or of CSV's columns, that a file begins with."""
    file = locate(path)
    if file.is_dir():
        return set()
    head = ""
    with suppress(OSError, EOFError, zlib.error), open_bytes(file) as stream:
        head = stream.read(_HEAD).decode(errors="replace")
    header = head.partition("\n")[0].split(",")
    return {*re.findall(r'"(\w+)"\s*:', head)} or {each.strip('" \r') for each in header}


def _complaint(error: HarnessError) -> str:
    """What is wrong, without the path that all begin with."""
    return f"{_place(error)}{error.problem}" if isinstance(error, TraceError) else str(error)


# ---- faults


def _tell(faults: Faults, say: Say) -> None:
    """All kinds of faults, in the order met."""
    kinds = [*faults.kinds.values()]
    found = _counted(faults.count, "fault")
    if len(kinds) > 1:
        found += f" of {len(kinds):,} kinds"
    lines = [f"{found}{_in_rows(faults)}:"]
    for kind in kinds[:_KINDS_SHOWN]:
        path = kind.first.path
        field = kind.first.field
        lead = [Path(path).name] if path is not None else []
        lead += [field] if field is not None else []
        lines.append(f"  {': '.join([*lead, kind.first.problem])}")
        lines.append(f"    {_times(kind)}{kind.first.do[:1].upper()}{kind.first.do[1:]}")
    if len(kinds) > _KINDS_SHOWN:
        lines.append(f"  and {len(kinds) - _KINDS_SHOWN:,} more kinds")
    say("\n".join(lines))


def _times(kind: Kind) -> str:
    """How often, and where first."""
    places = [f"{line:,}" for line in kind.lines] or kind.fields
    if kind.count == 1:
        return f"Line {places[0]}. " if kind.lines else ""
    shown = ", ".join(places)
    if kind.count > len(places) == PLACES_KEPT:
        shown += f" and {kind.count - PLACES_KEPT:,} more"
    where = f", lines {shown}" if kind.lines else f", at {shown}" if places else ""
    return f"{kind.count:,} times{where}. "


def _place(error: TraceError) -> str:
    line = [] if error.line is None else [f"line {error.line:,}"]
    field = [] if error.field is None else [error.field]
    return "".join(f"{each}: " for each in [*line, *field])


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _in_rows(faults: Faults) -> str:
    return f" in {_counted(faults.rows, 'row')}" if faults.rows else ""


# ---- what to know


def _changes(trace: Trace) -> Iterator[str]:
    for name, count in trace.header.changes.items():
        meaning = MEANINGS.get(name)
        yield f"{name} {count:,}" + (f": {meaning}" if meaning else "")


def _cautions(trace: Trace) -> Iterator[str]:
    """What may make a replay other than expected."""
    header = trace.header
    if header.prefix_data == "absent":
        yield "No prefix data: no prompt shares anything, and no hit rate can rest on it"
    else:
        yield from _missing_blocks(trace)
    if header.session_starts == "unknown":
        yield (
            "When sessions start relative to each other is not known: give pacing=poisson or "
            "pacing=closed"
        )
    else:
        yield from _clock(trace)
    delays_s = trace.column("delay_s")
    long = int((delays_s > _LONG_DELAY_S).sum())
    if long:
        yield (
            f"{_counted(long, 'delay')} above 1 h, the longest {np.nanmax(delays_s) / 3600:,.1f} "
            "h: transform=[cap_delays] shortens them"
        )
    above = int((trace.input_tokens > _LONG_PROMPT).sum())
    if above:
        yield (
            f"{_counted(above, 'prompt')} above {_LONG_PROMPT:,} tokens, the longest "
            f"{trace.input_tokens.max():,}: transform=[within_context] leaves out what a server "
            "cannot take"
        )


def _missing_blocks(trace: Trace) -> Iterator[str]:
    row, _, lengths = runs(trace)
    blocks = np.bincount(row, lengths, len(trace))
    room = trace.header.blocks(trace.input_tokens.astype(np.int64))
    fewer = int((blocks < room).sum())
    if fewer:
        yield (
            f"{_counted(fewer, 'prompt')} with ids for fewer blocks than there are: what has none "
            "counts as new"
        )


def _clock(trace: Trace) -> Iterator[str]:
    """Times in a wrong unit, and a clock so coarse that it makes bursts that there never were."""
    arrivals_s = trace.column("arrival_s")
    times_s, starts = np.unique(arrivals_s[~np.isnan(arrivals_s)], return_counts=True)
    sessions = int(starts.sum())
    span_s = float(np.ptp(times_s))
    if sessions >= _DENSE_SESSIONS and sessions > _DENSE_PER_S * span_s > 0:
        yield (
            f"{sessions:,} sessions start within {span_s:.3g} s, {sessions / span_s:,.0f} a "
            "second: where the times are of a larger unit, such as s for ms, "
            "transform=[scale_time] transform.scale_time.factor=1000 mends them"
        )
        return
    if sessions > 1 and span_s == 0:
        yield f"All {sessions:,} sessions start at once: give pacing=poisson or pacing=closed"
        return
    tick_s = clock_tick_s(arrivals_s[~np.isnan(arrivals_s)])
    if not tick_s:
        return
    yield (
        f"A coarse clock: {sessions:,} sessions start at {len(times_s):,} different times, mostly "
        f"{tick_s:g} s apart, up to {starts.max():,} at once: transform=[jitter] "
        f"transform.jitter.tick_s={tick_s:g} spreads them"
    )


MEANINGS = {
    # Of every reader.
    "blank_lines_skipped": "lines with nothing in them",
    "rows_out_of_order": "earlier than a row before; sorted by time",
    "zero_output_clamped_to_1": "no answer; one token is asked for, so that the prompt is cached",
    "empty_input_dropped": "no prompt; what waited for such a turn waits for what it waited for",
    "repeated_block_id_told_apart": "an id twice in one prompt; taken as two blocks",
    "negative_delay_clamped_to_0": "began before what it waits for had ended",
    "api_time_unknown_taken_as_0": "how long an answer took is not recorded: delays include it",
    "api_time_estimated": "how long an answer took is not recorded: taken from the others'",
    "background_subagent_not_joined": "a sub-agent whose result no later turn waits for",
    # Of CSV.
    "failed_request_dropped": "a request without an answer; trace.failures=keep keeps them",
    "session_id_not_used": "a session's name, without prefixes to replay it by",
    "total_tokens_is_not_the_sum": "Total tokens is another number; it is not used",
    # Of transforms, whose numbers are in their names where they have any.
    "turns_without_prefix_data": "merged from a trace that has none; each counts as new",
    "hit_tokens_lost_with_left_out_turns": "tokens, hit on what only turns left out had used",
    # Of sessions.
    "added_made_whole": "a turn that adds to those before it, made into a whole prompt",
    "delay_absent_taken_as_0": "neither a delay nor a time",
    "delay_from_timestamps": "no delay given; from start to start, so longer by the answer",
    "timestamp_estimated": "no time given; that of the row before and the delay",
    "session_start_unknown_taken_as_0": "a session without a time of its own",
    "parent_not_in_file_made_first_turn": "the turn before is in another file",
    "session_without_requests_dropped": "a session without a request",
    "subagent_without_requests_dropped": "a sub-agent without a request",
    "requests_without_session": "each is a session of its own",
    "spawned_before_its_caller_ended": "a sub-agent that starts with its caller, not after it",
    # Of lengths.
    "first_prefix_not_shared": "a first turn's prefix was cached by somebody unknown",
    "prefix_longer_than_context": "more cached than the turn before had; cut to its prompt",
    "input_tokens_not_their_sum": "the total is not prefix and rest; the total is used",
    "input_tokens_not_input_length": "two lengths of one prompt; input_length is used",
    "fewer_hashes_than_blocks": "a prompt of which not every block has a hash",
    "tokens_estimated_from_characters": "no count of tokens; 4 characters each",
    "call_without_messages_shares_nothing": "no text to tell what a prompt shares",
    "prompt_tokens_not_their_sum": "the messages add up to another number; prompt_tokens is used",
    "prompt_tokens_taken_from_messages": "no prompt_tokens; the sum of the messages",
    "message_tokens_unknown_taken_as_0": "a message of unknown length",
    "answer_without_request_kept_as_context": "an answer of unknown length; part of later prompts",
    "reasoning_longer_than_answer": "more reasoning than answer; nothing of it stays in the prompt",
    # Of time.
    "begin_unknown_taken_from_end": "no time of its start; its end less what it took",
    "begin_estimated_from_first_output": "no time of its start; that of its first output",
    "time_estimated": "no time at all; that of the turn before and its tools",
    "tool_time_unknown_taken_as_0": "a tool call of unknown length",
    "tool_events_kept_as_delay": "a tool's time is in the delay of the turn behind it",
    "unequal_delays_taken_as_shortest": "waits for several, with different delays",
    "unequal_ends_taken_as_longest": "branches that end with different waits",
    "dispatch_beside_completion_dropped": "waits for a start and for an end; the end is used",
    "not_before_of_a_dependent_dropped": "an earliest time beside a dependency, which is used",
    # Of events.
    "other_span_dropped": "no call of a model",
    "failed_call_dropped": "a call that failed",
    "call_without_tokens_dropped": "a call without lengths or texts",
    "duplicate_span_dropped": "a span twice, the same both times",
    "parent_span_not_in_file": "a span inside one that is not recorded",
    "request_payload_skipped": "an event with a request's text",
    "tool_event_without_session_dropped": "a tool of nobody known",
    "drop_kv_cache_dropped": "an order to the server; a replay gives none",
    # Of chats.
    "conversation_without_answer_dropped": "a conversation without a message of the model",
    "messages_after_last_answer_dropped": "messages that nobody answered",
    "delay_unknown_taken_as_0": "no times: a turn follows the answer before it at once",
    "content_part_not_text_dropped": "an image, or another part that is no text",
    "null_content_taken_as_empty": "a message without text",
    "half_surrogate_pair_replaced": "a character that was cut in half",
    "tool_calls_not_in_lengths": "a call of a tool, not counted in tokens",
    "tools_not_in_lengths": "a list of tools, not counted in tokens",
}
"""What a reader's changes mean, by their names in a trace's header."""
