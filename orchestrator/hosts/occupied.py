"""Who else is on a host's GPUs, and whether that leaves room for a job.

    warnings(facts)       "GPU 0 (Tesla V100-PCIE-16GB) is in use by alice's python3 train.py (pid 4711, 8.2GiB)"
    judge("v100", facts, node.gpu_uuids, needed_bytes, share=False).refusal       a HostError, with what to try

nvidia-smi reports the processes and the memory that is in use. In a container it may report the memory alone.
"""

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
from orchestrator.text import one_line, some
from orchestrator.units import format_bytes

if TYPE_CHECKING:
    from orchestrator.hosts.facts import Gpu, NodeFacts, Occupant


SHOWN = 3
UNREPORTED_BYTES = 1 << 30
"""Less than this may be the driver's own, or a desktop's. Assumed."""
WAIT = "wait until it is free (`--wait`), or take other hosts (`--nodes`, `--hosts`)"
ELSEWHERE = f"{WAIT}, or share it: `--share`"
NOT_EXCLUSIVE = "its administrator changes the mode: `nvidia-smi -c DEFAULT`"


class OccupiedError(HostError):
    """Others are on a GPU that the job is to have; that may pass."""


@dataclass(frozen=True)
class GpusSeen:
    """Before a start: what a person should know, a line each, and why the job cannot start on this host, if so."""

    lines: tuple[str, ...] = ()
    refusal: HostError | None = None


def warnings(facts: NodeFacts) -> Iterator[str]:
    """A line for each GPU that somebody is on."""
    for gpu in facts.gpus:
        if words := _occupants(gpu):
            yield _used(gpu, words)


def without_jobs(facts: NodeFacts, jobs: Collection[str]) -> NodeFacts:
    """The same without these jobs' processes, and without the GPUs that nobody else is on."""
    left = [(gpu, tuple(each for each in gpu.occupants if each.job not in jobs)) for gpu in facts.gpus]
    gpus = (gpu.model_copy(update={"occupants": others}) for gpu, others in left if others or not gpu.occupants)
    return facts.model_copy(update={"gpus": tuple(gpus)})


def judge(node: str, found: NodeFacts | HostError, uuids: Sequence[str], needed_bytes: int, *, share: bool) -> GpusSeen:
    """found: by a look at the host just now. uuids: the GPUs that the job is to have, with about so many bytes needed
    on each. share: the person wants them all the same, where that can work at all.
    """
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
    """Who is on it, those with the most memory first; "" where nobody is."""
    if gpu.occupants:
        return some([_one(each) for each in sorted(gpu.occupants, key=lambda each: -(each.memory_bytes or 0))], SHOWN)
    if gpu.memory_used_bytes < UNREPORTED_BYTES:
        return ""
    return f"programs that nvidia-smi does not name there ({format_bytes(gpu.memory_used_bytes)} of its memory)"


def _one(occupant: Occupant) -> str:
    """`alice's python3 train.py (pid 4711, 8.2GiB)`."""
    memory = "" if occupant.memory_bytes is None else f", {format_bytes(occupant.memory_bytes)}"
    what = f"job {occupant.job}" if occupant.job else occupant.command or "a program"
    whose = f"{occupant.user}'s " if occupant.user else ""
    return one_line(f"{whose}{what} (pid {occupant.pid}{memory})")


# What an inventory would have this very machine run, and whether its person has allowed it.
#
#     if commands := not_allowed(home, nodes):    # "desk: activate: . ~/venv/bin/activate"
#         ...                                     # ask, then allow(home, commands)
#
# `transport: local` makes nodes of this machine, without a login in between: a file from somebody else could run
# anything
# here at `orch up`. What its local nodes would run is therefore asked about once, and again whenever a value changes:
# consent is kept as one digest a node, keyed by this $ORCH_HOME, so that no value of `env` can be read from it. A node
# that names nothing but `python3`, or the Python that orch itself runs in, runs our own programs alone: nobody is
# asked.


@dataclass(frozen=True)
class Command:
    """What one key of a node would run. As text it shows no value of `env`, which may be a secret."""

    node: str
    key: str
    """The inventory's name for it, for example `activate`."""
    value: str

    def __str__(self) -> str:
        return f"{self.node}: {self.key}" + ("" if self.key.startswith("env ") else f": {self.value}")


_KNOWN_PYTHONS = frozenset({"python3", sys.executable, os.path.realpath(sys.executable)})


def local_commands(nodes: Sequence[Node]) -> tuple[Command, ...]:
    """Everything that local nodes among these would run here, or run it with."""
    return tuple(command for node in nodes if node.transport == "local" for command in _commands(node))


def not_allowed(home: Home, nodes: Sequence[Node]) -> tuple[Command, ...]:
    """The same, of the nodes that their person has not allowed as they are now."""
    found = [local_commands([node]) for node in nodes]
    return tuple(command for commands in found if not _is_allowed(home, commands) for command in commands)


def allow(home: Home, commands: Sequence[Command]) -> None:
    """commands: all those of each node, as `not_allowed` gives them."""
    for name in dict.fromkeys(command.node for command in commands):
        own = [command for command in commands if command.node == name]
        write_atomic(home.allowed(_digest(home, own)), "".join(f"{one.node}: {one.key}\n" for one in own))


def _is_allowed(home: Home, commands: Sequence[Command]) -> bool:
    return not commands or home.allowed(_digest(home, commands)).exists()


def _commands(node: Node) -> list[Command]:
    keys = {"activate": node.activate, "prepare": node.prepare}
    if node.python not in _KNOWN_PYTHONS:
        keys["python"] = node.python
    # A number names no program and no library.
    variables = [name for name, value in node.env.items() if not re.fullmatch(r"[0-9.]*", value)]
    found = [Command(node.name, key, value) for key, value in keys.items() if value]
    return [*found, *(Command(node.name, f"env {name}", node.env[name]) for name in variables)]


def _digest(home: Home, commands: Sequence[Command]) -> str:
    content = json.dumps([astuple(command) for command in commands]).encode()
    return hmac.new(read_owner(home).id.encode(), content, "sha256").hexdigest()
