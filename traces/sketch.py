"""A sketch of a trace: what is kept of it to draw a twin from (`traces.twin`), and the fit.

A session is a **line** of turns, from which sub-agents may be called, lines of their own. A line
has

- an opening: its length, and how much of it earlier openings had already laid (and how long ago);
- later turns, which keep the prompt before and add to it, or break off: then only the front of the
  prompt before is kept, and the rest is laid anew at some ratio of its length.

Each distribution is one a *phase*, a stretch of turns of a line. Some lines have long answers all
the way and some short: a variable's draws within a line share a normal score (a Gaussian copula),
as the lines' turns, openings, additions, answers and delays do with each other.

What it leaves out, so that a fit is not taken for more: no memory from one turn to the next beyond
that, no link between a break and how full the context is, and of time only what `Starts` has. It
has quantiles, shares and correlations alone; of a few requests the quantiles are those requests.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from harness import settings
from harness.errors import ConfigError, TraceError
from harness.prefix import Runs
from harness.trace import MAX_TOKENS, Trace
from traces.source import json_document, locate_file, read_text
from traces.spread import Floats, Spread
from traces.starts import MOST_TURNS, Starts, session_starts

VERSION = 2

VARIABLES = ("turns", "opening", "added", "output", "delay")
"""What a line has a normal score for."""
WITHIN = VARIABLES[2:]
"""Those of which a line has many draws."""

_PHASES = (1, 2, 3, 5, 9, 17, 33, 65)
"""Turns at which a phase may begin; the opening is turn 0."""
_PHASE_TURNS = 60
"""So many turns are needed for a phase of its own."""
_PARTS = 16
"""Parts that openings are divided into, where they are many."""
_LINES = 30
"""So many lines are needed for correlations."""
_UNSETTLED = 4
"""One in so many lines, the first ones, tell nothing of what openings share: what is from before
the trace began is new in it, and it is in a twin too."""
_ANSWER_S = 1e6
"""No answer is taken to have needed longer."""
_DELAY_S = 1e9
"""No delay is taken to be longer."""


@dataclass(frozen=True)
class Phase:
    """The later turns of a line from `from_turn` on, until the next phase."""

    from_turn: int
    added_tokens: Spread
    output_tokens: Spread
    delay_s: Spread
    broken: float
    """Share of turns that keep less than the prompt before."""
    kept: Spread
    """Of those: the share of its blocks that they keep."""
    ratio: Spread
    """Of those: their length over its length."""


@dataclass(frozen=True)
class Line:
    """One kind of line: that of sessions, or that of the sub-agents they call."""

    turns: Spread
    opening_tokens: Spread
    opening_hits: tuple[Spread, ...]
    """Share of an opening's blocks that are in an earlier one; a distribution for each of as many
    equal parts of the openings, by length."""
    opening_lags: tuple[Spread, ...]
    """How many openings earlier that was last laid, of those that share any; a distribution for
    each of as many equal parts of them, by how many tokens they share."""
    opening_common: Spread
    """How many blocks an opening has in common with the one before it: what is left of its hit
    where that would be from before the first."""
    output_tokens: Spread
    """The opening's answer."""
    delay_s: Spread
    """Before the opening of a sub-agent, from the end of what called it."""
    phases: tuple[Phase, ...]
    within: tuple[float, ...]
    """Share of each of added, output and delay's variance that is between lines."""
    correlation: tuple[tuple[float, ...], ...]
    """Of the lines' scores, in the order of `VARIABLES`."""
    answer_in_added: float
    """Correlation of what a turn adds with the answer before it, within a line."""


@dataclass(frozen=True)
class Sketch:
    """All that a twin is drawn from."""

    source: str
    """The format of the trace."""
    licence: str
    block_tokens: int
    partial_block: Literal["floor", "ceil"]
    prefixes: bool
    """Whether the trace says what prompts share: else no hit rate can rest on a twin either."""
    context_tokens: int
    """The longest prompt: a line ends before it would be passed."""
    starts: Starts | None
    """None where the trace does not know when its sessions began."""
    main: Line
    called: Line | None
    calling: float
    """Share of a session's own turns that call sub-agents."""
    calls: Spread
    """How many each of them calls, and what is called by those it calls."""
    joined: float
    """Share of sub-agents that the caller's next turn waits for."""
    nominal_s: float
    """An answer takes this, and `nominal_token_s` a token: orders the rows, gates nothing."""
    nominal_token_s: float
    agent: str
    """The name of the agents that most of the called turns are of."""
    like: Mapping[str, Spread]
    """What came out, over the requests of the trace, for comparison: nothing is drawn from it."""


