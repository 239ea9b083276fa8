"""Connects to one host through its jump hosts, with a checked key and a login at each, until a deadline.

    connection = Dialler(route, host_keys, accept_new, ask_passphrase, timeout_s=10).open(timeout_s=10)
    connection.transport.open_session()

Hundreds of hosts are dialled in parallel. A key exchange costs us about 50 ms of CPU, so at most 16 run at a time. A
host's turn comes after its server's greeting, so that silent hosts delay no others.
"""

from __future__ import annotations

import contextlib
import math
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import fabric
import paramiko

from orchestrator.errors import AuthError, ConnectError
from orchestrator.transport import ssh_errors
from orchestrator.transport.deadline import Deadline
from orchestrator.transport.hostkeys import HostKeys, OfferedKey, Peer, UnknownHostKeyError
from orchestrator.transport.login import AskPassphrase, Login
from orchestrator.transport.route import Hop
from orchestrator.transport.ssh_errors import hung_up_early, offer, translated
from orchestrator.transport.ssh_session import SignalAwareTransport

_KEY_EXCHANGES = 16  # at once, over all hosts: more of them only make each slower

# Disabled: CBC modes, MACs on MD5 and SHA-1, key exchange and signatures on SHA-1 (RFC 9142, RFC 8332).
_DISABLED = {
    "ciphers": ["aes128-cbc", "aes192-cbc", "aes256-cbc", "blowfish-cbc", "3des-cbc"],
    "macs": ["hmac-md5", "hmac-md5-96", "hmac-sha1", "hmac-sha1-96"],
    "kex": ["diffie-hellman-group1-sha1", "diffie-hellman-group14-sha1", "diffie-hellman-group-exchange-sha1"],
    "keys": ["ssh-rsa", "ssh-dss"],
    "pubkeys": ["ssh-rsa", "ssh-dss"],
}

CLOSING_S = 1.0

_key_exchanges = threading.Semaphore(_KEY_EXCHANGES)


@dataclass(frozen=True)
class Connection:
    transport: paramiko.Transport
    resources: ExitStack
    tries: int = 1  # attempts it took: a server with too many logins at a time hangs up on some
    took_s: float = 0.0  # without our own queues

    def close(self) -> None:
        self.resources.close()
        self.transport.join(CLOSING_S)  # paramiko does not wait for its thread, which crashes a program that ends now


@dataclass(frozen=True)
class Dialler:
    """Everything needed to connect repeatedly. look_only: refuse the last key as unknown, to get it."""

    route: tuple[Hop, ...]
    host_keys: HostKeys
    accept_new: bool
    ask_passphrase: AskPassphrase | None = field(repr=False)
    timeout_s: float
    look_only: bool = False
    dial_s: float = math.inf
    note: Callable[[str], None] = lambda line: None

    @property
    def node(self) -> str:
        return self.route[-1].peer.node

    def open(self, timeout_s: float) -> Connection:
        """Dials until the deadline, again if a server hangs up before its greeting. A refused login is final."""
        deadline = Deadline(min(self.timeout_s, timeout_s))
        pause_s, tries = 0.2, 0
        while True:
            tries += 1
            try:
                return replace(self._dial(deadline), tries=tries, took_s=deadline.spent())
            except ConnectError as error:
                if not hung_up_early(error.__cause__) or deadline.left() < pause_s:
                    raise
            time.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads load, keeps no secret
            pause_s = min(2 * pause_s, 2.0)

    def _dial(self, deadline: Deadline) -> Connection:
        with ExitStack() as resources:
            transport = None
            for hop in self.route:
                late = f"no SSH login within {deadline.timeout_s:g} s"
                with login_slot(hop, deadline), translated(hop, late, deadline):
                    transport = self._open_hop(hop, transport, deadline, resources)
            assert transport  # noqa: S101 - for the type checker: a route has hops
            if len(self.route) > 1:
                threading.Thread(target=ssh_errors.beat, args=(transport,), name="orch-heartbeat", daemon=True).start()
            return Connection(transport, resources.pop_all())

    def _open_hop(
        self, hop: Hop, jump: paramiko.Transport | None, deadline: Deadline, resources: ExitStack
    ) -> paramiko.Transport:
        dial = Deadline(min(self.dial_s, deadline.left()))
        late = "no answer" if self.dial_s < deadline.timeout_s else "no SSH login"
        with translated(hop, f"{late} within {min(self.dial_s, deadline.timeout_s):g} s", dial):
            sock = _through(jump, hop, dial) if jump else resources.enter_context(_dial_tcp(hop, dial))
        _await_greeting(sock, deadline)
        with ExitStack() as turn:
            with deadline.paused():
                turn.enter_context(_key_exchanges)
            late = f"the host answered, but the SSH login did not finish within {deadline.timeout_s:g} s"
            with translated(
                hop, late, deadline, "raise `connect_timeout:` in the inventory, or check why it is so slow"
            ):
                return self._log_in(hop, sock, deadline, resources, turn.close)

    def _log_in(
        self, hop: Hop, sock: Any, deadline: Deadline, resources: ExitStack, keys_exchanged: Callable[[], None]
    ) -> paramiko.Transport:
        # By fabric, which combines a hop's settings, host key policy and login. Jump hosts and commands use paramiko:
        # fabric's gateway has no deadline, and its `run` decodes output and may block in writes.
        settings = {
            "sock": sock,
            "timeout": deadline.left(),
            "banner_timeout": deadline.left(),
            "channel_timeout": deadline.left(),
            "disabled_algorithms": _DISABLED,
            "transport_factory": lambda sock, **options: self._transport(hop, sock, deadline, options),
            "auth_strategy": Login(hop, deadline, self.ask_passphrase, keys_exchanged),
        }
        # An empty configuration: ~/.fabric.yaml and fabric's reading of ~/.ssh/config must not change anything. Without
        # a gateway fabric uses our socket.
        config = fabric.Config(lazy=True, ssh_config=paramiko.SSHConfig())
        connection = fabric.Connection(hop.host, hop.user, hop.port, config, gateway=False, connect_kwargs=settings)
        connection.client.set_missing_host_key_policy(self._policy(hop))  # fabric's own accepts every key
        resources.callback(connection.client.close)
        resources.callback(_hang_up, sock)
        try:
            connection.open()
        except paramiko.ssh_exception.IncompatiblePeer as error:
            raise paramiko.ssh_exception.IncompatiblePeer(f"{error}{offer(connection.client, error)}") from error
        transport: paramiko.Transport = connection.transport
        return transport

    def _policy(self, hop: Hop) -> paramiko.MissingHostKeyPolicy:
        look_only = self.look_only and hop is self.route[-1]
        return _StrictPolicy(hop.peer, self.host_keys, self.accept_new, look_only, self.note)

    def _transport(self, hop: Hop, sock: Any, deadline: Deadline, options: dict[str, Any]) -> paramiko.Transport:
        transport = SignalAwareTransport(sock, **options)
        transport.handshake_timeout = deadline.left()
        security = transport.get_security_options()
        # If supported: AES-GCM takes a third less CPU here than AES-CTR with an HMAC.
        security.ciphers = tuple(sorted(security.ciphers, key=lambda name: "-gcm@" not in name))
        # The known key's type comes first, so that a host with several keys does not look unknown.
        transport.first_keys = tuple(self.host_keys.algorithms(hop.peer))
        return transport


