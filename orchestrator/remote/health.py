"""Host conditions that may end a job later, from system files; health of GPUs; network interfaces.

    gather()              # {"limits": {"nofile": {"soft": 1024, "hard": 1048576}, ...}, "uptime_s": 4711.0, ...}
    gpu_health(30.0)      # [{"index": 0, "uncorrected": 0, "replacement_due": False, "link_width": 16, ...}]

Keys as in `Health` and `GpuHealth` (`orchestrator/hosts/facts.py`); `orchestrator/doctor/` evaluates them.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import os
import re
import resource
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import cgroups
from .commands import run, text
from .occupants import user_name
from .processes import MARK, pids

LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}
# Variables that control ranks, torch and NCCL and hold no secret.
SHOWN = re.compile(
    r"(NCCL|TORCH|PYTORCH|GLOO|TP|OMP|MKL|CUDA|UCX|PET|TORCHELASTIC)_[A-Z0-9_]{1,60}|LD_(LIBRARY_PATH|PRELOAD)"
    r"|PYTHONPATH|((LOCAL|GROUP)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)"
)
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
    """Packages that need a reboot, as Debian and Ubuntu record them; None if no reboot is due."""
    if not os.path.exists(f"{run}/reboot-required"):
        return None
    return sorted({*(read_text(f"{run}/reboot-required.pkgs") or "").split()})[:MOST]


def kills_left(files: tuple[str, ...] = LOGIND, cgroup: str = "/proc/self/cgroup") -> bool | None:
    """systemd-logind ends this user's processes with the last session; None if logind does not manage this one."""
    if not re.search(r"/session-[^/]*\.scope$", read_text(cgroup) or "", re.MULTILINE):
        return None
    settings = dict[str, str]()
    for path in reversed(files):  # the first file overrides the others, and its drop-in folder overrides it
        for file in (Path(path), *sorted(Path(f"{path}.d").glob("*.conf"))):
            settings |= dict(re.findall(r"^\s*(Kill\w+)\s*=\s*(.*?)\s*$", read_text(str(file)) or "", re.MULTILINE))
    user = user_name(os.getuid())
    only, excluded = settings.get("KillOnlyUsers", "").split(), settings.get("KillExcludeUsers", "root").split()
    is_on = settings.get("KillUserProcesses", "no").lower() in ("yes", "true", "on", "1")
    return is_on and user not in excluded and (not only or user in only)


def cards(folder: str = "/sys/class/net") -> dict[str, dict[str, Any]]:

    def count(path: str) -> int:
        answer = (read_text(path) or "").strip()
        return int(answer) if answer.isdecimal() else 0

    return {
        card.name: {
            "duplex": (read_text(f"{card}/duplex") or "").strip() or None,
            "crc_errors": count(f"{card}/statistics/rx_crc_errors"),
            "packets": count(f"{card}/statistics/rx_packets"),
        }
        for card in sorted(Path(folder).glob("*"))[:MOST]
    }


def jobs() -> list[str]:
    found, mark = set[str](), f"{MARK}=".encode()
    for pid in pids():  # not by Path.glob, which raises ProcessLookupError if a process ends while it looks
        with contextlib.suppress(OSError):  # another user's, or gone
            words = [word for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if word.startswith(mark)]
            found |= {os.path.basename(word.decode(errors="replace")) for word in words}
    return sorted(found)[:MOST]


FIELDS = (
    "index",
    "uuid",
    "pci.bus_id",
    "ecc.errors.uncorrected.volatile.total",
    "retired_pages.pending",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "clocks_event_reasons.active",
    "clocks.applications.graphics",
    "clocks.default_applications.graphics",
    "power.limit",
    "power.default_limit",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "fabric.state",
)
OLDER = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}
"""New field name -> its name before driver 535."""
MOST_GPUS = 64
_REFUSED = re.compile(r'Field "([a-z_.]{1,64})" is not a valid field')
_NUMBER = re.compile(r"\d{1,12}(\.\d{1,6})?", re.ASCII)
_MASK = re.compile(r"0x0*[0-7]?[0-9a-fA-F]{1,15}")


def gpu_health(limit_s: float) -> list[dict[str, Any]]:
    return [health_of(row) for row in look(limit_s)]