# ---- fitting


def fit(trace: Trace) -> Sketch:
    """The sketch of a trace: a fit. Time: some 10 microseconds a turn."""
    lines = _Lines(trace)
    called = lines.kind(main=False)
    nominal_s, nominal_token_s = _nominal(trace)
    calls = Counter(line.caller for line in called)
    agents = [line.agent for line in called]
    return Sketch(
        source=trace.header.format,
        licence=trace.header.licence,
        block_tokens=trace.header.block_tokens,
        partial_block=trace.header.partial_block,
        prefixes=trace.header.prefix_data != "absent",
        context_tokens=int(trace.input_tokens.max()),
        starts=Starts.fit(trace),
        main=_fit_line(trace, lines.kind(main=True)),
        called=_fit_line(trace, called) if called else None,
        calling=len(calls) / sum(len(line.rows) for line in lines.kind(main=True)),
        calls=Spread.fit(np.array([*calls.values()] or [1], np.float64).clip(max=MOST_TURNS)),
        joined=sum(line.joined for line in called) / len(called) if called else 0.0,
        nominal_s=nominal_s,
        nominal_token_s=nominal_token_s,
        agent=Counter(agents).most_common(1)[0][0] if agents else "main",
        like={name: Spread.fit(values) for name, values in samples(trace).items() if len(values)},
    )


SAMPLES = (
    *("input_tokens", "output_tokens", "new_tokens", "ideal_hit_rate", "turns"),
    *("delay_s", "start_gap_s"),
)


def samples(trace: Trace) -> dict[str, Floats]:
    """What two traces are compared by: values over requests, by the names of `SAMPLES`.

    `turns` are over sessions, and `start_gap_s` is from one session's start to the next one's.
    Empty where there are none; what is hit, where the trace does not say what prompts share.
    """
    delays = trace.column("delay_s")
    inputs = trace.input_tokens.astype(np.float64)
    told = slice(0 if trace.header.prefix_data == "absent" else None)
    values = (
        inputs,
        trace.output_tokens.astype(np.float64),
        (inputs - trace.ideal_hit_tokens)[told],
        trace.ideal_hit_rates[told],
        np.bincount(trace.session).astype(np.float64),
        delays[~np.isnan(delays)],
        np.diff(session_starts(trace)),
    )
    return dict(zip(SAMPLES, values, strict=True))


@dataclass(slots=True)
class _Found:
    """A line of a trace."""

    main: bool
    agent: str
    rows: list[int]
    caller: int
    """The row of a session's own line that called it, or called what called it; its own if that."""
    joined: bool = False
    """Whether a turn of another line waits for its end."""
    lag: float = 0.0
    """Of the opening: how many openings ago its hit was last laid; 0 without one."""
    wait_s: float = 0.0


class _Lines:
    """A trace's turns, as lines: a turn goes on where a parent of the same agent stood last."""

    def __init__(self, trace: Trace) -> None:
        self.lines: list[_Found] = []
        offsets, parents = trace.parents()
        agents = trace.table.column("agent").to_pylist()
        sessions = trace.session.tolist()
        delays, recorded = trace.column("delay_s"), trace.column("recorded_s")
        of_row: list[_Found] = []
        first: dict[int, _Found] = {}
        for row, session in enumerate(sessions):
            waits = parents[offsets[row] : offsets[row + 1]].tolist()
            ends = [each for each in waits if each < row and of_row[each].rows[-1] == each]
            before = [each for each in ends if agents[each] == agents[row]]
            if before:
                line = of_row[max(before, key=lambda each: len(of_row[each].rows))]
                line.rows.append(row)
                for end in ends:
                    of_row[end].joined |= of_row[end] is not line
            else:
                line = _Found(session not in first, agents[row], [row], row)
                self.lines.append(line)
                if line.main:
                    first[session] = line
                else:
                    opening = first[session].rows[0]
                    caller = next((each for each in reversed(waits) if each < row), opening)
                    line.caller = caller if of_row[caller].main else of_row[caller].caller
                    line.wait_s = float(delays[row] if waits else recorded[row] - recorded[opening])
            of_row.append(line)
        for main in (True, False):
            _set_lags(trace, self.kind(main=main))

    def kind(self, *, main: bool) -> list[_Found]:
        """The lines of sessions, or those of the sub-agents they call."""
        return [line for line in self.lines if line.main == main]


