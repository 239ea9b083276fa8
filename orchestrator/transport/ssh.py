"""SSH to one host: a checked host key, a login by public key, one connection for all commands.

    transport = connect(Target("v100", "192.168.1.42", user="ubuntu"), host_keys=HostKeys.default(Home.default()))
    transport.run("nvidia-smi -L", timeout_s=20).stdout

Takes a `Target` and the person's SSH configuration; gives an `SshTransport`. This is the one edge where what paramiko,
fabric and sockets raise becomes our ConnectError, HostKeyError or AuthError.

Left to themselves, fabric accepts any host key, also one that changed, and paramiko waits for ever on a link that
swallows packets. So every key goes through `HostKeys`, and every wait has an end: TCP_USER_TIMEOUT for what was sent, a
heartbeat for the way behind a jump host, a deadline for each call.

Hundreds of hosts are dialled at once. Key exchanges cost our processor some 50 ms each, so few are under way at a time;
a host has its turn when its server has greeted us, and never waits behind one that is silent.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fabric
import paramiko

from orchestrator.errors import AuthError, ConnectError, HostError, ProbeError
from orchestrator.text import one_line
from orchestrator.transport import MAX_OUTPUT_BYTES, CommandResult
from orchestrator.transport.deadline import Deadline
from orchestrator.transport.hostkeys import HostKeys, OfferedKey, Peer, UnknownHostKeyError
from orchestrator.transport.login import AskPassphrase, Login
from orchestrator.transport.login import unlock as _unlock
from orchestrator.transport.route import Hop, Target, find_route, read_ssh_config
from orchestrator.transport.session import STDERR, STDOUT, LinkLostError, RemoteCommand, SignalAwareTransport

__all__ = ["SshTransport", "Target", "connect", "fetch_host_key", "unlock"]

USER_TIMEOUT_S = 20.0  # unanswered bytes older than this mean that the link is gone
_HEARTBEAT_S = 5.0
_HANDSHAKES_PER_SERVER = 8  # sshd's MaxStartups drops logins at random from 10 on; matters most for a jump host
_KEY_EXCHANGES = 16  # at once, over all hosts: more of them only make each last longer
_BANNER_FAULT = "Error reading SSH protocol banner"

# What is out of use: CBC modes, MACs on MD5 and SHA-1, key exchange and signatures on SHA-1 (RFC 9142, RFC 8332).
_DISABLED = {
    "ciphers": ["aes128-cbc", "aes192-cbc", "aes256-cbc", "blowfish-cbc", "3des-cbc"],
    "macs": ["hmac-md5", "hmac-md5-96", "hmac-sha1", "hmac-sha1-96"],
    "kex": ["diffie-hellman-group1-sha1", "diffie-hellman-group14-sha1", "diffie-hellman-group-exchange-sha1"],
    "keys": ["ssh-rsa", "ssh-dss"],
    "pubkeys": ["ssh-rsa", "ssh-dss"],
}

# paramiko logs what servers say, and tracebacks; whatever matters reaches the person as an error of ours.
logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)

_servers: dict[tuple[str, int], _Server] = {}
_key_exchanges = threading.Semaphore(_KEY_EXCHANGES)


def connect(
    target: Target,
    *,
    host_keys: HostKeys,
    accept_new: bool = False,
    ask_passphrase: AskPassphrase | None = None,
    timeout_s: float = 10.0,
    dial_s: float = math.inf,
    ssh_config: Path | None = None,
) -> SshTransport:
    """Logs in to `target`, through its jump hosts where it has some.

    dial_s: of timeout_s no more than so long for a hop's TCP connection: a host that is up accepts it, however busy it
    is. accept_new: record the key of a host of which none is known. ask_passphrase: gets a key file's path, answers its
    passphrase or None; asked once a key in the life of this process. ssh_config: in place of $ORCH_SSH_CONFIG, else
    ~/.ssh/config. Raises ConnectError, HostKeyError, AuthError, UsageError for a broken SSH configuration.
    """
    route = find_route(target, read_ssh_config(ssh_config))
    transport = SshTransport(_Way(route, host_keys, accept_new, ask_passphrase, timeout_s, dial_s=dial_s))
    transport.open(timeout_s)
    return transport


def unlock(target: Target, ask_passphrase: AskPassphrase, ssh_config: Path | None = None) -> None:
    """Opens the key file that the inventory names for `target`, asking for its passphrase if it must.

    Done for every node before hosts are dialled at once, a question never comes up in one of many threads.
    """
    _unlock(find_route(target, read_ssh_config(ssh_config))[-1], ask_passphrase)


def fetch_host_key(
    target: Target,
    *,
    host_keys: HostKeys,
    ask_passphrase: AskPassphrase | None = None,
    timeout_s: float = 10.0,
    ssh_config: Path | None = None,
) -> OfferedKey:
    """The key that a host shows, after a key exchange and before any login.

    That is the target's key, or the key of the first jump host on the way that we do not know (`peer.jump`): it has to
    be trusted first. Nothing is recorded: when a person has compared `fingerprint`, call
    `host_keys.check(peer, key, accept_new=True)`, which refuses a key that is not the known one.
    """
    route = find_route(target, read_ssh_config(ssh_config))
    way = _Way(route, host_keys, False, ask_passphrase, timeout_s, look_only=True)
    try:
        way.open(timeout_s).close()
    except UnknownHostKeyError as unknown:
        return unknown.offered
    raise ConnectError(target.node, "showed no host key", "try again")  # pragma: no cover - `look_only` always raises


class SshTransport:
    """A `Transport` over one SSH connection, which is opened again when a command finds it broken."""

    def __init__(self, way: _Way) -> None:
        self._way = way
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        self._closed = False

    @property
    def node(self) -> str:
        return self._way.node

    def open(self, timeout_s: float) -> paramiko.Transport:
        """The live connection; a new one where the last has ended. The host key is checked each time."""
        if not self._lock.acquire(timeout=timeout_s):
            raise ConnectError(self.node, f"no connection within {timeout_s:g} s", "try again")
        try:
            if self._closed:
                raise ConnectError(self.node, "this connection was closed", "connect again")
            if self._connection is None or not self._connection.transport.is_active():
                self._drop()
                self._connection = self._way.open(timeout_s)
            return self._connection.transport
        finally:
            self._lock.release()

    def run(self, command: str, *, stdin: bytes = b"", timeout_s: float) -> CommandResult:
        deadline = Deadline(timeout_s)
        output: dict[int, list[bytes]] = {STDOUT: [], STDERR: []}
        size = 0
        try:
            with (
                self._translated(f"the command did not end within {timeout_s:g} s"),
                RemoteCommand(self.open(timeout_s), command, stdin, open_s=timeout_s) as running,
            ):
                for stream, data in running.pieces(deadline.left):
                    output[stream].append(data)
                    size += len(data)
                    if size > MAX_OUTPUT_BYTES:
                        raise ProbeError(self.node, f"its answer is longer than {MAX_OUTPUT_BYTES} bytes")
                code = running.exit_code(deadline.left)
        except HostError as error:
            error.said = b"".join(output[STDOUT])
            raise
        return CommandResult(code, b"".join(output[STDOUT]), b"".join(output[STDERR]))

    @contextlib.contextmanager
    def stream(self, command: str, *, stdin: bytes | Iterable[bytes] = b"") -> Iterator[Iterator[bytes]]:
        timeout_s = self._way.timeout_s
        with (
            RemoteCommand(self.open(timeout_s), command, stdin, hold_stdin=True, open_s=timeout_s) as running,
            contextlib.closing(self._chunks(running)) as chunks,
        ):
            yield chunks

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._drop()

    def _chunks(self, running: RemoteCommand) -> Generator[bytes, None, None]:
        with self._translated("the host did not start the command"):
            for stream, data in running.pieces(lambda: float("inf")):
                yield data if stream == STDOUT else b""
            running.exit_code(lambda: USER_TIMEOUT_S)  # a link that broke leaves none

    def _translated(self, late: str) -> contextlib.AbstractContextManager[None]:
        return _translated(self._way.route[-1], late)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@dataclass(frozen=True)
class _Connection:
    """An open connection with everything that it rests upon."""

    transport: paramiko.Transport
    resources: ExitStack

    def close(self) -> None:
        self.resources.close()


@dataclass(frozen=True)
class _Way:
    """All that is needed to connect, again and again. look_only: refuse every last key as unknown, to see it."""

    route: tuple[Hop, ...]
    host_keys: HostKeys
    accept_new: bool
    ask_passphrase: AskPassphrase | None = field(repr=False)
    timeout_s: float
    look_only: bool = False
    dial_s: float = math.inf

    @property
    def node(self) -> str:
        return self.route[-1].peer.node

    def open(self, timeout_s: float) -> _Connection:
        """Dials until the deadline, again where a server hung up before it greeted us. A refused login is final."""
        deadline = Deadline(min(self.timeout_s, timeout_s))
        pause_s = 0.2
        while True:
            try:
                return self._dial(deadline)
            except ConnectError as error:
                if not _hung_up_early(error.__cause__) or deadline.left() < pause_s:
                    raise
            time.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads load, keeps no secret
            pause_s = min(2 * pause_s, 2.0)

    def _dial(self, deadline: Deadline) -> _Connection:
        with ExitStack() as resources:
            transport = None
            for hop in self.route:
                late = f"no SSH login within {deadline.timeout_s:g} s"
                with _slot(hop, deadline), _translated(hop, late, deadline):
                    transport = self._open_hop(hop, transport, deadline, resources)
            assert transport  # noqa: S101 - for the type checker: a route has hops
            if len(self.route) > 1:
                threading.Thread(target=_heartbeat, args=(transport,), name="orch-heartbeat", daemon=True).start()
            return _Connection(transport, resources.pop_all())

    def _open_hop(
        self, hop: Hop, jump: paramiko.Transport | None, deadline: Deadline, resources: ExitStack
    ) -> paramiko.Transport:
        """jump: the open connection to the hop before it."""
        dial = Deadline(min(self.dial_s, deadline.left()))
        late = "no answer" if self.dial_s < deadline.timeout_s else "no SSH login"
        with _translated(hop, f"{late} within {min(self.dial_s, deadline.timeout_s):g} s", dial):
            sock = _through(jump, hop, dial) if jump else resources.enter_context(_dial_tcp(hop, dial))
        _await_greeting(sock, deadline)
        with ExitStack() as turn:
            with deadline.paused():
                turn.enter_context(_key_exchanges)
            return self._log_in(hop, sock, deadline, resources, turn.close)

    def _log_in(
        self, hop: Hop, sock: Any, deadline: Deadline, resources: ExitStack, keys_exchanged: Callable[[], None]
    ) -> paramiko.Transport:
        settings = {
            "sock": sock,
            "timeout": deadline.left(),
            "banner_timeout": deadline.left(),
            "channel_timeout": deadline.left(),
            "disabled_algorithms": _DISABLED,
            "transport_factory": lambda sock, **options: self._transport(hop, sock, deadline, options),
            "auth_strategy": Login(hop, deadline, self.ask_passphrase, keys_exchanged),
        }
        # An own, empty configuration: neither ~/.fabric.yaml nor fabric's reading of ~/.ssh/config has a say here.
        config = fabric.Config(lazy=True, ssh_config=paramiko.SSHConfig())
        connection = fabric.Connection(
            hop.host,
            user=hop.user,
            port=hop.port,
            config=config,
            gateway=False,  # fabric's word for "none, whatever a configuration says"
            connect_kwargs=settings,
        )
        connection.client.set_missing_host_key_policy(self._policy(hop))  # in place of fabric's "add any"
        resources.callback(connection.client.close)
        try:
            connection.open()
        except paramiko.ssh_exception.IncompatiblePeer as error:
            raise paramiko.ssh_exception.IncompatiblePeer(f"{error}{_offer(connection.client, error)}") from error
        transport: paramiko.Transport = connection.client.get_transport()
        return transport

    def _policy(self, hop: Hop) -> paramiko.MissingHostKeyPolicy:
        look_only = self.look_only and hop is self.route[-1]
        return _StrictPolicy(hop.peer, self.host_keys, self.accept_new, look_only)

    def _transport(self, hop: Hop, sock: Any, deadline: Deadline, options: dict[str, Any]) -> paramiko.Transport:
        transport = SignalAwareTransport(sock, **options)
        transport.handshake_timeout = deadline.left()
        security = transport.get_security_options()
        # Where a host has it: AES-GCM takes a third less of our processor than AES-CTR with an HMAC.
        security.ciphers = tuple(sorted(security.ciphers, key=lambda name: "-gcm@" not in name))
        # The type of key that we know comes first: a host with several keys must not look unknown.
        known = [name for name in self.host_keys.algorithms(hop.peer) if name in security.key_types]
        security.key_types = (*known, *(name for name in security.key_types if name not in known))
        return transport


class _StrictPolicy(paramiko.MissingHostKeyPolicy):
    """paramiko is given no known hosts, so that every key comes here."""

    def __init__(self, peer: Peer, host_keys: HostKeys, accept_new: bool, look_only: bool) -> None:
        self._peer = peer
        self._host_keys = host_keys
        self._accept_new = accept_new
        self._look_only = look_only

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        if self._look_only:
            raise UnknownHostKeyError(OfferedKey(self._peer, key), "not compared yet", "")
        self._host_keys.check(self._peer, key, accept_new=self._accept_new)


class _Server:
    """An SSH server, which many hosts share when it is their jump host.

    failures: by hop, when we last failed to get through, and why.
    """

    def __init__(self) -> None:
        self.slots = threading.Semaphore(_HANDSHAKES_PER_SERVER)
        self.failures: dict[Hop, tuple[float, ConnectError | AuthError]] = {}


@contextlib.contextmanager
def _slot(hop: Hop, deadline: Deadline) -> Iterator[None]:
    """At most so many handshakes with one server at once. What a jump host did to one who stood before us in the queue
    it would do to us: a dead one is not dialled for each host behind it.
    """
    server = _servers.setdefault((hop.host, hop.port), _Server())
    anybodys = replace(hop, peer=replace(hop.peer, node=""))
    came_at = time.monotonic()
    with deadline.paused():
        server.slots.acquire()
    try:
        failed_at, failure = server.failures.get(anybodys, (0.0, None))
        if failure and failed_at > came_at:
            raise type(failure)(hop.peer.node, failure.message.removeprefix(f"{failure.node}: "), failure.remedy)
        try:
            yield
        except (ConnectError, AuthError) as error:
            if hop.peer.jump and not _hung_up_early(error.__cause__):
                server.failures[anybodys] = (time.monotonic(), error)
            raise
    finally:
        server.slots.release()


@contextlib.contextmanager
def _dial_tcp(hop: Hop, deadline: Deadline) -> Iterator[socket.socket]:
    """A TCP connection to the first of the host's addresses that answers; closed on leaving."""
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
            _tune(sock)
            yield sock
        return


