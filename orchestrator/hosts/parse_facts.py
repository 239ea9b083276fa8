"""Takes the raw answer of `remote/probe.py`, gives a frozen `NodeFacts`. Pure: one small parser a fact.

    facts = parse_facts("v100", answer, sent_at=before, received_at=after)
    facts.gpus[0].name, facts.torch.version      # "Tesla V100-PCIE-16GB", "2.0.1"

A fact that a host cannot give (no driver, no torch, no `ip`) is None or empty beside a line that says why. An answer
that makes no sense is refused with ProbeError: hosts are not trusted. Counts are capped, text is cut and printable.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from orchestrator.errors import ProbeError
from orchestrator.hosts.device_answers import parse_gpus, parse_torch
from orchestrator.hosts.facts import MAX_WORDS, NodeFacts
from orchestrator.hosts.network_answers import parse_interfaces, parse_own_name, parse_rdma, parse_routes
from orchestrator.hosts.raw_answer import Command, at_most, clean, failure, loads, mapping, text_or_none

Found = TypeVar("Found")


def parse_facts(
    node: str, raw: Mapping[str, Any], sent_at: float, received_at: float, peers: Sequence[str] = ()
) -> NodeFacts:
    """node: its name in the inventory. raw: the probe's answer. sent_at, received_at: our wall clock around the probe.
    peers: those that it was asked the route to.

    Raises ProbeError naming the node and the fact that makes no sense.
    """

    def fact(name: str, parse: Callable[..., Found], *inputs: Any) -> Found:
        return making_sense(node, name, parse, *inputs)

    commands, files, values = (fact("itself", mapping, raw.get(part)) for part in ("commands", "files", "values"))
    gpus, gpu_error, gpu_warnings = fact("GPUs", parse_gpus, commands.get("nvidia-smi"), values.get("occupants", []))
    torch, torch_error = fact("torch", parse_torch, commands.get("torch"))
    interfaces = fact("interfaces", parse_interfaces, commands.get("ip addr"), files, values)
    routes, unrouted = fact("routes", parse_routes, commands, values, interfaces, peers)
    found = {
        "node": node,
        "hostname_addresses": fact("its own name", parse_own_name, commands.get("own name")),
        "os": fact("its system", parse_os_release, files.get("/etc/os-release", "")),
        "memory_bytes": fact("memory", parse_meminfo, files.get("/proc/meminfo", "")),
        **fact("its clock", parse_clock, values, sent_at, received_at),
        "boot_id": fact("its boot", clean, files.get("/proc/sys/kernel/random/boot_id", "")),
        "machine_id": fact("its machine id", clean, files.get("/etc/machine-id", "")),
        "gpus": gpus,
        "gpu_error": gpu_error,
        "gpu_warnings": gpu_warnings,
        "torch": torch,
        "torch_error": torch_error,
        "interfaces": interfaces,
        "rdma": fact("InfiniBand", parse_rdma, values),
        "routes": routes,
        "unrouted": unrouted,
        **fact("its work folder", parse_workdir, commands.get("workdir")),
        **fact("its system", parse_process, values),
    }
    return fact("itself", lambda: NodeFacts.of(**found))


def making_sense(node: str, name: str, parse: Callable[..., Found], *inputs: Any) -> Found:
    """What is parsed of an answer. Raises ProbeError naming the node and the fact where that makes no sense."""
    try:
        return parse(*inputs)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise ProbeError(node, f"its answer about {name} makes no sense ({_reason(error)})") from error


def parse_clock(values: Mapping[str, Any], sent_at: float, received_at: float) -> dict[str, float]:
    """Offset between two clocks from four readings (NTP, RFC 5905 section 8): the probe's own time falls out.

    What is left of the round trip may lie on one side: what a start-up file of the shell takes comes before the probe.
    So the offset is right to half of it.
    """
    remote: list[float] = [values["wall_start"], values["wall_end"]]
    if not all(isinstance(value, float) and math.isfinite(value) for value in remote):
        raise ValueError("no time")
    on_the_way_s = (received_at - sent_at) - (remote[1] - remote[0])
    return {
        "clock_offset_s": round(sum(remote) / 2 - (sent_at + received_at) / 2, 3),
        "clock_error_s": round(max(0.0, on_the_way_s / 2), 3),
    }


def parse_meminfo(text: str) -> int:
    match = re.search(r"^MemTotal:\s+(\d{1,18}) kB", text, re.MULTILINE)
    if not match:
        raise ValueError("no MemTotal")
    return int(match[1]) * 1024


def parse_os_release(text: str) -> str:
    """PRETTY_NAME of os-release(5)."""
    match = re.search(r"^PRETTY_NAME=[\"']?([^\"'\n]*)", text, re.MULTILINE)
    return clean(match[1]) if match else "unknown"


def parse_workdir(command: Command | None) -> dict[str, Any]:
    if error := failure(command):
        return {"workdir": "", "disk_free_bytes": 0, "workdir_error": error}
    found = mapping(loads((command or {})["out"]))
    path, error = found["path"], text_or_none(found["error"])
    if not isinstance(path, str) or not path.startswith("/") or not path.isprintable():
        raise ValueError("no absolute path")
    free = {
        "disk_free_bytes": found["free"],
        "disk_free_inodes": found.get("inodes"),
        "workdir_inode": found.get("inode"),
    }
    why = found.get("unfit")
    unfit = tuple(clean(words, MAX_WORDS) for words in at_most(why, 2)) if why else None
    return {"workdir": path, **free, "workdir_error": error, "workdir_unfit": unfit}


def parse_process(values: Mapping[str, Any]) -> dict[str, Any]:
    _, kernel, machine = values["uname"]
    python = values["python"]
    if len(python) != 3 or not all(isinstance(part, int) for part in python):
        raise ValueError("no python version")
    return {
        "hostname": clean(values["hostname"]),
        "kernel": clean(kernel),
        "machine": clean(machine),
        "cores": values["cores"],
        "cpu_vendor": text_or_none(values.get("cpu_vendor")),
        "shm_bytes": values["shm_bytes"],
        "user": clean(values["user"]),
        "uid": values["uid"],
        "python_version": ".".join(str(part) for part in python),
        "python_executable": clean(values["executable"], 4096),
    }


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_input=False, include_url=False)[0]
        return clean(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}")
    return clean(f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__)
