"""Logs in with public keys, after the host's key was checked.

    Login(hop, deadline, ask_passphrase).authenticate(transport)      # raises AuthError with the keys tried

Keys come from the hop's files and from the agent, which signs for files whose key it holds. A key is offered with its
certificate first, then without. Private keys are never written, copied or forwarded; a file that others may read is
refused. Passphrases and opened keys stay in this process's memory.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import paramiko

from orchestrator.errors import AuthError
from orchestrator.transport import shell
from orchestrator.transport.certificates import SUFFIX, Certificate, is_public, public_of
from orchestrator.transport.deadline import Deadline
from orchestrator.transport.route import Hop
from orchestrator.transport.ssh_session import HUNG_UP, SignalAwareTransport
from orchestrator.units import one_line

AskPassphrase: TypeAlias = Callable[[str], "str | None"]
_AgentKeys: TypeAlias = "dict[bytes, list[paramiko.AgentKey]]"

_KEY_CLASSES: tuple[type[paramiko.PKey], ...] = (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey)

_LATE = "Authentication timeout."  # paramiko has no class of its own for it


class KeyUnusableError(Exception):
    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


class KeyRing:
    """Private keys opened by this process; each passphrase is asked for once, also by parallel logins."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[tuple[Path, int], paramiko.PKey | KeyUnusableError] = {}

    def open(self, path: Path, ask_passphrase: AskPassphrase | None) -> paramiko.PKey:
        """The key in `path`. Raises KeyUnusableError; after a wrong passphrase it does not ask again."""
        with self._lock:
            written = _check_private(path)
            held = self._keys.get((path, written)) or self._load(path, written, ask_passphrase)
        if isinstance(held, KeyUnusableError):
            raise held
        return held

    def _load(self, path: Path, written: int, ask_passphrase: AskPassphrase | None) -> paramiko.PKey | KeyUnusableError:
        # written: modification time, since a replaced file is another key.
        try:
            key: paramiko.PKey | KeyUnusableError = _read_key(path, None)
        except paramiko.PasswordRequiredException:
            if ask_passphrase is None:
                return KeyUnusableError("is encrypted", f"put it into your agent: ssh-add {shell.join([str(path)])}")
            key = _decrypt(path, ask_passphrase(str(path)))
        self._keys[path, written] = key
        return key


_RING = KeyRing()


class _Offer(paramiko.PKey):
    """A key as offered to a host, with a certificate if it has one.

    fault: why it did not sign. An agent's refusal must not end the connection: the next key is tried.
    """

    def __init__(self, label: str, key: paramiko.PKey, certificate: Certificate | None = None) -> None:
        self.label, self.fault = label, ""
        self._key = key
        self.public_blob = paramiko.pkey.PublicBlob(certificate.type, certificate.blob) if certificate else None
        if certificate is None and isinstance(key, paramiko.AgentKey):
            self.public_blob = paramiko.pkey.PublicBlob(key.get_name(), key.blob)

    @property
    def shown(self) -> bytes:
        return self.public_blob.key_blob if self.public_blob else self.asbytes()

    def get_name(self) -> str:
        return self._key.get_name()

    def asbytes(self) -> bytes:
        return self._key.asbytes()

    def sign_ssh_data(self, data: bytes, algorithm: str | None = None) -> Any:
        try:
            return self._key.sign_ssh_data(data, algorithm)
        except (paramiko.SSHException, OSError) as error:
            self.fault = f"the agent did not sign: {one_line(error, 100)}"
            return b""


