"""What one host's GPUs and their driver are like: `host -> (what was seen, remedy)`, one function a check. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.doctor.seen import Host
from orchestrator.hosts import checks
from orchestrator.hosts.checks import Finding
from orchestrator.hosts.health import GpuHealth
from orchestrator.hosts.occupied import ELSEWHERE, NOT_EXCLUSIVE, WAIT, without_jobs
from orchestrator.hosts.occupied import warnings as occupied
from orchestrator.jobs.gpu_reading import POWER_CAP, SYNC_BOOST, slowed_by_words

IN_ORDER = POWER_CAP | SYNC_BOOST
"""What a card in order may be slowed by."""
NEAR = 0.99
"""Of a limit: drivers round."""


def kernels(host: Host) -> Iterator[Finding]:
    if checks.fabric(host.node, host.facts)[0] or not host.facts.gpus or checks.gpus(host.node, host.facts)[0]:
        return  # P11, P06 and P08 say why
    found = [check(host.node, host.facts) for check in (checks.cuda, checks.kernels)]
    yield from [finding for finding in found if finding[0]][:1]
    if any(finding[0] for finding in found):
        return
    in_use = {gpu.index for gpu in host.gpus if gpu.occupants}
    for gpu in _health(host):
        if gpu.computes and gpu.index not in in_use:  # else it may be full, or another's alone: P09
            remedy = f"`dmesg | grep -i xid` there says why; `nvidia-smi --gpu-reset -i {gpu.index}` may help, as root"
            yield f"GPU {gpu.index} computes nothing ({gpu.computes})", remedy


def other_count(host: Host) -> Iterator[Finding]:
    return checks.other_gpus(host.node, host.facts) if host.facts.gpus else iter(())


def on_them(host: Host) -> Iterator[Finding]:
    """Whoever is on them, jobs of ours, too."""
    return ((line, ELSEWHERE) for line in occupied(host.facts.model_copy(update={"gpus": host.gpus})))


def in_use(host: Host) -> Iterator[Finding]:
    """By processes that belong to no job of ours, beside which there may be room."""
    return ((line, ELSEWHERE) for line in _used(host, exclusively=False))


def taken(host: Host) -> Iterator[Finding]:
    """The same where one process may have a GPU for itself."""
    for line in _used(host, exclusively=True):
        yield f"{line}, and it is in exclusive compute mode", f"{WAIT}; or {NOT_EXCLUSIVE}"


def _used(host: Host, *, exclusively: bool) -> Iterator[str]:
    jobs = {each.job for gpu in host.gpus for each in gpu.occupants if each.job}
    gpus = [gpu for gpu in host.gpus if gpu.compute_mode.startswith("Exclusive") == exclusively]
    return occupied(without_jobs(host.facts.model_copy(update={"gpus": tuple(gpus)}), jobs))


def health(host: Host) -> Iterator[Finding]:
    for gpu in _health(host):
        yield from _health_of(gpu)


def _health_of(gpu: GpuHealth) -> Iterator[Finding]:
    name, exclude = f"GPU {gpu.index}", "leave it out (`env: {CUDA_VISIBLE_DEVICES: ...}` names the others)"
    if gpu.uncorrected:
        yield f"{name} has had {gpu.uncorrected} memory errors that could not be corrected", f"replace it, or {exclude}"
    if gpu.replacement_failed:
        yield f"{name} has no spare rows left for its memory's faults", f"replace it, or {exclude}"
    if gpu.replacement_due:
        yield f"{name} has faulty memory that a reset would replace", f"`nvidia-smi --gpu-reset -i {gpu.index}` as root"
    if reason := slowed_by_words((gpu.slowed_by or 0) & ~IN_ORDER):
        remedy = f"look at its fans, its air and its power cables; `nvidia-smi -q -d PERFORMANCE -i {gpu.index}`"
        yield f"{name} is slowed by {reason}", remedy
    if gpu.clock_mhz and gpu.default_clock_mhz and gpu.clock_mhz < NEAR * gpu.default_clock_mhz:
        seen = f"{name} is set to {gpu.clock_mhz:.0f} MHz, below its own {gpu.default_clock_mhz:.0f}"
        yield seen, f"`nvidia-smi -rac -i {gpu.index}` as root"
    if gpu.limit_watts and gpu.default_limit_watts and gpu.limit_watts < NEAR * gpu.default_limit_watts:
        seen = f"{name} may draw {gpu.limit_watts:.0f} W, below its own {gpu.default_limit_watts:.0f}"
        yield seen, f"`nvidia-smi -pl {gpu.default_limit_watts:.0f} -i {gpu.index}` as root"
    if gpu.link_width and gpu.most_link_width and gpu.link_width < gpu.most_link_width:
        seen = f"{name} has {gpu.link_width} of its {gpu.most_link_width} PCIe lanes"
        yield seen, "reseat the card, or move it to a slot with more lanes"


def fabric(host: Host) -> Iterator[Finding]:
    waiting = [gpu.index for gpu in _health(host) if gpu.fabric in ("In Progress", "Not Started")]
    if (found := checks.fabric(host.node, host.facts))[0]:
        yield found
    elif waiting:
        yield f"GPU {', '.join(map(str, waiting))}: the NVSwitch fabric is not ready", checks.START_FABRIC


def peer_access(host: Host) -> Iterator[Finding]:
    translated = [str(gpu.index) for gpu in _health(host) if (gpu.iommu or "").startswith("DMA")]
    if host.ranks > 1 and len(translated) > 1:
        remedy = "`iommu=pt` on its kernel's command line, or NCCL_P2P_DISABLE=1 in its `env:` (slower)"
        yield f"the IOMMU stands between GPU {' and '.join(translated)}", remedy


def _health(host: Host) -> list[GpuHealth]:
    used = {gpu.index for gpu in host.gpus}
    return [gpu for gpu in host.health.gpus if gpu.index in used]
