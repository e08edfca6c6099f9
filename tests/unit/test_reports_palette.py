"""Labels and colours tell runs apart, on every figure alike."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.result import Run
from reports.palette import HIT_COLOURS, TOPOLOGY_COLOURS, colours, curves, labels
from reports.units import DASH, number, percent, seconds


def runs(*names: str) -> list[Run]:
    return [Run(Path(f"at{n}") / name, {"backend": {"name": name}}) for n, name in enumerate(names)]


@given(st.lists(st.text(max_size=50), max_size=12))
def test_every_run_has_a_label_of_its_own_that_can_be_drawn(names: list[str]) -> None:
    given_labels = labels([Run(Path("x"), {"backend": {"name": name}}) for name in names])
    assert len(set(given_labels)) == len(names)
    assert all(label.isprintable() for label in given_labels)
    assert len(set(colours(given_labels).values())) == len(names)


def test_runs_of_one_name_are_told_apart_by_their_folder() -> None:
    assert labels(runs("pdd", "in_dc", "pdd")) == ["pdd (at0)", "in_dc", "pdd (at2)"]


def test_known_topologies_keep_their_colours_whatever_stands_beside_them() -> None:
    first, second = colours(["pdd", "vllm", "in_dc"]), colours(["sglang", "vllm", "pdd"])
    assert first["pdd"] == second["pdd"] == TOPOLOGY_COLOURS["pdd"]
    assert first["in_dc"] == TOPOLOGY_COLOURS["in_dc"]
    assert colours(["sglang", "vllm", "pdd"]) == second


def test_the_hit_scale_has_seven_steps_of_ascending_lightness() -> None:
    def lightness(colour: str) -> float:
        red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    scale = [lightness(colour) for colour in HIT_COLOURS]
    assert len(scale) == 7
    assert all(later - earlier > 15 for earlier, later in itertools.pairwise(scale))


@pytest.mark.parametrize(
    ("value_s", "words"),
    [
        (None, DASH),
        (float("nan"), DASH),
        (float("inf"), "inf"),
        (0.0, "0 s"),
        (0.0001234, "0.123 ms"),
        (0.0305, "30.5 ms"),
        (0.85, "850 ms"),
        (0.9999, "1.00 s"),
        (4.2049, "4.20 s"),
        (29.71, "29.7 s"),
        (1204.4, "1,204 s"),
    ],
)
def test_times_are_written_for_people(value_s: float | None, words: str) -> None:
    assert seconds(value_s) == words


def test_what_was_not_measured_is_a_dash_and_not_a_zero() -> None:
    assert number(None) == percent(None) == percent(float("nan")) == DASH
    assert number(0.0) == "0"
    assert number(1234567.8) == "1,234,568"
    assert number(float("inf")) == "inf"
    assert percent(0.9004) == "90.0%"


def swept(name: str, overrides: list[str], **details: object) -> Run:
    backend = {"name": name, "details": details, "cards": {}}
    return Run(Path("x") / name, {"backend": backend, "overrides": overrides})


def test_runs_of_a_sweep_are_told_apart_by_what_was_swept() -> None:
    jobs = [["seed=1", f"pacing.requests_per_s={rate}", f"out=x/{rate}"] for rate in (4, 8)]
    found = labels([swept("pdd", job) for job in jobs] + [swept("in_dc", ["seed=1"])])
    assert found == ["pdd (requests_per_s=4)", "pdd (requests_per_s=8)", "in_dc"]


def test_runs_of_one_system_are_one_curve() -> None:
    several = [
        swept("pdd", [], link={"rtt_s": rtt_s}, relay={"cards": 3}) for rtt_s in (0.01, 0.02, 0.01)
    ]
    alone = swept("in_dc", [], link={"rtt_s": 0})
    found = curves([*several, alone])
    assert list(found) == ["pdd (rtt_s=0.01)", "pdd (rtt_s=0.02)", "in_dc"]
    assert list(found.values()) == [[several[0], several[2]], [several[1]], [alone]]
