"""A real browser without a screen: Debian's Chromium, driven by playwright.

with chromium() as browser:
    browser.new_page(viewport={"width": 900, "height": 900}).goto(address)
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WAIT_MS = 30_000


@contextlib.contextmanager
def chromium(program: str | Path | None = CHROMIUM) -> Iterator[Any]:
    """program: what to start it by. The test is skipped where it is not installed."""
    if program is None:
        pytest.skip("chromium is not installed")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=str(program), args=["--no-sandbox"])
        yield made
        made.close()


def started_by(words: Sequence[str], file: Path) -> Path | None:
    """A program, written to this file, that starts Chromium behind these words: in another network, say."""
    if CHROMIUM is None:
        return None
    file.write_text(f'#!/bin/sh\nexec {shlex.join([*words, CHROMIUM])} "$@"\n')
    file.chmod(0o755)
    return file


@contextlib.contextmanager
def page_of(browser: Any, address: str) -> Iterator[Any]:
    """The page there; fails where anything else is asked for than what lies below this address, or a script fails."""
    asked, wrong = [], []
    made = browser.new_page(viewport={"width": 900, "height": 900})
    made.set_default_timeout(WAIT_MS)
    made.on("request", lambda request: asked.append(request.url))
    made.on("pageerror", lambda error: wrong.append(str(error)))
    made.on("dialog", lambda dialog: dialog.accept())
    made.goto(address)
    yield made
    made.close()
    assert [url for url in asked if not url.startswith((address, "data:"))] == [] and wrong == []
