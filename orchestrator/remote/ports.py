"""The port that the ranks meet at: one of the training address that nobody has, the job's own until it ends.

    claim = claim_port("10.0.0.1", 29500)      # that port where it is free, else another
    admit(claim.store, {own_source(claim.store), "10.0.0.2"})
    listen(claim.store)                        # in `launch`, which torchrun is started by
    claim.close()

Nobody takes it in between. A socket may share its port with one that is only waiting to go (TIME_WAIT) if both have
SO_REUSEADDR set, and with another one that does not listen, too (socket(7)). So it is set while we bind and when we
listen, for the sake of what an earlier job left there, and not in between. A name among the abstract Unix sockets,
which Linux has once a network, as it has TCP ports (unix(7)), keeps two jobs of ours apart that bind at once.

torch's store asks nobody who he is. So the kernel does, as far as it can: a filter on the socket lets in packets from
the addresses of the job's hosts alone (classic BPF: socket(7), SO_ATTACH_FILTER). Most kernels take one of any user;
some of late take it of root alone (seen with 6.18.44), and there the store answers whoever reaches it.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import struct
from collections.abc import Collection
from typing import NamedTuple

TRIES = 20
BACKLOG = 4096
ATTACH_FILTER = 26
"""SO_ATTACH_FILTER of <asm-generic/socket.h>; Python's `socket` does not name it."""
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NETWORK_HEADER = 0xFFF00000
"""SKF_NET_OFF of <linux/filter.h>: from here on offsets count from the IP header."""
_SOURCE_AT = {4: 12, 6: 8}


class Claim(NamedTuple):
    number: int
    store: socket.socket
    name: socket.socket

    def close(self) -> None:
        self.store.close()
        self.name.close()


def claim_port(address: str, wanted: int) -> Claim:
    """Raises OSError where this host does not have the address, or no free port."""
    for port in (wanted, *[0] * TRIES):
        try:
            return _claim(address, port)
        except OSError as error:
            refused = error
    raise refused


def _claim(address: str, port: int) -> Claim:
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    store, name = socket.socket(family, socket.SOCK_STREAM), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(place)
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        number = int(store.getsockname()[1])
        name.bind(f"\0orch-rendezvous-{number}")
    except OSError:
        store.close()
        name.close()
        raise
    return Claim(number, store, name)


def listen(store: socket.socket) -> None:
    """Raises OSError."""
    store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the connections have it from here, too
    store.listen(BACKLOG)


def shut_out(store: socket.socket) -> None:
    """Hangs up on everybody who waits there to be let in."""
    store.setblocking(False)
    with contextlib.suppress(OSError):
        while True:
            store.accept()[0].close()
    store.setblocking(True)


def own_source(store: socket.socket) -> str:
    """Where packets of this very host to the store come from: to 127.0.0.2, for instance, from 127.0.0.1."""
    with socket.socket(store.family, socket.SOCK_DGRAM) as way:
        way.connect(store.getsockname())
        return str(way.getsockname()[0])


def admit(store: socket.socket, addresses: Collection[str]) -> None:
    """Who connects from another address than these gets no answer, where the kernel lets us have it so."""
    version = 6 if store.family == socket.AF_INET6 else 4
    code = b"".join(_passes(ipaddress.ip_address(one.partition("%")[0]), version) for one in sorted(addresses))
    code += _instruction(_RETURN, 0, 0, 0)
    kept = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HL", len(code) // 8, ctypes.addressof(kept))
    with contextlib.suppress(OSError):
        store.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, program)


def _passes(address: ipaddress.IPv4Address | ipaddress.IPv6Address, version: int) -> bytes:
    """A packet from this address passes; what comes from another one goes on behind these instructions."""
    if address.version != version:
        return b""
    words = struct.unpack(f"!{len(address.packed) // 4}I", address.packed)
    code = b""
    for number, word in enumerate(words):
        behind = 2 * (len(words) - number) - 1
        code += _instruction(_LOAD, 0, 0, _NETWORK_HEADER + _SOURCE_AT[version] + 4 * number)
        code += _instruction(_IF_EQUAL, 0, behind, word)
    return code + _instruction(_RETURN, 0, 0, 0xFFFFFFFF)


def _instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
    """struct sock_filter of <linux/filter.h>."""
    return struct.pack("HBBI", code, if_true, if_false, value)
