"""A link that swallows packets is noticed: TCP watches what was sent, a heartbeat the way behind a jump host."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import paramiko

USER_TIMEOUT_S = 20.0  # unanswered bytes older than this mean that the link is gone
_HEARTBEAT_S = 5.0


def tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_USER_TIMEOUT", int(USER_TIMEOUT_S * 1000)),  # Linux
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def beat(transport: paramiko.Transport) -> None:
    """Asks the far sshd for an answer every few seconds and ends a connection that stays silent.

    TCP watches only as far as the first jump host. (paramiko's own keep-alive expects no answer, so notices nothing.)
    """
    while transport.is_active():
        answered = threading.Event()
        threading.Thread(target=_ask_alive, args=(transport, answered), name="orch-heartbeat", daemon=True).start()
        if not answered.wait(USER_TIMEOUT_S):
            with contextlib.suppress(Exception):  # the jump host may be gone by now, and with it what close() writes to
                transport.close()
        ended = time.monotonic() + _HEARTBEAT_S
        while transport.is_active() and time.monotonic() < ended:
            transport.join(0.5)


def _ask_alive(transport: paramiko.Transport, answered: threading.Event) -> None:
    with contextlib.suppress(Exception):  # a broken connection ends the heartbeat by itself
        transport.global_request("keepalive@openssh.com", wait=True)
        answered.set()
