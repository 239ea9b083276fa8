"""Who we are: proving it to a host whose key has been checked.

Takes a hop and an authenticated-to-us connection; logs in with public keys alone, or raises AuthError that says which
keys were tried. Keys come from the files named for the hop and from the agent; where the agent holds the key of a named
file, the agent signs and the file is not opened. Private keys are read, never written, copied or forwarded, and a file
that others may read is refused. Passphrases and opened keys live in this process's memory only.

    Login(hop, deadline, ask_passphrase).authenticate(transport)
"""

from __future__ import annotations

import base64
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import paramiko

from orchestrator.errors import AuthError
from orchestrator.transport import shell
from orchestrator.transport.deadline import Deadline
from orchestrator.transport.route import Hop

AskPassphrase: TypeAlias = Callable[[str], "str | None"]

_KEY_CLASSES: tuple[type[paramiko.PKey], ...] = (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey)


class KeyUnusableError(Exception):
    """A key file that cannot be used: what is wrong, and what to try."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


class KeyRing:
    """The private keys that this process has opened, each asked for once, however many hosts want it at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[Path, paramiko.PKey | KeyUnusableError] = {}

    def open(self, path: Path, ask_passphrase: AskPassphrase | None) -> paramiko.PKey:
        """The key in `path`. Raises KeyUnusableError; a passphrase that was wrong is not asked for again."""
        with self._lock:
            held = self._keys.get(path)
            if held is None:
                _check_private(path)
                held = self._load(path, ask_passphrase)
        if isinstance(held, KeyUnusableError):
            raise held
        return held

    def _load(self, path: Path, ask_passphrase: AskPassphrase | None) -> paramiko.PKey | KeyUnusableError:
        try:
            self._keys[path] = _read_key(path, None)
        except paramiko.PasswordRequiredException:
            if ask_passphrase is None:
                return KeyUnusableError("is encrypted", f"put it into your agent: ssh-add {shell.join([str(path)])}")
            self._keys[path] = _decrypt(path, ask_passphrase(str(path)))
        return self._keys[path]


_RING = KeyRing()


class Login:
    """Logs in over one connection. Has the shape of paramiko's AuthStrategy."""

    def __init__(
        self,
        hop: Hop,
        deadline: Deadline,
        ask_passphrase: AskPassphrase | None,
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        """begins: called when the keys are exchanged and the login begins."""
        self._hop = hop
        self._deadline = deadline
        self._ask_passphrase = ask_passphrase
        self._begins = begins
        self._tried: list[str] = []

    def authenticate(self, transport: paramiko.Transport) -> None:
        """Raises AuthError when no key is taken, TimeoutError when the host gives no answer in time."""
        self._begins()
        with _agent() as agent:
            for label, key in self._keys(agent):
                self._tried.append(label)
                if self._try(transport, key):
                    return
        raise self._refused("")

    def _try(self, transport: paramiko.Transport, key: paramiko.PKey) -> bool:
        transport.auth_timeout = max(0.1, self._deadline.left())
        try:
            further = transport.auth_publickey(self._hop.user, key)
        except paramiko.BadAuthenticationType as error:
            raise self._refused("the host takes no public keys for this user") from error
        except paramiko.AuthenticationException as error:
            if not self._deadline.left():
                raise TimeoutError from error
            if not transport.is_active():
                raise self._refused("the host ended the login; name one `key_file:` and set IdentitiesOnly") from error
            return False
        if further:
            raise self._refused(f"the key was taken, but the host also asks for {', '.join(further)}")
        return True

    def _keys(self, agent: dict[bytes, paramiko.PKey]) -> Iterator[tuple[str, paramiko.PKey]]:
        """What to try, in order. An encrypted file is opened only when its turn comes."""
        for path in self._hop.key_files:
            held = agent.pop(_public_blob(path), None)
            if held is not None:
                yield f"{path} (agent)", held
                continue
            try:
                with self._deadline.paused():
                    key = _RING.open(path, self._ask_passphrase)
            except KeyUnusableError as error:
                if self._hop.key_required:
                    raise AuthError(self._hop.peer.node, f"key {path} {error}", error.remedy) from error
                self._tried.append(f"{path} ({error})")
                continue
            yield str(path), key
        if self._hop.agent:
            yield from ((f"agent key {key.get_name()} {key.fingerprint}", key) for key in agent.values())

    def _refused(self, why: str) -> AuthError:
        hop = self._hop
        tried = ", ".join(self._tried) or "none: no key file and no agent"
        error = AuthError(
            hop.peer.node,
            f"{hop.login} was refused{' (' + why + ')' if why else ''}; keys tried: {tried}",
            f"try `{_ssh_line(hop)}`; `ssh-copy-id` puts your public key there",
        )
        error.at = "" if hop.peer.jump else hop.host
        return error


def unlock(hop: Hop, ask_passphrase: AskPassphrase) -> None:
    """Opens the key that the inventory names for this hop, so that no question comes up while hosts are waiting.

    Raises AuthError when it cannot be used.
    """
    if not hop.key_required:
        return
    with _agent() as agent:
        for path in hop.key_files:
            try:
                if _public_blob(path) not in agent:
                    _RING.open(path, ask_passphrase)
            except KeyUnusableError as error:
                raise AuthError(hop.peer.node, f"key {path} {error}", error.remedy) from error


@contextlib.contextmanager
def _agent() -> Iterator[dict[bytes, paramiko.PKey]]:
    """The agent's keys by their public part; none where there is no agent."""
    try:
        agent = paramiko.Agent()
    except (paramiko.SSHException, OSError):
        yield {}
        return
    try:
        yield {key.asbytes(): key for key in agent.get_keys()}
    finally:
        agent.close()


def _public_blob(path: Path) -> bytes:
    """The public key beside a private one; b"" where there is none."""
    try:
        return base64.b64decode(Path(f"{path}.pub").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return b""


def _check_private(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise KeyUnusableError(f"cannot be read: {error.strerror}", "check `key_file:` in the inventory") from error
    if mode & 0o077:
        remedy = f"chmod 600 {shell.join([str(path)])}"
        raise KeyUnusableError(f"may be read by others (mode {mode & 0o777:04o})", remedy)


def _decrypt(path: Path, passphrase: str | None) -> paramiko.PKey | KeyUnusableError:
    if passphrase:
        with contextlib.suppress(KeyUnusableError):
            return _read_key(path, passphrase)
    return KeyUnusableError(
        "stays locked: wrong passphrase", "run this again, or put the key into your agent (ssh-add)"
    )


def _read_key(path: Path, passphrase: str | None) -> paramiko.PKey:
    """Raises PasswordRequiredException for an encrypted file, KeyUnusableError for anything else that is amiss."""
    for key_class in _KEY_CLASSES:
        try:
            return key_class.from_private_key_file(str(path), passphrase)
        except paramiko.PasswordRequiredException:
            raise
        except (paramiko.SSHException, ValueError, IndexError):
            continue
        except OSError as error:
            raise KeyUnusableError(f"cannot be read: {error.strerror}", "check its owner and mode") from error
    raise KeyUnusableError("is no private key that we can read", "name an OpenSSH key of type ed25519, ecdsa or rsa")


def _ssh_line(hop: Hop) -> str:
    key = ["-i", str(hop.key_files[0])] if hop.key_required else []
    port = ["-p", str(hop.port)] if hop.port != 22 else []
    jump = ["-J", hop.through] if hop.through else []
    return shell.join(["ssh", "-v", *key, *port, *jump, f"{hop.user}@{hop.host}", "true"])
