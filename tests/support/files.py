"""Files for tests that ship or read a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def fill(folder: Path, files: Mapping[str, str]) -> Path:
    """Writes them, by their path within the folder, and gives it back."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
