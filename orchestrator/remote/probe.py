"""Gathers what a host is, in one round trip; the controller makes sense of it (`orchestrator/hosts/facts.py`).

Request: {"workdir", "peers": [addresses or names], "torch": bool, "limit_s"}. The answer is raw, not judged:

    {"commands": {name: {"rc", "out", "err"}}, "files": {path: text}, "values": {...}}

The routes to hundreds of peers cost no process each: a socket tells our own address on the way to a peer, and `ip` is
asked once for each such address. Every command has its own limit of time and they run side by side, so that a driver
that hangs or a dead NFS mount costs one fact and never the answer. Whatever may block without end runs in a process of
its own for that reason. rc is 127 where a command is missing and 124 where it was too slow, as a shell and timeout(1)
have it.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import workfolder
from .occupants import QUERY, occupants, user_name

LIMIT_S = 60.0
COMMAND_S = 15.0
SMI_S = 30.0
"""Where no program keeps the driver awake (no persistence mode), it takes nvidia-smi a few seconds for each GPU."""
TORCH_S = 60.0
OUT_BYTES = 1 << 18
ERR_BYTES = 1 << 12
MAX_PEERS = 2048
MAX_LINKS = 256
MAX_RDMA = 64
MAX_WAYS = 16
AT_ONCE = 8
NOT_FOUND, TOO_SLOW = 127, 124

GPU_FIELDS = "index,name,uuid,memory.total,memory.used,driver_version,pci.bus_id,compute_mode"
FILES = (
    "/proc/meminfo",
    "/etc/os-release",
    "/proc/sys/kernel/random/boot_id",
    "/etc/machine-id",
    "/proc/net/if_inet6",
)
# Tools that an SSH session's short PATH often misses.
PATHS = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin:/usr/lib/wsl/lib:/usr/local/nvidia/bin"

# Prints the numeric addresses that this host's own name leads to: a resolver may take its time.
OWN_NAME = """
import json, socket
found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
print(json.dumps(sorted({entry[4][0] for entry in found})))
"""

# Prints {name: numeric address} of what was found in time. All at once: a dead resolver takes its time for each.
NAMES = """
import json, os, queue, socket, sys, threading, time
end = time.monotonic() + float(sys.argv[1])
todo, found = queue.SimpleQueue(), {}
def look_up():
    while True:
        try:
            name = todo.get_nowait()
            found[name] = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
        except queue.Empty:
            return
        except (OSError, ValueError):
            pass
for name in sys.argv[2:]:
    todo.put(name)
