"""SSH to one host: a checked host key, a login by public key, one connection for all commands.

    transport = connect(Target("v100", "192.168.1.42", user="ubuntu"), host_keys=HostKeys.default(Home.default()))
    transport.run("nvidia-smi -L", timeout_s=20).stdout

Takes a `Target` and the person's SSH configuration; gives an `SshTransport`. This is the one edge where what paramiko,
fabric and sockets raise becomes our ConnectError, HostKeyError or AuthError.

Left to themselves, fabric accepts any host key, also one that changed, and paramiko waits for ever on a link that
swallows packets. So every key goes through `HostKeys`, and every wait has an end: TCP_USER_TIMEOUT for what was sent, a
heartbeat for the way behind a jump host, a deadline for each call.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path

import paramiko

from orchestrator.errors import ConnectError, HostError, ProbeError
from orchestrator.transport import MAX_OUTPUT_BYTES, CommandResult, ssh_errors
from orchestrator.transport.connection import Connection, Dialler
from orchestrator.transport.deadline import Deadline, allow_more
from orchestrator.transport.hostkeys import HostKeys, OfferedKey, UnknownHostKeyError
from orchestrator.transport.login import AskPassphrase, opens
from orchestrator.transport.login import unlock as _unlock
from orchestrator.transport.route import Hop, Target, find_route
from orchestrator.transport.ssh_errors import translated
from orchestrator.transport.ssh_session import STDERR, STDOUT, RemoteCommand

__all__ = ["SshTransport", "Target", "connect", "fetch_host_key", "unlock"]

# paramiko logs what servers say, and tracebacks; whatever matters reaches the person as an error of ours.
logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)


def connect(
    target: Target,
    *,
    host_keys: HostKeys,
    accept_new: bool = False,
    ask_passphrase: AskPassphrase | None = None,
    timeout_s: float = 10.0,
    dial_s: float = math.inf,
    ssh_config: Path | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> SshTransport:
    """Logs in to `target`, through its jump hosts where it has some.

    timeout_s: unless the inventory sets another limit, or the SSH configuration a longer one. dial_s: of that no more
    than so long for a hop's TCP connection: a host that is up accepts it, however busy it is. accept_new: record the
    key of a host of which none is known. ask_passphrase: gets a key file's path, answers its passphrase or None; asked
    once a key in the life of this process. ssh_config: in place of $ORCH_SSH_CONFIG, else ~/.ssh/config. note: called
    with what had to be left out of it. Raises ConnectError, HostKeyError, AuthError, UsageError for a broken SSH
    configuration.
    """
    route = find_route(target, ssh_config, note)
    limit_s = _limit_s(target, route, timeout_s)
    transport = SshTransport(Dialler(route, host_keys, accept_new, ask_passphrase, limit_s, dial_s=dial_s))
    allow_more(max(0.0, limit_s - timeout_s))
    transport.open(limit_s)
    return transport


def _limit_s(target: Target, route: Sequence[Hop], usual_s: float) -> float:
    return target.connect_timeout_s or max(usual_s, *(hop.connect_timeout_s for hop in route))


def unlock(target: Target, ask_passphrase: AskPassphrase, ssh_config: Path | None = None) -> None:
    """Opens the key file that the inventory names for `target`, asking for its passphrase if it must.

    Done for every node before hosts are dialled at once, a question never comes up in one of many threads.
    """
    if target.key_file and not opens(Path(target.key_file).expanduser()):
        _unlock(find_route(target, ssh_config)[-1], ask_passphrase)


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
    route = find_route(target, ssh_config)
    limit_s = _limit_s(target, route, timeout_s)
    dialler = Dialler(route, host_keys, False, ask_passphrase, limit_s, look_only=True)
    try:
        dialler.open(limit_s).close()
    except UnknownHostKeyError as unknown:
        return unknown.offered
    raise ConnectError(target.node, "showed no host key", "try again")  # pragma: no cover - `look_only` always raises


class SshTransport:
    """A `Transport` over one SSH connection, which is opened again when a command finds it broken."""

    def __init__(self, dialler: Dialler) -> None:
        self._dialler = dialler
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._closed = False
        self.login_s, self.logins_tried = 0.0, 1

    @property
    def node(self) -> str:
        return self._dialler.node

    def open(self, timeout_s: float) -> paramiko.Transport:
        """The live connection; a new one where the last has ended. The host key is checked each time."""
        if not self._lock.acquire(timeout=timeout_s):
            raise ConnectError(self.node, f"no connection within {timeout_s:g} s", "try again")
        try:
            if self._closed:
                raise ConnectError(self.node, "this connection was closed", "connect again")
            if self._connection is None or not self._connection.transport.is_active():
                self._drop()
                self._connection = self._dialler.open(timeout_s)
                self.login_s, self.logins_tried = self._connection.took_s, self._connection.tries
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
        timeout_s = self._dialler.timeout_s
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
            running.exit_code(lambda: ssh_errors.USER_TIMEOUT_S)  # a link that broke leaves none

    def _translated(self, late: str) -> contextlib.AbstractContextManager[None]:
        return translated(self._dialler.route[-1], late)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
