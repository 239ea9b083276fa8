"""Checks every server's host key, before we log in.

    HostKeys.default(Home.default()).check(Peer("v100", "192.168.1.42"), key)      # raises HostKeyError

Known keys come from the inventory's pin, which overrides the others; from the person's known_hosts files, which are
only read; and from `$ORCH_HOME/known_hosts`, to which `orch trust` appends. A changed key is always refused, a @revoked
key even if it is pinned. A certificate by an authority of a @cert-authority line is accepted.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import paramiko

from orchestrator.errors import HostKeyError
from orchestrator.files import locked, write_atomic
from orchestrator.paths import Home
from orchestrator.transport import certificates
from orchestrator.transport.certificates import Certificate
from orchestrator.units import fits

# Signature algorithms per key type (RFC 8332). SHA-1 signatures are never requested.
_ALGORITHMS = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256")}
_AUTHORITY = "@cert-authority"
# Keys with supported certificates.
_SIGNED = (
    *("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"),
    *("rsa-sha2-512", "rsa-sha2-256"),
)
_ENTRY = re.compile(r"(?:(@[\w-]+)\s+)?(\S+)\s+(\S+)\s+(\S+)")


@dataclass(frozen=True)
class Peer:
    node: str  # its name in the inventory
    name: str  # its name in known_hosts files (`known_name`)
    pin: str | None = None  # the inventory's `host_key`
    files: tuple[Path, ...] | None = None  # the person's known_hosts files, if their SSH configuration sets others
    jump: bool = False  # this is a jump host on the way to `node`
    host: str = ""  # the name required in a certificate

    def __str__(self) -> str:
        return f"jump host {self.name}" if self.jump else self.name


@dataclass(frozen=True)
class OfferedKey:
    """The key that a peer presented in the key exchange, not checked yet."""

    peer: Peer
    key: paramiko.PKey

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.key)


class UnknownHostKeyError(HostKeyError):
    """No key of this host is known. `offered` is the presented key."""

    def __init__(self, offered: OfferedKey, message: str, remedy: str) -> None:
        super().__init__(offered.peer.node, message, remedy)
        self.offered = offered


@dataclass(frozen=True)
class KnownKey:
    """One line of a known_hosts file (sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT")."""

    file: Path
    line: int
    marker: str
    hosts: str
    type: str
    blob: bytes

    def __str__(self) -> str:
        return f"{self.type} {_digest(self.blob)} ({self.file}:{self.line})"


class HostKeys:
    """All known host keys; safe for several threads and processes."""

    def __init__(self, recorded: Path, users: Sequence[Path] = ()) -> None:
        """recorded: our own file. users: files of the person and the system, only read."""
        self.recorded = recorded
        self.users = tuple(users)

    @classmethod
    def default(cls, home: Home) -> HostKeys:
        ssh, system = Path.home() / ".ssh", Path("/etc/ssh")
        names = (ssh / "known_hosts", ssh / "known_hosts2", system / "ssh_known_hosts", system / "ssh_known_hosts2")
        return cls(home.known_hosts, names)

    def algorithms(self, peer: Peer) -> list[str]:
        """Host key algorithms to request first, so that a host with several keys presents the known key."""
        if peer.pin:
            return list(_ALGORITHMS.get(peer.pin.split(" ")[0], (peer.pin.split(" ")[0],)))
        known = self._known(peer)
        types = dict.fromkeys(entry.type for entry in known if not entry.marker)
        plain = [algorithm for type_ in types for algorithm in _ALGORITHMS.get(type_, (type_,))]
        signed = [f"{name}{certificates.SUFFIX}" for name in _SIGNED] if _authorities(known) else []
        return [*signed, *plain]

    def check(self, peer: Peer, key: paramiko.PKey, *, accept_new: bool = False) -> bool:
        """Returns if `key` is the peer's, and whether it was recorded now. accept_new: record the key of a host without
        known keys.

        Raises UnknownHostKeyError without a known key, HostKeyError for another or a revoked key.
        """
        try:
            self._check(peer, key)
        except UnknownHostKeyError:
            if not accept_new:
                raise
            self._record(peer, key)
            return True
        return False

    def record(self, host: str, port: int, key: paramiko.PKey) -> None:
        """Records a key that a person has compared. Raises HostKeyError if another is known for this host."""
        name = known_name(host, port)
        self.check(Peer(name, name), key, accept_new=True)

    def _record(self, peer: Peer, key: paramiko.PKey) -> None:
        self.recorded.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        with locked(self.recorded.with_name(f"{self.recorded.name}.lock")):
            try:
                self._check(peer, key)  # another process may have recorded one while we waited for the lock
            except UnknownHostKeyError:
                before = self.recorded.read_bytes() if self.recorded.exists() else b""
                line = f"{peer.name} {key.get_name()} {key.get_base64()}\n"
                write_atomic(self.recorded, before + line.encode())

    def _check(self, peer: Peer, key: paramiko.PKey) -> None:
        blob = key.asbytes()
        known = self._known(peer)
        certificate = Certificate.of(key)
        for entry in known:
            if entry.marker == "@revoked" and entry.blob == blob:
                remedy = "give this host a new key; a revoked key is never accepted"
                raise HostKeyError(peer.node, f"{peer}: its host key {_show(key)} is revoked ({_at(entry)})", remedy)
            if entry.marker == "@revoked" and certificate and entry.blob == certificate.authority:
                words = f"{peer}: the authority that signed its host key's certificate is revoked ({_at(entry)})"
                raise HostKeyError(peer.node, words, "have the host's key signed by another authority")
        if peer.pin is not None:
            if not _is_pinned(peer.pin, key):
                raise _not_pinned(peer, peer.pin, key)
            return
        authorities = _authorities(known)
        known = [entry for entry in known if not entry.marker]
        if any(entry.blob == blob for entry in known):
            return
        fault = ""
        if certificate and certificate.authority in [entry.blob for entry in authorities]:
            fault = certificate.fault_of_host(peer.host)
            if not fault:
                return
        raise _changed(peer, key, known[0]) if known else _unknown(peer, key, authorities, certificate, fault)

    def _known(self, peer: Peer) -> list[KnownKey]:
        files = (*(self.users if peer.files is None else peer.files), self.recorded)
        return [entry for file in files for entry in _read(file) if _matches(entry.hosts, peer.name)]


def known_name(host: str, port: int) -> str:
    """`host` as in known_hosts files: lower case, and `[host]:port` if the port is not 22."""
    return host.lower() if port == 22 else f"[{host.lower()}]:{port}"


def fingerprint(key: paramiko.PKey) -> str:
    """`SHA256:...` as OpenSSH prints it: base 64 (RFC 4648) without padding."""
    return _digest(key.asbytes())


def _digest(blob: bytes) -> str:
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _read(file: Path) -> Iterator[KnownKey]:
    # The entries of a file. Unreadable lines are skipped, as in OpenSSH.
    try:
        lines = file.read_text(errors="replace").split("\n")
    except OSError:
        return
    for number, line in enumerate(lines, start=1):
        match = _ENTRY.match(line.strip())
        if not match or line.lstrip().startswith("#"):
            continue
        marker, hosts, type_, encoded = match.groups()
        try:
            blob = base64.b64decode(encoded, validate=True)
        except ValueError:
            continue
        if marker in (None, "@revoked", _AUTHORITY):
            yield KnownKey(file, number, marker or "", hosts, type_, blob)


def _matches(hosts: str, name: str) -> bool:
    if hosts.startswith("|1|"):
        return _matches_hash(hosts, name)
    matched = False
    for pattern in hosts.lower().split(","):
        if fits(pattern.removeprefix("!"), name):
            if pattern.startswith("!"):
                return False
            matched = True
    return matched


def _matches_hash(hosts: str, name: str) -> bool:
    try:
        salt, expected = (base64.b64decode(part, validate=True) for part in hosts[3:].split("|"))
    except ValueError:
        return False
    return hmac.compare_digest(hmac.new(salt, name.encode(), "sha1").digest(), expected)


def _is_pinned(pin: str, key: paramiko.PKey) -> bool:
    words = pin.split()
    if pin.startswith("SHA256:"):
        return hmac.compare_digest(words[0].rstrip("="), fingerprint(key))
    return words[:2] == [key.get_name(), key.get_base64()]


def _show(key: paramiko.PKey) -> str:
    return f"{key.get_name()} {fingerprint(key)}"


def _at(entry: KnownKey) -> str:
    return f"{entry.file}:{entry.line}"


def _authorities(known: Sequence[KnownKey]) -> list[KnownKey]:
    return [entry for entry in known if entry.marker == _AUTHORITY]


def _unknown(
    peer: Peer, key: paramiko.PKey, authorities: Sequence[KnownKey], certificate: Certificate | None, fault: str
) -> UnknownHostKeyError:
    words = f"{peer}: its host key {_show(key)} is not known"
    remedy = f"compare it with what `ssh-keygen -lf` prints for the key on that host, then `orch trust {peer.node}`"
    if authorities:
        shown = "has a certificate of another authority" if certificate else "shows no certificate"
        words += (
            f", and {f'its certificate {fault}' if fault else f'it {shown}'} (@cert-authority {_at(authorities[0])})"
        )
    return UnknownHostKeyError(OfferedKey(peer, key), words, remedy)


def _changed(peer: Peer, key: paramiko.PKey, known: KnownKey) -> HostKeyError:
    return HostKeyError(
        peer.node,
        f"{peer}: its host key is not the one we know: known {known}, offered {_show(key)}",
        "somebody may intercept the connection; if the host was reinstalled, compare the new key there, remove the old "
        f"key with `ssh-keygen -R '{peer.name}' -f {known.file}`, then `orch trust {peer.node}`",
    )


def _not_pinned(peer: Peer, pin: str, key: paramiko.PKey) -> HostKeyError:
    return HostKeyError(
        peer.node,
        f"{peer}: its host key is not the pinned key: pinned {_show_pin(pin)} (host_key in the inventory), "
        f"offered {_show(key)}",
        "somebody may intercept the connection; if the host was reinstalled, compare the new key there and correct "
        "`host_key:` (a pin written as `ssh-rsa AAAA...` asks for that type of key)",
    )


def _show_pin(pin: str) -> str:
    words = pin.split()
    try:
        return f"{words[0]} {_digest(base64.b64decode(words[1], validate=True))}"
    except (IndexError, ValueError):
        return pin