def health_of(row: dict[str, str]) -> dict[str, Any]:
    """row: nvidia-smi's field -> value. A figure is None if the driver writes [N/A] or the like."""

    def number(field: str) -> float | None:
        return float(row[field]) if _NUMBER.fullmatch(row.get(field, "")) else None

    def count(field: str) -> int | None:
        return None if (found := number(field)) is None else int(found)

    def word(text: str) -> str | None:
        return None if not text or text == "N/A" or text.startswith("[") else text

    slowed_by = row.get("clocks_event_reasons.active", "")
    return {
        "index": int(row["index"]),
        "uncorrected": count("ecc.errors.uncorrected.volatile.total"),
        "replacement_due": "Yes" in (row.get("retired_pages.pending"), row.get("remapped_rows.pending")),
        "replacement_failed": row.get("remapped_rows.failure") == "Yes",
        "slowed_by": int(slowed_by, 16) if _MASK.fullmatch(slowed_by) else None,
        "clock_mhz": number("clocks.applications.graphics"),
        "default_clock_mhz": number("clocks.default_applications.graphics"),
        "limit_watts": number("power.limit"),
        "default_limit_watts": number("power.default_limit"),
        "link_width": count("pcie.link.width.current"),
        "most_link_width": count("pcie.link.width.max"),
        "fabric": word(row.get("fabric.state", "")),
        "iommu": word(translated(row.get("pci.bus_id", "")) or ""),
    }


def look(limit_s: float) -> list[dict[str, str]]:
    """Rows by field, without fields that the driver lacks. Empty if nvidia-smi is missing or fails."""
    fields = {field: field for field in FIELDS}  # field to query -> its name in the result
    for _ in range(2 * len(FIELDS)):
        command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        answer = run(command, limit_s)
        refused = _REFUSED.search(answer["out"] + answer["err"])
        if not refused or refused[1] not in fields:
            return rows(answer, list(fields.values()))
        fields = without(refused[1], fields)
    return []


def without(refused: str, fields: dict[str, str]) -> dict[str, str]:
    kept = {field: name for field, name in fields.items() if field != refused}
    return {**kept, OLDER[refused]: refused} if refused in OLDER else kept


def rows(answer: dict[str, Any], names: list[str]) -> list[dict[str, str]]:
    lines = [[value.strip() for value in line.split(",")] for line in answer["out"].splitlines()[:MOST_GPUS]]
    return [dict(zip(names, row, strict=True)) for row in lines if len(row) == len(names) and row[0].isdecimal()]


def translated(bus_id: str, devices: Path = Path("/sys/bus/pci/devices")) -> str | None:
    """The IOMMU's mode for this GPU ("identity", "DMA", "DMA-FQ"); None without an IOMMU. bus_id: nvidia-smi's, with an
    eight-digit domain.
    """
    try:
        return (devices / bus_id.lower()[-12:] / "iommu_group" / "type").read_text().strip()
    except (OSError, ValueError):  # missing, or no valid path: a driver may print anything
        return None


# Takes a few milliseconds: part of `prepare`'s answer, replacing older facts (`orchestrator/hosts/probe.py`).


def now(folder: Path) -> dict[str, Any]:
    disk, wall = os.statvfs(folder), time.time()
    return {
        "clock": {"began": wall, "ended": wall},
        "disk_free_bytes": disk.f_bavail * disk.f_frsize,
        "disk_free_inodes": disk.f_favail if disk.f_files else None,
        "shm_bytes": shm_bytes(),
        "interfaces": interfaces(),
        "health": {"uptime_s": uptime_s(), "available_bytes": available_bytes(), "cards": cards()},
    }


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
    with contextlib.suppress(OSError), open("/proc/cpuinfo", "rb") as file:
        for line in file:
            name, _, value = line.partition(b":")
            if name.strip() == b"vendor_id":
                return text(value).strip()
    return None


