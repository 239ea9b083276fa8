"""What the end of a log says about why its writer ended."""

from __future__ import annotations

import os
import re
from pathlib import Path

TAIL_BYTES = 1 << 16
_LAST_WORDS = 20

# What the survivors of somebody else's death print (Gloo, NCCL, TCPStore): an effect, never the cause.
_SECONDARY = re.compile(
    r"connection (was likely )?(closed|reset)( by (remote )?peer)?|recv, got 0 bytes|broken pipe|"
    r"connectFullMesh failed|remote process exit|ncclRemoteError|socket (closed|timeout)|failed to recv|"
    r"connection (refused|timed out)|application timeout caused pair|watchdog caught collective|"
    r"timed out waiting|wait timeout|no route to host",
    re.IGNORECASE,
)


def is_secondary(lines: list[str]) -> bool:
    """Whether a log's last words (its last traceback, where there is one) blame the network for a peer's death."""
    starts = [index for index, line in enumerate(lines) if line.endswith("Traceback (most recent call last):")]
    words = lines[starts[-1] :] if starts else lines[-_LAST_WORDS:]
    return any(_SECONDARY.search(line) for line in words)


def log_tail(log: Path) -> list[str]:
    """The last lines of a log that are not empty."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.path.getsize(log) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line.strip() for line in lines if line.strip()]


def telling_line(lines: list[str]) -> str | None:
    """The line that most likely says why: the last that names an error and more than that, else the last of all."""
    worth = [
        line for line in lines if not line.startswith(("[W", "warnings.warn")) and not line.endswith("Last error:")
    ]
    errors = [line for line in worth if "Error" in line or "error:" in line.lower()]
    found = (errors or worth)[-1:]
    return found[0][:400] if found else None
