"""What the README promises is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

PROJECT = Path(__file__).parents[2]
README = (PROJECT / "README.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    """The overrides of each `relaybench run` in the README's shell blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    words = [shlex.split(line) for line in lines if line.startswith("relaybench run")]
    return [[word for word in each[2:] if word != "-m"] for each in words]


@pytest.mark.parametrize("overrides", commands(), ids=" ".join)
def test_every_command_of_the_readme_composes(overrides: list[str]) -> None:
    single = [word.split(",")[0] if not set("[{") & set(word) else word for word in overrides]
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("run", single)
    assert config.backend


def test_the_table_of_choices_is_the_configuration() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", README, re.MULTILINE)
    written = {group: set(re.findall(r"`(\w+)`", choices)) for group, choices in rows}
    folders = {
        folder.name: {path.stem for path in folder.glob("*.yaml")}
        for folder in (PROJECT / "conf").iterdir()
        if folder.is_dir() and any(folder.glob("*.yaml"))
    }
    assert written == folders


def test_files_that_documents_name_exist() -> None:
    for document in [PROJECT / "README.md", *(PROJECT / "docs").glob("*.md")]:
        text = document.read_text(encoding="utf-8")
        for name in re.findall(
            r"`((?:conf|docs|harness|traces|adapters|reports|tests|benchmarks)/[\w/.]+)`", text
        ):
            assert (PROJECT / name).exists(), f"{document.name} names {name}"


def test_the_changelog_has_a_place_for_what_comes() -> None:
    assert "## [Unreleased]" in (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8")
