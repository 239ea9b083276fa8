"""The master's rendezvous port: binds it, keeps other jobs off it, filters foreign packets, lets members test it.

    claim = claim_port("10.0.0.1", 29500)      # this port if free, otherwise another
    admit(claim.store, {own_source(claim.store), "10.0.0.2"})
    listen(claim.store)                        # in `launch`, which starts torchrun
    claim.close()

With SO_REUSEADDR on both, sockets share a port with connections in TIME_WAIT, but also with a bound socket that does
not listen (socket(7)). So it is set only while we bind and when we listen. Two jobs that bind at the same moment are
kept apart by an abstract Unix socket, which like TCP ports belongs to a network namespace (unix(7)).

torch's store has no authentication, so a socket filter admits only packets from the job's hosts (classic BPF:
socket(7), SO_ATTACH_FILTER). Some kernels accept a filter only from root (seen with 6.18.44); the store is open there.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import struct
from collections.abc import Collection, Iterable
from typing import NamedTuple

TRIES = 20
BACKLOG = 4096
ATTACH_FILTER = 26  # SO_ATTACH_FILTER of <asm-generic/socket.h>, missing in Python's `socket`
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF of <linux/filter.h>: offsets from the IP header
_SOURCE_AT = {4: 12, 6: 8}


class Claim(NamedTuple):
    number: int
    store: socket.socket
    name: socket.socket

    def close(self) -> None:
        self.store.close()
        self.name.close()


def claim_port(address: str, wanted: int) -> Claim:
    """Raises OSError if the host lacks the address or a free port."""
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
    store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # its connections inherit the option
    store.listen(BACKLOG)


def shut_out(store: socket.socket) -> None:
    store.setblocking(False)
    with contextlib.suppress(OSError):
        while True:
            store.accept()[0].close()
    store.setblocking(True)


def own_source(store: socket.socket) -> str:
    """Source address of our own packets to the store: 127.0.0.1 for 127.0.0.2, for instance."""
    with socket.socket(store.family, socket.SOCK_DGRAM) as way:
        way.connect(store.getsockname())
        return str(way.getsockname()[0])


def admit(store: socket.socket, addresses: Collection[str]) -> None:
    """Other addresses get no answer, if the kernel accepts the filter."""
    version = 6 if store.family == socket.AF_INET6 else 4
    code = b"".join(_passes(ipaddress.ip_address(one.partition("%")[0]), version) for one in sorted(addresses))
    code += _instruction(_RETURN, 0, 0, 0)
    kept = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HL", len(code) // 8, ctypes.addressof(kept))
    with contextlib.suppress(OSError):
        store.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, program)


def _passes(address: ipaddress.IPv4Address | ipaddress.IPv6Address, version: int) -> bytes:
    """Instructions that pass packets from this address, and fall through for others."""
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
    # struct sock_filter of <linux/filter.h>.
    return struct.pack("HBBI", code, if_true, if_false, value)


# The master's rendezvous port: claim it, let members test it, then admit only them.
#
# rendezvous = Rendezvous("10.0.0.1", 29500)
# port = rendezvous.claim()                       # raises OSError
# rendezvous.listen()                             # members can test the connection
# rendezvous.admit(["10.0.0.2"])                  # from now on only they get in


class Rendezvous:
    def __init__(self, address: str, wanted: int) -> None:
        self._address, self._wanted = address, wanted
        self._claim: Claim | None = None

    def claim(self) -> int:
        """The port in the plan if it is free, otherwise another, ours until the job ends. Raises OSError."""
        self._claim = claim_port(self._address, self._wanted)
        return self._claim.number

    @property
    def port(self) -> int | None:
        return self._claim.number if self._claim else None

    @property
    def store(self) -> socket.socket | None:
        """The socket for torchrun's store. The caller closes it after passing it on."""
        return self._claim.store if self._claim else None

    def listen(self) -> socket.socket:
        """Members can now test the connection. Returns a listening socket of the caller's own. Raises OSError."""
        assert self._claim
        listen(self._claim.store)
        return self._claim.store.dup()

    def admit(self, addresses: Iterable[str]) -> None:
        assert self._claim
        admit(self._claim.store, {own_source(self._claim.store), *addresses})
        shut_out(self._claim.store)  # still-waiting connections are foreign: the job's hosts have tested theirs