def _set_lags(trace: Trace, lines: Sequence[_Found]) -> None:
    """How many openings ago each opening's hit was last laid by one of its kind."""
    # Of each chain: who laid it how deep, less those that a later one laid as deep or deeper.
    last: dict[int, list[tuple[int, int]]] = defaultdict(list)
    block = trace.header.block_tokens
    hits = (trace.ideal_hit_tokens.astype(np.int64) + block - 1) // block
    for number, line in enumerate(lines):
        row = line.rows[0]
        runs, left = trace.runs(row), int(hits[row])
        for start, length in runs:
            laid = last[start]
            if 0 < left <= length:
                line.lag = float(
                    next((number - at for at, depth in reversed(laid) if depth >= left), 0)
                )
            left -= length
            while laid and laid[-1][1] <= length:
                laid.pop()
            laid.append((number, length))


def _fit_line(trace: Trace, lines: Sequence[_Found]) -> Line:
    inputs = trace.input_tokens.astype(np.float64)
    outputs = trace.output_tokens.astype(np.float64)
    opening = np.array([line.rows[0] for line in lines])
    settled = opening[len(lines) // _UNSETTLED :]
    lags = np.array([line.lag for line in lines[len(lines) // _UNSETTLED :]])
    later = _Later.of(trace, lines)
    turns = np.array([len(line.rows) for line in lines], np.float64).clip(max=MOST_TURNS)
    scores = {
        "turns": _scores(turns),
        "opening": _scores(inputs[opening]),
    }
    within, means, trust = _between_lines(later, len(lines))
    return Line(
        turns=Spread.fit(turns),
        opening_tokens=Spread.fit(inputs[opening]),
        opening_hits=_opening_hits(trace, settled),
        opening_lags=_opening_lags(lags, trace.ideal_hit_tokens[settled]),
        opening_common=Spread.fit(_common(trace, opening)),
        output_tokens=Spread.fit(outputs[opening]),
        delay_s=Spread.fit(np.array([line.wait_s for line in lines]).clip(max=_DELAY_S)),
        phases=_phases(later),
        within=within,
        correlation=_correlation(scores, means, trust),
        answer_in_added=_answers(later),
    )


def _opening_hits(trace: Trace, opening: NDArray[np.int64]) -> tuple[Spread, ...]:
    """By length: what is said anew is so much, however long what was said before."""
    blocks = trace.header.blocks
    inputs = trace.input_tokens[opening].astype(np.int64)
    hits = trace.ideal_hit_tokens[opening].astype(np.int64)
    shares = blocks(hits) / np.maximum(1, blocks(inputs))
    return _by_rank(shares, inputs)


def _opening_lags(lags: Floats, hits: NDArray[np.int32]) -> tuple[Spread, ...]:
    """By the length of the hit: a system's prompt was there a moment ago, a long talk was not."""
    known = lags > 0
    return _by_rank(lags[known], hits[known]) if known.any() else (Spread.fit(np.ones(1)),)


def _common(trace: Trace, opening: NDArray[np.int64]) -> Floats:
    """Blocks that each opening but the first has in common with the one before; 0 for one alone."""
    prompts = [trace.runs(row) for row in opening.tolist()]
    blocks = [_shared(one, other) for one, other in pairwise(prompts)]
    return np.array(blocks or [0], np.float64)


def _shared(one: Runs, other: Runs) -> int:
    """How many blocks two prompts share."""
    shared = 0
    for (start, length), (start_, length_) in zip(one, other, strict=False):
        shared += min(length, length_) if start == start_ else 0
        if (start, length) != (start_, length_):
            break
    return shared


def _by_rank(values: Floats, by: NDArray[Any]) -> tuple[Spread, ...]:
    """The distribution of values in each of some equal parts, ranked `by` another."""
    parts = max(1, min(_PARTS, len(values) // _PHASE_TURNS))
    ranked = np.array_split(np.argsort(by, kind="stable"), parts)
    return tuple(Spread.fit(values[part]) for part in ranked)


@dataclass(frozen=True)
class _Later:
    """The turns of lines after their openings: arrays of one shape."""

    line: NDArray[np.int64]
    turn: NDArray[np.int64]
    added: Floats
    output: Floats
    delay: Floats
    before: Floats
    """The answer of the turn before."""
    broken: NDArray[np.bool_]
    kept: Floats
    ratio: Floats

    @classmethod
    def of(cls, trace: Trace, lines: Sequence[_Found]) -> _Later:
        rows = np.array([row for line in lines for row in line.rows[1:]], np.int64)
        last = np.array([row for line in lines for row in line.rows[:-1]], np.int64)
        number = [at for at, line in enumerate(lines) for _ in line.rows[1:]]
        turn = [at for line in lines for at in range(1, len(line.rows))]
        inputs = trace.input_tokens.astype(np.int64)
        block = trace.header.block_tokens
        hits = trace.ideal_hit_tokens[rows] // block
        whole = inputs[last] // block
        delays = np.nan_to_num(trace.column("delay_s")[rows]).clip(max=_DELAY_S)
        return cls(
            line=np.array(number, np.int64),
            turn=np.array(turn, np.int64),
            added=np.maximum(1, inputs[rows] - inputs[last]).astype(np.float64),
            output=trace.output_tokens[rows].astype(np.float64),
            delay=delays,
            before=trace.output_tokens[last].astype(np.float64),
            broken=hits < whole,
            kept=hits / np.maximum(whole, 1),
            ratio=inputs[rows] / inputs[last],
        )

    def __getitem__(self, kept: NDArray[np.bool_]) -> _Later:
        return _Later(*(getattr(self, name)[kept] for name in self.__dataclass_fields__))


def _phases(later: _Later) -> tuple[Phase, ...]:
    """As many as have turns enough."""
    begins: list[int] = []
    for turn in _PHASES:
        here = later.turn >= turn
        if not begins or here.sum() >= _PHASE_TURNS:
            if begins and ((later.turn >= begins[-1]) & ~here).sum() < _PHASE_TURNS:
                continue
            begins.append(turn)
    ends = [*begins[1:], inf]
    phases = []
    for begin, end in zip(begins, ends, strict=True):
        part = later[(later.turn >= begin) & (later.turn < end)]
        if len(part.line):
            phases.append(_phase(begin, part))
    return tuple(phases)


def _phase(begin: int, part: _Later) -> Phase:
    grown = part[~part.broken]
    broken = part[part.broken]
    one = np.ones(1)
    return Phase(
        from_turn=begin,
        added_tokens=Spread.fit(grown.added if len(grown.added) else one),
        output_tokens=Spread.fit(part.output),
        delay_s=Spread.fit(part.delay),
        broken=float(part.broken.mean()),
        kept=Spread.fit(broken.kept if len(broken.kept) else one),
        ratio=Spread.fit(broken.ratio if len(broken.ratio) else one),
    )


def _scores(values: Floats) -> Floats:
    """Normal scores: what a standard normal variable would be at the values' ranks."""
    scores: Floats = special.ndtri((stats.rankdata(values) - 0.5) / max(len(values), 1))
    return scores


def _between_lines(later: _Later, lines: int) -> tuple[tuple[float, ...], dict[str, Any], Any]:
    """Of each variable: the share of variance between lines, the lines' means, their reliability.

    The share is the one-way random-effects estimate (intraclass correlation).
    """
    counts = np.bincount(later.line, minlength=lines)
    several = counts > 1
    shares, means, trust = [], {}, {}
    for name in WITHIN:
        if several.sum() < _LINES:
            shares.append(0.0)
            means[name], trust[name] = np.zeros(lines), 0.0
            continue
        scores = _phase_scores(later, getattr(later, name))
        sums = np.bincount(later.line, scores, lines)
        mean = sums / np.maximum(counts, 1)
        inside = (scores - mean[later.line]) ** 2
        within = inside.sum() / (counts[several] - 1).sum()
        typical = (counts.sum() - (counts**2).sum() / counts.sum()) / (several.sum() - 1)
        centre = scores.mean()
        between = (counts * (mean - centre) ** 2).sum() / (several.sum() - 1)
        whole = between + (typical - 1) * within
        share = max(0.0, (between - within) / whole) if whole else 0.0
        shares.append(round(min(share, 0.95), 4))
        means[name] = np.where(counts > 0, mean, np.nan)
        trust[name] = share / (share + (1 - share) / max(1.0, float(np.median(counts[several]))))
    return tuple(shares), means, trust


def _phase_scores(later: _Later, values: Floats) -> Floats:
    """Normal scores among the turns of each phase, so that phases make no lines look alike."""
    scores = np.zeros(len(values))
    at = np.searchsorted(_PHASES, later.turn, side="right")
    for phase in np.unique(at):
        here = at == phase
        scores[here] = _scores(values[here])
    return scores


def _correlation(
    scores: Mapping[str, Floats], means: Mapping[str, Floats], trust: Mapping[str, float]
) -> tuple[tuple[float, ...], ...]:
    """Of the lines' scores, freed of what noise takes from it; what noise may explain is 0."""
    every = {**scores, **means}
    sure = {**dict.fromkeys(scores, 1.0), **trust}
    size = len(VARIABLES)
    matrix = np.eye(size)
    for i in range(size):
        for j in range(i):
            a, b = every[VARIABLES[i]], every[VARIABLES[j]]
            both = np.isfinite(a) & np.isfinite(b)
            root = np.sqrt(sure[VARIABLES[i]] * sure[VARIABLES[j]])
            if both.sum() < _LINES or root == 0 or not a[both].std() or not b[both].std():
                continue
            found = float(np.corrcoef(a[both], b[both])[0, 1])
            if abs(found) > 2 / np.sqrt(both.sum()):
                matrix[i, j] = matrix[j, i] = np.clip(found / root, -0.95, 0.95)
    values, vectors = np.linalg.eigh(matrix)
    matrix = vectors @ np.diag(values.clip(min=1e-3)) @ vectors.T
    scale = np.sqrt(np.diag(matrix))
    matrix = matrix / np.outer(scale, scale)
    return tuple(tuple(row) for row in matrix.round(4).tolist())


def _answers(later: _Later) -> float:
    """Correlation of what is added with the answer before, among turns that break nothing."""
    grown = later[~later.broken]
    if len(grown.added) < _PHASE_TURNS:
        return 0.0
    added, before = _phase_scores(grown, grown.added), _phase_scores(grown, grown.before)
    if not added.std() or not before.std():
        return 0.0
    return round(float(np.clip(np.corrcoef(added, before)[0, 1], -0.95, 0.95)), 4)


def _nominal(trace: Trace) -> tuple[float, float]:
    """How long answers took in the recording: medians of what lies between a turn and its parent.

    2 s and 0.017 s a token where no turn has exactly one parent.
    """
    offsets, parents = trace.parents()
    single = np.flatnonzero(np.diff(offsets) == 1)
    if not len(single):
        return 2.0, 0.017
    before = parents[offsets[single]]
    recorded = trace.column("recorded_s")
    took = recorded[single] - recorded[before] - trace.column("delay_s")[single]
    took = took.clip(0, _ANSWER_S)
    outputs = trace.output_tokens[before]
    short = outputs <= np.median(outputs)
    base = float(np.median(took[short]))
    per_token = float(np.median(((took - base) / outputs)[~short])) if (~short).any() else 0.0
    return round(base, 4), round(max(0.0, per_token), 6)


# ---- the file


def to_json(sketch: Sketch) -> dict[str, Any]:
    """The sketch as `load` takes it."""
    return {"relaybench_sketch": VERSION, **_plain(sketch)}


def _plain(value: Any) -> Any:
    if isinstance(value, Spread | Starts):
        return value.to_json()
    if isinstance(value, Sketch | Line | Phase):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value


def load(path: str | Path) -> Sketch:
    """Read a sketch, such as `relaybench trace profile` leaves. Raises `TraceError`."""
    try:
        path = locate_file(path)
        row = json_document(read_text(path), path)
    except TraceError as error:
        raise _refused(error.problem, path) from error
    if row.values.pop("relaybench_sketch", None) != VERSION:
        raise _refused(f"not a sketch of version {VERSION}", path)
    try:
        return _parsed(row.values)
    except ConfigError as error:
        raise _refused(f"a sketch that cannot be drawn from: {error}", path) from error
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
        raise _refused(f"a sketch that cannot be understood ({error!r})", path) from error


def _refused(problem: str, path: str | Path) -> TraceError:
    do = "give as trace.sketch the sketch.json that relaybench trace profile makes"
    return TraceError(problem, do=do, path=path)


def _parsed(values: Mapping[str, Any]) -> Sketch:
    called, starts = values["called"], values["starts"]
    made = Sketch(
        **{
            **values,
            "starts": None if starts is None else Starts.of("starts", **starts),
            "main": _line("main", values["main"]),
            "called": None if called is None else _line("called", called),
            "calls": _spread(values, "calls", 1, MOST_TURNS),
            "like": {name: Spread.of(it, f"like.{name}") for name, it in values["like"].items()},
        }
    )
    settings.whole("block_tokens", made.block_tokens, least=1, most=MAX_TOKENS)
    settings.whole("context_tokens", made.context_tokens, least=1, most=MAX_TOKENS)
    for name in ("calling", "joined"):
        settings.number(name, getattr(made, name), least=0, most=1)
    for name in ("nominal_s", "nominal_token_s"):
        settings.number(name, getattr(made, name), least=0, most=_ANSWER_S)
    for name in ("source", "licence", "agent"):
        if not isinstance(getattr(made, name), str):
            raise ConfigError(f"{name} is no text")
    if odd := set(made.like) - set(SAMPLES):
        raise ConfigError(f"like.{min(odd)} is unknown: give {', '.join(SAMPLES)}")
    if not isinstance(made.prefixes, bool):
        raise ConfigError(f"prefixes is {made.prefixes!r}: give true or false")
    if made.partial_block not in {"floor", "ceil"}:
        raise ConfigError(f"partial_block is {made.partial_block!r}: give floor or ceil")
    return made


def _spread(values: Mapping[str, Any], name: str, least: float, most: float) -> Spread:
    return Spread.of(values[name], name, least=least, most=most)


def _spreads(values: Mapping[str, Any], name: str, most: float) -> tuple[Spread, ...]:
    if not isinstance(values[name], list) or not values[name]:
        raise ConfigError(f"{name} is {values[name]!r:.40}: give a list of distributions")
    return tuple(Spread.of(each, name, most=most) for each in values[name])


def _line(kind: str, values: Mapping[str, Any]) -> Line:
    try:
        matrix = np.array(values["correlation"], np.float64)
    except ValueError:
        matrix = np.empty(0)
    size = len(VARIABLES)
    if (
        matrix.shape != (size, size)
        or not np.allclose(matrix, matrix.T)
        or not np.allclose(np.diag(matrix), 1)
        or np.linalg.eigvalsh(matrix).min() <= 0
    ):
        raise ConfigError(f"{kind}.correlation is no matrix of correlations of {size} variables")
    if len(values["within"]) != len(WITHIN):
        raise ConfigError(f"{kind}.within has no {len(WITHIN)} shares")
    for share in values["within"]:
        settings.number(f"{kind}.within", share, least=0, most=1)
    settings.number(f"{kind}.answer_in_added", values["answer_in_added"], least=-1, most=1)
    phases = tuple(_phase_of(each) for each in values["phases"])
    begins = [phase.from_turn for phase in phases]
    if begins and (begins[0] != 1 or begins != sorted(set(begins))):
        raise ConfigError(f"{kind}.phases begin at turns {begins}: begin at 1 and go up")
    return Line(
        **{
            **values,
            "turns": _spread(values, "turns", 1, MOST_TURNS),
            "opening_tokens": _spread(values, "opening_tokens", 1, MAX_TOKENS),
            "opening_hits": _spreads(values, "opening_hits", 1),
            "opening_lags": _spreads(values, "opening_lags", MAX_TOKENS),
            "opening_common": _spread(values, "opening_common", 0, MAX_TOKENS),
            "output_tokens": _spread(values, "output_tokens", 1, MAX_TOKENS),
            "delay_s": _spread(values, "delay_s", 0, _DELAY_S),
            "phases": phases,
            "within": tuple(values["within"]),
            "correlation": tuple(map(tuple, values["correlation"])),
        }
    )


def _phase_of(values: Mapping[str, Any]) -> Phase:
    settings.whole("from_turn", values["from_turn"], least=1)
    settings.number("broken", values["broken"], least=0, most=1)
    return Phase(
        **{
            **values,
            "added_tokens": _spread(values, "added_tokens", 1, MAX_TOKENS),
            "output_tokens": _spread(values, "output_tokens", 1, MAX_TOKENS),
            "delay_s": _spread(values, "delay_s", 0, _DELAY_S),
            "kept": _spread(values, "kept", 0, 1),
            "ratio": _spread(values, "ratio", 0, MAX_TOKENS),
        }
    )
