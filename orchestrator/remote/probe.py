"""Gathers facts about a host in one request, named as in `NodeFacts` and `Health` (`orchestrator/hosts/`).

Request: {"workdir", "peers": [addresses or names], "torch": bool, "limit_s"}; with "computes", torch also computes on
each GPU. "torch_memory": a folder that keeps facts about installations of torch, which other hosts may share.
The answer, which the controller checks (`orchestrator/hosts/probe.py`):

    {"clock": {"began", "ended"}, "facts": {...}, "health": {...}}

Commands run in parallel with a time limit each, and anything that may block runs in a process of its own, so that a
hanging driver or a dead NFS mount costs one fact. Routes to hundreds of peers need one `ip` command per source address.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from . import health, workfolder
from .commands import COMMAND_S, NOT_FOUND, SMI_S, TOO_SLOW, printed, run, run_all, why_failed
from .health import about_process, cpu_vendor, gpu_health, interfaces, rdma_ports, read_text, source_towards
from .occupants import QUERY, occupants

LIMIT_S = 60.0
MAX_PEERS = 2048
MAX_WAYS = 16


def main(request: dict[str, Any]) -> None:
    answer = gather(request)
    sys.stdout.write(request["marker"] + json.dumps(answer) + request["marker"])


def gather(request: dict[str, Any]) -> dict[str, Any]:
    return answer_of(request, {})[0]


def answer_of(request: dict[str, Any], more: dict[str, list[str]]) -> tuple[dict[str, Any], dict[str, Any]]:
    began = time.time()
    limit_s = float(request.get("limit_s", LIMIT_S))
    peers = [str(peer) for peer in request["peers"][:MAX_PEERS]]
    with ThreadPoolExecutor(2) as pool:
        gpus, cards = pool.submit(look, limit_s), pool.submit(gpu_health, min(SMI_S, limit_s))
        done = run_all({**command_lines(request, peers, limit_s), **more}, limit_s)
        addresses = addresses_of(peers, printed(done["names"], dict) or {})
        sources = {peer: source for peer in peers if (source := source_towards(addresses.get(peer, "")))}
        ways = run_all(route_lines(addresses, sources), limit_s)
        facts = {**system_facts(), **gpus.result(), **facts_of(done)}
        computes = (facts.get("torch") or {}).get("computes", {})
        rows = [{**row, "computes": computes.get(str(row["index"]))} for row in cards.result()]
    facts |= routes(peers, sources, facts["interfaces"], named_devices(sources, ways))
    clock = {"began": began, "ended": time.time()}
    return {"clock": clock, "facts": facts, "health": {**health.gather(), "gpus": rows}}, done


# ---- facts ------------------------------------------------------------------------------------------------------


def system_facts() -> dict[str, Any]:
    pretty = re.search(r"^PRETTY_NAME=[\"']?([^\"'\n]*)", read_text("/etc/os-release") or "", re.MULTILINE)
    memory = re.search(r"^MemTotal:\s+(\d{1,18}) kB", read_text("/proc/meminfo") or "", re.MULTILINE)
    return {
        **about_process(),
        "os": pretty[1] if pretty else "unknown",
        "memory_bytes": 1024 * int(memory[1]) if memory else None,
        "boot_id": read_text("/proc/sys/kernel/random/boot_id") or "",
        "machine_id": read_text("/etc/machine-id") or "",
        "cpu_vendor": cpu_vendor(),
        "interfaces": interfaces(),
        "rdma": rdma_ports(),
    }


def facts_of(done: dict[str, dict[str, Any]]) -> dict[str, Any]:
    slurm = next(iter(done["slurm"]["out"].split()), None)  # a line for each partition
    facts = {"hostname_addresses": printed(done["own name"], list) or [], "slurm": slurm}
    if (workdir := printed(done["workdir"], dict)) is None:
        workdir = {"workdir": "", "disk_free_bytes": 0, "workdir_error": _why(done["workdir"])}
    if "torch" not in done:
        return {**facts, **workdir}
    torch = printed(done["torch"], dict)
    return {**facts, **workdir, **({"torch": torch} if torch else {"torch_error": _why(done["torch"])})}


def _why(done: dict[str, Any]) -> str:
    return why_failed(done) or "its answer was not readable"


def routes(
    peers: list[str], sources: dict[str, str], links: Iterable[dict[str, Any]], named: dict[str, str]
) -> dict[str, Any]:
    """Routes out of this host, and peers without one.

    A source address belongs to the interface that `ip` reported, or else to the interface with that address. The route
    of most peers has an empty list: with hundreds of hosts, names would be most of the stored facts.
    """
    device = {address.partition("/")[0]: link["name"] for link in links for address in link["addresses"]} | named
    reached: dict[str, list[str]] = {}
    for peer in peers:
        if sources.get(peer) in device:
            reached.setdefault(sources[peer], []).append(peer)
    most = max(reached, key=lambda source: len(reached[source]), default=None)
    found = [
        {"interface": device[source], "source": source, "peers": [] if source == most else names}
        for source, names in reached.items()
    ]
    return {"routes": found, "unrouted": [peer for peer in peers if sources.get(peer) not in device]}


def named_devices(sources: dict[str, str], ways: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Source address -> interface. ways: peer -> result of `ip route get`."""
    found = {}
    for peer, done in ways.items():
        with contextlib.suppress(LookupError, TypeError):  # an `ip` with other output
            found[sources[peer]] = (printed(done, list) or [])[0]["dev"]
    return found