def _through(jump: paramiko.Transport, hop: Hop, deadline: Deadline) -> paramiko.Channel:
    """A connection that the jump host opens for us."""
    place, ours = (hop.host, hop.port), ("", 0)
    return jump.open_channel("direct-tcpip", place, ours, timeout=max(0.01, deadline.left()))


def _await_greeting(sock: socket.socket | paramiko.Channel, deadline: Deadline) -> None:
    """A server speaks first (RFC 4253, 4.2): until it does, it takes none of our turns. Raises TimeoutError."""
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        if not selector.select(deadline.left()):
            raise TimeoutError


def _tune(sock: socket.socket) -> None:
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


def _heartbeat(transport: paramiko.Transport) -> None:
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


def _hung_up_early(cause: BaseException | None) -> bool:
    """How a server that is short of login slots (MaxStartups) shows: it goes away before or in the key exchange."""
    return isinstance(cause, (EOFError, ConnectionResetError, BrokenPipeError)) or _BANNER_FAULT in str(cause)


@contextlib.contextmanager
def _translated(hop: Hop, late: str, deadline: Deadline | None = None) -> Iterator[None]:
    """Turns what paramiko, fabric and sockets raise into ours, the cause kept. late: what to say of a time-out."""
    try:
        yield
    except (paramiko.SSHException, OSError, EOFError, LinkLostError) as error:
        timed_out = isinstance(error, TimeoutError) or "timeout" in str(error).lower()
        if timed_out or (deadline is not None and not deadline.left()):
            remedy = "check that the host is up, not overloaded, and reachable"
            ours = ConnectError(hop.peer.node, f"{_where(hop)}: {late}", remedy)
        else:
            ours = _translate(hop, error, is_up=deadline is None)
        ours.at = "" if hop.peer.jump else hop.host
        raise ours from error


