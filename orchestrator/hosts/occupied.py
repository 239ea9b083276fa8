"""Reports other users of a host's GPUs, and commands of an inventory that need consent on this machine."""

from __future__ import annotations

import hmac
import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from orchestrator.errors import HostError
from orchestrator.files import write_atomic
from orchestrator.hosts.inventory import Node
from orchestrator.owner import read_owner
from orchestrator.paths import Home
from orchestrator.units import format_bytes, one_line, some

if TYPE_CHECKING:
    from orchestrator.hosts.facts import Gpu, NodeFacts, Occupant


SHOWN = 3
UNREPORTED_BYTES = 1 << 30
"""Less may be the driver's own use, or a desktop's. Assumed."""
WAIT = "wait until it is free (`--wait`), or take other hosts (`--nodes`, `--hosts`)"
ELSEWHERE = f"{WAIT}, or share it: `--share`"
NOT_EXCLUSIVE = "its administrator changes the mode: `nvidia-smi -c DEFAULT`"


class OccupiedError(HostError):
    """May pass: other programs use a GPU of the job."""


@dataclass(frozen=True)
class GpusSeen:
    lines: tuple[str, ...] = ()
    refusal: HostError | None = None


def warnings(facts: NodeFacts) -> Iterator[str]:
    for gpu in facts.gpus:
        if words := _occupants(gpu):
            yield _used(gpu, words)


def without_jobs(facts: NodeFacts, jobs: Collection[str]) -> NodeFacts:
    """Removes these jobs' processes, and GPUs that only they use."""
    left = [(gpu, tuple(each for each in gpu.occupants if each.job not in jobs)) for gpu in facts.gpus]
    gpus = (gpu.model_copy(update={"occupants": others}) for gpu, others in left if others or not gpu.occupants)
    return facts.model_copy(update={"gpus": tuple(gpus)})


def judge(node: str, found: NodeFacts | HostError, uuids: Sequence[str], needed_bytes: int, *, share: bool) -> GpusSeen:
    """found: a fresh probe. uuids: the job's GPUs. share: use occupied GPUs if possible."""
    if isinstance(found, HostError):
        return GpusSeen((f"{found.message}; who else uses its GPUs is unknown",))
    if found.gpu_error:
        return GpusSeen((f"{node}: nvidia-smi: {found.gpu_error}; who else uses its GPUs is unknown",))
    there = {gpu.uuid: gpu for gpu in found.gpus}
    if gone := [uuid for uuid in uuids if uuid not in there]:
        return GpusSeen((), HostError(node, f"its GPU {gone[0]} is no longer there", "`orch up` again"))
    own = [there[uuid] for uuid in uuids]
    refusals = [error for gpu in own if (error := _refusal(node, gpu, needed_bytes, share))]
    if refusals:
        return GpusSeen((), refusals[0])
    return GpusSeen(tuple(f"{node}: {line}" for line in warnings(found.model_copy(update={"gpus": tuple(own)}))))


def _refusal(node: str, gpu: Gpu, needed_bytes: int, share: bool) -> HostError | None:
    if not (who := _occupants(gpu)):
        return None
    if gpu.compute_mode.startswith("Exclusive"):
        return OccupiedError(
            node, f"{_used(gpu, who)}, and it is in exclusive compute mode", f"{WAIT}; or {NOT_EXCLUSIVE}"
        )
    free = gpu.memory_bytes - gpu.memory_used_bytes
    if share or not gpu.memory_bytes or free >= min(needed_bytes, gpu.memory_bytes - UNREPORTED_BYTES):
        return None
    room = f"{format_bytes(free)} of {format_bytes(gpu.memory_bytes)} are free on {_name(gpu)}"
    words = f"{room}, and the job needs about {format_bytes(needed_bytes)}; on it: {who}"
    return OccupiedError(node, words, ELSEWHERE)


def _used(gpu: Gpu, who: str) -> str:
    return f"{_name(gpu)} is in use by {who}"


def _name(gpu: Gpu) -> str:
    return f"GPU {gpu.index} ({gpu.name})"


def _occupants(gpu: Gpu) -> str:
    """Largest first; "" if the GPU is free. In a container nvidia-smi may report memory without processes."""
    if gpu.occupants:
        return some([_one(each) for each in sorted(gpu.occupants, key=lambda each: -(each.memory_bytes or 0))], SHOWN)
    if gpu.memory_used_bytes < UNREPORTED_BYTES:
        return ""
    return f"programs that nvidia-smi does not name there ({format_bytes(gpu.memory_used_bytes)} of its memory)"


def _one(occupant: Occupant) -> str:
    memory = "" if occupant.memory_bytes is None else f", {format_bytes(occupant.memory_bytes)}"
    what = f"job {occupant.job}" if occupant.job else occupant.command or "a program"
    whose = f"{occupant.user}'s " if occupant.user else ""
    return one_line(f"{whose}{what} (pid {occupant.pid}{memory})")


# Consent to commands of `transport: local` nodes. Such nodes need no login, so a file from somebody else could run
# anything on this machine at `orch up`. Their commands are asked about once, and again after any change. Consent is
# stored as one digest per node, keyed by this $ORCH_HOME, so that no value of `env` can be read from it. A node that
# sets only `python3` or orch's own Python runs only our programs and needs no consent.


@dataclass(frozen=True)
class Command:
    """Its text shows no value of `env`, which may be a secret."""

    node: str
    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.node}: {self.key}" + ("" if self.key.startswith("env ") else f": {self.value}")


_KNOWN_PYTHONS = frozenset({"python3", sys.executable, os.path.realpath(sys.executable)})


def local_commands(nodes: Sequence[Node]) -> tuple[Command, ...]:
    """Everything that local nodes would run here, or run with."""
    return tuple(command for node in nodes if node.transport == "local" for command in _commands(node))


def not_allowed(home: Home, nodes: Sequence[Node]) -> tuple[Command, ...]:
    """Commands of nodes that are not allowed in their present form."""
    found = [local_commands([node]) for node in nodes]
    return tuple(command for commands in found if not _is_allowed(home, commands) for command in commands)


def allow(home: Home, commands: Sequence[Command]) -> None:
    """commands: complete for each node."""
    for name in dict.fromkeys(command.node for command in commands):
        own = [command for command in commands if command.node == name]
        write_atomic(home.allowed(_digest(home, own)), "".join(f"{one.node}: {one.key}\n" for one in own))


def _is_allowed(home: Home, commands: Sequence[Command]) -> bool:
    return not commands or home.allowed(_digest(home, commands)).exists()


def _commands(node: Node) -> list[Command]:
    keys = {"activate": node.activate, "prepare": node.prepare}
    if node.python not in _KNOWN_PYTHONS:
        keys["python"] = node.python
    # A number can name no program or library.
    variables = [name for name, value in node.env.items() if not re.fullmatch(r"[0-9.]*", value)]
    found = [Command(node.name, key, value) for key, value in keys.items() if value]
    return [*found, *(Command(node.name, f"env {name}", node.env[name]) for name in variables)]


def _digest(home: Home, commands: Sequence[Command]) -> str:
    content = json.dumps([astuple(command) for command in commands]).encode()
    return hmac.new(read_owner(home).id.encode(), content, "sha256").hexdigest()
