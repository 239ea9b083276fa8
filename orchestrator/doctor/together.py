"""Checks that compare hosts with each other. Pure."""

from __future__ import annotations

import ipaddress
import re
import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

from orchestrator.doctor.observations import Host, Observations, RawFinding
from orchestrator.hosts import checks
from orchestrator.hosts.cluster import masked_env
from orchestrator.hosts.exec import host_set
from orchestrator.hosts.wheels import numbers
from orchestrator.planning.nccl import GpuHost, unlike_versions
from orchestrator.units import counted, format_duration, some

NETWORK_DISKS = re.compile(
    r"nfs.*|cifs|smb.*|lustre|ceph|glusterfs|gpfs|beegfs|9p|virtiofs|fuse\..*|afs|ocfs2|gfs2|orangefs"
)
COMPARED = re.compile(r"(NCCL|TORCH|PYTORCH|GLOO|TP|UCX)_.*|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH")
OF_PLAN = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG"}
"""`orch run` sets these for each host."""
UNSET = "(not set)"
CLOCK_S = 30.0
_OWN_ADDRESS = "set `address:` in the inventory to the one that the others reach (`ip -br addr` there lists them)"

Value = TypeVar("Value", bound=Hashable)


def versions(seen: Observations) -> Iterator[RawFinding]:
    hosts = seen.hosts
    everybody = tuple(host.name for host in hosts)
    nccl = unlike_versions([GpuHost(host.node, host.facts, host.ranks) for host in hosts if host.trains_on_gpus])
    if nccl:
        gpu_hosts = tuple(host.name for host in hosts if host.trains_on_gpus)
        yield RawFinding(gpu_hosts, nccl.message, nccl.remedy, "block")
    torches = _by(hosts, lambda host: _minor(host.facts.torch.version) if host.facts.torch else None)
    if len(torches) > 1:
        remedy = "`orch setup --torch X.Y.Z` gives all of them one; scripts of your own may hang otherwise"
        yield RawFinding(everybody, f"torch is not the same everywhere: {_named(torches)}", remedy, "warn")
    pythons = _by(hosts, lambda host: _minor(host.facts.python_version))
    if len(pythons) > 1:
        remedy = "set `python:` of each to the same version: what one pickles another may not load"
        yield RawFinding(everybody, f"Python is not the same everywhere: {_named(pythons)}", remedy, "warn")


def machines(seen: Observations) -> Iterator[RawFinding]:
    """Containers of one machine share the kernel's boot id; clones of a disk image do not."""
    for hosts in _groups(seen.hosts, lambda host: host.facts.boot_id or None):
        names = tuple(host.name for host in hosts)
        shared = {gpu.uuid for gpu in hosts[0].gpus}.intersection(
            *({gpu.uuid for gpu in one.gpus} for one in hosts[1:])
        )
        named = [host for host in hosts if "CUDA_VISIBLE_DEVICES" in host.node.env]
        if shared and len(named) < len(hosts):
            remedy = "take one entry for the machine, or CUDA_VISIBLE_DEVICES in each one's `env:`"
            yield RawFinding(
                names, f"they are one machine, with {counted(len(shared), 'GPU')} in common", remedy, "block"
            )
        elif any(host.node.transport == "ssh" for host in hosts):
            yield RawFinding(
                names, "they are one machine", "take one entry for it, unless that is what you want", "warn"
            )
    for hosts in _groups(seen.hosts, lambda host: host.address):
        if len({host.facts.boot_id for host in hosts}) > 1:
            names = tuple(host.name for host in hosts)
            yield RawFinding(
                names, f"they have one training address, {hosts[0].address}", "set `address:` of each", "block"
            )


def families(seen: Observations) -> Iterator[RawFinding]:
    found = _by(seen.hosts, lambda host: f"IPv{ipaddress.ip_address(host.address).version}" if host.address else None)
    if len(found) > 1:
        names = tuple(host.name for host in seen.hosts)
        yield RawFinding(
            names, f"training addresses are of two kinds: {_named(found)}", "set `address:` to IPv4 everywhere"
        )


