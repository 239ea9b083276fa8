"""Gathers what a host is, in one round trip; the controller makes sense of it (`orchestrator/hosts/facts.py`).

Request: {"workdir", "peers": [addresses or names], "torch": bool, "limit_s"}, with "computes" torch computes something
on each GPU, too. The answer is raw, not judged:

    {"commands": {name: {"rc", "out", "err"}}, "files": {path: text}, "values": {...}, "health": {...},
     "gpu_health": [...]}

The routes to hundreds of peers cost no process each: a socket gives our own address on the way to a peer, and `ip` is
asked once for each such address. Every command has its own limit of time and they run side by side, so that a driver
that hangs or a dead NFS mount costs one fact and never the answer. Whatever may block without end runs in a process of
its own for that reason. rc is 127 where a command is missing and 124 where it was too slow, as a shell and timeout(1)
have it.
"""

from __future__ import annotations

import ipaddress
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from . import gpu_health, health, workfolder
from .commands import COMMAND_S, NOT_FOUND, SMI_S, TOO_SLOW, run, run_all
from .hardware import about_process, cpu_vendor, rdma_ports, read_text
from .interfaces import read_links, socket_interfaces, source_towards
from .occupants import QUERY, occupants
from .probe_programs import COMPUTES, NAMES, OWN_NAME, TORCH

LIMIT_S = 60.0
MAX_PEERS = 2048
MAX_WAYS = 16

GPU_FIELDS = "index,name,uuid,memory.total,memory.used,driver_version,pci.bus_id,compute_mode"
FILES = (
    "/proc/meminfo",
    "/etc/os-release",
    "/proc/sys/kernel/random/boot_id",
    "/etc/machine-id",
    "/proc/net/if_inet6",
)


def main(request: dict[str, Any]) -> None:
    answer = gather(request)
    sys.stdout.write(request["marker"] + json.dumps(answer) + request["marker"])


def gather(request: dict[str, Any]) -> dict[str, Any]:
    started = time.time()
    limit_s = float(request.get("limit_s", LIMIT_S))
    peers = [str(peer) for peer in request["peers"][:MAX_PEERS]]
    with ThreadPoolExecutor(2) as pool:
        gpus = pool.submit(look_at_gpus, limit_s)
        cards = pool.submit(gpu_health.look, min(SMI_S, limit_s))
        commands = run_all(command_lines(request, peers, limit_s), limit_s)
        commands["nvidia-smi"], on_gpus = gpus.result()
        rows = [{**row, "iommu": gpu_health.translated(row.get("pci.bus_id", "")) or ""} for row in cards.result()]
    files = {path: text for path in FILES if (text := read_text(path)) is not None}
    addresses = addresses_of(peers, commands.pop("names"))
    sources = {peer: source for peer in peers if (source := source_towards(addresses.get(peer, "")))}
    hardware = {"links": read_links(), "cpu_vendor": cpu_vendor(), "rdma": rdma_ports(), "occupants": on_gpus}
    values = {**about_process(), **hardware, "sources": sources, "wall_start": started}
    if commands["ip addr"]["rc"] != 0:
        values["sockets"] = socket_interfaces()
    else:
        commands |= run_all(route_lines(addresses, sources), limit_s)
    more = {"health": health.gather(), "gpu_health": rows}
    return {"commands": commands, "files": files, "values": {**values, "wall_end": time.time()}, **more}


# ---- commands -------------------------------------------------------------------------------------------------


def command_lines(request: dict[str, Any], peers: list[str], limit_s: float) -> dict[str, list[str]]:
    """Name -> argument list. torch comes first: it takes longest."""
    computes = [COMPUTES] if request.get("computes") else []
    lines = {"torch": [sys.executable, "-c", TORCH, *computes]} if request["torch"] else {}
    python = [sys.executable, "-S", "-c"]  # what needs no more than the standard library starts in half the time
    names = [peer for peer in peers if not is_numeric(peer)]
    names_s = 0.8 * min(COMMAND_S, limit_s)  # so that it prints what it has before it is killed
    return {
        **lines,
        "workdir": [*python, workdir_trial(), request["workdir"]],
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
    if "," not in shown["out"]:
        return shown, []
    return shown, occupants(run(["nvidia-smi", *QUERY], limit_s)["out"])


def ask_old_driver(first: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Drivers before 510 do not know `compute_cap` and answer nothing at all then; the rest they know."""
    again = run(smi(GPU_FIELDS), limit_s) if "compute_cap" in first["out"] + first["err"] else first
    return again if "," in again["out"] else first
