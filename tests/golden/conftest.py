"""What users see, kept word for word: a change of the code's shape changes none of it.

`GOLDEN=write pytest tests/golden` writes it anew; what differs then is in the commit, for people to read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Types, typist
from tests.support.plan_command import remember

KEPT = Path(__file__).parent / "kept"
IS_WRITTEN = os.environ.get("GOLDEN") == "write"
Golden = Callable[[str, str], None]
ROOT = Path(__file__).parents[2]

CHANGING = {
    r"\b([a-z][\w.]*)-\d{8}-\d{4}-[a-z0-9]{3}\b": r"\1-DAY-TIME-KEY",
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(\+00:00|Z)": "TIME",
    r"\b[0-9a-f]{64}\b": "SHA256",
    r"ships \d+ files, [\d.]+KiB, from ORCH/trainer.*": "ships FILES from ORCH/trainer",
    r"sha256 [0-9a-f]{12}": "sha256 SHORT",
    r'("id"): "[0-9a-f]{40}"': r'\1: "COMMIT"',
    r'("dirty"): (true|false)': r"\1: DIRTY",
    r"(\d\.\d{6})\d+": r"\1",
}
"""What differs from run to run, or from machine to machine in its last digits."""


def masked(text: str, **known: str) -> str:
    """known: what else to replace, by what stands for it."""
    for name, found in known.items():
        text = text.replace(found, name)
    text = text.replace(str(ROOT), "ORCH")
    for found, stands in CHANGING.items():
        text = re.sub(found, stands, text)
    return text


def pretty(document: Any) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


@pytest.fixture
def golden() -> Golden:
    """Compares a text with the one that is kept under this name."""

    def compare(name: str, text: str) -> None:
        file = KEPT / name
        if IS_WRITTEN:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        assert file.read_text() == text

    return compare


@pytest.fixture
def orch(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Types:
    """Types a command in an empty folder, with the lab's A2000 and V100 remembered; gives exit code, standard output
    and standard error.
    """
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "ORCH_HOME": str(tmp_path / "home"),
        "COLUMNS": "80",
        "HF_TOKEN": "s3cret",
        "TZ": "UTC",
    }.items():
        monkeypatch.setenv(name, value)
    remember(tmp_path, "a2000_v100.yaml")
    return typist(capfd)
