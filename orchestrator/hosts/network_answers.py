"""What a host answered of its interfaces, and how it reaches its peers, as facts. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.hosts.facts import Interface, RdmaPort, Route
from orchestrator.hosts.raw_answer import Command, at_most, clean, failure, loads, mapping, whole

MAX_INTERFACES = 256
MAX_PEERS = 2048
MAX_ADDRESSES = 1024
# Flags of an interface that is up and has a carrier: IFF_UP and IFF_RUNNING of netdevice(7).
UP, RUNNING = 0x1, 0x40


def parse_interfaces(ip: Command | None, files: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[Interface, ...]:
    """From `ip -j addr`, else from what the host's sockets showed."""
    speeds = mapping(values.get("links", {}))
    if failure(ip):
        return _socket_interfaces(values.get("sockets", []), files.get("/proc/net/if_inet6", ""), speeds)
    return tuple(
        Interface.of(
            name=clean(link["ifname"]),
            addresses=tuple(
                _address(f"{entry['local']}/{entry['prefixlen']}")
                for entry in at_most(link["addr_info"], MAX_ADDRESSES)
            ),
            mtu=link["mtu"],
            speed_bps=speed_bps(speeds.get(link["ifname"])),
            up={"UP", "LOWER_UP"} <= set(link["flags"]),
        )
        for link in at_most(loads((ip or {})["out"]), MAX_INTERFACES)
        # iproute2 before 4.18 writes an empty object for each thing that it filtered out
        if link
    )


def _socket_interfaces(sockets: Any, if_inet6: str, speeds: Mapping[str, Any]) -> tuple[Interface, ...]:
    """IPv4 by ioctl; IPv6 of /proc/net/if_inet6 (address, index, prefix, scope, flags, name; numbers in hex)."""
    addresses: dict[str, list[str]] = {}
    about: dict[str, tuple[int, int]] = {}
    for entry in at_most(sockets, MAX_INTERFACES):
        name = clean(entry["name"]).partition(":")[0]
        about[name] = (entry["mtu"], entry["flags"])
        addresses.setdefault(name, []).append(_address(f"{entry['address']}/{entry['netmask']}"))
    for line in if_inet6.splitlines()[:MAX_INTERFACES]:
        number, _, prefix, _, _, name = line.split()
        about.setdefault(clean(name), (0, UP | RUNNING))
        addresses.setdefault(clean(name), []).append(_address(f"{_inet6(number)}/{int(prefix, 16)}"))
    return tuple(
        Interface.of(
            name=name,
            addresses=tuple(addresses[name][:MAX_ADDRESSES]),
            mtu=mtu,
            speed_bps=speed_bps(speeds.get(name)),
            up=flags & (UP | RUNNING) == UP | RUNNING,
        )
        for name, (mtu, flags) in about.items()
    )


def parse_routes(
    commands: Mapping[str, Any], values: Mapping[str, Any], interfaces: tuple[Interface, ...], peers: Sequence[str]
) -> tuple[tuple[Route, ...], tuple[str, ...]]:
    """The ways out, and the peers that none leads to.

    A socket gave the source address towards each peer. Its interface is the one that `ip route get` named for that
    source, else the one that has the address. The way to most peers names none of them: in a cluster of hundreds, lists
    of peers on every host would be most of what is remembered.
    """
    sources = mapping(values.get("sources", {}))
    if len(sources) > MAX_PEERS:
        raise ValueError("too many routes")
    interface_of = {own.partition("/")[0]: one.name for one in interfaces for own in one.addresses}
    for peer, source in sources.items():
        way = commands.get(f"ip route {peer}")
        if way and not failure(way):
            interface_of[source] = clean(at_most(loads(way["out"]), MAX_INTERFACES)[0]["dev"])
    found: dict[str, list[str]] = {}
    for peer in peers:
        source = str(ipaddress.ip_address(sources[peer])) if peer in sources else None
        if source in interface_of:
            found.setdefault(source, []).append(peer)
    most = max(found, key=lambda source: len(found[source]), default=None)
    routes = [
        Route.of(interface=interface_of[source], source=source, peers=() if source == most else tuple(reached))
        for source, reached in found.items()
    ]
    routed = {peer for reached in found.values() for peer in reached}
    return tuple(routes), tuple(peer for peer in peers if peer not in routed)


def parse_own_name(command: Command | None) -> tuple[str, ...]:
    if failure(command):
        return ()
    found = at_most(loads((command or {})["out"]), MAX_ADDRESSES)
    return tuple(str(ipaddress.ip_address(address.partition("%")[0])) for address in found)


def _address(text: str) -> str:
    return ipaddress.ip_interface(text).with_prefixlen


def _inet6(digits: str) -> str:
    return str(ipaddress.IPv6Address(bytes.fromhex(digits)))


def parse_rdma(values: Mapping[str, Any]) -> tuple[RdmaPort, ...]:
    ports = at_most(values.get("rdma", []), MAX_INTERFACES)
    return tuple(RdmaPort.of(device=clean(device), link_layer=clean(layer)) for device, layer in ports)


def speed_bps(text: Any) -> float | None:
    """The kernel writes Mbit/s, and -1 where a link has no speed."""
    return whole(text) * 1e6 if isinstance(text, str) and re.fullmatch(r"[1-9]\d{0,8}\s*", text) else None
