"""What may end a job later, by the system's own files: limits, environment, network cards, running jobs, a due reboot.

    gather()         # {"limits": {"nofile": {"soft": 1024, "hard": 1048576}, ...}, "uptime_s": 4711.0, ...}

The keys are those of `Health` (`orchestrator/hosts/health.py`); `orchestrator/doctor/` judges them.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
from pathlib import Path
from typing import Any

from . import cgroups
from .hardware import read_text
from .occupants import user_name
from .processes import MARK

LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}
SHOWN = re.compile(
    r"(NCCL|TORCH|PYTORCH|GLOO|TP|OMP|MKL|CUDA|UCX|PET|TORCHELASTIC)_[A-Z0-9_]{1,60}|LD_(LIBRARY_PATH|PRELOAD)"
    r"|PYTHONPATH|((LOCAL|GROUP)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)"
)
"""Variables by which ranks, torch and NCCL are steered: none of them is a place for a secret."""
MOST, MOST_TEXT = 64, 200
LOGIND = ("/etc/systemd/logind.conf", "/run/systemd/logind.conf", "/usr/lib/systemd/logind.conf")


def gather() -> dict[str, Any]:
    return {
        "limits": {name: limits(kind) for name, kind in LIMITS.items()},
        **{f"group_{name}": value for name, value in cgroups.limits().items()},
        "environment": environment(),
        "available_bytes": available_bytes(),
        "uptime_s": uptime_s(),
        "reboot": reboot(),
        "kills_left": kills_left(),
        "cards": cards(),
        "jobs": jobs(),
    }


def available_bytes() -> int | None:
    """Memory that programs can still have; None where the kernel does not say."""
    found = re.search(r"^MemAvailable:\s+(\d{1,18}) kB", read_text("/proc/meminfo") or "", re.MULTILINE)
    return 1024 * int(found[1]) if found else None


def uptime_s() -> float:
    return float((read_text("/proc/uptime") or "0").split()[0])


def limits(kind: int) -> dict[str, int | None]:
    found = zip(("soft", "hard"), resource.getrlimit(kind), strict=True)
    return {name: None if limit == resource.RLIM_INFINITY else limit for name, limit in found}


def environment() -> dict[str, str]:
    found = [(name, value) for name, value in sorted(os.environ.items()) if SHOWN.fullmatch(name)]
    return {name: value[:MOST_TEXT] for name, value in found[:MOST]}


def reboot(run: str = "/var/run") -> list[str] | None:
    """Why a reboot is due, as Debian and Ubuntu note it: the packages; None where none is."""
    if not os.path.exists(f"{run}/reboot-required"):
        return None
    return sorted({*(read_text(f"{run}/reboot-required.pkgs") or "").split()})[:MOST]


def kills_left(files: tuple[str, ...] = LOGIND, cgroup: str = "/proc/self/cgroup") -> bool | None:
    """Whether systemd-logind is set to end this user's processes with the last session; None where it has no say."""
    if not re.search(r"/session-[^/]*\.scope$", read_text(cgroup) or "", re.MULTILINE):
        return None
    settings = dict[str, str]()
    for path in reversed(files):  # the first file named wins over the others, and what lies in its folder over it
        for file in (Path(path), *sorted(Path(f"{path}.d").glob("*.conf"))):
            settings |= dict(re.findall(r"^\s*(Kill\w+)\s*=\s*(.*?)\s*$", read_text(str(file)) or "", re.MULTILINE))
    user = user_name(os.getuid())
    only, excluded = settings.get("KillOnlyUsers", "").split(), settings.get("KillExcludeUsers", "root").split()
    is_on = settings.get("KillUserProcesses", "no").lower() in ("yes", "true", "on", "1")
    return is_on and user not in excluded and (not only or user in only)


def cards(folder: str = "/sys/class/net") -> dict[str, dict[str, Any]]:
    """By network interface."""

    def count(path: str) -> int:
        said = (read_text(path) or "").strip()
        return int(said) if said.isdecimal() else 0

    return {
        card.name: {
            "duplex": (read_text(f"{card}/duplex") or "").strip() or None,
            "crc_errors": count(f"{card}/statistics/rx_crc_errors"),
            "packets": count(f"{card}/statistics/rx_packets"),
        }
        for card in sorted(Path(folder).glob("*"))[:MOST]
    }


def jobs() -> list[str]:
    """Jobs of ours that have a process here, by the mark that all of theirs carry."""
    found, mark = set[str](), f"{MARK}=".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's, or gone
            words = [word for word in path.read_bytes().split(b"\0") if word.startswith(mark)]
            found |= {os.path.basename(word.decode(errors="replace")) for word in words}
    return sorted(found)[:MOST]
