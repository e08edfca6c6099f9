"""The pages in a real browser: quiet, self-contained, for a phone, a keyboard and a reader."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
NEEDED = os.environ.get("RELAYBENCH_BROWSER") == "required"
PHONE, DESK = (375, 800), (1280, 900)

pytestmark = pytest.mark.skipif(
    CHROMIUM is None and not NEEDED, reason="there is no Chromium on this machine"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module", params=["report.html", "index.html"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of three systems with all that can be drawn of them, and a booklet."""
    folder: Path = tmp_path_factory.mktemp("pages")
    small = ["trace.sessions=30", "trace.session_rate_per_s=0.5"]
    commands = {
        "report.html": ["run", *small, "out=here"],
        "index.html": [
            "figures", "only=[ttft,hitrate]", "out=here",
            f"sweeps.headline={[*small, 'backend=pdd']}".replace(" ", ""),
        ],
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "harness", *commands[request.param]],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page: Path = folder / "here" / request.param
    assert page.exists(), done.stdout
    return page


@pytest.fixture(params=[(PHONE, "light"), (DESK, "light"), (DESK, "dark")], ids=str)
def opened(request: pytest.FixtureRequest, browser: Browser, path: Path) -> Iterator[Page]:
    """The page, opened; whatever it says or asks for is noted and must be nothing."""
    (width, height), scheme = request.param
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda asked: said.append(asked.url[:100]))
    page.goto(path.as_uri())
    page.wait_for_load_state("networkidle")
    assert [each for each in said if not each.startswith("data:")] == [path.as_uri()]
    yield page
    page.close()


def look(page: Page, code: str) -> Any:
    return page.evaluate(code)


def test_an_accessibility_check_finds_nothing(opened: Page) -> None:
    """Contrast, names, headings, landmarks, tables; with the details open too."""
    look(opened, "document.querySelectorAll('details').forEach(each => each.open = true)")
    found = Axe().run(opened).response["violations"]
    assert [
        (each["id"], [node["html"][:120] for node in each["nodes"][:3]]) for each in found
    ] == []


def test_the_page_is_no_wider_than_the_screen(opened: Page) -> None:
    look(opened, "document.querySelectorAll('details').forEach(each => each.open = true)")
    wide, screen = look(opened, "[document.scrollingElement.scrollWidth, innerWidth]")
    assert wide <= screen


def test_every_picture_is_there_and_has_its_numbers_beneath(opened: Page) -> None:
    figures = look(
        opened,
        """[...document.querySelectorAll('figure')].map(each => [
            each.querySelector('img').naturalWidth, each.querySelector('img').alt.length,
            each.querySelectorAll('tbody tr').length])""",
    )
    assert len(figures) >= 2
    assert all(width > 500 and words > 40 and rows > 0 for width, words, rows in figures)


def test_the_keyboard_reaches_and_opens_the_numbers(opened: Page) -> None:
    reached = set()
    for _ in range(60):
        opened.keyboard.press("Tab")
        reached.add(look(opened, "document.activeElement.tagName"))
        if "SUMMARY" in reached:
            opened.keyboard.press("Enter")
            break
    assert "SUMMARY" in reached
    assert look(opened, "document.activeElement.parentElement.open") is True


def test_print_cuts_nothing_off(opened: Page) -> None:
    opened.emulate_media(media="print")
    clipped = look(
        opened,
        """[...document.querySelectorAll('.wide, .picture')].filter(
            each => each.checkVisibility() && getComputedStyle(each).overflowX !== 'visible'
                && each.scrollWidth > each.clientWidth + 1).length""",
    )
    assert clipped == 0
