"""OpenSSH certificates (`ssh-keygen -s`): a public key with its users or hosts and validity, signed by an authority.

    certificate = Certificate.parse(blob)
    certificate.public == key.asbytes()          # it certifies this key
    certificate.fault_of_host("v100.lab")        # "" if it proves that its key is this host's

We check hosts' certificates; hosts check users'. Format: OpenSSH's `PROTOCOL.certkeys`.
"""

from __future__ import annotations

import base64
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import paramiko

from orchestrator.units import one_line

SUFFIX = "-cert-v01@openssh.com"
_ECDSA = ("ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521")
_FIELDS = {"ssh-ed25519": 1, "ssh-rsa": 2, **dict.fromkeys(_ECDSA, 2), "sk-ssh-ed25519": 2, "sk-ecdsa-sha2-nistp256": 3}
"""Number of fields of a public key."""
_HOST = 2
_FOREVER = (1 << 64) - 1
_WEAK = {"ssh-rsa", "ssh-dss"}


@dataclass(frozen=True)
class Certificate:
    type: str  # `ssh-ed25519-cert-v01@openssh.com`
    blob: bytes
    public: bytes  # the certified key, in public key format
    kind: int
    principals: tuple[str, ...]  # hosts or logins; empty for any
    valid_from: int
    valid_until: int  # seconds since 1970
    critical: bytes
    authority: bytes  # the signer's public key
    signed: bytes
    signature: bytes

    @classmethod
    def parse(cls, blob: bytes) -> Certificate:
        reader = _Reader(blob)
        type_ = reader.text()
        plain = type_.removesuffix(SUFFIX)
        if plain == type_ or plain not in _FIELDS:
            raise ValueError(f"{one_line(type_, 60)!r} is no kind of certificate")
        reader.string()  # nonce
        key = plain + ("@openssh.com" if plain.startswith("sk-") else "")
        public = _string(key.encode()) + b"".join(_string(reader.string()) for _ in range(_FIELDS[plain]))
        reader.number(8)  # serial
        kind = reader.number(4)
        reader.string()  # key id
        names = _Reader(reader.string())
        principals = []
        while names.left:
            principals.append(names.text())
        valid_from, valid_until = reader.number(8), reader.number(8)
        critical = reader.string()
        reader.string()  # extensions
        reader.string()  # reserved
        authority = reader.string()
        signed = blob[: len(blob) - len(reader.left)]
        signature = reader.string()
        return cls(
            type_,
            blob,
            public,
            kind,
            tuple(principals),
            valid_from,
            valid_until,
            critical,
            authority,
            signed,
            signature,
        )

    @classmethod
    def read(cls, path: Path) -> Certificate | None:
        try:
            return cls.parse(base64.b64decode(path.read_text().split()[1]))
        except (OSError, ValueError, IndexError):
            return None

    @classmethod
    def of(cls, key: paramiko.PKey) -> Certificate | None:
        blob = getattr(key, "public_blob", None)
        try:
            return cls.parse(blob.key_blob) if blob else None
        except ValueError:
            return None

    def __str__(self) -> str:
        names = ", ".join(one_line(name, 40) for name in self.principals) or "anybody"
        now = time.time()
        if now < self.valid_from:
            return f"for {names}, not before {_moment(self.valid_from)}"
        if self.valid_until == _FOREVER:
            return f"for {names}"
        return f"for {names}, {'until' if now < self.valid_until else 'expired'} {_moment(self.valid_until)}"

    def fault_of_host(self, name: str) -> str:
        """Why it does not prove that its key is host `name`'s; "" if it does. The authority is trusted already."""
        if not self._is_signed():
            return "is not signed by it"
        if self.kind != _HOST:
            return "is not for a host"
        if self.critical:
            return "has conditions that orch does not support"
        if not self.valid_from <= time.time() < self.valid_until:
            return f"is not valid now ({self})"
        if self.principals and name not in self.principals:  # no patterns, as in ssh
            return f"is not for {name} ({self})"
        return ""

    def _is_signed(self) -> bool:
        # SHA-1 signatures are rejected.
        try:
            if _Reader(self.signature).text() in _WEAK:
                return False
            authority = paramiko.PKey.from_type_string(_Reader(self.authority).text(), self.authority)
            return bool(authority.verify_ssh_sig(self.signed, paramiko.Message(self.signature)))
        except (ValueError, paramiko.SSHException, paramiko.pkey.UnknownKeyType):
            return False


def public_of(path: Path) -> bytes:
    """Public key of a public or private key file, or of FILE.pub; b"" if not found."""
    return _written_public(path) or _public_part(path) or _written_public(Path(f"{path}.pub"))


def is_public(path: Path) -> bool:
    return bool(_written_public(path))


def _written_public(path: Path) -> bytes:
    try:
        kind, encoded = path.read_text().split()[:2]
        blob = base64.b64decode(encoded, validate=True)
        return blob if _Reader(blob).text() == kind else b""
    except (OSError, ValueError):
        return b""


def _public_part(path: Path) -> bytes:
    # OpenSSH's private key format begins with the public key, unencrypted.
    try:
        lines = path.read_text().split("-----")
        if lines[1] != "BEGIN OPENSSH PRIVATE KEY":
            return b""
        data = base64.b64decode(lines[2])
        reader = _Reader(data.removeprefix(b"openssh-key-v1\0"))
        for _ in ("cipher", "way from the passphrase to a key", "its options"):
            reader.string()
        return reader.string() if reader.number(4) == 1 else b""
    except (OSError, ValueError, IndexError):
        return b""


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.left = data

    def number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "big")

    def string(self) -> bytes:
        return self._take(self.number(4))

    def text(self) -> str:
        return self.string().decode()

    def _take(self, size: int) -> bytes:
        if size > len(self.left):
            raise ValueError("it ends too early")
        taken, self.left = self.left[:size], self.left[size:]
        return taken


def _string(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def _moment(seconds: int) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, ValueError):
        return "a time beyond all years"
