"""One request on a time axis: which one is chosen, and when its parts begin and end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.record import Record
from harness.result import Run, find_runs
from reports.timeline import Timeline, _choose, _end_s, _lane
from tests.unit.rundir import make_run, trace
from tests.unit.test_cli import relaybench
from tests.unit.test_metrics import record, table


def naive(turn: int, transfer_s: float = 2.0, **values: Any) -> Record:
    """Queue 0.5 s, prefill 1 s, then the transfer, and a first token 0.25 s after it."""
    arrived_s = turn + 1.5 + transfer_s
    served: dict[str, Any] = {
        "ideal_hit_tokens": 0,
        "prefill_start_s": turn + 0.5,
        "prefill_end_s": turn + 1.5,
        "transfer_start_s": turn + 1.5,
        "transfer_end_s": arrived_s,
        "transfer_bytes": 1e9,
        "decode_start_s": arrived_s,
        "first_token_s": arrived_s + 0.25,
        "last_token_s": arrived_s + 2.75,
    }
    return record(turn, **served | values)


def relayed(turn: int, **values: Any) -> Record:
    """The same, with ten tokens 0.25 s apart from a relay, handed over once it has crossed."""
    served: dict[str, Any] = {
        "first_token_s": turn + 1.75,
        "last_token_s": turn + 6.0,
        "gaps_us": np.full(17, 250_000, np.int32),
        "timed_by": "token",
        "relay_tokens": 10,
        "handoff": "one-shot",
        "handoff_start_s": turn + 3.75,
        "handoff_s": turn + 4.25,
        "decode_start_s": turn + 4.0,
    }
    return naive(turn, **served | values)


def test_the_parts_are_those_worked_out_by_hand(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "cross_dc", [naive(3)]),
        make_run(tmp_path / "pdd", [relayed(3)]),
    ]
    (figure,) = Timeline().render(runs, tmp_path)
    parts = {
        (row["run"], row["part"]): (row["start_s"], row["end_s"])
        for row in figure.numbers.to_pylist()
    }
    assert parts == {
        ("cross_dc", "queue"): (0, 0.5),
        ("cross_dc", "prefill"): (0.5, 1.5),
        ("cross_dc", "transfer"): (1.5, 3.5),
        ("cross_dc", "main decode"): (3.5, 6.25),
        ("cross_dc", "first token"): (3.75, 3.75),
        ("pdd", "queue"): (0, 0.5),
        ("pdd", "prefill"): (0.5, 1.5),
        ("pdd", "transfer"): (1.5, 3.5),
        ("pdd", "relay decode"): (1.75, 4.0),
        ("pdd", "handoff"): (3.75, 4.25),
        ("pdd", "main decode"): (4.0, 6.0),
        ("pdd", "first token"): (1.75, 1.75),
    }
    assert "pdd: transfer 2.00 s, first token after 1.75 s, last after 6.00 s" in figure.caption
    assert "an ideal hit rate below 90% and a relay" in figure.caption
    assert figure.path.read_bytes().startswith(b"\x89PNG")


def test_the_one_chosen_has_the_median_transfer_of_those_that_hit_little_and_were_relayed() -> None:
    first = table(
        naive(0, 9.0),
        naive(1, 3.0),
        naive(2, 1.0),
        naive(3, 2.0),
        naive(4, 2.5, ideal_hit_tokens=950),
        naive(5, 2.2, status="failed", error="BadStatus: 500"),
    )
    second = table(*(relayed(turn) for turn in (1, 2, 3, 4, 5)), naive(0))
    assert _choose([first, second]) == (3, ["an ideal hit rate below 90%", "a relay"])
    assert _choose([second, first]) == (1, ["an ideal hit rate below 90%", "a relay"])


def test_without_relays_or_low_hits_the_median_is_of_what_there_is() -> None:
    rows = [naive(turn, 1.0 + turn) for turn in range(5)]
    assert _choose([table(*rows)]) == (2, ["an ideal hit rate below 90%"])
    high = [naive(turn, 1.0 + turn, ideal_hit_tokens=990) for turn in range(4)]
    assert _choose([table(*high)]) == (1, [])
    assert _choose([table(*rows), table(naive(7))]) is None


def test_a_transfer_that_outlasts_the_answer_has_no_end(tmp_path: Path) -> None:
    whole_at_relay = relayed(
        0, transfer_end_s=None, handoff=None, handoff_start_s=None, handoff_s=None,
        decode_start_s=None, relay_tokens=18,
    )  # fmt: skip
    runs = [
        make_run(tmp_path / "cross_dc", [naive(0)]),
        make_run(tmp_path / "pdd", [whole_at_relay, relayed(1)]),
    ]
    (figure,) = Timeline().render(runs, tmp_path)
    rows = {row["part"]: row for row in figure.numbers.to_pylist() if row["run"] == "pdd"}
    assert rows["transfer"]["end_s"] is None
    assert rows["relay decode"]["end_s"] == 6.0
    assert "main decode" not in rows
    assert "Hatched" in figure.caption


def test_without_times_of_tokens_the_end_of_the_relay_is_not_known(tmp_path: Path) -> None:
    run = make_run(tmp_path / "pdd", [relayed(0, timed_by="event")])
    (figure,) = Timeline().render([run], tmp_path)
    rows = {row["part"]: row["end_s"] for row in figure.numbers.to_pylist()}
    assert rows["relay decode"] is None
    assert rows["handoff"] == 4.25


@pytest.mark.parametrize(("last_s", "end_s"), [(6.25, 1.02 * 6.25), (60.0, 1.5 * 3.75)])
def test_the_axis_is_cut_where_decoding_takes_much_longer(
    tmp_path: Path, last_s: float, end_s: float
) -> None:
    run = make_run(tmp_path / "cross_dc", [naive(0, last_token_s=last_s)])
    records = run.records()
    assert _end_s([_lane("cross_dc", run, 0, records)]) == pytest.approx(end_s)


def test_runs_without_a_breakdown_are_named_and_alone_draw_nothing(tmp_path: Path) -> None:
    silent = make_run(tmp_path / "vllm", [record(0)])
    none = make_run(tmp_path / "none", [])
    lost = make_run(tmp_path / "lost", [naive(0, status="failed", last_token_s=None)])
    telling = make_run(tmp_path / "cross_dc", [naive(0)], partial=True)
    assert Timeline().render([silent, none, lost], tmp_path) == []
    (figure,) = Timeline().render([silent, telling, none], tmp_path)
    assert figure.caption.endswith(
        " Left out, without times of prefill and transfer: vllm, none."
        " Partial, ended before the trace did: cross_dc."
    )


def test_runs_of_two_traces_get_a_figure_each(tmp_path: Path) -> None:
    runs: list[Run] = [
        make_run(tmp_path / name, [naive(0)], trace=trace(digest=digest))
        for name, digest in (("a", "2"), ("b", "1"), ("c", "2"))
    ]
    figures = Timeline().render(runs, tmp_path)
    drawn = [list(dict.fromkeys(each.numbers.column("run").to_pylist())) for each in figures]
    assert drawn == [["b"], ["a", "c"]]
    assert len({figure.path for figure in figures}) == 2


def test_of_simulated_runs_the_relay_is_first(tmp_path: Path) -> None:
    done = relaybench(
        "run", "trace.sessions=8", "backend=[cross_dc,pdd]", "backend.pdd.link.bandwidth_bps=2e9",
        "report=[timeline]", "out=here", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (figure,) = Timeline().render(find_runs(tmp_path / "here"), tmp_path)
    assert figure.path.read_bytes() == (tmp_path / "here" / "timeline.png").read_bytes()
    rows = figure.numbers.to_pylist()
    first_s = {row["run"]: row["start_s"] for row in rows if row["part"] == "first token"}
    ends_s = {row["part"]: row["end_s"] for row in rows if row["run"] == "pdd"}
    assert first_s["pdd"] < ends_s["transfer"] < ends_s["handoff"] < ends_s["main decode"]
    assert first_s["pdd"] < first_s["cross_dc"]
