"""Transfers by hit rate: shares and percentiles by hand, and what is left out is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module

from harness.plugins import build
from harness.record import Record
from harness.result import find_runs
from reports.transfer import Transfer
from tests.unit.rundir import make_run
from tests.unit.test_cli import relaybench
from tests.unit.test_metrics import record


def moved(turn: int, hit_tokens: int, lasted_s: float, **values: Any) -> Record:
    """Of 1,000 tokens, those not held at the decode side sent: 1 KB each."""
    sent: dict[str, Any] = {
        "decode_hit_tokens": hit_tokens,
        "transfer_start_s": float(turn),
        "transfer_end_s": turn + lasted_s,
        "transfer_bytes": 1e3 * (1000 - hit_tokens),
    }
    return record(turn, **sent | values)


def requests() -> list[Record]:
    """Two that hit nothing, six that hit 99.5%: 2 MB and 30 KB."""
    return [
        moved(0, 0, 2.0),
        moved(1, 0, 4.0),
        *(moved(turn, 995, turn / 10) for turn in range(2, 8)),
    ]


def test_the_bins_are_those_of_a_count_by_hand(tmp_path: Path) -> None:
    run = make_run(tmp_path / "pdd", requests())
    (figure,) = Transfer().render([run], tmp_path)
    rows = {row["hit_rate"]: row for row in figure.numbers.to_pylist()}
    assert list(rows) == [
        "0-90%", "90-95%", "95-97%", "97-98%", "98-99%", "99-99.5%", "99.5-100%", "all",
    ]  # fmt: skip
    low, none, high, whole = (rows[name] for name in ("0-90%", "90-95%", "99.5-100%", "all"))
    assert (low["run"], low["hits_at"]) == ("pdd", "decode")
    assert (low["requests"], low["request_share"]) == (2, 0.25)
    assert low["transfer_bytes"] == 2e6
    assert low["byte_share"] == pytest.approx(2e6 / 2.03e6)
    assert (low["transfer_p50_s"], low["transfer_p99_s"]) == (2.0, 4.0)
    assert high["transfer_p50_s"] == pytest.approx(0.4)
    assert not high["p90_supported"]
    assert (none["requests"], none["byte_share"], none["transfer_p50_s"]) == (0, 0.0, None)
    assert (whole["requests"], whole["byte_share"]) == (8, 1.0)
    assert whole["transfer_p50_s"] == pytest.approx(0.5)
    assert figure.path.read_bytes().startswith(b"\x89PNG")


def test_the_caption_tells_what_the_lowest_quarter_carries(tmp_path: Path) -> None:
    (figure,) = Transfer().render([make_run(tmp_path / "pdd", requests())], tmp_path)
    assert "pdd: P50 500 ms, P99 4.00 s of 8 transfers" in figure.caption
    assert "carries 98.5% of the bytes" in figure.caption
    assert "P99 (662)" in figure.caption


def test_without_a_cache_at_the_decode_side_the_bins_are_of_prefill(tmp_path: Path) -> None:
    bare = make_run(tmp_path / "cross_dc", [moved(turn, 0, 1.0) for turn in range(3)])
    (figure,) = Transfer().render([bare], tmp_path)
    rows = {row["hit_rate"]: row["requests"] for row in figure.numbers.to_pylist()}
    assert rows["90-95%"] == 3
    assert set(figure.numbers.column("hits_at").to_pylist()) == {"prefill"}
    assert "Nothing was held at the decode side of cross_dc" in figure.caption


def test_failed_and_unfinished_transfers_are_not_counted(tmp_path: Path) -> None:
    rows = [
        *requests(),
        moved(8, 500, 9.0, status="failed", error="BadStatus: 500", last_token_s=None),
        moved(9, 500, 9.0, transfer_end_s=None),
    ]
    (figure,) = Transfer().render([make_run(tmp_path / "pdd", rows)], tmp_path)
    assert figure.numbers.to_pylist()[-1]["requests"] == 8
    assert "1 not over when the answer was whole" in figure.caption


def test_the_window_is_that_of_the_run(tmp_path: Path) -> None:
    window = {"warmup_s": 2.0, "cooldown_s": 0.0}
    (figure,) = Transfer().render([make_run(tmp_path / "pdd", requests(), window=window)], tmp_path)
    assert figure.numbers.to_pylist()[-1]["requests"] == 6


def test_runs_that_tell_nothing_are_named_and_alone_draw_nothing(tmp_path: Path) -> None:
    silent = make_run(tmp_path / "vllm", [record(0)])
    none = make_run(tmp_path / "none", [])
    one = make_run(
        tmp_path / "pdd", requests()[:1], validity={"valid": False, "reasons": ["a test"]}
    )
    partial = make_run(tmp_path / "cross_dc", requests()[2:3], partial=True)
    assert Transfer().render([silent, none], tmp_path) == []
    (figure,) = Transfer().render([silent, one, none, partial], tmp_path)
    assert figure.caption.endswith(
        " Left out, without transfer times and hits: vllm, none."
        " Partial, ended before the trace did: cross_dc. Not valid: pdd."
    )


def test_transfers_without_bytes_or_of_no_time_are_drawn(tmp_path: Path) -> None:
    rows = [moved(0, 0, 0.0, transfer_bytes=None), moved(1, 990, 0.0, transfer_bytes=None)]
    (figure,) = Transfer().render([make_run(tmp_path / "pdd", rows)], tmp_path)
    assert figure.numbers.to_pylist()[-1]["byte_share"] is None


def test_a_simulated_run_is_drawn_alike_twice(tmp_path: Path) -> None:
    done = relaybench(
        "run", "trace.sessions=8", "backend=[cross_dc,pdd]", "report=[transfer]", "out=here",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with initialize_config_module("conf", version_base="1.3"):
        report = build(compose("run", ["report=[transfer]"]), "report.transfer")
    (figure,) = report.render(find_runs(tmp_path / "here"), tmp_path)
    assert figure.path.read_bytes() == (tmp_path / "here" / "transfer.png").read_bytes()
    whole = [row for row in figure.numbers.to_pylist() if row["hit_rate"] == "all"]
    assert [row["hits_at"] for row in whole] == ["prefill", "decode"]
    assert whole[0]["transfer_bytes"] > whole[1]["transfer_bytes"]
