"""The bathtub: throughput, revenue and gain by hand, what is left out, and the published points."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from harness.errors import ConfigError
from harness.record import Record
from harness.result import Run, find_runs
from harness.run import run
from reports.bathtub import Bathtub
from tests.unit.rundir import make_run, prices, trace
from tests.unit.test_metrics import record

CLOSED = {"_target_": "harness.pacing.Closed", "sessions": 4}
CHUNK = 400
BIG = 1e12


def answers(hit: float, per_s: float, seconds: int = 20, **values: Any) -> list[Record]:
    """So many a second for so long, 1,000 tokens in and 10 out, each answered within a second."""
    return [
        record(
            turn,
            **{
                "scheduled_s": turn / per_s,
                "sent_s": turn / per_s,
                "first_token_s": turn / per_s + 0.5,
                "last_token_s": turn / per_s + 1.0,
                "ideal_hit_tokens": round(1000 * hit),
                "served_hit_tokens": round(1000 * hit),
                "served_output_tokens": 10,
            }
            | values,
        )
        for turn in range(round(seconds * per_s) + 1)
    ]


def at(
    path: Path,
    hit: float,
    per_s: float,
    *,
    records: list[Record] | None = None,
    ideal: float | None = None,
    packs: bool = False,
    cache_bytes: float = BIG,
    input_tokens: int = 1000,
    **values: Any,
) -> Run:
    """A saturated run at one hit rate, from its third second on."""
    ideal = hit if ideal is None else ideal
    made = {"hits": [ideal], "input_tokens": input_tokens, "output_tokens": 10}
    cluster = {"chunk_tokens": CHUNK, "pack_tail": packs, "cache_bytes": cache_bytes}
    alike = trace(
        format="constant",
        parameters=made,
        digest=f"{ideal:.3f}" + "d" * 59,
        ideal_hit_token_weighted=ideal,
    )
    backend = {
        "name": "in_dc",
        "topology": "in_dc",
        "cards": {"P": 8, "D": 8},
        "details": {"prefill": {"P": cluster}},
    }
    whole: dict[str, Any] = {
        "trace": alike,
        "backend": backend,
        "overrides": [f"case={path.name}"],
        "pacing": CLOSED,
        "window": {"warmup_s": 2.0, "cooldown_s": 0.0},
    }
    return make_run(path, answers(hit, per_s) if records is None else records, **whole | values)


RATES = {0.0: 4.0, 0.4: 5.0, 0.6: 8.0, 0.9: 20.0}
"""Requests a second by hit rate: the second earns less than the first."""


def tub(folder: Path, **values: Any) -> list[Run]:
    return [at(folder / f"{hit}", hit, per_s, **values) for hit, per_s in RATES.items()]


def drawn(runs: list[Run], out: Path) -> tuple[str, list[dict[str, Any]]]:
    """The caption, and the numbers as rows."""
    (figure,) = Bathtub().render(runs, out)
    assert figure.path.read_bytes().startswith(b"\x89PNG")
    return figure.caption, figure.numbers.to_pylist()


def test_numbers_are_those_worked_out_by_hand(tmp_path: Path) -> None:
    caption, rows = drawn(tub(tmp_path), tmp_path)
    assert [row["achieved_hit_share"] for row in rows] == pytest.approx(list(RATES))
    assert [row["requests_per_s"] for row in rows] == pytest.approx(list(RATES.values()))
    assert [row["goodput_requests_per_s"] for row in rows] == pytest.approx(list(RATES.values()))
    # 1 a million computed, 0.1 cached, 4 answered: 1,000 in, 10 out.
    paid = [1040e-6, 680e-6, 500e-6, 230e-6]
    assert [row["revenue_per_request"] for row in rows] == pytest.approx(paid)
    gains = [each * rate / (4 * 1040e-6) for each, rate in zip(paid, RATES.values(), strict=True)]
    assert [row["gain"] for row in rows] == pytest.approx(gains)
    assert [row["mark"] for row in rows] == [None, "valley, minimum", None, "highest"]
    assert [row["tail_tokens"] for row in rows] == [200, 200, 0, 100]
    assert {row["currency"] for row in rows} == {"A-card"}
    assert (
        "in_dc: over no hits, lowest 0.82 at 40.0%, highest 1.11 at 90.0%; minima at 40.0% (tail "
        "200 of 400 tokens)."
    ) in caption
    assert caption.endswith("tokens).")  # nothing to beware of


def test_neither_the_fill_nor_the_drain_moves_the_throughput(tmp_path: Path) -> None:
    """A closed loop of 40 that answers 4 a second: each waits 10 s behind those before it."""
    ends_s = [(turn + 1) / 4 for turn in range(400)]
    sent_s = [0.0] * 40 + ends_s[:360]
    slow = [
        record(turn, scheduled_s=sent, sent_s=sent, first_token_s=end, last_token_s=end)
        for turn, (sent, end) in enumerate(zip(sent_s, ends_s, strict=True))
    ]
    runs = [*tub(tmp_path), at(tmp_path / "slow", 0.9, 0, ideal=0.95, records=slow)]
    _, rows = drawn(runs, tmp_path)
    (row,) = [row for row in rows if row["ideal_hit_share"] == 0.95]
    assert row["requests_per_s"] == pytest.approx(4.0)
    assert runs[-1].summary().to_pylist()[0]["requests_per_s"] < 3.8


def test_what_is_late_is_not_goodput(tmp_path: Path) -> None:
    slo = {"ttft_s": 0.4, "tpot_s": None, "e2e_s": None, "share": 0.99}
    caption, rows = drawn(tub(tmp_path, slo=slo), tmp_path)
    assert {row["goodput_requests_per_s"] for row in rows} == {0.0}
    assert "SLO: TTFT within 0.4 s." in caption


def test_failed_requests_earn_nothing_and_are_said(tmp_path: Path) -> None:
    runs = tub(tmp_path)
    half = [
        each if turn % 2 else each._replace(status="failed", served_hit_tokens=None)
        for turn, each in enumerate(answers(0.5, 8.0))
    ]
    caption, rows = drawn([*runs, at(tmp_path / "half", 0.5, 8.0, records=half)], tmp_path)
    assert rows[2]["requests_per_s"] == pytest.approx(4.0, rel=0.02)
    assert rows[2]["failed_requests"] == 73
    assert rows[2]["achieved_hit_share"] == 0.5
    assert "Requests failed, and were not paid for, in: in_dc (case=half)." in caption


def test_a_run_without_its_hits_has_no_place(tmp_path: Path) -> None:
    silent = answers(0.5, 8.0, served_hit_tokens=None)
    runs = [*tub(tmp_path), at(tmp_path / "silent", 0.5, 8.0, records=silent)]
    caption, rows = drawn(runs, tmp_path)
    assert [row["achieved_hit_share"] for row in rows] == pytest.approx(list(RATES))
    assert "Without a place, as some answers came without their hits" in caption
    assert caption.endswith("window: in_dc (case=silent).")
    nothing = at(tmp_path / "nothing", 0.5, 8.0, records=answers(0.5, 8.0, status="failed"))
    caption, rows = drawn([*runs[:-1], nothing], tmp_path)
    assert len(rows) == len(RATES)
    assert caption.endswith("window: in_dc (case=nothing).")


def test_several_price_sheets_are_refused(tmp_path: Path) -> None:
    other = at(tmp_path / "other", 0.5, 8.0, prices=prices(currency="USD"))
    with pytest.raises(ConfigError, match=r"several price sheets.*A-card; .*USD a million tokens"):
        Bathtub().render([*tub(tmp_path), other], tmp_path)
    free = prices(input=0.0, cached_input=0.0, output=0.0)
    with pytest.raises(ConfigError, match="in_dc earns nothing at its fewest hits"):
        Bathtub().render(tub(tmp_path / "free", prices=free), tmp_path)


def test_what_should_not_be_trusted_is_said(tmp_path: Path) -> None:
    invalid = {"valid": False, "reasons": ["interrupted"]}
    bad = at(tmp_path / "bad", 0.5, 8.0, validity=invalid, partial=True)
    caption, rows = drawn([*tub(tmp_path), bad], tmp_path)
    assert len(rows) == len(RATES) + 1
    assert "Drawn, but not valid: in_dc (case=bad)." in caption
    assert "Drawn, but interrupted: in_dc (case=bad)." in caption
    poisson = {"_target_": "harness.pacing.Poisson", "requests_per_s": 30.0}
    caption, _ = drawn(tub(tmp_path / "open", pacing=poisson), tmp_path)
    assert "Not in a closed loop, so their requests/s may be what was offered: in_dc" in caption
    assert caption.endswith(" (case=0.9).")


def test_runs_of_one_hit_rate_are_one_point_their_median(tmp_path: Path) -> None:
    seeds = [at(tmp_path / f"seed {per_s}", 0.5, per_s) for per_s in (2.0, 3.0, 10.0)]
    _, rows = drawn([*tub(tmp_path), *seeds], tmp_path)
    assert [row["runs"] for row in rows] == [1, 1, 3, 1, 1]
    assert rows[2]["requests_per_s"] == pytest.approx(3.0)


def test_a_system_with_idle_prefill_is_not_saturated(tmp_path: Path) -> None:
    idle, busy = (
        [
            each._replace(
                prefill_start_s=(each.sent_s or 0.0) + wait_s, prefill_end_s=each.first_token_s
            )
            for each in answers(0.5, 8.0)
        ]
        for wait_s in (0.01, 0.4)
    )
    runs = [at(tmp_path / "idle", 0.5, 8.0, records=idle)]
    runs.append(at(tmp_path / "busy", 0.7, 8.0, records=busy))
    caption, _ = drawn([*tub(tmp_path), *runs], tmp_path)
    assert caption.endswith("Hardly queued, so perhaps not saturated: in_dc (case=idle).")


def test_a_trace_of_its_own_is_a_line_over_cache_sizes_without_tails(tmp_path: Path) -> None:
    runs = [
        at(
            tmp_path / f"{size:g}", hit, 4.0, cache_bytes=size,
            trace=trace(ideal_hit_token_weighted=0.93),
        )
        for size, hit in ((1e9, 0.3), (2e9, 0.6), (3e9, 0.9))
    ]  # fmt: skip
    _, rows = drawn(runs, tmp_path)
    assert {row["curve"] for row in rows} == {"in_dc, caches of several sizes at 93% ideal"}
    assert {row["tail_tokens"] for row in rows} == {None}


def test_systems_are_lines_and_gains_are_over_each_ones_own_first(tmp_path: Path) -> None:
    packed = [
        at(tmp_path / f"packed {hit}", hit, 8 * per_s, packs=True)
        for hit, per_s in RATES.items()
        if hit
    ]
    caption, rows = drawn([*tub(tmp_path), *packed], tmp_path)
    assert list(dict.fromkeys(row["curve"] for row in rows)) == [
        "in_dc (pack_tail=false)",
        "in_dc (pack_tail=true)",
    ]
    assert rows[len(RATES)]["gain"] == 1.0
    assert "in_dc (pack_tail=true): over a hit rate of 40.0%, lowest 1.00" in caption


def test_caches_of_several_sizes_are_one_line_by_what_they_achieve(tmp_path: Path) -> None:
    sized = [
        at(tmp_path / f"{size:g}", hit, per_s, ideal=0.9, cache_bytes=size)
        for size, (hit, per_s) in zip((0.0, 1e9, 2.5e9, 1e13), RATES.items(), strict=True)
    ]
    _, rows = drawn([*tub(tmp_path), *sized], tmp_path)
    apart = [row for row in rows if row["curve"] == "in_dc, caches of several sizes at 90% ideal"]
    assert [row["cache_bytes"] for row in apart] == [0.0, 1e9, 2.5e9, 1e13]
    assert [row["achieved_hit_share"] for row in apart] == pytest.approx(list(RATES))
    assert {row["ideal_hit_share"] for row in apart} == {0.9}
    assert [row["curve"] for row in rows].count("in_dc") == len(RATES)
    _, alone = drawn(sized, tmp_path)
    assert alone == apart


def test_each_cache_size_with_its_own_hit_rates_is_a_line(tmp_path: Path) -> None:
    runs = [*tub(tmp_path / "a"), *tub(tmp_path / "b", cache_bytes=5e8)]
    _, rows = drawn(runs, tmp_path)
    assert list(dict.fromkeys(row["curve"] for row in rows)) == [
        "in_dc, 1 TB of cache",
        "in_dc, 500 MB of cache",
    ]


def test_requests_of_other_lengths_are_on_another_line_or_none(tmp_path: Path) -> None:
    other = at(tmp_path / "other", 0.5, 8.0, input_tokens=2000)
    fuller = at(tmp_path / "fuller", 0.5, 8.0, pacing=CLOSED | {"sessions": 8})
    mixed = at(tmp_path / "mixed", 0.5, 8.0)
    mixed.manifest["trace"]["parameters"]["hits"] = [0.1, 0.9]
    caption, rows = drawn([*tub(tmp_path), other, fuller, mixed], tmp_path)
    assert {row["curve"] for row in rows} == {"in_dc, 1,000 + 10 tokens, 4 sessions"}
    left_out = "in_dc (case=other), in_dc (case=fuller), in_dc (case=mixed)"
    assert f"Left out, as their system has not 3 hit rates of one load: {left_out}." in caption


def test_a_backend_that_says_nothing_of_its_prefill_has_no_tails(tmp_path: Path) -> None:
    silent = {"name": "vllm", "topology": "vllm", "cards": {}, "details": {"url": "http://x"}}
    caption, rows = drawn(tub(tmp_path, backend=silent), tmp_path)
    assert {(row["tail_tokens"], row["cache_bytes"]) for row in rows} == {(None, None)}
    assert "minima at 40.0%." in caption


def test_fewer_than_three_hit_rates_draw_nothing(tmp_path: Path) -> None:
    runs = tub(tmp_path)[:2]
    runs += [at(tmp_path / f"again {hit}", hit, 5.0) for hit in (0.0, 0.4)]
    assert Bathtub().render(runs, tmp_path) == []
    assert Bathtub().render([], tmp_path) == []
    assert Bathtub().render([make_run(tmp_path / "none", [])], tmp_path) == []
    assert not (tmp_path / "bathtub.png").exists()


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    runs = tub(tmp_path)
    first = Bathtub().render(runs, tmp_path)[0].path.read_bytes()
    assert Bathtub().render(runs, tmp_path)[0].path.read_bytes() == first


# ---- the published bathtub

SATURATED = [
    "model=deepseek_v3", "chip@chip_a=fitted", "backend=in_dc", "report=[]",
    "trace=constant", "trace.requests=300", "trace.input_tokens=65500", "trace.output_tokens=16",
    "trace.block_tokens=6550", "pacing=closed", "pacing.sessions=32", "window.warmup_s=100",
    "backend.in_dc.prefill.P.cards=8", "backend.in_dc.prefill.P.chunk_tokens=16375",
    "backend.in_dc.prefill.P.ranks=8",
]  # fmt: skip


def simulate(folder: Path, hit: float, *, packs: bool, cache_bytes: float = 2e13) -> Run:
    """One run, as `relaybench run` makes it."""
    config = saturated().copy()
    config.trace.hits = [hit]
    config.backend.in_dc.prefill.P.pack_tail = packs
    config.backend.in_dc.prefill.P.cache_bytes = cache_bytes
    path = folder / f"{hit} {packs} {cache_bytes:g}"
    assert run(config, path, lambda _: None) == 0
    (made,) = find_runs(path)
    return made


@functools.cache
def saturated() -> DictConfig:
    with initialize_config_module("conf", version_base="1.3"):
        return compose("run", [*SATURATED, "out=here"])


def test_lock_step_has_the_published_singular_points_and_packing_is_shallower(
    tmp_path: Path,
) -> None:
    runs = [
        simulate(tmp_path, tenths / 10, packs=packs)
        for packs in (False, True)
        for tenths in range(10)
    ]
    caption, rows = drawn(runs, tmp_path)
    lost, packed = ([row for row in rows if packs in row["curve"]] for packs in ("false", "true"))
    minima = {round(100 * row["achieved_hit_share"]) for row in lost if row["mark"] == "minimum"}
    (valley,) = [row for row in lost if row["mark"] == "valley, minimum"]
    assert (minima, round(valley["achieved_hit_share"], 3)) == ({20, 40}, 0.7)
    assert [row["tail_tokens"] for row in lost if row["mark"] in ("minimum", valley["mark"])] == [
        3275, 6550, 3275,
    ]  # fmt: skip
    assert min(row["gain"] for row in packed) > valley["gain"] + 0.1
    assert lost[-1]["mark"] == packed[-1]["mark"] == "highest"
    assert "over no hits" in caption


def test_more_cache_leaves_the_floor(tmp_path: Path) -> None:
    runs = [
        simulate(tmp_path, 0.9, packs=False, cache_bytes=size)
        for size in (0.0, 0.5e9, 1.65e9, 2.1e9, 50e9)
    ]
    _, rows = drawn(runs, tmp_path)
    hits = [row["achieved_hit_share"] for row in rows]
    assert hits == pytest.approx([0.0, 0.2, 0.7, 0.9, 0.9])
    assert rows[3]["gain"] > rows[2]["gain"] + 0.5
