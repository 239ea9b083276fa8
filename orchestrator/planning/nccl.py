"""Chooses the backend for gradients (NCCL or Gloo) and the NCCL settings that unlike hosts need. Pure.

Settings are equal on all hosts and carry a reason. Names and meanings: NCCL's user guide, "Environment Variables".
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.errors import UnlikeError
from orchestrator.hosts.exec import host_set
from orchestrator.hosts.facts import NodeFacts
from orchestrator.hosts.inventory import Node
from orchestrator.hosts.wheels import newest_for, numbers
from orchestrator.planning.launch_plan import NcclSetting
from orchestrator.planning.placement import PlannedNode
from orchestrator.planning.request import RunRequest
from orchestrator.units import format_bandwidth

SLOW_BPS, FAST_BPS = 10e9, 25e9
"""Up to the first two channels suffice; from the second a single socket per channel is too few."""
BY_LOCAL_CPU = ((2, 18, 1), (2, 21, 5))
"""First and last NCCL whose ranks choose algorithms by the vendor of their own CPU (NVIDIA/nccl#1136)."""
UNEVEN_NVLS = (2, 31)
"""This NCCL hangs with unequal numbers of ranks per host, unless NVLS is off (NVIDIA/nccl#2385)."""
NCCL2_SINCE = (2, 15)
"""First torch whose `nccl` blocks the compute stream (pytorch/pytorch#192281)."""
VENDORS = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD"}
SAME_MATTER = {
    "NCCL_IB_DISABLE": ("NCCL_IB_HCA", "NCCL_NET", "NCCL_NET_PLUGIN"),
    "NCCL_MAX_NCHANNELS": ("NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS"),
    "NCCL_SOCKET_NTHREADS": ("NCCL_NSOCKS_PERTHREAD",),
    "NCCL_NSOCKS_PERTHREAD": ("NCCL_SOCKET_NTHREADS",),
}
"""A setting is left out if the user set it or one of these."""


@dataclass(frozen=True)
class GpuHost:
    node: Node
    facts: NodeFacts
    ranks: int = 1

    @property
    def nccl(self) -> tuple[int, ...]:
        torch = self.facts.torch
        return numbers(torch.nccl) if torch and torch.nccl else ()

    @property
    def networks(self) -> frozenset[str] | None:
        """Link layers for RDMA by its NCCL; None if unknown."""
        torch, ports = self.facts.torch, self.facts.rdma
        if ports is None or torch is None or torch.verbs is None:
            return None
        return frozenset(port.link_layer for port in ports if torch.verbs)

    @property
    def link_bps(self) -> float | None:
        link = self.facts.training_interface(self.node.interface, self.node.address)
        return self.node.bandwidth_bps or (link.speed_bps if link else None)


@dataclass(frozen=True)
class Carrier:
    backend: Literal["nccl", "gloo"]
    settings: tuple[NcclSetting, ...] = ()
    """Equal on every host."""
    notes: tuple[str, ...] = ()


def choose_carrier(nodes: Sequence[PlannedNode], request: RunRequest) -> Carrier:
    """The user's choice, else what all hosts support.

    Raises UnlikeError if NCCL versions differ; a script, which may not use NCCL, gets a note.
    """
    hosts = [GpuHost(placed.node, placed.facts, placed.ranks) for placed in nodes if placed.device == "cuda"]
    without = [host.node.name for host in hosts if host.facts.torch and not host.facts.torch.nccl_available]
    notes: tuple[str, ...] = ()
    if hosts and len(hosts) < len(nodes):
        notes = ("some hosts train on CUDA and some on the CPU: Gloo carries the gradients everywhere",)
    elif without:
        notes = (f"torch on {host_set(without)} has no NCCL: Gloo carries the gradients everywhere",)
    chosen = request.settings.backend if request.settings and "backend" in request.chosen else "auto"
    if chosen == "gloo" or (chosen == "auto" and (notes or not hosts)):
        return Carrier("gloo", notes=notes)
    is_own_script, notes = request.kind != "experiment", ()
    if wrong := unlike_versions(hosts):
        if not is_own_script:
            raise wrong
        notes = (_if_it_uses_nccl(wrong),)
    given = {*request.env, *(name for placed in nodes for name in placed.node.env)}
    return Carrier("nccl", nccl_settings(hosts, given, own_script=is_own_script), notes)


def _if_it_uses_nccl(wrong: UnlikeError) -> str:
    return f"{wrong.message}. A script that uses NCCL would hang or fail, a script that uses Gloo runs; {wrong.remedy}"


def unlike_versions(hosts: Sequence[GpuHost]) -> UnlikeError | None:
    """NCCL before 2.23.4 does not detect different versions: ranks hang or compute garbage. Newer ones fail."""
    by_version = dict[str, list[GpuHost]]()
    for host in hosts:
        if host.facts.torch and host.facts.torch.nccl:
            by_version.setdefault(host.facts.torch.nccl, []).append(host)
    if len(by_version) < 2:
        return None
    named = {version: [host.node.name for host in found] for version, found in by_version.items()}
    versions = "; ".join(f"{version} on {host_set(names)}" for version, names in named.items())
    most = max(named.values(), key=len)
    return UnlikeError(
        f"NCCL must be the same on all hosts that train together, and is not: {versions}",
        f"give all of them one torch{_by_setup(hosts)}, or take alike ones: `--nodes {','.join(most)}`",
    )


def _by_setup(hosts: Sequence[GpuHost]) -> str:
    """A release that hosts have in different builds would stay as it is."""
    builds = dict[str, set[str | None]]()
    for host in hosts:
        if torch := host.facts.torch:
            builds.setdefault(torch.version.partition("+")[0], set()).add(torch.nccl)
    unlike = [release for release, nccl in builds.items() if len(nccl) > 1]
    release = newest_for([gpu for host in hosts for gpu in host.facts.gpus], but=unlike)
    return f" (`orch setup --torch {release}`)" if release else " build"


def nccl_settings(
    hosts: Sequence[GpuHost], given: Collection[str], *, own_script: bool = False
) -> tuple[NcclSetting, ...]:
    """given: variables that the user set on any host. own_script: not our trainer."""
    settings = [NcclSetting(name="NCCL_DEBUG", value="WARN", reason="so that NCCL reports errors")]
    settings += _old_back_end(hosts) if own_script else ()
    if len(hosts) > 1:
        settings += [*_algorithms(hosts), *_network(hosts), *_uneven(hosts)]
    return tuple(each for each in settings if not {each.name, *SAME_MATTER.get(each.name, ())} & set(given))


def _old_back_end(hosts: Sequence[GpuHost]) -> Iterator[NcclSetting]:
    if any(host.facts.torch and numbers(host.facts.torch.version) >= NCCL2_SINCE for host in hosts):
        reason = "else backward waits for each exchange (torch 2.15 and newer)"
        yield NcclSetting(name="TORCH_DIST_USE_NCCL2", value="0", reason=reason)


def _algorithms(hosts: Sequence[GpuHost]) -> Iterator[NcclSetting]:
    vendors = sorted({host.facts.cpu_vendor for host in hosts if host.facts.cpu_vendor})
    versions = [host.nccl for host in hosts if BY_LOCAL_CPU[0] <= host.nccl <= BY_LOCAL_CPU[1]]
    if len(vendors) < 2 or not versions:
        return
    version = ".".join(map(str, versions[0]))
    words = " and ".join(VENDORS.get(vendor, vendor) for vendor in vendors)
    reason = f"{words} CPUs, by which NCCL {version} chooses on each host for itself"
    for name, value in (("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "Simple"), ("NCCL_NET_OVERHEAD", "1000")):
        yield NcclSetting(name=name, value=value, reason=reason)


def _network(hosts: Sequence[GpuHost]) -> Iterator[NcclSetting]:
    """A host with InfiniBand uses it even if NCCL_SOCKET_IFNAME is set (NVIDIA/nccl#234, #2428)."""
    networks = [host.networks for host in hosts if host.networks is not None]
    if len(networks) < len(hosts) or frozenset.intersection(*networks):
        return
    if any(networks):
        without = [host.node.name for host in hosts if not host.networks]
        none = f"no InfiniBand or RoCE on {host_set(without)}"
        reason = none if without else "InfiniBand on some hosts and RoCE on others"
        yield NcclSetting(name="NCCL_IB_DISABLE", value="1", reason=reason)
    yield from _sockets(hosts)


def _uneven(hosts: Sequence[GpuHost]) -> Iterator[NcclSetting]:
    counts = {host.ranks for host in hosts}
    if len(counts) > 1 and any(host.nccl[:2] == UNEVEN_NVLS for host in hosts):
        reason = "unequal numbers of GPUs a host, with which NVLS of NCCL 2.31 waits without end"
        yield NcclSetting(name="NCCL_NVLS_ENABLE", value="0", reason=reason)


def _sockets(hosts: Sequence[GpuHost]) -> Iterator[NcclSetting]:
    """Sending occupies a GPU's multiprocessors, of which an A16 has ten. Fast links need more threads and sockets per
    channel, which NCCL uses by itself only on AWS and Google Cloud.
    """
    speeds = [host.link_bps for host in hosts if host.link_bps]
    if len(speeds) < len(hosts):
        return
    slowest = min(speeds)
    if slowest <= SLOW_BPS:
        reason = f"no more are needed at {format_bandwidth(slowest)}, and each takes from computing"
        yield NcclSetting(name="NCCL_MAX_NCHANNELS", value="2", reason=reason)
    if slowest >= FAST_BPS:
        reason = f"one socket a channel does not fill {format_bandwidth(slowest)}"
        yield NcclSetting(name="NCCL_SOCKET_NTHREADS", value="4", reason=reason)
        yield NcclSetting(name="NCCL_NSOCKS_PERTHREAD", value="2", reason=reason)