threads = [threading.Thread(target=look_up, daemon=True) for _ in sys.argv[2:][:256]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(max(0, end - time.monotonic()))
print(json.dumps(dict(found)), flush=True)
os._exit(0)
"""

# Prints what this torch is. A part that this build or version lacks is null, never a failure of the whole.
TORCH = """
import ctypes, json, subprocess, sys, types, warnings
class Compiler(types.ModuleType):
    # In place of torch's, which torchvision imports, uses for nothing here, and which takes longer than all the rest.
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None
def vision():
    # What it says of itself; "" where it does not load.
    try:
        for name in ("torch._dynamo", "torch._dynamo.utils"):
            sys.modules.setdefault(name, Compiler(name))
        import torchvision
        return str(torchvision.__version__)
    except Exception:
        return ""
def tell(ask):
    try:
        return ask()
    except Exception:
        return None
import torch
import torch.distributed as dist
facts = {"version": str(torch.__version__), "cuda": torch.version.cuda}
facts["nccl"] = tell(lambda: ".".join(str(part) for part in torch.cuda.nccl.version()))
# Without this library NCCL uses no InfiniBand device, whatever the kernel lists.
facts["verbs"] = bool(tell(lambda: ctypes.CDLL("libibverbs.so.1")))
facts["cudnn"] = tell(lambda: torch.backends.cudnn.version())
# get_arch_list() is empty where no GPU is in reach; the flags of the build are there always.
facts["archs"] = tell(lambda: (torch._C._cuda_getArchFlags() or "").split()) or tell(torch.cuda.get_arch_list) or []
distributed = dist.is_available()
facts["gloo"] = bool(distributed and tell(getattr(dist, "is_gloo_available", lambda: True)))
facts["nccl_available"] = bool(distributed and tell(lambda: dist.is_nccl_available()))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    facts["devices"] = tell(lambda: torch.cuda.device_count() if torch.cuda.is_available() else 0) or 0
facts["cuda_error"] = str(said[-1].message) if said else None
facts["torchvision"] = facts["torchvision_error"] = None
if found := vision():
    facts["torchvision"] = found
else:
    plainly = "import torchvision; print(); print(torchvision.__version__)"
    done = subprocess.run([sys.executable, "-c", plainly], capture_output=True, text=True, errors="replace")
    said = (done.stderr if done.returncode else done.stdout).strip().splitlines() or ["exit code %d" % done.returncode]
    facts["torchvision_error" if done.returncode else "torchvision"] = said[-1]
print("\\n" + json.dumps(facts))
"""


def main(request: dict[str, Any]) -> None:
    answer = gather(request)
    sys.stdout.write(request["marker"] + json.dumps(answer) + request["marker"])


def gather(request: dict[str, Any]) -> dict[str, Any]:
    started = time.time()
    limit_s = min(float(request.get("limit_s", LIMIT_S)), TORCH_S)
    peers = [str(peer) for peer in request["peers"][:MAX_PEERS]]
    with ThreadPoolExecutor(1) as pool:
        gpus = pool.submit(look_at_gpus, limit_s)
        commands = run_all(command_lines(request["workdir"], peers, request["torch"], limit_s), limit_s)
        commands["nvidia-smi"], on_gpus = gpus.result()
    files = {path: text for path in FILES if (text := read_text(path)) is not None}
    addresses = addresses_of(peers, commands.pop("names"))
    sources = {peer: source for peer in peers if (source := source_towards(addresses.get(peer, "")))}
    hardware = {"links": read_links(), "cpu_vendor": cpu_vendor(), "rdma": rdma_ports(), "occupants": on_gpus}
    values = {**about_process(), **hardware, "sources": sources, "wall_start": started}
    if commands["ip addr"]["rc"] != 0:
        values["sockets"] = socket_interfaces()
    else:
        commands |= run_all(route_lines(addresses, sources), limit_s)
    return {"commands": commands, "files": files, "values": {**values, "wall_end": time.time()}}


# ---- commands -------------------------------------------------------------------------------------------------


def command_lines(workdir: str, peers: list[str], torch: bool, limit_s: float) -> dict[str, list[str]]:
    """Name -> argument list. torch comes first: it takes longest."""
    lines = {"torch": [sys.executable, "-c", TORCH]} if torch else {}
    python = [sys.executable, "-S", "-c"]  # what needs no more than the standard library starts in half the time
    names = [peer for peer in peers if not is_numeric(peer)]
    names_s = 0.8 * min(COMMAND_S, limit_s)  # so that it tells what it has before it is killed
    return {
        **lines,
        "workdir": [*python, workdir_trial(), workdir],
        "own name": [*python, OWN_NAME],
        "ip addr": ["ip", "-j", "addr"],
        "names": [*python, NAMES, str(names_s), *names] if names else ["true"],
    }


def addresses_of(peers: list[str], names: dict[str, Any]) -> dict[str, str]:
    """Peer -> its numeric address; a name that leads nowhere is left out."""
    found = json.loads(names["out"] or "{}") if names["rc"] == 0 else {}
    return {peer: peer if is_numeric(peer) else found[peer] for peer in peers if is_numeric(peer) or peer in found}


def route_lines(addresses: dict[str, str], sources: dict[str, str]) -> dict[str, list[str]]:
    """One question for each way out of this host: its device need not be the one that has the address."""
    firsts: dict[str, str] = {}
    for peer, source in sources.items():
        firsts.setdefault(source, peer)
    asked = list(firsts.values())[:MAX_WAYS]
    return {f"ip route {peer}": ["ip", "-j", "route", "get", addresses[peer]] for peer in asked}


def workdir_trial() -> str:
    """The text of `workfolder`, wherever this package was loaded from: a dead mount must cost a process, not us."""
    get_source = getattr(workfolder.__loader__, "get_source")  # noqa: B009 - all loaders of text have it (PEP 302)
    return str(get_source(workfolder.__name__))


def is_numeric(peer: str) -> bool:
    try:
        return bool(ipaddress.ip_address(peer))
    except ValueError:
        return False


def smi(fields: str) -> list[str]:
    return ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]


def look_at_gpus(limit_s: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """nvidia-smi's answer, and who is on the GPUs that it shows."""
    limit_s = min(SMI_S, limit_s)
    shown = run(smi(GPU_FIELDS + ",compute_cap"), limit_s)
    if shown["rc"] not in (0, NOT_FOUND, TOO_SLOW):
        shown = ask_old_driver(shown, limit_s)
    if shown["rc"] != 0:
        return shown, []
    return shown, occupants(run(["nvidia-smi", *QUERY], limit_s)["out"])


def ask_old_driver(first: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Drivers before 510 do not know `compute_cap` and answer nothing at all then; the rest they know."""
    again = run(smi(GPU_FIELDS), limit_s) if "compute_cap" in first["out"] + first["err"] else first
    return again if again["rc"] == 0 else first


def run_all(lines: dict[str, list[str]], limit_s: float) -> dict[str, dict[str, Any]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        waiting = {
            name: pool.submit(run, line, limit_s if name == "torch" else min(COMMAND_S, limit_s))
            for name, line in lines.items()
        }
        return {name: future.result() for name, future in waiting.items()}


def run(argv: list[str], limit_s: float) -> dict[str, Any]:
    """Runs one command in a session of its own, and kills all of that when it is too slow."""
    env = {**os.environ, "LC_ALL": "C", "PATH": f"{os.environ.get('PATH', '')}:{PATHS}"}
    # A job chooses its GPUs itself; what a profile hides here says nothing about the host.
    env.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env=env,
            start_new_session=True,
        )
    except FileNotFoundError:
        return {"rc": NOT_FOUND, "out": "", "err": f"{argv[0]}: command not found"}
    except OSError as error:
        return {"rc": 126, "out": "", "err": f"{argv[0]}: {error.strerror}"}
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        give_up(process)
        return {"rc": TOO_SLOW, "out": "", "err": f"no answer in {limit_s:g} s"}
    return {"rc": process.returncode, "out": text(out[:OUT_BYTES]), "err": text(err[-ERR_BYTES:])}


def give_up(process: subprocess.Popen[bytes]) -> None:
    """Kills a command and all it started. One stuck in the kernel takes the signal when it comes back, if ever."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1)


def text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


# ---- simple values --------------------------------------------------------------------------------------------


def about_process() -> dict[str, Any]:
    kernel = os.uname()
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "hostname": socket.gethostname(),
        "uname": [kernel.sysname, kernel.release, kernel.machine],
        "cores": len(os.sched_getaffinity(0)),
        "uid": os.getuid(),
        "user": user_name(os.getuid()),
        "python": list(sys.version_info[:3]),
        "executable": sys.executable,
        "shm_bytes": shm.f_blocks * shm.f_frsize if shm else 0,
    }


def read_text(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return text(file.read(1 << 16))
    except OSError:
        return None


def read_links() -> dict[str, str]:
    """Interface -> its speed as the kernel writes it, in Mbit/s; virtual, wireless and idle ones have none."""
    links = sorted(Path("/sys/class/net").glob("*"))[:MAX_LINKS]
    return {link.name: speed for link in links if (speed := read_text(f"{link}/speed")) is not None}


def cpu_vendor() -> str | None:
    """Like "GenuineIntel", as /proc/cpuinfo has it; None on machines whose kernel does not say (ARM)."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", "rb") as file:
        for line in file:
            name, _, value = line.partition(b":")
            if name.strip() == b"vendor_id":
                return text(value).strip()
    return None


def rdma_ports(system: str = "/sys/class", devices: str = "/dev/infiniband") -> list[list[str]]:
    """[device, link layer] of every InfiniBand and RoCE port that is active and that this user may open."""
    found = []
    for verbs in sorted(Path(system, "infiniband_verbs").glob("uverbs*"))[:MAX_RDMA]:
        name = (read_text(f"{verbs}/ibdev") or "").strip()
        if not name or not os.access(f"{devices}/{verbs.name}", os.R_OK | os.W_OK):
            continue
        for port in sorted(Path(system, "infiniband", name, "ports").glob("*"))[:MAX_RDMA]:
            if "ACTIVE" in (read_text(f"{port}/state") or ""):
                found.append([name, (read_text(f"{port}/link_layer") or "").strip()])
    return found


# ---- without the ip command -----------------------------------------------------------------------------------


def socket_interfaces() -> list[dict[str, Any]]:
    """IPv4 interfaces by the ioctls of netdevice(7): [{name, address, netmask, mtu, flags}]."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        for name in configured(link):
            request = struct.pack("256s", name.encode()[:15])

            def ask(number: int, request: bytes = request) -> bytes:
                return fcntl.ioctl(link.fileno(), number, request)

            try:
                found.append(
                    {
                        "name": name,
                        "address": socket.inet_ntoa(ask(0x8915)[20:24]),  # SIOCGIFADDR
                        "netmask": socket.inet_ntoa(ask(0x891B)[20:24]),  # SIOCGIFNETMASK
                        "mtu": struct.unpack_from("i", ask(0x8921), 16)[0],  # SIOCGIFMTU
                        "flags": struct.unpack_from("H", ask(0x8913), 16)[0],  # SIOCGIFFLAGS
                    }
                )
            except OSError:
                continue  # it went away, or carries no IPv4 address
    return found


def configured(link: socket.socket) -> list[str]:
    """Names of the interfaces with an IPv4 address, aliases such as eth0:1 among them (SIOCGIFCONF)."""
    size, room = 40, 128 * 40  # struct ifreq has 40 bytes on every 64-bit Linux
    names = array.array("B", bytes(room))
    request = struct.pack("iL", room, names.buffer_info()[0])
    used = struct.unpack("iL", fcntl.ioctl(link.fileno(), 0x8912, request))[0]
    data = names.tobytes()
    return [data[at : at + 16].split(b"\0", 1)[0].decode("ascii", "replace") for at in range(0, used, size)]


def source_towards(peer: str) -> str | None:
    """Our own address on the route to a numeric peer: a UDP socket's connect chooses it and sends nothing."""
    try:
        found = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as link:
            link.connect(address)
            return str(link.getsockname()[0])
    except OSError:
        return None