def routes(seen: Observations) -> Iterator[RawFinding]:
    boots = {host.facts.boot_id for host in seen.hosts}
    for host in seen.hosts:
        lost = [other.name for other in seen.hosts if _place(other) in host.facts.unrouted]
        if lost:
            yield RawFinding((host.name,), f"it has no route to {host_set(lost)}", _route(seen, lost), "block")
        if not host.address:
            yield RawFinding((host.name,), "its training address is unknown", _OWN_ADDRESS, "block")
        elif len(boots) > 1 and ipaddress.ip_address(host.address).is_loopback:
            words = f"its training address is {host.address}, which no other machine reaches"
            yield RawFinding((host.name,), words, _OWN_ADDRESS, "block")


def bound_addresses(seen: Observations) -> Iterator[RawFinding]:
    for host in seen.hosts:
        own = host.address or host.node.address or next((route.source for route in host.facts.routes), None)
        link = host.facts.training_interface(host.node.interface, own)
        others = [other.facts for other in seen.hosts if other is not host]
        if own and link:
            words, remedy = checks.bound_address(host.node, host.facts, own, link.name, others)
            if words:
                yield RawFinding((host.name,), words, remedy, "block")


def _route(seen: Observations, lost: Sequence[str]) -> str:
    return f"`ip route add {_place(seen.host(lost[0]))} via GATEWAY` there, as root; or set `address:` of both"


def packet_sizes(seen: Observations) -> Iterator[RawFinding]:
    def mtu(host: Host) -> str | None:
        link = host.facts.training_interface(host.node.interface, host.node.address)
        return str(link.mtu) if link and link.mtu else None

    found = _by([host for host in seen.hosts if not _is_local(host)], mtu)
    if len(found) > 1:
        smallest = min(found, key=int)
        names = tuple(host.name for host in seen.hosts)
        larger = host_set([name for size, held in found.items() if size != smallest for name in held])
        remedy = f"`ip link set IFACE mtu {smallest}` on {larger}, as root; or the larger MTU on all hosts and switches"
        yield RawFinding(names, f"the MTU is not the same everywhere: {_named(found)}", remedy, "warn")


def clocks(seen: Observations) -> Iterator[RawFinding]:
    """Relative to the median of three or more; with fewer it is unknown which clock is wrong."""
    offsets = [host.facts.clock_offset_s for host in seen.hosts]
    middle = statistics.median(offsets) if len(offsets) > 2 else 0.0
    for host in seen.hosts:
        off_s = host.facts.clock_offset_s - middle
        if abs(off_s) - host.facts.clock_error_s > CLOCK_S:
            side = "ahead" if off_s > 0 else "behind"
            whose = "of the others" if len(offsets) > 2 else "of this machine's"
            error_s = host.facts.clock_error_s
            error = f" (give or take {format_duration(error_s)})" if error_s >= 1 else ""
            words = f"its clock is {format_duration(abs(off_s))} {side} {whose}{error}"
            yield RawFinding((host.name,), words, "`timedatectl set-ntp true` there, as root")


def environments(seen: Observations) -> Iterator[RawFinding]:
    given = {host.name: masked_env({**host.health.environment, **host.node.env}) for host in seen.hosts}
    compared = sorted({name for values in given.values() for name in values if COMPARED.fullmatch(name)} - OF_PLAN)
    for name in compared:
        values = _by(seen.hosts, lambda host, name=name: given[host.name].get(name, UNSET))  # type: ignore[misc]
        if len(values) > 1:
            words = f"{name} is not the same everywhere: {_named(values)}"
            remedy = f"set {name} in the inventory's `defaults: {{env: ...}}`, or remove it on the hosts"
            yield RawFinding(tuple(host.name for host in seen.hosts), words, remedy)