class _StrictPolicy(paramiko.MissingHostKeyPolicy):
    def __init__(
        self, peer: Peer, host_keys: HostKeys, accept_new: bool, look_only: bool, note: Callable[[str], None]
    ) -> None:
        self._peer, self._note = peer, note
        self._host_keys = host_keys
        self._accept_new = accept_new
        self._look_only = look_only

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        if self._look_only:
            raise UnknownHostKeyError(OfferedKey(self._peer, key), "not compared yet", "")
        offered = OfferedKey(self._peer, key)
        if self._host_keys.check(self._peer, key, accept_new=self._accept_new):
            self._note(f"recorded the {key.get_name()} key {offered.fingerprint} of {self._peer}, not compared")


@contextlib.contextmanager
def _dial_tcp(hop: Hop, deadline: Deadline) -> Iterator[socket.socket]:
    addresses = socket.getaddrinfo(hop.host, hop.port, type=socket.SOCK_STREAM)
    for position, (family, kind, protocol, _, address) in enumerate(addresses):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(max(0.01, deadline.left() / (len(addresses) - position)))
            sock.connect(address)
        except OSError:
            sock.close()
            if position == len(addresses) - 1:
                raise
            continue
        with sock:
            ssh_errors.tune(sock)
            yield sock
        return


def _through(jump: paramiko.Transport, hop: Hop, deadline: Deadline) -> paramiko.Channel:
    place, ours = (hop.host, hop.port), ("", 0)
    return jump.open_channel("direct-tcpip", place, ours, timeout=max(0.01, deadline.left()))


def _hang_up(sock: socket.socket | paramiko.Channel) -> None:
    with contextlib.suppress(OSError, EOFError):
        sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it


def _await_greeting(sock: socket.socket | paramiko.Channel, deadline: Deadline) -> None:
    # A server speaks first (RFC 4253, 4.2); until then it takes none of our slots. Raises TimeoutError.
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        if not selector.select(deadline.left()):
            raise TimeoutError


# Limits the number of logins per SSH server: many hosts may share a jump host.

HANDSHAKES_PER_SERVER = 8  # from 10 on, sshd's MaxStartups drops logins at random


class _Server:
    """failures: by hop, time and reason of our last failure."""

    def __init__(self) -> None:
        self.slots = threading.Semaphore(HANDSHAKES_PER_SERVER)
        self.failures: dict[Hop, tuple[float, ConnectError | AuthError]] = {}


_servers: dict[tuple[str, int], _Server] = {}


@contextlib.contextmanager
def login_slot(hop: Hop, deadline: Deadline) -> Iterator[None]:
    """Limits handshakes per server. A jump host's failure during our wait in the queue counts for us too, so that a
    dead jump host is not dialled for each host behind it.
    """
    server = _servers.setdefault((hop.host, hop.port), _Server())
    hop_of_any_node = replace(hop, peer=replace(hop.peer, node=""))
    came_at = time.monotonic()
    with deadline.paused():
        server.slots.acquire()
    try:
        failed_at, failure = server.failures.get(hop_of_any_node, (0.0, None))
        if failure and failed_at > came_at:
            raise type(failure)(hop.peer.node, failure.message.removeprefix(f"{failure.node}: "), failure.remedy)
        try:
            yield
        except (ConnectError, AuthError) as error:
            if hop.peer.jump and not hung_up_early(error.__cause__):
                server.failures[hop_of_any_node] = (time.monotonic(), error)
            raise
    finally:
        server.slots.release()
