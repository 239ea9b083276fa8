"""A port for a server that a test starts a moment later."""

import secrets
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000


def free_port() -> int:
    """Below those that the kernel gives to outgoing connections: one of the many that run beside this test would now
    and then take it before the server listens.
    """
    outgoing = int(_RANGE.read_text().split()[0])
    while True:
        port = _LOWEST + secrets.randbelow(outgoing - _LOWEST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
