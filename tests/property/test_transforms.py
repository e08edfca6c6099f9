"""Every transform, on any trace: its rules hold, what it should keep is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import ConfigError
from harness.metrics import HIT_EDGES, hit_bin
from harness.seed import stream
from harness.trace import MAX_BLOCK, Header, Trace, build_table
from tests.property.test_prefix import expand, trees
from traces import combine, lengths, retarget, transform
from traces.rows import changed, runs

BLOCK = 4
AGENTS = ("main", "coder", "tester")
TIMES = st.floats(0, 1e6)


@st.composite
def traces(draw: st.DrawFn, partial_block: Any = None) -> Trace:
    """Prompts over chains that branch, in up to four sessions, gated by graphs of any shape.

    A parent may be recorded after its child; some prompts have tokens beyond their blocks.
    """
    prompts = draw(trees())
    rows = len(prompts)
    ceil = (partial_block or draw(st.sampled_from(("floor", "ceil")))) == "ceil"
    sessions = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    dense = {session: at for at, session in enumerate(dict.fromkeys(sessions))}
    topological = draw(st.permutations(range(rows)))
    parents: list[list[int]] = [[] for _ in range(rows)]
    for at, row in enumerate(topological):
        able = [other for other in topological[:at] if sessions[other] == sessions[row]]
        if able:
            parents[row] = draw(st.lists(st.sampled_from(able), max_size=2, unique=True))
    gates = [draw(TIMES) for _ in range(rows)]
    slack = draw(st.lists(st.integers(1 - BLOCK if ceil else 0, 6), min_size=rows, max_size=rows))
    columns = {
        "session": [dense[session] for session in sessions],
        "turn_index": draw(st.permutations(range(rows))),
        "parents": parents,
        "recorded_s": sorted(draw(st.lists(TIMES, min_size=rows, max_size=rows))),
        "arrival_s": [None if p else g for p, g in zip(parents, gates, strict=True)],
        "delay_s": [g if p else None for p, g in zip(parents, gates, strict=True)],
        "input_tokens": [
            len(expand(runs)) * BLOCK + more for runs, more in zip(prompts, slack, strict=True)
        ],
        "output_tokens": draw(st.lists(st.integers(1, 500), min_size=rows, max_size=rows)),
        "run_starts": [[start for start, _ in runs] for runs in prompts],
        "run_lengths": [[length for _, length in runs] for runs in prompts],
        "agent": draw(st.lists(st.sampled_from(AGENTS), min_size=rows, max_size=rows)),
    }
    rule: Any = "ceil" if ceil else "floor"
    return Trace(build_table(columns), Header("hand", BLOCK, rule, "file", "s", "none"))


def rows_of(trace: Trace, *left_out: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = trace.table.drop_columns(list(left_out)).to_pylist()
    return rows


def blocks_of(trace: Trace) -> list[list[int]]:
    return [expand(trace.runs(row)) for row in range(len(trace))]


SHAPE: dict[str, Callable[[Trace], Trace]] = {
    "scale_time": lambda trace: transform.scale_time(trace, 0.37),
    "cap_delays": lambda trace: transform.cap_delays(trace, 5.0),
    "cap_lengths": lambda trace: lengths.cap_lengths(trace, 9, 30),
    "scale_lengths": lambda trace: lengths.scale_lengths(trace, 0.6, 2.5),
    "jitter": lambda trace: transform.jitter(trace, 10.0, 3),
    "retarget": lambda trace: retarget.retarget(trace, [0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2], 3),
    "anonymise": transform.anonymise,
    "shrink": lambda trace: transform.shrink(trace, 2),
}


@given(trace=traces())
def test_no_turn_and_no_gate_is_lost(trace: Trace) -> None:
    for change in SHAPE.values():
        made = change(trace)  # a Trace checks its rules when it is made
        assert len(made) == len(trace)
        assert np.bincount(made.session).tolist() == np.bincount(trace.session).tolist()
        assert len(made.parents()[1]) == len(trace.parents()[1])
        assert change(trace).digest == made.digest


@given(trace=traces(), factor=st.floats(1e-3, 1e3))
def test_scaled_time_is_every_time_scaled(trace: Trace, factor: float) -> None:
    made = transform.scale_time(trace, factor)
    for name in ("recorded_s", "arrival_s", "delay_s"):
        expected = trace.column(name) * factor
        assert np.array_equal(made.column(name), expected, equal_nan=True)
    same = ("recorded_s", "arrival_s", "delay_s")
    assert made.table.drop_columns(same).equals(trace.table.drop_columns(same))


@given(trace=traces(), inputs=st.integers(1, 60), outputs=st.integers(1, 600))
def test_capped_prompts_keep_their_fronts(trace: Trace, inputs: int, outputs: int) -> None:
    made = lengths.cap_lengths(trace, inputs, outputs)
    assert made.input_tokens.tolist() == [min(n, inputs) for n in trace.input_tokens.tolist()]
    assert made.output_tokens.tolist() == [min(n, outputs) for n in trace.output_tokens.tolist()]
    fits = inputs // BLOCK if trace.header.partial_block == "floor" else -(-inputs // BLOCK)
    cut = [
        blocks[:fits] if tokens > inputs else blocks
        for blocks, tokens in zip(blocks_of(trace), trace.input_tokens.tolist(), strict=True)
    ]
    assert blocks_of(made) == cut


@given(trace=traces("floor"), factor=st.floats(0.05, 20))
def test_scaled_prompts_share_as_much_to_less_than_a_block(trace: Trace, factor: float) -> None:
    made = lengths.scale_lengths(trace, factor)
    before, after = blocks_of(trace), blocks_of(made)
    shared = [floor_of(len(blocks) * factor) for blocks in before]
    assert [len(blocks) for blocks in after] == shared
    hits = trace.ideal_hit_tokens // BLOCK
    assert (made.ideal_hit_tokens // BLOCK).tolist() == [floor_of(h * factor) for h in hits]
    off = np.abs(made.ideal_hit_tokens - factor * trace.ideal_hit_tokens)
    assert (off <= BLOCK + 1e-6).all()


@given(trace=traces("ceil"), factor=st.floats(0.05, 20))
def test_a_partial_block_scales_to_no_more_than_its_tokens(trace: Trace, factor: float) -> None:
    made = lengths.scale_lengths(trace, factor)
    sizes = [floor_of(len(blocks) * factor) for blocks in blocks_of(trace)]
    most = (-(-made.input_tokens // BLOCK)).tolist()
    assert [len(blocks) for blocks in blocks_of(made)] == list(map(min, sizes, most))


def floor_of(blocks: float) -> int:
    return int(np.floor(blocks + 1e-9))


@given(trace=traces())
def test_a_factor_of_one_only_numbers_blocks_anew(trace: Trace) -> None:
    made = lengths.scale_lengths(trace, 1.0, 1.0)
    assert rows_of(made, "run_starts") == rows_of(trace, "run_starts")
    assert made.ideal_hit_tokens.tolist() == trace.ideal_hit_tokens.tolist()
    new = dict(zip(chain(*blocks_of(trace)), chain(*blocks_of(made)), strict=True))
    assert len(set(new.values())) == len(new)
    assert [[new[block] for block in blocks] for blocks in blocks_of(trace)] == blocks_of(made)
    assert made.header == trace.header


@given(trace=traces())
def test_an_anonymous_trace_hits_as_it_did_whatever_its_ids(trace: Trace) -> None:
    """The same chains with numbers far apart, the last first."""
    _, starts, _ = runs(trace)
    chains = np.unique(starts).tolist()
    far = {start: MAX_BLOCK - at * 2**40 for at, start in enumerate(chains)}
    column = [[far[start] for start, _ in trace.runs(row)] for row in range(len(trace))]
    apart = Trace(changed(trace.table, {"run_starts": column}), trace.header)
    made = transform.anonymise(apart)
    assert made.table.equals(transform.anonymise(trace).table)
    assert made.ideal_hit_tokens.tolist() == trace.ideal_hit_tokens.tolist()
    assert [len(blocks) for blocks in blocks_of(made)] == list(map(len, blocks_of(trace)))
    distinct = len(set(chain(*blocks_of(trace))))
    assert distinct <= made.blocks <= distinct + max(len(chains) - 1, 0)


@given(trace=traces(), until=TIMES)
def test_lost_hits_are_those_that_a_part_no_longer_has(trace: Trace, until: float) -> None:
    try:
        made = transform.between(trace, 0, until + 1)
    except ConfigError:
        return
    kept = np.isin(trace.session, sessions_until(trace, until + 1))
    lost = int(trace.ideal_hit_tokens[kept].sum() - made.ideal_hit_tokens.sum())
    assert made.header.changes.get("hit_tokens_lost_with_left_out_turns", 0) == lost


def sessions_until(trace: Trace, until: float) -> list[int]:
    starts = [
        min(turn.arrival_s for turn in session.turns if turn.arrival_s is not None)
        for session in trace.by_session()
    ]
    return [at for at, start in enumerate(starts) if start - min(starts) < until]


@given(trace=traces(), tick=st.floats(1e-3, 1e4), seed=st.integers(0, 99))
def test_the_turns_of_a_session_shift_together(trace: Trace, tick: float, seed: int) -> None:
    made = transform.jitter(trace, tick, seed)
    key = np.lexsort((made.column("turn_index"), made.session))
    was = np.lexsort((trace.column("turn_index"), trace.session))
    shift = made.column("recorded_s")[key] - trace.column("recorded_s")[was]
    assert (shift >= -1e-6).all()
    assert (shift < tick + 1e-6).all()
    arrived = made.column("arrival_s")[key] - trace.column("arrival_s")[was]
    roots = ~np.isnan(arrived)
    assert np.allclose(arrived[roots], shift[roots], rtol=0, atol=1e-6)
    for session in range(trace.sessions):
        mine = shift[made.session[key] == session]
        assert np.ptp(mine) < 1e-6
    index, before = made.column("turn_index"), trace.column("turn_index")
    waits = {(t.session, t.turn_index): {int(index[p]) for p in t.parents} for t in turns(made)}
    assert waits == {
        (t.session, t.turn_index): {int(before[p]) for p in t.parents} for t in turns(trace)
    }


def turns(trace: Trace) -> list[Any]:
    return [trace.turn(row) for row in range(len(trace))]


def part(trace: Trace, sessions: range) -> list[dict[str, Any]]:
    """The rows of these sessions, as a trace of their own would number them, with their hits."""
    mine = [row for row in range(len(trace)) if trace.session[row] in sessions]
    number = {row: at for at, row in enumerate(mine)}
    first = min((start for row in mine for start, _ in trace.runs(row)), default=0)
    found = []
    for row in mine:
        values = trace.table.slice(row, 1).to_pylist()[0]
        values["session"] -= sessions.start
        values["parents"] = [number[parent] for parent in values["parents"]]
        values["run_starts"] = [start - first for start in values["run_starts"]]
        values["hit"] = int(trace.ideal_hit_tokens[row])
        found.append(values)
    return found


@given(trace=traces(), copies=st.integers(1, 4), shift=st.sampled_from((0.0, 2.0, 1024.0)))
def test_each_copy_is_the_trace_later(trace: Trace, copies: int, shift: float) -> None:
    made = combine.replicate(trace, copies, shift)
    assert len(made) == copies * len(trace)
    original = part(trace, range(trace.sessions))
    for copy in range(copies):
        at = copy * trace.sessions
        expected = [
            row
            | {
                name: None if row[name] is None else row[name] + copy * shift
                for name in ("recorded_s", "arrival_s")
            }
            for row in original
        ]
        assert part(made, range(at, at + trace.sessions)) == expected
    assert made.header.changes == (
        {"turns_of_copies_added": (copies - 1) * len(trace)} if copies > 1 else {}
    )


@given(data=st.data(), rule=st.sampled_from(("floor", "ceil")))
def test_merged_traces_are_each_what_they_were(data: st.DataObject, rule: str) -> None:
    one, other = data.draw(traces(rule)), data.draw(traces(rule))
    made = combine.merge(one, other)
    assert len(made) == len(one) + len(other)
    assert part(made, range(one.sessions)) == part(one, range(one.sessions))
    rest = range(one.sessions, one.sessions + other.sessions)
    assert part(made, rest) == part(other, range(other.sessions))
    assert Header.from_json(made.header.to_json()) == made.header


@given(trace=traces(), agents=st.lists(st.sampled_from(AGENTS), min_size=1, unique=True))
def test_only_turns_of_the_agents_asked_for_stay(trace: Trace, agents: list[str]) -> None:
    there = set(pc.unique(trace.table.column("agent")).to_pylist())
    if not set(agents) <= there:
        with pytest.raises(ConfigError, match="no turn is of"):
            transform.only_agents(trace, agents)
        return
    made = transform.only_agents(trace, agents)
    kept = [turn for turn in turns(trace) if turn.agent in agents]
    alike = ("recorded_s", "input_tokens", "output_tokens", "runs", "agent")
    assert [[getattr(t, name) for name in alike] for t in turns(made)] == [
        [getattr(t, name) for name in alike] for t in kept
    ]
    place = {turn.row: at for at, turn in enumerate(kept)}

    def ready(row: int) -> tuple[set[int], float]:
        """What a turn waits for, of those kept, and how long after: the rule as it is said."""
        turn = trace.turn(row)
        waits, longest, arrives = set(), 0.0, 0.0
        for parent in turn.parents:
            if parent in place:
                waits.add(place[parent])
                continue
            before, after_s = ready(parent)
            waits |= before
            if before:
                longest = max(longest, after_s)
            else:
                arrives = max(arrives, after_s)
        gate = turn.delay_s or turn.arrival_s or 0.0
        return waits, gate + (longest if waits else arrives)

    for turn, was in zip(turns(made), kept, strict=True):
        waits, gate = ready(was.row)
        assert set(turn.parents) == waits
        assert (turn.delay_s if waits else turn.arrival_s) == pytest.approx(gate, abs=1e-6)
    for session in made.by_session():
        assert [turn.turn_index for turn in session.turns] == list(range(len(session.turns)))
        was = [kept[turn.row].turn_index for turn in session.turns]
        assert was == sorted(was)


@st.composite
def shares(draw: st.DrawFn) -> list[float]:
    weights = draw(st.lists(st.integers(0, 5), min_size=7, max_size=7).filter(any))
    return [weight / sum(weights) for weight in weights]


@given(trace=traces(), bins=shares(), seed=st.integers(0, 99))
def test_retargeted_hits_are_as_the_header_says(trace: Trace, bins: list[float], seed: int) -> None:
    made = retarget.retarget(trace, bins, seed)
    laid = ("run_starts", "run_lengths")
    assert made.table.drop_columns(laid).equals(trace.table.drop_columns(laid))
    told = made.header.parameters["retarget"]
    found = np.bincount(hit_bin(made.ideal_hit_rates), minlength=7) / len(made)
    assert told["achieved"] == found.tolist()
    assert told["greatest_difference"] == np.abs(found - bins).max()
    room = trace.input_tokens // BLOCK
    if trace.header.partial_block == "ceil":
        room = -(-trace.input_tokens // BLOCK)
    assert [len(blocks) for blocks in blocks_of(made)] == room.tolist()


@given(trace=traces(), bins=shares(), seed=st.integers(0, 99))
def test_no_exchange_of_bins_brings_one_more_turn_to_a_target(
    trace: Trace, bins: list[float], seed: int
) -> None:
    """Against a matching of turns and targets, one by one, over what each turn could hit."""
    made = retarget.retarget(trace, bins, seed)
    targets = asked_of(bins, len(trace), seed)
    able = reachable_bins(made)
    missed = targets - Counter(hit_bin(made.ideal_hit_rates).tolist())
    assert sum(missed.values()) == len(trace) - matched(able, sorted(targets.elements()))


def asked_of(bins: list[float], turns_: int, seed: int) -> Counter[int]:
    random = stream(seed, "transform.retarget")
    random.permutation(turns_)
    found, rates = retarget._targets(np.array(bins), random.random(turns_))
    edges = np.array(HIT_EDGES)
    assert ((edges[found] <= rates) & (rates <= edges[found + 1])).all()
    assert (np.diff(rates) >= 0).all()
    return Counter(found.tolist())


def reachable_bins(trace: Trace) -> list[set[int]]:
    """Of each turn: by every length that it could take from the prompt it takes from."""
    sizes = [len(blocks) for blocks in blocks_of(trace)]
    latest: dict[int, int] = {}
    longest = 0
    found = []
    for row, session in enumerate(trace.session.tolist()):
        reach = min(latest.get(session, longest), sizes[row])
        tokens = int(trace.input_tokens[row])
        hits = np.minimum(np.arange(reach + 1) * BLOCK, tokens)
        found.append(set(hit_bin(hits / tokens).tolist()))
        if session not in latest:
            longest = max(longest, sizes[row])
        latest[session] = sizes[row]
    return found


def matched(able: list[set[int]], targets: list[int]) -> int:
    """How many turns can have a target of their own (Kuhn's matching)."""
    of: dict[int, int] = {}

    def find(row: int, tried: set[int]) -> bool:
        for at, target in enumerate(targets):
            if target in able[row] and at not in tried:
                tried.add(at)
                if at not in of or find(of[at], tried):
                    of[at] = row
                    return True
        return False

    return sum(find(row, set()) for row in range(len(able)))
