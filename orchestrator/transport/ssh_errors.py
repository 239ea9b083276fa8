"""Translates errors of paramiko, fabric and sockets: what failed, where, and what to try; detects dead connections.

with translated(hop, "no SSH login within 10 s", deadline):
    connection.open()
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import paramiko

from orchestrator.errors import ConnectError, LateError
from orchestrator.transport.deadline import Deadline
from orchestrator.transport.route import Hop
from orchestrator.transport.ssh_session import HUNG_UP, LinkLostError, SignalAwareTransport
from orchestrator.units import one_line

_BANNER_FAULT = "Error reading SSH protocol banner"


def hung_up_early(cause: BaseException | None) -> bool:
    """A server short of login slots (MaxStartups) disconnects before or during the key exchange."""
    return isinstance(cause, (EOFError, ConnectionResetError, BrokenPipeError)) or _BANNER_FAULT in str(cause)


@contextlib.contextmanager
def translated(
    hop: Hop,
    late: str,
    deadline: Deadline | None = None,
    late_remedy: str = "check that the host is up, not overloaded, and reachable",
) -> Iterator[None]:
    """Raises errors as ConnectError, with their cause. late: message for a time-out. deadline: of a login, which
    ends in a LateError.
    """
    try:
        yield
    except (paramiko.SSHException, OSError, EOFError, LinkLostError) as error:
        timed_out = isinstance(error, TimeoutError) or "timeout" in str(error).lower()
        if timed_out or (deadline is not None and not deadline.left()):
            named = hop.origin_of("host") if hop.peer.jump else ""  # for hosts, a line would keep equal errors apart
            kind = LateError if deadline else ConnectError
            ours = kind(hop.peer.node, f"{_where(hop)}: {late}{named}", late_remedy)
        else:
            ours = translate(hop, error, is_up=deadline is None)
        ours.at = "" if hop.peer.jump else hop.host
        raise ours from error


def translate(hop: Hop, error: Exception, *, is_up: bool) -> ConnectError:
    node, where = hop.peer.node, _where(hop)
    if isinstance(error, socket.gaierror):
        said = hop.origin_of("host")
        key = "proxy_jump:" if hop.peer.jump else "host:"
        remedy = "check that setting" if said else f"check `{key}` in the inventory"
        return ConnectError(node, f"no address for {hop.host!r} ({error.strerror}){said}", remedy)
    if isinstance(error, ConnectionRefusedError):
        said = hop.origin_of("port", *(("host",) if hop.peer.jump else ()))
        remedy = f"start sshd on that host, or mend {'that setting' if said else '`port:`'}"
        return ConnectError(node, f"nothing listens at {where}{said}", remedy)
    if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
        remedy = "update OpenSSH on that host; CBC ciphers, MD5 and SHA-1 are not used"
        return ConnectError(node, f"{where}: no safe algorithm in common ({_plain(error)})", remedy)
    if isinstance(error, paramiko.ChannelException):
        remedy = "look at MaxSessions, and on a jump host at AllowTcpForwarding, in its sshd_config"
        return ConnectError(node, f"{where}: a channel was refused ({_plain(error)})", remedy)
    if _BANNER_FAULT in str(error):
        remedy = "is this port SSH? sshd also hangs up on too many logins at once (MaxStartups, PerSourcePenalties)"
        return ConnectError(node, f"{where}: hung up before an SSH greeting", remedy)
    if str(error) == HUNG_UP:
        return ConnectError(node, f"{where}: {HUNG_UP}", "try again; sshd's log there shows why (journalctl -u ssh)")
    what = "the SSH connection broke" if is_up else "cannot connect by SSH"
    return ConnectError(
        node, f"{where}: {what} ({_plain(error)})", "check that the host is on and reachable, and try again"
    )


def _where(hop: Hop) -> str:
    return f"{'jump host ' if hop.peer.jump else ''}{hop.place}"


def offer(client: paramiko.SSHClient, error: Exception) -> str:
    """`: it offers hmac-md5,hmac-sha1`: the server's algorithms of the kind without a match."""
    transport = client.get_transport()
    offers = transport.servers_offer if isinstance(transport, SignalAwareTransport) else {}
    return next((f": it offers {names}" for kind, names in offers.items() if kind in str(error)), "")


def _plain(error: Exception) -> str:
    words = error.strerror if isinstance(error, OSError) and error.strerror else error
    return one_line(words, 300) or type(error).__name__


USER_TIMEOUT_S = 20.0  # a link with older unacknowledged bytes is dead
HEARTBEAT_S = 5.0


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
    """Sends a request to the far sshd every few seconds, and closes a connection without answers.

    TCP covers only the first jump host, and paramiko's own keep-alive expects no answer.
    """
    while transport.is_active():
        answered = threading.Event()
        threading.Thread(target=_ask_alive, args=(transport, answered), name="orch-heartbeat", daemon=True).start()
        if not answered.wait(USER_TIMEOUT_S):
            with contextlib.suppress(Exception):  # close() writes to the jump host, which may be gone
                transport.close()
        ended = time.monotonic() + HEARTBEAT_S
        while transport.is_active() and time.monotonic() < ended:
            transport.join(0.5)


def _ask_alive(transport: paramiko.Transport, answered: threading.Event) -> None:
    with contextlib.suppress(Exception):  # a broken connection ends the heartbeat by itself
        transport.global_request("keepalive@openssh.com", wait=True)
        answered.set()
