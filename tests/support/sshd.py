"""A real OpenSSH server on 127.0.0.1 for tests: its own host keys, configuration and folder, no lab needed.

    with running_sshd(tmp_path / "host") as server:
        connect(server.target(), host_keys=server.host_keys())

We log in to it as the user who runs the tests.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.files import write_atomic
from orchestrator.transport import HostKeys
from orchestrator.transport.ssh import Target
from tests.support.free_port import free_port

SSHD = "/usr/sbin/sshd"
needs_sshd = pytest.mark.skipif(not os.access(SSHD, os.X_OK), reason=f"{SSHD} (openssh-server) is not installed")


@dataclass
class Sshd:
    folder: Path
    port: int
    key: Path
    node: str = "v100"
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def target(self, **changes: Any) -> Target:
        ours = Target(self.node, "127.0.0.1", self.port, getpass.getuser(), str(self.key))
        return replace(ours, **changes)

    def host_key(self, kind: str = "ed25519") -> str:
        """`ssh-ed25519 AAAA...`, as the inventory's `host_key` has it."""
        return " ".join((self.folder / f"host_{kind}.pub").read_text().split()[:2])

    def fingerprint(self, kind: str = "ed25519") -> str:
        """As ssh-keygen prints it."""
        return _output("ssh-keygen", "-lf", self.folder / f"host_{kind}.pub").split()[1]

    def known_hosts_line(self, kind: str = "ed25519") -> str:
        return f"[127.0.0.1]:{self.port} {self.host_key(kind)}\n"

    def host_keys(self, kind: str = "ed25519") -> HostKeys:
        """Host keys among which this server's is known, in a file of the person's."""
        users = self.folder / "users_known_hosts"
        write_atomic(users, self.known_hosts_line(kind))  # another thread may be reading it
        return HostKeys(self.folder / "recorded", [users])

    def log(self) -> str:
        return (self.folder / "sshd.log").read_text()

    def logins(self) -> int:
        return self.log().count("Accepted publickey")

    def start(self) -> None:
        with open(self.folder / "sshd.log", "ab") as log:
            self.process = subprocess.Popen([SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")], stderr=log)
        wait_for(self._listens, f"sshd to listen ({self.folder / 'sshd.log'})")

    def stop(self) -> None:
        """Ends the server and its open connections, none of which can still say that its command has ended."""
        if self.process:
            self.freeze()
            for child in _children(self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        """The server and its connections stay, and no longer answer anything."""
        assert self.process
        for pid in [self.process.pid, *_children(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):  # a connection may just have ended
                os.kill(pid, signal.SIGSTOP)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@contextlib.contextmanager
def running_sshd(
    folder: Path,
    *,
    options: Sequence[str] = (),
    host_keys: Sequence[str] = ("ed25519",),
    key: Path | None = None,
    environment: Sequence[str] = (),
    prepare: Callable[[Path], object] = lambda folder: None,
) -> Iterator[Sshd]:
    """options: further lines of sshd_config, before ours. key: a private key that may log in; made when None.
    environment: NAME=value of each session. prepare: called with the folder before the server starts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)  # where a root sshd separates its privileges
    key = key or make_key(folder / "id")
    server = Sshd(folder, free_port(), key)
    lines = [
        *options,
        f"Port {server.port}",
        "ListenAddress 127.0.0.1",
        *(f"HostKey {make_key(folder / f'host_{kind}', kind)}" for kind in host_keys),
        f"AuthorizedKeysFile {shutil.copy(f'{key}.pub', folder / 'authorized_keys')}",
        "StrictModes no",
        "UsePAM no",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin prohibit-password",
        # So bash takes itself for an inner shell, which does not read the person's start-up files.
        f"SetEnv {' '.join(['SHLVL=1', *environment])}",
        "PidFile none",
        "Subsystem sftp internal-sftp",
        "LogLevel VERBOSE",
    ]
    (folder / "sshd_config").write_text("\n".join(lines) + "\n")
    prepare(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def make_key(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    path.unlink(missing_ok=True)
    _output("ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", "test", "-f", path)
    return path


def wait_for(condition: Any, what: str, timeout_s: float = 10.0) -> None:
    """Looks until `condition()` holds; fails the test when it does not in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"waited {timeout_s:g} s for {what}")
        time.sleep(0.02)


def _children(pid: int) -> list[int]:
    """Of sshd: one process a connection, and one more where it separated its privileges."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may just have ended
        direct = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return [grandchild for child in direct for grandchild in [*_children(child), child]]
    return []


def _output(*argv: Any) -> str:
    return subprocess.run([str(word) for word in argv], check=True, capture_output=True, text=True).stdout