def rdma_ports(system: str = "/sys/class", devices: str = "/dev/infiniband") -> list[dict[str, str]]:
    found = []
    for verbs in sorted(Path(system, "infiniband_verbs").glob("uverbs*"))[:MAX_RDMA]:
        name = (read_text(f"{verbs}/ibdev") or "").strip()
        if not name or not os.access(f"{devices}/{verbs.name}", os.R_OK | os.W_OK):
            continue
        for port in sorted(Path(system, "infiniband", name, "ports").glob("*"))[:MAX_RDMA]:
            if "ACTIVE" in (read_text(f"{port}/state") or ""):
                found.append({"device": name, "link_layer": (read_text(f"{port}/link_layer") or "").strip()})
    return found


# Network interfaces are read without `ip`, which containers often lack.

MAX_LINKS = 256
MAX_ADDRESSES = 1024
# netdevice(7)
SIOCGIFCONF, SIOCGIFFLAGS, SIOCGIFNETMASK, SIOCGIFMTU = 0x8912, 0x8913, 0x891B, 0x8921
UP, RUNNING = 0x1, 0x40
IFREQ_BYTES = 40  # on every 64-bit Linux


def interfaces() -> list[dict[str, Any]]:
    """[{name, addresses (with prefix length), mtu, speed_bps, up (switched on, with a carrier)}]"""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        addresses = dict[str, list[str]]()
        for name, address in (*_ipv4(link), *ipv6_addresses(read_text("/proc/net/if_inet6") or "")):
            addresses.setdefault(name, []).append(address)
        for _, name in socket.if_nameindex()[:MAX_LINKS]:
            request = struct.pack(f"{IFREQ_BYTES}s", name.encode()[:15])
            with contextlib.suppress(OSError):  # the interface has just gone
                (mtu,) = struct.unpack_from("i", fcntl.ioctl(link, SIOCGIFMTU, request), 16)
                (flags,) = struct.unpack_from("H", fcntl.ioctl(link, SIOCGIFFLAGS, request), 16)
                is_up = flags & (UP | RUNNING) == UP | RUNNING
                about = {"mtu": mtu, "speed_bps": speed_bps(name), "up": is_up}
                found.append({"name": name, "addresses": addresses.get(name, []), **about})
    return found


def speed_bps(name: str, folder: str = "/sys/class/net") -> float | None:
    # None for virtual, wireless and idle interfaces, which have no speed or -1.
    speed = (read_text(f"{folder}/{name}/speed") or "").strip()
    return int(speed) * 1e6 if speed.isdecimal() and 0 < int(speed) < 10**9 else None


def _ipv4(link: socket.socket) -> Iterator[tuple[str, str]]:
    # (interface, address): an alias such as eth0:1 counts as eth0.
    room = MAX_ADDRESSES * IFREQ_BYTES
    entries = array.array("B", bytes(room))
    used, _ = struct.unpack("iL", fcntl.ioctl(link, SIOCGIFCONF, struct.pack("iL", room, entries.buffer_info()[0])))
    for at in range(0, used, IFREQ_BYTES):
        entry = entries[at : at + IFREQ_BYTES].tobytes()
        name = entry[:16].split(b"\0", 1)[0].decode("ascii", "replace").partition(":")[0]
        with contextlib.suppress(OSError):
            # The entry includes the address, so the kernel answers for this one of several.
            mask = fcntl.ioctl(link, SIOCGIFNETMASK, entry)
            address = f"{socket.inet_ntoa(entry[20:24])}/{socket.inet_ntoa(mask[20:24])}"
            yield name, ipaddress.ip_interface(address).with_prefixlen


def ipv6_addresses(if_inet6: str) -> Iterator[tuple[str, str]]:
    # Lines of: address, index, prefix length, scope, flags (all in hex), name. Global addresses come first.
    rows = [line.split() for line in if_inet6.splitlines()[:MAX_ADDRESSES]]
    for number, _, prefix, _, _, name in sorted((row for row in rows if len(row) == 6), key=lambda row: row[3]):
        yield name, f"{ipaddress.IPv6Address(bytes.fromhex(number))}/{int(prefix, 16)}"


def source_towards(peer: str) -> str | None:
    """Our address on the route to a numeric peer, chosen by a UDP socket's connect, which sends nothing."""
    try:
        found = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as link:
            link.connect(address)
            return str(link.getsockname()[0])
    except OSError:
        return None