# ---- commands -------------------------------------------------------------------------------------------------


def command_lines(request: dict[str, Any], peers: list[str], limit_s: float) -> dict[str, list[str]]:
    # Name -> argument list. torch comes first: it takes longest.
    memory = str(request.get("torch_memory", ""))
    more = [COMPUTES] if request.get("computes") else [MEMORY, memory] if memory else []
    lines = {"torch": [sys.executable, "-c", TORCH, *more]} if request["torch"] else {}
    python = [sys.executable, "-S", "-c"]  # without site-packages, Python starts in half the time
    names = [peer for peer in peers if not is_numeric(peer)]
    names_s = 0.8 * min(COMMAND_S, limit_s)  # prints partial results before it is killed
    return {
        **lines,
        "workdir": [*python, workdir_trial(), request["workdir"]],
        "own name": [*python, OWN_NAME],
        "names": [*python, NAMES, str(names_s), *names] if names else ["true"],
        "slurm": [shutil.which("sinfo") or "true", "--noheader", "--Node", f"--nodes={slurm_name()}", "--format=%t"],
    }


def slurm_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def addresses_of(peers: list[str], names: dict[str, str]) -> dict[str, str]:
    return {peer: peer if is_numeric(peer) else names[peer] for peer in peers if is_numeric(peer) or peer in names}


def route_lines(addresses: dict[str, str], sources: dict[str, str]) -> dict[str, list[str]]:
    # One query per source address: its interface may differ from the one with the address.
    firsts: dict[str, str] = {}
    for peer, source in sources.items():
        firsts.setdefault(source, peer)
    asked = list(firsts.values())[:MAX_WAYS]
    return {peer: ["ip", "-j", "route", "get", addresses[peer]] for peer in asked}


def workdir_trial() -> str:
    """The source of `workfolder`, to run in a process of its own, since a dead mount blocks."""
    get_source = getattr(workfolder.__loader__, "get_source")  # noqa: B009 - all loaders of text have it (PEP 302)
    return str(get_source(workfolder.__name__))


def is_numeric(peer: str) -> bool:
    try:
        return bool(ipaddress.ip_address(peer))
    except ValueError:
        return False


# Programs that may hang or import torch, each in a process of its own. Each prints JSON.

# Prints the numeric addresses of this host's own name, which a resolver may delay.
OWN_NAME = """
import json, socket
found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
print(json.dumps(sorted({entry[4][0].partition("%")[0] for entry in found})))
"""

# Prints {name: numeric address} as far as resolved in time, all in parallel: a dead resolver is slow for each.
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

