"""What tests of this folder share."""

from __future__ import annotations

import pytest


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Puts a shell script of this name first on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def make(name, script):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return make
