"""From an inventory to the lab that it describes: pure, makes nothing.

lab  = plan(load_inventory(path), sys.executable, binds)       # `Lab`: hosts, addresses, folders to show
link = parse_link(["rate", "1Gbps", "loss", "5%"], bandwidth_bps=2.5e9)
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import ipaddress
import json
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import lab_host
from lab_net import Link, Port

from orchestrator.errors import UsageError
from orchestrator.units import parse_bandwidth

if TYPE_CHECKING:  # pydantic takes longer to import than most commands of the lab take to run
    from orchestrator.hosts.inventory import Inventory, Node

LAB_USER = "lab"


@dataclass(frozen=True)
class LabHost:
    """One host of a lab. ssh_address: where its sshd is reached."""

    name: str
    user: str
    ssh_address: str
    ssh_port: int
    port: Port

    @property
    def address(self) -> str:
        """Where it trains."""
        return self.port.addresses[0].split("/")[0]


@dataclass(frozen=True)
class Lab:
    """All that a lab is made from; kept in its state folder while it stands."""

    cluster: str
    python: str
    binds: tuple[tuple[str, str], ...]
    hosts: tuple[LabHost, ...]

    @property
    def controller_addresses(self) -> tuple[str, ...]:
        """The highest free address of every subnet that a host is in. Raises UsageError where one is full."""
        interfaces = [ipaddress.ip_interface(text) for host in self.hosts for text in host.port.addresses]
        taken = {interface.ip for interface in interfaces}
        return tuple(_free(network, taken) for network in dict.fromkeys(each.network for each in interfaces))

    def host(self, name: str) -> LabHost:
        for host in self.hosts:
            if host.name == name:
                return host
        names = ", ".join(host.name for host in self.hosts)
        raise UsageError(f"lab {self.cluster} has no node {name!r}", f"it has {names}")


def plan(inventory: Inventory, python: str, binds: Iterable[tuple[str, str]] = ()) -> Lab:
    """The lab that this inventory describes. Raises UsageError where it cannot be one."""
    hosts = tuple(_plan_host(inventory.cluster, node, number) for number, node in enumerate(inventory.nodes))
    addresses = [address.split("/")[0] for host in hosts for address in host.port.addresses]
    for address in addresses:
        if addresses.count(address) > 1:
            raise UsageError(f"two nodes have the address {address}", "give every host of a lab its own `host`")
    lab = Lab(inventory.cluster, python, (*_python_trees(python), *binds), hosts)
    _ = lab.controller_addresses  # full subnets are refused now, before anything is made
    return lab


def from_json(text: str) -> Lab:
    """What `to_json` wrote."""
    value = json.loads(text)
    hosts = []
    for host in value["hosts"]:
        port = Port(**{**host["port"], "addresses": tuple(host["port"]["addresses"])})
        hosts.append(LabHost(**{**host, "port": port}))
    return Lab(value["cluster"], value["python"], tuple((here, there) for here, there in value["binds"]), tuple(hosts))


def to_json(lab: Lab) -> str:
    return json.dumps(dataclasses.asdict(lab), indent=2) + "\n"


def _plan_host(cluster: str, node: Node, number: int) -> LabHost:
    if node.transport != "ssh":
        raise UsageError(f"node {node.name}: transport {node.transport} needs no lab", "leave it out, or use ssh")
    interface = node.interface or "eth0"
    prefix = f"/{node.address_prefix}" if node.address_prefix else ""
    ssh_address = _numeric(node.name, node.host)
    addresses = [_interface(node.name, f"{node.address}{prefix}")] if node.address else []
    if ssh_address not in [str(address.ip) for address in addresses]:
        addresses.append(_interface(node.name, ssh_address))
    digest = hashlib.sha256(f"{cluster}/{node.name}".encode()).hexdigest()
    # The same at every start: after a power cut the others still know the host by it.
    mac = ":".join(["02", *(digest[i : i + 2] for i in range(0, 10, 2))])
    texts = tuple(str(address) for address in addresses)
    port = Port(cluster, node.name, number, interface, texts, mac, node.bandwidth_bps)
    return LabHost(node.name, node.user or LAB_USER, ssh_address, node.port or 22, port)


def _numeric(node: str, host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise UsageError(f"node {node}: host {host!r} is a name", "a lab needs numbers, like 192.168.1.41") from None
    if address.is_loopback or address.is_unspecified or address.is_multicast:
        raise UsageError(f"node {node}: host {host} cannot be a host's own address", "use one like 192.168.1.41")
    return str(address)


def _interface(node: str, text: str) -> ipaddress.IPv4Interface | ipaddress.IPv6Interface:
    try:
        address = ipaddress.ip_interface(text)
    except ValueError:
        raise UsageError(f"node {node}: {text!r} is no address", "write it like 192.168.1.41/24") from None
    if "/" in text:
        return address
    return ipaddress.ip_interface(f"{text}/{24 if address.version == 4 else 64}")


def parse_bind(text: str) -> tuple[str, str]:
    """(folder here, folder on every host) of `DIR[:TARGET]`."""
    source, _, target = text.partition(":")
    source = os.path.abspath(source)
    target = os.path.normpath(target) if target else source
    if not os.path.isdir(source):
        raise UsageError(f"--bind {text}: {source} is no folder")
    if not target.startswith("/") or _top(target) in ("", "dev", "proc", "sys", *lab_host.SYSTEM):
        raise UsageError(f"--bind {text}: nothing can be put at {target}", "give a TARGET like /data")
    return source, target


def _top(path: str) -> str:
    return path.split("/")[1]


def _python_trees(python: str) -> list[tuple[str, str]]:
    """The folders without which this Python does not start on a host, by each name that leads to them."""
    trees = {Path(sys.prefix), Path(sys.base_prefix), Path(python).resolve().parents[1]}
    trees |= {tree.resolve() for tree in trees}
    outside = {tree for tree in trees if _top(str(tree)) not in ("", *lab_host.SYSTEM)}
    # Those above first: mounted later, a folder would hide what lies in it.
    return [(str(tree), str(tree)) for tree in sorted(outside) if not outside & set(tree.parents)]


def _free(network: ipaddress.IPv4Network | ipaddress.IPv6Network, taken: Collection[object]) -> str:
    for offset in range(network.num_addresses - 2, 0, -1):  # without the first and last, which name the network
        if network[offset] not in taken:
            return f"{network[offset]}/{network.prefixlen}"
    raise UsageError(f"subnet {network} has no address left for the controller", "use a shorter prefix, like /24")


def parse_link(words: Sequence[str], bandwidth_bps: float | None) -> Link:
    """The link that these words state: what they do not name is as in the inventory."""
    link = Link(rate_bps=bandwidth_bps)
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in ("up", "down"):
            link = dataclasses.replace(link, up=word == "up")
        elif word in ("rate", "loss", "drop-over") and rest:
            link = _impaired(link, word, rest.pop(0))
        else:
            raise UsageError(f"link: {word!r} is not understood", "down, up, rate 1Gbps, loss 5% or drop-over 1400")
    return link


def _impaired(link: Link, word: str, value: str) -> Link:
    with contextlib.suppress(ValueError):
        if word == "rate":
            return dataclasses.replace(link, rate_bps=parse_bandwidth(value))
        if word == "loss" and value.endswith("%") and 0 <= float(value[:-1]) <= 100:
            return dataclasses.replace(link, loss=float(value[:-1]) / 100)
        if word == "drop-over" and 0 < int(value) <= 65535:
            return dataclasses.replace(link, drop_over=int(value))
    raise UsageError(f"link {word}: {value!r} is not understood", "rate 1Gbps, loss 5% or drop-over 1400")
