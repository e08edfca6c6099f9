"""The page: self-contained, escaped, honest about what failed, and the same twice."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from harness import __version__
from harness.errors import ResultError
from harness.plugins import build
from harness.record import Record
from harness.result import Run
from reports.page import Page
from tests.unit.rundir import make_run, manifest, trace
from tests.unit.test_metrics import record

HOSTILE = "<script>alert('x')</script>"


@pytest.fixture(scope="module")
def page() -> Page:
    """The page of the shipped configuration, with all its sections."""
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("run")
    made: Page = build(config, "page")
    return made


class Elements(HTMLParser):
    """Gathers tags and attributes, and fails on an end without its start."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in {"meta", "img"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def answered(count: int = 5) -> list[Record]:
    return [record(turn) for turn in range(count)]


def failed(turn: int, error: str) -> Record:
    return record(turn, status="failed", error=error, first_token_s=None, last_token_s=None)


def written(page: Page, runs: Iterable[Run], out: Path) -> str:
    return page.render(list(runs), out).read_text(encoding="utf-8")


def words(text: str) -> str:
    """What a reader sees: without tags, entities resolved, white space folded."""
    return " ".join(
        html.unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", text, flags=re.DOTALL)).split()
    )


def test_the_shipped_page_has_its_three_sections(page: Page, tmp_path: Path) -> None:
    text = written(page, [make_run(tmp_path / "pdd", answered())], tmp_path)
    assert list(page.sections) == ["workload", "ttft", "hitrate"]
    assert text.count('src="data:image/png;base64,iVBOR') == 3
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "hitrate.png", "ttft.png", "workload.png",
    ]  # fmt: skip


def test_nothing_is_loaded_and_nothing_runs(page: Page, tmp_path: Path) -> None:
    seen = Elements(written(page, [make_run(tmp_path / "pdd", answered())], tmp_path))
    assert seen.open == []
    assert not {"script", "link", "iframe", "object", "form"} & set(seen.tags)
    assert not [name for name, _ in seen.attributes if name.startswith("on") or name == "href"]
    sources = [value or "" for name, value in seen.attributes if name == "src"]
    assert sources
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not [value for _, value in seen.attributes if "://" in (value or "")]


def test_whatever_a_trace_or_a_server_says_is_escaped(page: Page, tmp_path: Path) -> None:
    rows = [record(0, agent=HOSTILE), failed(1, f"BadStatus: {HOSTILE}")]
    values = manifest("pdd", 2)
    values["backend"] |= {
        "name": HOSTILE,
        "topology": HOSTILE,
        "cards": {HOSTILE: 8},
        "details": {HOSTILE: HOSTILE},
    }
    values["trace"] |= {
        "format": HOSTILE,
        "licence": HOSTILE,
        "sources": [{"name": HOSTILE, "sha256": HOSTILE}],
        "changes": {HOSTILE: 1},
        "parameters": {HOSTILE: HOSTILE},
    }
    values["validity"] = {"valid": False, "reasons": [HOSTILE, "\ud800 is half a character"]}
    values["command"] = ["relaybench", HOSTILE]
    text = written(page, [make_run(tmp_path / "pdd", rows, **values)], tmp_path)
    assert "script" not in Elements(text).tags
    assert "&lt;script&gt;" in text
    assert words(text).count(HOSTILE) > 8
    assert "? is half a character" in text


def test_the_headline_is_in_units_for_people(page: Page, tmp_path: Path) -> None:
    seen = words(written(page, [make_run(tmp_path / "in_dc", answered(70))], tmp_path))
    assert "TTFT from the scheduled time P50 1.00 s P90 1.00 s P99 1.00 s n too small" in seen
    assert "Time per output token (TPOT) P50 100 ms" in seen
    assert "End to end (E2E) P50 2.00 s" in seen
    assert "Prefix-hit rate Served, mean 90.0% Ideal, mean 96.0%" in seen
    assert "Cards by role 40 P, 48 D" in seen
    assert "P50 / P99: in_dc 0 s / 0 s." in seen


def test_how_it_was_measured_is_said(page: Page, tmp_path: Path) -> None:
    seen = words(written(page, [make_run(tmp_path / "in_dc", answered())], tmp_path))
    assert "Times on this page are simulated" in seen
    for expected in (
        "Trace digest " + "d" * 64,
        "output_clamped: 2",
        "Seed 7",
        "harness.pacing.Recorded",
    ):
        assert expected in seen
    assert "link.bandwidth_bps 20,000,000,000" in seen
    assert "Calibrated" in seen
    assert "Measured on the wall clock" not in seen


def test_a_measured_run_beside_a_simulated_one_is_told_apart(page: Page, tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "pdd", answered()),
        make_run(tmp_path / "vllm", answered(), clock="wall"),
    ]
    seen = words(written(page, runs, tmp_path))
    assert "Times of pdd are simulated" in seen
    assert "Measured on the wall clock" in seen
    assert "vllm: wall: times are those at which bytes reached this client" in seen


