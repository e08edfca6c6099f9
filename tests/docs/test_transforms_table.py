"""The table of transforms in docs/traces.md is the configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

PROJECT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (PROJECT / "conf" / "transform").glob("*.yaml"))
OF_HYDRA = {"_target_", "_partial_"}


def table() -> dict[str, list[str]]:
    """(settings, what it does, example) of each transform."""
    text = (PROJECT / "docs" / "traces.md").read_text(encoding="utf-8")
    section = text.split("## Transforms")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \| `(.+)` \|$", section, re.MULTILINE)
    return {name: cells for name, *cells in rows}


def settings_of(name: str, *words: str) -> dict[str, Any]:
    """A transform's settings, composed with these overrides; `merge` has a trace's too."""
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("run", [f"transform=[{name}]", *words])
    settings = OmegaConf.to_container(config.transform[name], resolve=False)
    assert isinstance(settings, dict)
    return {str(key): value for key, value in settings.items() if key not in OF_HYDRA}


def test_the_table_has_every_transform() -> None:
    assert sorted(table()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_table_has_every_setting_and_its_default(name: str) -> None:
    cell, _, example = table()[name]
    words = example.split() if name == "merge" else []
    found = settings_of(name, *words)
    written = dict(re.findall(r"`(\w+)`(?: \(([\d.]+)\))?", cell))
    assert set(written) == set(found)
    defaults = {
        key: str(value).removesuffix(".0") if isinstance(value, int | float) else ""
        for key, value in found.items()
    }
    assert written == defaults


@pytest.mark.parametrize("name", NAMES)
def test_the_example_composes(name: str) -> None:
    *_, example = table()[name]
    words = [word for word in example.split() if not word.startswith("transform=")]
    assert settings_of(name, *words).keys() >= {
        word.split("=")[0].split(".")[2] for word in words if word.count(".") == 2
    }