def running(seen: Observations) -> Iterator[RawFinding]:
    """Jobs of orch, of any installation of this user."""
    where = dict[str, list[str]]()
    on_gpus = dict[str, list[str]]()
    for host in seen.hosts:
        there = {each.job for gpu in host.gpus for each in gpu.occupants if each.job}
        for job in sorted({*host.health.jobs, *there}):
            where.setdefault(job, []).append(host.name)
            if job in there:
                on_gpus.setdefault(job, []).append(host.name)
    for job, names in where.items():
        what = "runs on GPUs there" if job in on_gpus else "has processes there"
        remedy = f"`orch jobs`; `orch cancel --job {job}`, or `orch reap` if it is not listed"
        yield RawFinding(tuple(names), f"job {job} {what}", remedy, "block" if job in on_gpus else "warn")


def shares(seen: Observations) -> Iterator[RawFinding]:
    found = _by(seen.hosts, lambda host: str(host.ranks))
    if len(found) > 1:
        names = tuple(host.name for host in seen.hosts)
        remedy = "orch's own trainer divides the batch; a script of your own has to allow it, or set `ranks:`"
        yield RawFinding(names, f"hosts have unequal numbers of ranks: {_named(found)}", remedy)


def data(seen: Observations) -> Iterator[RawFinding]:
    """Reports nothing if no host has data: the job's needs are unknown."""
    held = {host.name: {name for name in host.health.data or () if not name.startswith(".")} for host in seen.hosts}
    for host, names in held.items():
        if lacking := sorted(set[str]().union(*held.values()) - names):
            words = f"its data folder lacks {some(lacking, 3)}, which other hosts have"
            yield RawFinding((host,), words, "`orch data push DIR` brings all hosts the same")


def work_folders(seen: Observations) -> Iterator[RawFinding]:
    """Hosts with one folder: on a shared disk, or on one machine."""

    def place(host: Host) -> tuple[str | int, ...] | None:
        disk = host.health.disk
        if disk and NETWORK_DISKS.fullmatch(disk.kind):
            return disk.kind, disk.source, disk.path
        return (host.facts.boot_id, disk.device, disk.path) if disk and host.facts.boot_id else None

    tried = set(seen.shared_folders)
    for names in sorted(tried | {tuple(host.name for host in hosts) for hosts in _groups(seen.hosts, place)}):
        if names in tried or not any(set(names) <= set(each) for each in tried):
            remedy = 'set `workdir:` of each to its own, as with `defaults: {workdir: "~/.orch-{name}"}`'
            yield RawFinding(names, f"they have one work folder, {seen.host(names[0]).facts.workdir}", remedy)


def _by(hosts: Sequence[Host], value: Callable[[Host], str | None]) -> dict[str, list[str]]:
    """Names of hosts by this value; None is left out."""
    found = dict[str, list[str]]()
    for host in hosts:
        if (own := value(host)) is not None:
            found.setdefault(own, []).append(host.name)
    return found


def _groups(hosts: Sequence[Host], value: Callable[[Host], Value | None]) -> list[list[Host]]:
    """Groups of hosts with an equal value."""
    found = dict[Value, list[Host]]()
    for host in hosts:
        if (own := value(host)) is not None:
            found.setdefault(own, []).append(host)
    return [group for group in found.values() if len(group) > 1]


def _named(values: Mapping[str, Sequence[str]]) -> str:
    """Like `1500 on a2000; 9000 on v100, a16`."""
    return "; ".join(f"{value} on {host_set(names)}" for value, names in values.items())


def _minor(version: str) -> str:
    return ".".join(map(str, numbers(version)[:2]))


def _place(host: Host) -> str:
    return host.node.address or host.node.host


def _is_local(host: Host) -> bool:
    return bool(host.address) and ipaddress.ip_address(host.address or "").is_loopback
