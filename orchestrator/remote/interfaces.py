"""This host's network interfaces, from its kernel and without a command: containers often have no `ip`."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from typing import Any

from .hardware import read_text

MAX_LINKS = 256
MAX_ADDRESSES = 1024
# netdevice(7)
SIOCGIFCONF, SIOCGIFFLAGS, SIOCGIFNETMASK, SIOCGIFMTU = 0x8912, 0x8913, 0x891B, 0x8921
UP, RUNNING = 0x1, 0x40
IFREQ_BYTES = 40  # on every 64-bit Linux


def interfaces() -> list[dict[str, Any]]:
    """[{name, addresses (with prefix length), mtu, speed_bps, up (switched on and with a carrier)}]"""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        addresses = dict[str, list[str]]()
        for name, address in (*_ipv4(link), *_ipv6(read_text("/proc/net/if_inet6") or "")):
            addresses.setdefault(name, []).append(address)
        for _, name in socket.if_nameindex()[:MAX_LINKS]:
            request = struct.pack(f"{IFREQ_BYTES}s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface that has just gone
                (mtu,) = struct.unpack_from("i", fcntl.ioctl(link, SIOCGIFMTU, request), 16)
                (flags,) = struct.unpack_from("H", fcntl.ioctl(link, SIOCGIFFLAGS, request), 16)
                is_up = flags & (UP | RUNNING) == UP | RUNNING
                about = {"mtu": mtu, "speed_bps": speed_bps(name), "up": is_up}
                found.append({"name": name, "addresses": addresses.get(name, []), **about})
    return found


def speed_bps(name: str, folder: str = "/sys/class/net") -> float | None:
    """The kernel writes Mbit/s; virtual, wireless and idle interfaces have none, or -1."""
    speed = (read_text(f"{folder}/{name}/speed") or "").strip()
    return int(speed) * 1e6 if speed.isdecimal() and 0 < int(speed) < 10**9 else None


def _ipv4(link: socket.socket) -> Iterator[tuple[str, str]]:
    """(interface, address): an alias such as eth0:1 is an address of eth0."""
    room = MAX_ADDRESSES * IFREQ_BYTES
    entries = array.array("B", bytes(room))
    used, _ = struct.unpack("iL", fcntl.ioctl(link, SIOCGIFCONF, struct.pack("iL", room, entries.buffer_info()[0])))
    for at in range(0, used, IFREQ_BYTES):
        entry = entries[at : at + IFREQ_BYTES].tobytes()
        name = entry[:16].split(b"\0", 1)[0].decode("ascii", "replace").partition(":")[0]
        with contextlib.suppress(OSError):
            # The entry holds the address, too: of several addresses the kernel answers for this one.
            mask = fcntl.ioctl(link, SIOCGIFNETMASK, entry)
            address = f"{socket.inet_ntoa(entry[20:24])}/{socket.inet_ntoa(mask[20:24])}"
            yield name, ipaddress.ip_interface(address).with_prefixlen


def _ipv6(if_inet6: str) -> Iterator[tuple[str, str]]:
    """From lines of: address, index, prefix length, scope, flags (all in hex), name. Global addresses come first."""
    rows = [line.split() for line in if_inet6.splitlines()[:MAX_ADDRESSES]]
    for number, _, prefix, _, _, name in sorted((row for row in rows if len(row) == 6), key=lambda row: row[3]):
        yield name, f"{ipaddress.IPv6Address(bytes.fromhex(number))}/{int(prefix, 16)}"


def source_towards(peer: str) -> str | None:
    """Our own address on the route to a numeric peer: a UDP socket's connect chooses it and sends nothing."""
    try:
        found = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as link:
            link.connect(address)
            return str(link.getsockname()[0])
    except OSError:
        return None
