"""The files a job takes along: one folder packed into one reproducible tar, addressed by its SHA-256.

What git would take (`wanted`), less what looks like a secret (`secret_files`), and never a home folder. The same files
give the same bytes on every machine: names sorted, times and owners left out.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path

from orchestrator.errors import UsageError
from orchestrator.planning.git import commit_of
from orchestrator.planning.launch_plan import CodeFolder
from orchestrator.planning.secret_files import is_secret, left_out_words, refuse_home
from orchestrator.planning.wanted import wanted_files
from orchestrator.units import format_bytes

MAX_BYTES = 100 << 20
MAX_NAMED = 100
"""So many of the files left out are kept by name."""


IMPORTS_TRAINER = re.compile(rb"^[ \t]*(?:import\b[^#\n]*(?<![\w.])trainer\b|from[ \t]+trainer\b)", re.MULTILINE)


def trainer_folder() -> Path:
    """Of the `trainer` package here. Raises UsageError where there is none."""
    found = importlib.util.find_spec("trainer")
    if found is None or found.origin is None:
        raise UsageError("the trainer package is not installed beside orch", "install this project again")
    return Path(found.origin).parent


def pack_folder(folder: Path, *, prefix: str = "", trainer_at: str | None = None) -> tuple[CodeFolder, bytes]:
    """The folder's description and its tar. prefix: a folder name put before every file name. trainer_at: where, with a
    slash at its end, the package `trainer` is laid that a file of the folder imports, unless one lies there; None:
    nowhere.

    Raises UsageError for a missing folder, for a home folder, for a file that cannot be read, and above MAX_BYTES,
    naming the largest files.
    """
    folder = folder.absolute()
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder", "name the folder that holds your script with --folder")
    refuse_home(folder, "make a folder for the script (`mkdir ~/project`) and run it there, or name one with --folder")
    wanted = wanted_files(folder)
    try:
        secret = [name for name in wanted.names if name not in wanted.named and is_secret(folder, name)]
        files = [name for name in wanted.names if name not in set(secret)]
        sizes = {file: (folder / file).stat().st_size for file in files}
        _refuse_too_much(folder, sizes)
        content = {f"{prefix}{file}": folder / file for file in files}
        if trainer_at is not None and _needs_trainer(content, trainer_at):
            ours = trainer_folder()
            content |= {f"{trainer_at}trainer/{name}": ours / name for name in wanted_files(ours).names}
        blob = _tar(content)
    except OSError as error:
        raise UsageError(
            f"{error.filename}: {error.strerror}", "make it readable, or name it in .orchignore to leave it at home"
        ) from error
    described = CodeFolder(
        sha256=hashlib.sha256(blob).hexdigest(),
        source=str(folder),
        files=len(content),
        size_bytes=sum(path.stat().st_size for path in content.values()),
        left_out=tuple(secret[:MAX_NAMED]),
        notes=tuple(filter(None, (wanted.note, left_out_words(secret)))),
        commit=commit_of(folder),
    )
    return described, blob


def names_in(blob: bytes) -> list[str]:
    """The files of a packed folder."""
    with tarfile.open(fileobj=io.BytesIO(blob), mode="r:") as tar:  # ours: it is not compressed
        return tar.getnames()


def _refuse_too_much(folder: Path, sizes: dict[str, int]) -> None:
    if sum(sizes.values()) <= MAX_BYTES:
        return
    largest = sorted(sizes, key=lambda file: -sizes[file])[:5]
    named = ", ".join(f"{file} ({format_bytes(sizes[file])})" for file in largest)
    raise UsageError(
        f"{folder} holds {format_bytes(sum(sizes.values()))} to ship, more than {format_bytes(MAX_BYTES)}; "
        f"the largest: {named}",
        "list what the job does not need in .orchignore",
    )


def _needs_trainer(files: Mapping[str, Path], at: str) -> bool:
    """Does one of these import `trainer`, and is none of them such a module?"""
    if any(name == f"{at}trainer.py" or name.startswith(f"{at}trainer/") for name in files):
        return False
    return any(IMPORTS_TRAINER.search(path.read_bytes()) for name, path in files.items() if name.endswith(".py"))


def _tar(files: Mapping[str, Path]) -> bytes:
    """files: by their names in it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, path in files.items():
            content = path.read_bytes()
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
