"""What every user of this machine can read of all that runs on it."""

from __future__ import annotations

import contextlib
from pathlib import Path


def command_lines_of_all_processes() -> bytes:
    """Of those that have not ended meanwhile."""
    found = b""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += entry.read_bytes()
    return found