def _translate(hop: Hop, error: Exception, *, is_up: bool) -> ConnectError:
    """is_up: whether there was a connection before this."""
    node, where = hop.peer.node, _where(hop)
    if isinstance(error, socket.gaierror):
        return ConnectError(node, f"no address for {hop.host!r} ({error.strerror})", "check `host:` in the inventory")
    if isinstance(error, ConnectionRefusedError):
        return ConnectError(node, f"nothing listens at {where}", "start sshd on that host, or mend `port:`")
    if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
        remedy = "update OpenSSH on that host; CBC ciphers, MD5 and SHA-1 are not used"
        return ConnectError(node, f"{where}: no safe algorithm in common ({_plain(error)})", remedy)
    if isinstance(error, paramiko.ChannelException):
        remedy = "look at MaxSessions, and on a jump host at AllowTcpForwarding, in its sshd_config"
        return ConnectError(node, f"{where}: a channel was refused ({_plain(error)})", remedy)
    if _BANNER_FAULT in str(error):
        remedy = "is this port SSH? sshd also hangs up on too many logins at once (MaxStartups, PerSourcePenalties)"
        return ConnectError(node, f"{where}: hung up before an SSH greeting", remedy)
    what = "the SSH connection broke" if is_up else "no SSH connection was made"
    return ConnectError(node, f"{where}: {what} ({_plain(error)})", "check host and network, try again")


def _where(hop: Hop) -> str:
    return f"{'jump host ' if hop.peer.jump else ''}{hop.place}"


def _offer(client: paramiko.SSHClient, error: Exception) -> str:
    """`: it offers hmac-md5,hmac-sha1`: what the server has of the kind in which we found nothing in common."""
    transport = client.get_transport()
    offers = transport.servers_offer if isinstance(transport, SignalAwareTransport) else {}
    return next((f": it offers {names}" for kind, names in offers.items() if kind in str(error)), "")


def _plain(error: Exception) -> str:
    """An error's words on one line, fit for a terminal: servers have a say in them."""
    words = error.strerror if isinstance(error, OSError) and error.strerror else error
    return one_line(words, 300) or type(error).__name__
