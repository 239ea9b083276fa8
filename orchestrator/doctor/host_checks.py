"""Checks of a single host and its GPUs: each function yields problems with their remedies. Pure."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Iterator

from orchestrator.doctor.observations import Host
from orchestrator.hosts import checks
from orchestrator.hosts.checks import Finding
from orchestrator.hosts.facts import GpuHealth
from orchestrator.hosts.occupied import ELSEWHERE, NOT_EXCLUSIVE, WAIT, without_jobs
from orchestrator.hosts.occupied import warnings as occupied
from orchestrator.jobs.live_stats import POWER_CAP, SYNC_BOOST, slowed_by_words
from orchestrator.units import counted, format_bytes, format_duration, some

SLOW_LOGIN_S = 5.0
NOFILE, NPROC = 1024, 2048
"""Needs of a rank with some loader workers: files and sockets, threads and processes."""
MEMLOCK_BYTES = 1 << 30
"""InfiniBand locks its buffers in memory. Assumed."""
GROUP_BYTES = 8 << 30
MEMORY_BYTES = 1 << 30
YOUNG_S = 600.0
SLOW_CARD_BPS = 100e6
CRC_PART, CRC_COUNT = 1e-6, 100
"""More damaged packets than any sound cable causes."""
NOT_FOR_TRAINING = ("docker", "veth", "virbr", "br-", "lxc", "cni", "flannel", "cali")


_OTHER_CARD = "set `interface:` to the card that leads to the other hosts (`ip -br addr` there lists them)"


def login(host: Host) -> Iterator[Finding]:
    if host.login_s > SLOW_LOGIN_S:
        remedy = "`UseDNS no` in its /etc/ssh/sshd_config, then reload sshd; or shorten its shell's start-up files"
        yield f"its login takes {format_duration(host.login_s)}", remedy


def login_limits(host: Host) -> Iterator[Finding]:
    if host.logins_tried > 1:
        words = f"its SSH server hung up {counted(host.logins_tried - 1, 'time')} before a login got through"
        yield words, "raise `MaxStartups` in its /etc/ssh/sshd_config (`MaxStartups 100:30:200`), then reload sshd"


def own_name(host: Host) -> Iterator[Finding]:
    """Gloo and other launchers resolve it if no interface is named; `orch run` names one."""
    addresses = host.facts.hostname_addresses
    local = [address for address in addresses if ipaddress.ip_address(address).is_loopback]
    remedy = (
        "`orch run` is not affected. For other launchers, add a line `ADDRESS NAME` with this host's own address and "
        "name to its /etc/hosts"
    )
    if not addresses:
        yield "its own name (`hostname`) leads to no address", remedy
    elif local == list(addresses) and host.address not in local:
        yield f"its own name (`hostname`) leads to {local[0]}", remedy


def link_down(host: Host) -> Iterator[Finding]:
    link = host.facts.training_interface(host.node.interface, host.node.address)
    if link and not link.up:
        remedy = f"`ip link set {shlex.quote(link.name)} up` there, as root, or plug it in"
        yield f"{link.name}, its interface for training, is down", remedy


def interface(host: Host) -> Iterator[Finding]:
    yield from checks.interface(host.node, host.facts)
    link = host.facts.training_interface(host.node.interface, host.node.address)
    if link and link.name.startswith(NOT_FOR_TRAINING):
        yield f"{link.name}, its interface for training, belongs to containers", _OTHER_CARD


def card(host: Host) -> Iterator[Finding]:
    yield from checks.link(host.node, host.facts)
    link = host.facts.training_interface(host.node.interface, host.node.address)
    known = host.health.cards.get(link.name) if link else None
    if not link or not known:
        return
    remedy = f"look at its cable and its switch's port; `ethtool {link.name}` shows both ends"
    if known.duplex == "half":
        yield f"{link.name} runs half duplex", remedy
    elif link.speed_bps and link.speed_bps <= SLOW_CARD_BPS and not host.node.bandwidth_bps:
        yield f"{link.name} runs at {link.speed_bps / 1e6:.0f} Mbps", remedy
    if known.crc_errors >= CRC_COUNT and known.crc_errors > CRC_PART * known.packets:
        yield f"{link.name} has received {known.crc_errors} damaged packets (CRC)", remedy


def locked_memory(host: Host) -> Iterator[Finding]:
    limit = host.health.limits.get("memlock")
    if limit and limit.soft is not None and limit.soft < MEMLOCK_BYTES:
        remedy = "`* - memlock unlimited` in its /etc/security/limits.conf, then log in again; or NCCL_IB_DISABLE=1"
        yield f"a session may lock {format_bytes(limit.soft)} of memory (`ulimit -l`)", remedy


def limits(host: Host) -> Iterator[Finding]:
    for name, least, flag in (("nofile", NOFILE, "-n"), ("nproc", NPROC, "-u")):
        limit = host.health.limits.get(name)
        if limit and limit.soft is not None and limit.soft < least:
            what = "files" if name == "nofile" else "processes and threads"
            raised = f"`{host.facts.user} - {name} {16 * least}` in its /etc/security/limits.conf, then log in again"
            yield f"a session may have {limit.soft} {what} (`ulimit {flag}`)", raised


def group_limits(host: Host) -> Iterator[Finding]:
    health, slice_ = host.health, f"user-{host.facts.uid}.slice"
    if health.group_memory_bytes is not None and health.group_memory_bytes < min(GROUP_BYTES, host.facts.memory_bytes):
        of = f"of the host's {format_bytes(host.facts.memory_bytes)}"
        remedy = f"`systemctl set-property {slice_} MemoryMax=infinity` there, as root, or give its container more"
        yield f"its control group may use {format_bytes(health.group_memory_bytes)} {of}", remedy
    if health.group_pids is not None and health.group_pids < NPROC:
        remedy = f"`systemctl set-property {slice_} TasksMax=infinity` there, as root, or give its container more"
        yield f"its control group may have {health.group_pids} processes and threads", remedy
    if health.group_cpus is not None and health.group_cpus < host.facts.cores:
        threads = max(1, int(health.group_cpus))
        remedy = f"`env: {{OMP_NUM_THREADS: {threads}}}` for it, or `docker run --cpus {host.facts.cores}`"
        yield f"its control group may use {health.group_cpus:g} of its {host.facts.cores} cores", remedy


def memory(host: Host) -> Iterator[Finding]:
    left = host.health.available_bytes
    if left is not None and left < min(MEMORY_BYTES, host.facts.memory_bytes / 8):
        remedy = "`ps aux --sort=-rss | head` there shows who has it: wait, or end it"
        yield f"only {format_bytes(left)} of its {format_bytes(host.facts.memory_bytes)} memory are free", remedy


def leftovers(host: Host) -> Iterator[Finding]:
    """torchrun obeys them; `remote/programs.py` starts our jobs without them."""
    found = [name for name in host.health.environment if _steers_ranks(name)]
    if found:
        look = f"`grep -n {shlex.quote(found[0])} ~/.bashrc ~/.profile /etc/environment /etc/profile.d/*`"
        remedy = f"`orch run` ignores them, other launchers obey: {look} there, and remove them"
        yield f"a session has {', '.join(found)}", remedy


def _steers_ranks(name: str) -> bool:
    return name.startswith(("PET_", "TORCHELASTIC_", "MASTER_")) or name.endswith(("RANK", "WORLD_SIZE"))


def outlives(host: Host) -> Iterator[Finding]:
    if host.outlives is False and host.node.transport != "slurm":  # a keeper step outlives it there
        yield "what is started there ends with its SSH connection", _spared(host)


def may_end_with_it(host: Host) -> Iterator[Finding]:
    if host.outlives is None and host.health.kills_left:
        yield "KillUserProcesses ends what is started there with its session", _spared(host)


def _spared(host: Host) -> str:
    """Lingering does not help: it keeps the user's own manager, which is no parent of a session's processes."""
    setting = f"`KillExcludeUsers=root {host.facts.user}` in its /etc/systemd/logind.conf"
    return f"{setting}, then `systemctl restart systemd-logind`, as root"


def reboot(host: Host) -> Iterator[Finding]:
    due = host.health.reboot
    if due is not None:
        why = f" (for {some(due, 3)})" if due else ""
        yield f"a reboot is due{why}", "`reboot` there, as root, before a long job"


def young(host: Host) -> Iterator[Finding]:
    if host.node.transport != "local" and 0 < host.health.uptime_s < YOUNG_S:  # this machine's start is no news
        remedy = "`last -x reboot` and `journalctl -eb -1` there show whether it crashed"
        yield f"it came up {format_duration(host.health.uptime_s)} ago", remedy


# Checks of one host's GPUs and their driver.

IN_ORDER = POWER_CAP | SYNC_BOOST
"""Clock limits of a healthy card."""
NEAR = 0.99
"""Share of a limit, since drivers round."""


def kernels(host: Host) -> Iterator[Finding]:
    if checks.fabric(host.node, host.facts)[0] or not host.facts.gpus or checks.gpus(host.node, host.facts)[0]:
        return  # P11, P06 and P08 report it
    found = [check(host.node, host.facts) for check in (checks.cuda, checks.kernels)]
    yield from [finding for finding in found if finding[0]][:1]
    if any(finding[0] for finding in found):
        return
    in_use = {gpu.index for gpu in host.gpus if gpu.occupants}
    for gpu in _health(host):
        if gpu.computes and gpu.index not in in_use:  # else it may be full, or in another's exclusive use: P09
            remedy = f"`dmesg | grep -i xid` there shows why; `nvidia-smi --gpu-reset -i {gpu.index}` may help, as root"
            yield f"GPU {gpu.index} computes nothing ({gpu.computes})", remedy


def other_count(host: Host) -> Iterator[Finding]:
    return checks.other_gpus(host.node, host.facts) if host.facts.gpus else iter(())


def on_them(host: Host) -> Iterator[Finding]:
    """All programs on its GPUs, including our jobs."""
    return ((line, ELSEWHERE) for line in occupied(host.facts.model_copy(update={"gpus": host.gpus})))


def in_use(host: Host) -> Iterator[Finding]:
    """Programs that belong to no job of ours, on GPUs that may have room for more."""
    return ((line, ELSEWHERE) for line in _used(host, exclusively=False))


def taken(host: Host) -> Iterator[Finding]:
    """Like `in_use`, for GPUs in exclusive mode."""
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