COMPUTES, MEMORY = "computes", "memory"
# Prints facts about this torch; parts that this build or version lacks are null. With the argument COMPUTES each GPU
# multiplies a matrix: {index: error, or null}. With MEMORY and a folder, facts in it about this installation spare the
# import, which takes longer than everything else; the driver counts the GPUs.
TORCH = """
import ctypes, hashlib, importlib.metadata, importlib.util, json, os, subprocess, sys, threading, types, warnings
os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as nvidia-smi counts them
class Compiler(types.ModuleType):
    # Replaces torch's, which torchvision imports without need here, and which takes longer than everything else.
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None
def vision():
    # torchvision's version; "" if it does not load.
    try:
        for name in ("torch._dynamo", "torch._dynamo.utils"):
            sys.modules.setdefault(name, Compiler(name))
        import torchvision
        return str(torchvision.__version__)
    except Exception:
        return ""
def attempt(ask):
    try:
        return ask()
    except Exception:
        return None
def verbs():
    # Without this library NCCL uses no InfiniBand device, whatever the kernel lists.
    return bool(attempt(lambda: ctypes.CDLL("libibverbs.so.1")))
def installation():
    # A package that comes or goes changes the time of the folder of packages.
    packages = os.path.dirname(os.path.dirname(importlib.util.find_spec("torch").origin))
    about = [sys.executable, packages, os.stat(packages).st_mtime_ns]
    about += [os.environ.get("LD_LIBRARY_PATH"), os.environ.get("PYTHONPATH")]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16] + ".json"
OF_HOST = ("devices", "cuda_error", "verbs")
def remembered():
    with open(os.path.join(memory, installation())) as file:
        facts = json.load(file)
    return {**facts, "devices": devices(facts["cuda"]), "cuda_error": None, "verbs": verbs()}
def devices(cuda):
    # As torch counts them. Raises an error if only torch can explain why it would use none.
    try:
        driver = ctypes.CDLL("libcuda.so.1") if cuda else None
    except OSError:
        driver = None
    if driver is None:
        return 0
    version, count = ctypes.c_int(), ctypes.c_int()
    codes = [driver.cuInit(0), driver.cuDriverGetVersion(ctypes.byref(version))]
    codes.append(driver.cuDeviceGetCount(ctypes.byref(count)))
    if any(codes) or version.value // 1000 < int(cuda.split(".")[0]):
        raise OSError(codes)
    return count.value
memory = os.path.expanduser(sys.argv[2]) if sys.argv[1:2] == ["memory"] else ""
if memory and (known := attempt(remembered)):
    print("\\n" + json.dumps(known), flush=True)
    os._exit(0)
import torch
import torch.distributed as dist
facts = {"version": str(torch.__version__), "cuda": torch.version.cuda}
facts["nccl"] = attempt(lambda: ".".join(str(part) for part in torch.cuda.nccl.version()))
facts["verbs"] = verbs()
facts["cudnn"] = attempt(lambda: str(torch.backends.cudnn.version() or "")) or None
# get_arch_list() is empty without a GPU; the flags of the build are always there.
facts["arch_list"] = attempt(lambda: (torch._C._cuda_getArchFlags() or "").split())
facts["arch_list"] = facts["arch_list"] or attempt(torch.cuda.get_arch_list) or []
distributed = dist.is_available()
facts["gloo"] = bool(distributed and attempt(getattr(dist, "is_gloo_available", lambda: True)))
facts["nccl_available"] = bool(distributed and attempt(lambda: dist.is_nccl_available()))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    facts["devices"] = attempt(lambda: torch.cuda.device_count() if torch.cuda.is_available() else 0) or 0
facts["cuda_error"] = str(caught[-1].message) if caught else None
if sys.argv[1:] == ["computes"]:
    facts["computes"] = dict.fromkeys(map(str, range(facts["devices"])), "no answer in 20 s")
    def compute():
        for index in range(facts["devices"]):
            try:
                square = torch.ones(64, 64, device="cuda:%d" % index)
                facts["computes"][str(index)] = None if float((square @ square)[0, 0]) == 64 else "a wrong product"
            except Exception as error:
                facts["computes"][str(index)] = str(error).strip().split("\\n")[0]
    computing = threading.Thread(target=compute, daemon=True)
    computing.start()
    computing.join(20)
facts["horovod"] = attempt(lambda: importlib.metadata.version("horovod"))
facts["torchvision"] = facts["torchvision_error"] = None
if found := vision():
    facts["torchvision"] = found
else:
    plainly = "import torchvision; print(); print(torchvision.__version__)"
    done = subprocess.run([sys.executable, "-c", plainly], capture_output=True, text=True, errors="replace")
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines() or ["exit code %d" % done.returncode]
    facts["torchvision_error" if done.returncode else "torchvision"] = lines[-1]
print("\\n" + json.dumps(facts), flush=True)
def remember():
    os.makedirs(memory, mode=0o700, exist_ok=True)
    path = os.path.join(memory, installation())
    with open("%s.%d" % (path, os.getpid()), "w") as file:
        json.dump({name: fact for name, fact in facts.items() if name not in OF_HOST}, file)
    os.replace(file.name, path)
if memory and not getattr(torch.version, "hip", None):
    attempt(remember)
os._exit(0)  # to take torch down takes as long as a quarter of its start
"""


