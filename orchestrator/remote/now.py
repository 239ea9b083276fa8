"""What of this host may have changed since it was last looked at, from files alone: a part of what `prepare` answers.

now(Path("/home/me/.orch"))     # {"free": 81604378624, "inodes": 5183942, "wall": 1795689123.7, "up": ["eno1"], ...}

It costs a few milliseconds, and is put over what is remembered of the host (`orchestrator/hosts/now.py`).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from .hardware import read_text, shm_bytes
from .health import available_bytes, cards, uptime_s
from .interfaces import MAX_LINKS, read_links


def now(folder: Path) -> dict[str, Any]:
    """folder: on the disk that it is about."""
    disk = os.statvfs(folder)
    return {
        "free": disk.f_bavail * disk.f_frsize,
        "inodes": disk.f_favail if disk.f_files else None,
        "shm_bytes": shm_bytes(),
        "available_bytes": available_bytes(),
        "uptime_s": uptime_s(),
        "links": read_links(),
        "up": up(),
        "cards": cards(),
        "wall": time.time(),
    }


def up(system: str = "/sys/class/net") -> list[str]:
    """Interfaces that are switched on and have a carrier: the kernel answers for no others."""
    links = sorted(Path(system).glob("*"))[:MAX_LINKS]
    return [link.name for link in links if (read_text(f"{link}/carrier") or "").strip() == "1"]
