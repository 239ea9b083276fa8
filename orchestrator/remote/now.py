"""What may have changed on this host since it was probed, from the kernel alone: a part of what `prepare` answers.

It costs a few milliseconds; `orchestrator/hosts/answers.py` puts it over what is remembered of the host.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from .hardware import shm_bytes
from .health import available_bytes, cards, uptime_s
from .interfaces import interfaces


def now(folder: Path) -> dict[str, Any]:
    """folder: on the disk to look at."""
    disk, wall = os.statvfs(folder), time.time()
    return {
        "clock": {"began": wall, "ended": wall},
        "disk_free_bytes": disk.f_bavail * disk.f_frsize,
        "disk_free_inodes": disk.f_favail if disk.f_files else None,
        "shm_bytes": shm_bytes(),
        "interfaces": interfaces(),
        "health": {"uptime_s": uptime_s(), "available_bytes": available_bytes(), "cards": cards()},
    }