# This host's GPUs and the processes on them, from nvidia-smi.
#
# look(30.0)      # {"gpus": [{"index": 0, "name": "NVIDIA A16", ...}], "gpu_error": None, "gpu_warnings": []}

FIELDS = "index,name,uuid,memory.total,memory.used,driver_version,pci.bus_id,compute_mode"
MOST_GPUS, MOST_WARNINGS = 64, 8
_ROW = re.compile(r"\s*\d{1,4}\s*,(?:[^,]*,){5,7}[^,]*$", re.ASCII)
_MEBIBYTES = re.compile(r"\d{1,12}", re.ASCII)


def look(limit_s: float) -> dict[str, Any]:
    limit_s = min(SMI_S, limit_s)
    shown = run(smi(FIELDS + ",compute_cap"), limit_s)
    if shown["rc"] not in (0, NOT_FOUND, TOO_SLOW):
        shown = ask_old_driver(shown, limit_s)
    used = run(["nvidia-smi", *QUERY], limit_s)["out"] if "," in shown["out"] else ""
    return gpu_facts(shown, occupants(used))


def ask_old_driver(first: dict[str, Any], limit_s: float) -> dict[str, Any]:
    # Drivers before 510 refuse the whole query because of `compute_cap`.
    again = run(smi(FIELDS), limit_s) if "compute_cap" in first["out"] + first["err"] else first
    return again if "," in again["out"] else first


def smi(fields: str) -> list[str]:
    return ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]


def gpu_facts(shown: dict[str, Any], on_gpus: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    # Reads rows at any exit code: 14 is a warning, 15 means that one of several GPUs is lost.
    lines = [line.strip() for line in f"{shown['out']}\n{shown['err']}".splitlines() if line.strip()]
    gpus = [_gpu(line, on_gpus) for line in lines if _ROW.match(line)][:MOST_GPUS]
    others = [line for line in lines if not _ROW.match(line)]
    if not gpus:
        return {"gpus": [], "gpu_error": others[0] if others else why_failed(shown)}
    ordered = sorted(gpus, key=lambda gpu: int(gpu["index"]))
    return {"gpus": ordered, "gpu_warnings": list(dict.fromkeys(others))[:MOST_WARNINGS]}


def _gpu(row: str, on_gpus: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    index, name, uuid, total, used, driver, bus_id, *more = (field.strip() for field in row.split(","))
    return {
        "index": int(index),
        "name": name,
        "uuid": uuid,
        "memory_bytes": _bytes(total),
        "memory_used_bytes": _bytes(used),
        "driver": driver,
        "bus_id": bus_id,
        "compute_capability": next((field for field in more if re.fullmatch(r"\d{1,2}\.\d", field)), None),
        "compute_mode": next((field for field in more if field.startswith(("Exclusive", "Prohibited"))), "Default"),
        "occupants": on_gpus.get(uuid, []),
    }


def _bytes(mebibytes: str) -> int:
    # 0 for a GPU without memory of its own ([N/A] or [Not Supported]).
    return int(mebibytes) << 20 if _MEBIBYTES.fullmatch(mebibytes) else 0
