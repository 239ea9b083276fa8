"""Judges a host's facts for a job: reasons why it cannot take part, and warnings. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator

from orchestrator.errors import HostError, ProbeError
from orchestrator.hosts.facts import VISIBLE, NodeFacts, TorchFacts
from orchestrator.hosts.inventory import Node
from orchestrator.hosts.occupied import warnings as occupied
from orchestrator.hosts.wheels import OLDEST_TORCH, WHEELS_FOR, newest_for, numbers, supports
from orchestrator.units import counted, format_bandwidth, format_bytes

OLDEST_PYTHON = (3, 10)
SHM_BYTES = 1 << 30
DISK_BYTES = 1 << 30
INODES = 10_000
"""A job needs about a hundred, plus two per file of its code."""

CPU_REMEDY = "set `device: cpu` to train without it"
START_FABRIC = "`systemctl restart nvidia-fabricmanager` there, as root; its version has to be the driver's"
NO_FABRIC = ("802", "system not yet initialized")
"""CUDA's error until the fabric manager has started (cudaErrorSystemNotReady)."""

# Problem and remedy; both empty if all is well.
Finding = tuple[str, str]
FINE: Finding = ("", "")


def unusable(node: Node, facts: NodeFacts) -> HostError | None:
    """The first reason why this host cannot take part; None if it can."""
    for check in BLOCKING:
        problem, remedy = check(node, facts)
        if problem:
            return ProbeError(node.name, problem, remedy)
    return None


def gpu_warnings(node: Node, facts: NodeFacts) -> tuple[str, ...]:
    return tuple(f"{node.name}: {line}" for line in occupied(facts)) if wants_cuda(node, facts) else ()


def wants_cuda(node: Node, facts: NodeFacts) -> bool:
    """`device` is `cuda`, or `auto` and the host has or declares GPUs."""
    if node.device != "auto":
        return node.device == "cuda"
    return not node.paced and (bool(facts.gpus) or _declared(node) > 0)


# ---- what blocks ----------------------------------------------------------------------------------------------


def python(node: Node, facts: NodeFacts) -> Finding:
    if numbers(facts.python_version) >= OLDEST_PYTHON:
        return FINE
    problem = f"python {facts.python_version} ({facts.python_executable}) is too old"
    return problem, "set `python:` or `activate:` to a Python 3.10 or newer on that host"


def workdir(node: Node, facts: NodeFacts) -> Finding:
    if facts.workdir_unfit:
        problem, remedy = facts.workdir_unfit
        return f"its work folder: {problem}", remedy
    if not facts.workdir_error:
        return FINE
    problem = f"its work folder {facts.workdir or node.workdir} cannot be written ({facts.workdir_error})"
    if facts.disk_free_inodes == 0:
        return f"{problem}: no inode is free there", "delete files there (`df -i` counts them), or move `workdir:`"
    return problem, f"give user {facts.user} that folder, or set `workdir:` to another one"


def torch(node: Node, facts: NodeFacts) -> Finding:
    environment = "point `python:` or `activate:` at an environment with torch, or let `orch setup` make one"
    if facts.torch_error and facts.torch_is_slow:
        limit = facts.torch_error.removeprefix("no answer in ")
        remedy = (
            "look at the disk that this Python lies on (a network disk?) and at the load there; then `orch up` again"
        )
        return f"torch did not load within {limit} in {facts.python_executable}", remedy
    if facts.torch_error:
        return f"no torch in {facts.python_executable} ({facts.torch_error})", environment
    if not facts.torch:
        return FINE  # not asked for
    if numbers(facts.torch.version) < numbers(OLDEST_TORCH):
        return f"torch {facts.torch.version} is too old; {OLDEST_TORCH} is the oldest", environment
    if not facts.torch.gloo:
        return f"torch {facts.torch.version} has no distributed part (Gloo)", environment
    return FINE


def driver(node: Node, facts: NodeFacts) -> Finding:
    """A host with a broken GPU never becomes a CPU rank by itself: the job would wait for it at each step."""
    cpu = CPU_REMEDY
    if not facts.gpus and (wants_cuda(node, facts) or _is_broken(node, facts)):
        if not facts.gpu_error:
            return "no GPU found", f"look at `nvidia-smi` on that host, or {cpu}"
        if "version mismatch" in facts.gpu_error:
            return f"its driver is broken ({facts.gpu_error})", f"reboot the host: its driver was updated; or {cpu}"
        slow = "no answer" in facts.gpu_error
        awake = "`nvidia-smi -pm 1` there, as root, keeps its driver awake; " if slow else ""
        return f"no usable GPU ({facts.gpu_error})", f"{awake}look at `nvidia-smi` on that host, or {cpu}"
    return FINE