class Login:
    """Logs in over one connection. Has the interface of paramiko's AuthStrategy."""

    def __init__(
        self,
        hop: Hop,
        deadline: Deadline,
        ask_passphrase: AskPassphrase | None,
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        self._hop = hop
        self._deadline = deadline
        self._ask_passphrase = ask_passphrase
        self._begins = begins
        self._tried: list[str] = []
        self._shown: set[bytes] = set()
        self._certified = bool(hop.certificates)

    def authenticate(self, transport: SignalAwareTransport) -> None:
        """Raises AuthError if no key is accepted, TimeoutError without an answer in time."""
        self._begins()
        with _agent(self._hop) as agent:
            for offer in self._offers(agent):
                if offer.shown in self._shown:
                    continue  # a certificate may be both in a file and in the agent, and hosts count attempts
                self._shown.add(offer.shown)
                if self._try(transport, offer):
                    return
                self._tried.append(f"{offer.label} ({offer.fault})" if offer.fault else offer.label)
                # A host may look up each key in a slow directory, so each key gets the full time.
                self._deadline.renew()
        raise self._refused("")

    def _try(self, transport: SignalAwareTransport, offer: _Offer) -> bool:
        transport.auth_timeout = max(0.1, self._deadline.left())
        try:
            further = transport.auth_publickey(self._hop.user, offer)
        except paramiko.BadAuthenticationType as error:
            raise self._refused("the host takes no public keys for this user") from error
        except paramiko.AuthenticationException as error:
            if str(error) == _LATE:
                raise TimeoutError from error
            if transport.is_active():
                return False
            self._tried.append(offer.label)
            raise self._ended(transport.goodbye) from error
        if further:
            raise self._refused(f"the key was taken, but the host also asks for {', '.join(further)}")
        return True

    def _ended(self, words: str) -> Exception:
        if "too many authentication failures" in words.lower():
            return self._refused("the host takes no more tries; name one `key_file:` and set IdentitiesOnly")
        if words:
            return self._refused(f"the host ended the login: {one_line(words, 200)}")
        return paramiko.SSHException(HUNG_UP)

    def _offers(self, agent: _AgentKeys) -> Iterator[_Offer]:
        named = [(path, Certificate.read(path)) for path in self._hop.certificates]
        for path in self._hop.key_files:
            beside = [Path(f"{name}-cert.pub") for name in dict.fromkeys([str(path), str(path).removesuffix(".pub")])]
            certificates = [*((one, Certificate.read(one)) for one in beside), *named]
            held = agent.pop(public_of(path), [])
            for key in held:
                yield from self._forms(f"{path} (agent)", key, certificates)
            if held:
                continue
            try:
                opened = self._open(path)
            except KeyUnusableError as error:
                if self._hop.key_required:
                    raise AuthError(self._hop.peer.node, f"key {path} {error}", error.remedy) from error
                self._tried.append(f"{path} ({error}){self._hop.origin_of(str(path))}")
                continue
            yield from self._forms(str(path), opened, certificates)
        for key in [key for keys in agent.values() for key in keys] if self._hop.agent else ():
            self._certified |= key.get_name().endswith(SUFFIX)
            yield from self._forms(f"agent key {key.get_name()} {key.fingerprint}", key, named)
        for path, certificate in named:
            if not certificate or certificate.blob not in self._shown:
                self._tried.append(f"{path} ({'is of no key here' if certificate else 'holds no certificate'})")

    def _open(self, path: Path) -> paramiko.PKey:
        with self._deadline.paused():
            return _RING.open(path, self._ask_passphrase)

    def _forms(
        self, label: str, key: paramiko.PKey, certificates: Sequence[tuple[Path, Certificate | None]]
    ) -> Iterator[_Offer]:
        for path, certificate in certificates:
            if certificate and certificate.public == key.asbytes():
                self._certified = True
                yield _Offer(f"{path} ({certificate}) with {label}", key, certificate)
        yield _Offer(label, key)

    def _refused(self, why: str) -> AuthError:
        hop = self._hop
        tried = ", ".join(self._tried) or "none: no key file and no agent"
        remedy = "`ssh-copy-id` puts your public key there"
        if self._certified:
            remedy = "a certificate must be valid now, for this user, and of an authority that the host trusts"
        error = AuthError(
            hop.peer.node,
            f"{hop.login} was refused{hop.origin_of('user')}{' (' + why + ')' if why else ''}; "
            f"keys tried: {tried}{f'; not tried: {hop.not_tried}, put them into an agent' if hop.not_tried else ''}",
            f"`{_ssh_line(hop)}` shows why; {remedy}",
        )
        error.at = "" if hop.peer.jump else hop.host
        return error


def unlock(hop: Hop, ask_passphrase: AskPassphrase) -> None:
    """Opens the key that the inventory names for this hop, so that no question comes up during parallel logins. Raises
    AuthError if it cannot be used.
    """
    if not hop.key_required:
        return
    with _agent(hop) as agent:
        for path in hop.key_files:
            try:
                if public_of(path) not in agent:
                    _RING.open(path, ask_passphrase)
            except KeyUnusableError as error:
                raise AuthError(hop.peer.node, f"key {path} {error}", error.remedy) from error


def opens(path: Path) -> bool:
    """The key file is not encrypted, or was opened before."""
    try:
        _RING.open(path, None)
    except KeyUnusableError:
        return False
    return True


class _AgentAt(paramiko.agent.AgentSSH):
    # paramiko's class uses only $SSH_AUTH_SOCK.

    def __init__(self, path: str) -> None:
        super().__init__()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
            self._connect(self._socket)  # type: ignore[attr-defined]
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def _agent(hop: Hop) -> Iterator[_AgentKeys]:
    try:
        agent = _AgentAt(hop.agent_socket) if hop.agent_socket else None
    except (paramiko.SSHException, OSError):
        agent = None
    if agent is None:
        yield {}
        return
    found: _AgentKeys = {}
    for key in sorted(agent.get_keys(), key=lambda key: not key.get_name().endswith(SUFFIX)):
        found.setdefault(key.asbytes(), []).append(key)
    try:
        yield found
    finally:
        agent.close()


def _check_private(path: Path) -> int:
    try:
        found = path.stat()
    except OSError as error:
        raise KeyUnusableError(f"cannot be read: {error.strerror}", "check `key_file:` in the inventory") from error
    if found.st_mode & 0o077 and not is_public(path):
        remedy = f"chmod 600 {shell.join([str(path)])}"
        raise KeyUnusableError(f"may be read by others (mode {found.st_mode & 0o777:04o})", remedy)
    return found.st_mtime_ns


def _decrypt(path: Path, passphrase: str | None) -> paramiko.PKey | KeyUnusableError:
    if passphrase:
        with contextlib.suppress(KeyUnusableError):
            return _read_key(path, passphrase)
    return KeyUnusableError(
        "stays locked: wrong passphrase", "run this again, or put the key into your agent (ssh-add)"
    )


def _read_key(path: Path, passphrase: str | None) -> paramiko.PKey:
    if is_public(path):
        private = f" ({path.with_suffix('')})" if path.suffix == ".pub" else ""
        raise KeyUnusableError(
            "is a public key, and no agent holds its private half",
            f"put that into an agent (ssh-add), or name the private key{private}",
        )
    for key_class in _KEY_CLASSES:
        try:
            return key_class.from_private_key_file(str(path), passphrase)
        except paramiko.PasswordRequiredException:
            raise
        except (paramiko.SSHException, ValueError, IndexError):
            continue
        except OSError as error:
            raise KeyUnusableError(f"cannot be read: {error.strerror}", "check its owner and mode") from error
    if public_of(path)[4:].startswith(b"sk-"):
        raise KeyUnusableError("is a security key, which only an agent can use", f"ssh-add {shell.join([str(path)])}")
    raise KeyUnusableError("is no private key that we can read", "name an OpenSSH key of type ed25519, ecdsa or rsa")


def _ssh_line(hop: Hop) -> str:
    # Includes settings from the SSH configuration: `ssh` would not find them by the address.
    named = [path for path in hop.key_files if hop.key_required or hop.origin_of(str(path))]
    settings = [f"CertificateFile={path}" for path in hop.certificates]
    if hop.agent_socket != os.environ.get("SSH_AUTH_SOCK", ""):
        settings.append(f"IdentityAgent={hop.agent_socket or 'none'}")
    keys = [word for path in named for word in ("-i", str(path))] + [
        word for setting in settings for word in ("-o", setting)
    ]
    port = ["-p", str(hop.port)] if hop.port != 22 else []
    jump = ["-J", hop.through] if hop.through else []
    return shell.join(["ssh", "-v", *keys, *port, *jump, f"{hop.user}@{hop.host}", "true"])
