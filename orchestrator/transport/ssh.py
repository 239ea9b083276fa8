"""SSH to one host: a checked host key, a login by public key, one connection for all commands.

    transport = connect(Target("v100", "192.168.1.42", user="ubuntu"), host_keys=HostKeys.default(Home.default()))
    transport.run("nvidia-smi -L", timeout_s=20).stdout

Errors of paramiko, fabric and sockets become ConnectError, HostKeyError or AuthError here. fabric would accept any host
key, and paramiko would wait for ever on a dead link: so keys go through `HostKeys`, and waits are limited by
TCP_USER_TIMEOUT, a heartbeat behind jump hosts, and a deadline for each call.
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

# paramiko logs servers' messages and tracebacks; everything relevant becomes an error of ours.
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
    """Logs in to `target`, through its jump hosts if any.

    timeout_s: overridden by the inventory's limit, or a longer limit in the SSH configuration. dial_s: limit for a
    hop's TCP connection. accept_new: record the key of a host without known keys. ask_passphrase: gets a key file's
    path, returns its passphrase or None; called once per key and process. ssh_config: replaces $ORCH_SSH_CONFIG and
    ~/.ssh/config. note: called with ignored parts of it, and
    with newly recorded keys. Raises ConnectError, HostKeyError, AuthError, UsageError
    (broken SSH configuration).
    """
    route = find_route(target, ssh_config, note)
    limit_s = _limit_s(target, route, timeout_s)
    dialler = Dialler(route, host_keys, accept_new, ask_passphrase, limit_s, dial_s=dial_s, note=note)
    transport = SshTransport(dialler)
    allow_more(max(0.0, limit_s - timeout_s))
    transport.open(limit_s)
    return transport


def _limit_s(target: Target, route: Sequence[Hop], usual_s: float) -> float:
    return target.connect_timeout_s or max(usual_s, *(hop.connect_timeout_s for hop in route))


def unlock(target: Target, ask_passphrase: AskPassphrase, ssh_config: Path | None = None) -> None:
    """Opens the key file that the inventory names for `target`, asking for its passphrase if needed: before a parallel
    dial, so that no thread has to ask.
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
    """The key that a host presents, before any login.

    It is the target's, or the first unknown jump host's (`peer.jump`), which has to be trusted first. Nothing is
    recorded: after a person has compared `fingerprint`, call `host_keys.check(peer, key, accept_new=True)`.
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
    """A `Transport` over one SSH connection, reopened when a command finds it broken."""

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
        """The live connection, or a new one if it has ended. The host key is checked each time."""
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
            running.exit_code(lambda: ssh_errors.USER_TIMEOUT_S)  # a broken connection leaves none

    def _translated(self, late: str) -> contextlib.AbstractContextManager[None]:
        return translated(self._dialler.route[-1], late)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
