"""The files a job takes along: one folder packed into one reproducible tar, addressed by its SHA-256.

`.gitignore` and `.orchignore` of the folder are honoured (gitignore patterns, by `pathspec`), `.git` and caches stay at
home. The same files give the same bytes on every machine: names sorted, times and owners left out.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pathspec

from orchestrator.errors import UsageError
from orchestrator.records import CodeFolder
from orchestrator.units import format_bytes

MAX_BYTES = 100 << 20
ALWAYS_LEFT = (
    ".git/",
    "__pycache__/",
    "*.pyc",
    ".venv/",
    "venv/",
    ".mypy_cache/",
    ".pytest_cache/",
    "node_modules/",
    "/runs/",
)
IGNORE_FILES = (".gitignore", ".orchignore")


def pack_folder(folder: Path, *, prefix: str = "") -> tuple[CodeFolder, bytes]:
    """The folder's description and its tar. prefix: a folder name put before every file name.

    Raises UsageError for a missing folder, and above MAX_BYTES, naming the largest files.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder", "name the folder that holds your script with --folder")
    files = sorted(_wanted(folder))
    sizes = {file: (folder / file).stat().st_size for file in files}
    if sum(sizes.values()) > MAX_BYTES:
        largest = sorted(sizes, key=lambda file: -sizes[file])[:5]
        named = ", ".join(f"{file} ({format_bytes(sizes[file])})" for file in largest)
        raise UsageError(
            f"{folder} holds {format_bytes(sum(sizes.values()))} to ship, more than {format_bytes(MAX_BYTES)}; "
            f"the largest: {named}",
            "list what the job does not need in .orchignore",
        )
    blob = _tar(folder, files, prefix)
    digest = hashlib.sha256(blob).hexdigest()
    return CodeFolder(sha256=digest, source=str(folder), files=len(files), size_bytes=sum(sizes.values())), blob


def _wanted(folder: Path) -> Iterator[str]:
    patterns = list(ALWAYS_LEFT)
    for name in IGNORE_FILES:
        file = folder / name
        if file.is_file():
            patterns += file.read_text(errors="replace").splitlines()
    ignored = pathspec.PathSpec.from_lines("gitignore", patterns)
    for root, folders, names in os.walk(folder):
        base = Path(root).relative_to(folder)
        folders[:] = [name for name in folders if not ignored.match_file(f"{base / name}/")]
        for name in names:
            relative = (base / name).as_posix()
            # Links are left at home: what they point to may not exist, or not be meant for another host.
            if (
                not ignored.match_file(relative)
                and (folder / relative).is_file()
                and not (folder / relative).is_symlink()
            ):
                yield relative


def _tar(folder: Path, files: list[str], prefix: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for file in files:
            content = (folder / file).read_bytes()
            info = tarfile.TarInfo(f"{prefix}{file}")
            info.size = len(content)
            info.mode = 0o755 if os.access(folder / file, os.X_OK) else 0o644
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