def gpus(node: Node, facts: NodeFacts) -> Finding:
    wanted, found = _declared(node), len(facts.gpus)
    if not found or not wants_cuda(node, facts):
        return FINE
    if found < wanted:
        problem = f"the inventory declares {wanted} GPUs, the host shows {found}"
        return problem, f"look at `nvidia-smi` and `dmesg` on that host, or correct `gpus:` of {node.name}"
    closed = [str(gpu.index) for gpu in facts.gpus if gpu.is_closed]
    if closed and found - len(closed) < (node.ranks or wanted or 1):
        problem = f"GPU {', '.join(closed)}: compute mode Prohibited, no program may use it"
        return problem, f"`nvidia-smi -c DEFAULT` on that host, as root, or {CPU_REMEDY}"
    return FINE


def fabric(node: Node, facts: NodeFacts) -> Finding:
    cuda_error = (facts.torch.cuda_error if facts.torch else None) or ""
    if wants_cuda(node, facts) and any(sign in cuda_error for sign in NO_FABRIC):
        return f"its GPUs wait for their NVSwitches ({cuda_error})", START_FABRIC
    return FINE


def cuda(node: Node, facts: NodeFacts) -> Finding:
    torch = facts.torch
    if not torch or not wants_cuda(node, facts):
        return FINE
    if not torch.cuda:
        remedy = f"install a CUDA build of torch and torchvision there{_by_setup(facts)}, or set `device: cpu`"
        return f"torch {torch.version} is a CPU build, but GPUs are to be used", remedy
    if not torch.devices:
        reason = f" ({torch.cuda_error})" if torch.cuda_error else ""
        remedy = f"update the driver, or install a torch built for an older CUDA than {torch.cuda}{_by_setup(facts)}"
        return f"torch {torch.version} cannot use the GPUs{reason}", remedy
    if torch.devices < _needed(node, facts):
        remedy = f"look at `nvidia-smi` (MIG mode?) and `dmesg` on that host, or set `gpus: {torch.devices}`"
        return _unequal(torch, facts), remedy
    return FINE


def kernels(node: Node, facts: NodeFacts) -> Finding:
    torch = facts.torch
    if not torch or not torch.arch_list or not wants_cuda(node, facts):
        return FINE
    for gpu in facts.gpus:
        if gpu.compute_capability and not supports(torch.arch_list, gpu.compute_capability):
            arch = f"sm_{gpu.compute_capability.replace('.', '')}"
            problem = f"torch {torch.version} has no code for its {gpu.name} ({arch}; built for {_span(torch)})"
            remedy = f"install a torch build whose list holds {arch}: older GPUs need an older CUDA, newer a newer"
            return problem, remedy + _by_setup(facts)
    return FINE


# ---- what to know ---------------------------------------------------------------------------------------------


def space(node: Node, facts: NodeFacts) -> Iterator[Finding]:
    if facts.shm_bytes < SHM_BYTES:
        size = format_bytes(facts.shm_bytes)
        remedy = "`mount -o remount,size=8G /dev/shm` there, as root; of a container `docker run --shm-size 8g`"
        yield f"/dev/shm holds only {size}, data loader workers may die of it", remedy  # noqa: S108
    if not facts.workdir_error and facts.disk_free_bytes < DISK_BYTES:
        remedy = f"delete files there (`du -xh {shlex.quote(facts.workdir)} | sort -h | tail`), or move `workdir:`"
        yield f"only {format_bytes(facts.disk_free_bytes)} free for {facts.workdir}", remedy
    inodes = facts.disk_free_inodes
    if not facts.workdir_error and inodes is not None and inodes < INODES:
        yield f"only {inodes} inodes free for {facts.workdir} (`df -i`)", "delete files there, or move `workdir:`"


def driver_warnings(node: Node, facts: NodeFacts) -> Iterator[Finding]:
    """Lost GPUs and memory errors next to working GPUs."""
    if wants_cuda(node, facts):
        for line in facts.gpu_warnings:
            yield f"nvidia-smi reports: {line}", "`dmesg | grep -i nvrm` there gives details; a lost GPU needs a reboot"


def interface(node: Node, facts: NodeFacts) -> Iterator[Finding]:
    if node.interface and not facts.training_interface(node.interface, node.address):
        yield f"it has no interface {node.interface}", "correct `interface:` (`ip -br addr` there lists them)"