def test_a_run_without_an_answer_still_has_a_page_that_says_so(page: Page, tmp_path: Path) -> None:
    errors = ["BadStatus: 500", "BadStatus: 500", "ConnectFailed: refused"]
    run = make_run(
        tmp_path / "pdd",
        [failed(turn, error) for turn, error in enumerate(errors)],
        validity={"valid": False, "reasons": ["3 requests failed"]},
    )
    seen = words(written(page, [run], tmp_path))
    assert "No request was answered." in seen
    assert "pdd: not valid" in seen
    assert re.search(r"2 . BadStatus: 500 1 . ConnectFailed: refused", seen)
    assert "P50 inf too many failed" in seen


def test_an_empty_and_killed_run_still_has_a_page(page: Page, tmp_path: Path) -> None:
    reasons = {"valid": False, "reasons": ["the run has not ended"]}
    run = make_run(
        tmp_path / "pdd",
        [],
        summarised=False,
        partial=True,
        ended=None,
        wall_s=None,
        validity=reasons,
    )
    seen = words(written(page, [run], tmp_path))
    assert "pdd: partial" in seen
    assert "the run has not ended" in seen
    assert seen.count("Nothing to draw") == 3
    assert "never ended" in seen


def test_different_traces_are_not_compared_in_silence(page: Page, tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "pdd", answered()),
        make_run(tmp_path / "in_dc", answered(), trace=trace(digest="e" * 64)),
    ]
    assert "replayed 2 different traces" in words(written(page, runs, tmp_path))
    assert "different traces" not in words(written(page, runs[:1], tmp_path))


def test_the_same_runs_give_the_same_page(page: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / "pdd", answered())
    assert written(page, [run], tmp_path) == written(page, [run], tmp_path)


def test_a_page_that_cannot_be_written_says_where(page: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / "pdd", answered())
    with pytest.raises(ResultError, match=r"workload\.png cannot be written"):
        page.render([run], tmp_path / "absent")


def test_a_warning_and_the_client_stand_beside_a_valid_verdict(page: Page, tmp_path: Path) -> None:
    client = {
        "send_lag_p50_s": 0.0002,
        "send_lag_p99_s": 0.0452,
        "loop_lag_p50_s": 0.0001,
        "loop_lag_p99_s": 0.0021,
        "stamped_by_user": 0,
        "shared_reads": 3,
        "cpu_s": 1.0,
        "cpu_share": 0.25,
        "rule": "the rule",
    }
    tokens = {"input": {"wanted": 5000, "sent": 5000, "served": None}}
    run = make_run(
        tmp_path / "vllm",
        [*answered(4), record(4, status="failed", error_class="BadStream", error="cut")],
        clock="wall",
        warnings=["the client was the bottleneck: late"],
        client=client,
        fidelity={"tokens": tokens, "off": {}},
    )
    text = " ".join(page.render([run], tmp_path).read_text().split())
    assert "vllm: <b>valid</b>" in text
    assert "<b>Warning:</b> the client was the bottleneck: late" in text
    assert "<code>BadStream: cut</code>" in text
    assert "sent late by P50 0.200 ms, P99 45.2 ms; its loop late by P99 2.10 ms" in text
    assert "input: wanted 5,000, sent 5,000, served —" in text


def test_what_to_beware_of_stands_on_top(page: Page, tmp_path: Path) -> None:
    """Too few for a P99; hits lost; a simulation of another version."""
    few = [record(turn, served_hit_tokens=800) for turn in range(5)]
    old = make_run(tmp_path / "pdd", few, relaybench="0.0.1")
    many = make_run(
        tmp_path / "in_dc", [record(turn, served_hit_tokens=950) for turn in range(700)],
        relaybench=__version__,
    )  # fmt: skip
    text = words(written(page, [old, many], tmp_path))
    top = text[: text.index("What it came to")]
    assert "5 requests were measured: a P99 needs 662 to mean something" in top
    assert "hits served are 16 points below those of an endless cache" in top
    assert "simulated by relaybench 0.0.1" in top
    assert top.count("Warning:") == 3


def test_each_systems_settings_stand_under_its_name(page: Page, tmp_path: Path) -> None:
    """One without settings does not push the others' names on."""
    unknown = {"name": "vllm", "topology": "unknown", "cards": {}, "details": {}}
    runs = [
        make_run(tmp_path / "vllm", answered(), backend=unknown),
        make_run(tmp_path / "pdd", answered()),
    ]
    text = words(written(page, runs, tmp_path))
    assert "What decides the behaviour of pdd" in text
    assert "What decides the behaviour of vllm" not in text
