"""A data set's folder as it is to be sent: takes a folder here, gives the names, sizes and SHA-256 of its files.

    manifest = read_manifest(Path("~/data").expanduser(), progress)
    manifest.files[0]       # ManifestFile(name="MNIST/raw/train-images-idx3-ubyte", size=47040016, sha256="ba89...")

A link that stays inside the folder is sent as what it leads to; one that leads outside is refused, as is whatever is
neither file nor folder; so are a home folder, and what looks like a login or a private key. Names are sent byte for
byte; whoever shows one escapes it.
"""

from __future__ import annotations

import errno
import hashlib
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import UsageError
from orchestrator.planning.secret_files import LOGINS, is_secret, refuse_home

CHUNK_BYTES = 1 << 20
OURS = ".orch-"
"""How the names of files begin that a push has under way on a host."""


@dataclass(frozen=True)
class ManifestFile:
    """One file of a data set."""

    name: str
    """Relative, with `/`."""
    size: int
    sha256: str
    """In hex."""


@dataclass(frozen=True)
class Manifest:
    root: Path
    files: tuple[ManifestFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files)


def read_manifest(root: Path, progress: Callable[[int, int], None] = lambda *_: None) -> Manifest:
    """progress: bytes hashed, and of how many. Raises UsageError for what is not to be sent."""
    if not root.is_dir():
        raise UsageError(f"{root} is no folder here", "name the folder that holds the data set")
    refuse_home(root, "name the folder that holds the data set, and nothing else")
    names = list(_walk(root, root, (root.resolve(),)))
    if not names:
        raise UsageError(f"{root} holds no files", "name the folder that holds the data set")
    if secret := [name for name in names if is_secret(root, name, LOGINS)]:
        more = f" and {len(secret) - 1} more" if len(secret) > 1 else ""
        raise UsageError(f"{root / secret[0]}{more}: looks like a secret, not like data", "move it out of the data set")
    total, done = sum((root / name).stat().st_size for name in names), 0
    files = []
    for name in names:
        sha256, size = hashlib.sha256(), 0
        for piece in read_pieces(root / name):
            sha256.update(piece)
            size, done = size + len(piece), done + len(piece)
            progress(done, total)
        files.append(ManifestFile(name, size, sha256.hexdigest()))
    return Manifest(root, tuple(files))


def read_pieces(path: Path, offset: int = 0, piece_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as content:
        content.seek(offset)
        while piece := content.read(piece_bytes):
            yield piece


def _walk(root: Path, folder: Path, above: tuple[Path, ...]) -> Iterator[str]:
    """Names of all files below, relative to root. above: the folders that this one is in, for links in a circle."""
    for path in sorted(folder.iterdir()):
        name = path.relative_to(root).as_posix()
        if path.name.startswith(OURS) or name == ".lock":  # of a push or a training that had this folder, too
            continue
        real = _resolved(path)
        if not real.is_relative_to(above[0]):
            raise UsageError(f"{path} leads outside of {root}", "copy what it leads to, or remove the link")
        kind = _kind(path)
        if stat.S_ISREG(kind):
            yield name
        elif stat.S_ISDIR(kind) and real not in above:
            yield from _walk(root, path, (*above, real))
        else:
            what = "leads to a folder that it is in" if stat.S_ISDIR(kind) else "is neither a file nor a folder"
            raise UsageError(f"{path} {what}", "remove it from the data set")


def _resolved(path: Path) -> Path:
    """`resolve` alone says something else of a circle in every Python."""
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UsageError(f"{path} leads in a circle", "remove it from the data set") from None
    return path.resolve()


def _kind(path: Path) -> int:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        raise UsageError(f"{path} is a link to nothing", "remove it from the data set") from None
