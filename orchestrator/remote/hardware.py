"""What the kernel says of this host's processor and network cards, and of the process that asks."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import Any

from .commands import text
from .occupants import user_name

MAX_RDMA = 64


def about_process() -> dict[str, Any]:
    kernel = os.uname()
    return {
        "hostname": socket.gethostname(),
        "kernel": kernel.release,
        "machine": kernel.machine,
        "cores": len(os.sched_getaffinity(0)),
        "uid": os.getuid(),
        "user": user_name(os.getuid()),
        "python_version": ".".join(map(str, sys.version_info[:3])),
        "python_executable": sys.executable,
        "shm_bytes": shm_bytes(),
    }


def shm_bytes() -> int:
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return shm.f_blocks * shm.f_frsize if shm else 0


def read_text(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return text(file.read(1 << 16))
    except OSError:
        return None


def cpu_vendor() -> str | None:
    """Like "GenuineIntel", as /proc/cpuinfo has it; None on machines whose kernel does not say (ARM)."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", "rb") as file:
        for line in file:
            name, _, value = line.partition(b":")
            if name.strip() == b"vendor_id":
                return text(value).strip()
    return None


def rdma_ports(system: str = "/sys/class", devices: str = "/dev/infiniband") -> list[dict[str, str]]:
    """Every InfiniBand and RoCE port that is active and that this user may open."""
    found = []
    for verbs in sorted(Path(system, "infiniband_verbs").glob("uverbs*"))[:MAX_RDMA]:
        name = (read_text(f"{verbs}/ibdev") or "").strip()
        if not name or not os.access(f"{devices}/{verbs.name}", os.R_OK | os.W_OK):
            continue
        for port in sorted(Path(system, "infiniband", name, "ports").glob("*"))[:MAX_RDMA]:
            if "ACTIVE" in (read_text(f"{port}/state") or ""):
                found.append({"device": name, "link_layer": (read_text(f"{port}/link_layer") or "").strip()})
    return found
