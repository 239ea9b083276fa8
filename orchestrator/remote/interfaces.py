"""This host's network interfaces as the kernel lists them, without a command."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from pathlib import Path
from typing import Any

from .hardware import read_text

MAX_LINKS = 256


def read_links() -> dict[str, str]:
    """Interface -> its speed as the kernel writes it, in Mbit/s; virtual, wireless and idle ones have none."""
    links = sorted(Path("/sys/class/net").glob("*"))[:MAX_LINKS]
    return {link.name: speed for link in links if (speed := read_text(f"{link}/speed")) is not None}


def socket_interfaces() -> list[dict[str, Any]]:
    """IPv4 interfaces by the ioctls of netdevice(7): [{name, address, netmask, mtu, flags}]."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        for name in configured(link):
            request = struct.pack("256s", name.encode()[:15])

            def ask(number: int, request: bytes = request) -> bytes:
                return fcntl.ioctl(link.fileno(), number, request)

            try:
                found.append(
                    {
                        "name": name,
                        "address": socket.inet_ntoa(ask(0x8915)[20:24]),  # SIOCGIFADDR
                        "netmask": socket.inet_ntoa(ask(0x891B)[20:24]),  # SIOCGIFNETMASK
                        "mtu": struct.unpack_from("i", ask(0x8921), 16)[0],  # SIOCGIFMTU
                        "flags": struct.unpack_from("H", ask(0x8913), 16)[0],  # SIOCGIFFLAGS
                    }
                )
            except OSError:
                continue  # it went away, or carries no IPv4 address
    return found


def configured(link: socket.socket) -> list[str]:
    """Names of the interfaces with an IPv4 address, aliases such as eth0:1 among them (SIOCGIFCONF)."""
    size, room = 40, 128 * 40  # struct ifreq has 40 bytes on every 64-bit Linux
    names = array.array("B", bytes(room))
    request = struct.pack("iL", room, names.buffer_info()[0])
    used = struct.unpack("iL", fcntl.ioctl(link.fileno(), 0x8912, request))[0]
    data = names.tobytes()
    return [data[at : at + 16].split(b"\0", 1)[0].decode("ascii", "replace") for at in range(0, used, size)]


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