def bound_address(
    node: Node, facts: NodeFacts, address: str, interface: str | None, others: Iterable[NodeFacts]
) -> Finding:
    """Gloo may bind another address than `address`; if another host has that one too, ranks connect to themselves."""
    bound = facts.bound_address(interface)
    if bound is None or bound == address:
        return FINE
    if not any(bound in other.addresses for other in others if other.boot_id != facts.boot_id):
        return FINE
    problem = f"{interface} has several addresses, and Gloo takes the first, {bound}, which other hosts have, too"
    return problem, (
        f"make {address} the first address of {interface} there (`ip addr del`, `ip addr add`), or give it an "
        "interface of its own (a VLAN or macvlan) and name that: `interface:`"
    )


def link(node: Node, facts: NodeFacts) -> Iterator[Finding]:
    used = facts.training_interface(node.interface, node.address)
    # A hundredth of tolerance: people round, and so do drivers.
    if used and used.speed_bps and node.bandwidth_bps and used.speed_bps < 0.99 * node.bandwidth_bps:
        declared = format_bandwidth(node.bandwidth_bps)
        problem = f"{used.name} runs at {format_bandwidth(used.speed_bps)}, below the {declared} declared"
        yield problem, f"look at its cable and its switch's port; `ethtool {used.name}` shows both ends"


def packages(node: Node, facts: NodeFacts) -> Iterator[Finding]:
    torch = facts.torch
    if not torch:
        return
    label = re.search(r"torch[-_:/ ]*v?(\d+(?:\.\d+)+)", node.image or "", re.IGNORECASE)
    if label and (named := numbers(label[1])) != numbers(torch.version)[: len(named)]:
        problem = f"image {node.image}, but torch {torch.version} found in {facts.python_executable}"
        yield problem, f"correct `image:` of {node.name}, or point `python:` at the Python of that image"
    if not torch.torchvision:
        reason = torch.torchvision_error or "not installed"
        remedy = f"install the version for torch {torch.version}, from the same source, or run `orch setup`"
        yield f"no torchvision ({reason})", remedy
    if wants_cuda(node, facts) and torch.cuda and not torch.nccl_available:
        words = f"torch {torch.version} has no NCCL, so Gloo carries the gradients everywhere, which is slower"
        yield words, f"install a build of torch with NCCL there{_by_setup(facts)}"


def other_gpus(node: Node, facts: NodeFacts) -> Iterator[Finding]:
    torch = facts.torch
    if torch and wants_cuda(node, facts) and torch.cuda and _needed(node, facts) <= torch.devices != len(facts.gpus):
        yield _unequal(torch, facts), "look at `nvidia-smi` (MIG mode?) and `dmesg` on that host"


BLOCKING: tuple[Callable[[Node, NodeFacts], Finding], ...] = (
    python,
    workdir,
    torch,
    driver,
    gpus,
    fabric,
    cuda,
    kernels,
)
"""`doctor/table.py` gives each check a name."""

# ---- small things ---------------------------------------------------------------------------------------------


def _declared(node: Node) -> int:
    """GPUs that the inventory promises; a label without `gpus` promises 1."""
    return node.gpus if node.gpus is not None else int(bool(node.gpu))


def _is_broken(node: Node, facts: NodeFacts) -> bool:
    """Whether an `auto` host has a failing driver, as opposed to no driver or no GPU."""
    harmless = ("command not found", "No devices were found", "not asked")
    failed = facts.gpu_error and not any(words in facts.gpu_error for words in harmless)
    return bool(failed) and node.device == "auto" and not node.paced


def _unequal(torch: TorchFacts, facts: NodeFacts) -> str:
    return f"torch {torch.version} sees {counted(torch.devices, 'GPU')}, nvidia-smi shows {len(facts.gpus)}"


def _needed(node: Node, facts: NodeFacts) -> int:
    return node.ranks or node.gpus or (1 if VISIBLE in node.env else len(facts.gpus))


def _by_setup(facts: NodeFacts) -> str:
    if facts.machine != WHEELS_FOR:
        return ""
    here = [facts.torch.version.partition("+")[0]] if facts.torch else []  # setup keeps a release that is there
    torch = newest_for(facts.gpus, but=here)
    return f" (`orch setup --torch {torch}` on all hosts, or an index of your own by PIP_INDEX_URL)" if torch else ""


def _span(torch: TorchFacts) -> str:
    return f"{torch.arch_list[0]} to {torch.arch_list[-1]}"
