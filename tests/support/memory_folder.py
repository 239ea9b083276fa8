"""A folder in memory for the files of a whole test run: a disk takes a tenth of its time, and knows nothing more of a
file that is gone in a second.

Only this process and those that it starts see it, so that it goes with the last of them, however the run ends. So it is
no place for what somebody wants to look at later: run one file's tests, or name a --basetemp, for that.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from pathlib import Path

NEEDED_KB = 6 << 20
"""Free memory, of which a run's files take a tenth."""
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE, _MS_NOSUID = 0x20000, 0x4000, 1 << 18, 2
_libc = ctypes.CDLL(None, use_errno=True)


def use() -> None:
    """As root: only the tests see their mounts, and if there is memory enough, their temporary files lie in it."""
    if os.geteuid():
        return
    folder = Path(tempfile.gettempdir(), "orch-tests")
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        _ask(_libc.unshare(_CLONE_NEWNS))
        _ask(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
        if _free_kb() < NEEDED_KB:
            return
        _ask(_libc.mount(b"tmpfs", bytes(folder), b"tmpfs", _MS_NOSUID, b"size=50%,mode=1777"))
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


def _free_kb() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0)


def _ask(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), "no folder in memory")
