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
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.errors import UsageError
from orchestrator.planning.git import commit_of
from orchestrator.planning.launch_plan import CodeFolder
from orchestrator.planning.secret_files import is_secret, left_out_words, refuse_home
from orchestrator.planning.wanted import WantedFiles, wanted_files
from orchestrator.text import some
from orchestrator.units import format_bytes

MAX_BYTES = 100 << 20
MAX_NAMED = 100
"""So many of the files left out are kept by name."""


IMPORTS_TRAINER = re.compile(rb"^[ \t]*(?:import\b[^#\n]*(?<![\w.])trainer\b|from[ \t]+trainer\b)", re.MULTILINE)


MISSING = re.compile(r"No such file or directory: '(?P<path>[^']{1,4096})'|No module named '(?P<module>[\w.]{1,400})'")
"""A line of Python's about a file or module that it does not find."""


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
        sources = {name: name for name in wanted.names} | dict(wanted.links)
        files = {name: source for name, source in sources.items() if source not in set(secret)}
        sizes = {name: (folder / source).stat().st_size for name, source in files.items()}
        _refuse_too_much(folder, sizes)
        content = {f"{prefix}{name}": folder / source for name, source in sorted(files.items())}
        if trainer_at is not None and _needs_trainer(content, trainer_at):
            ours = trainer_folder()
            content |= {f"{trainer_at}trainer/{name}": ours / name for name in wanted_files(ours).names}
        blob = _tar(content, [f"{prefix}{name}" for name in wanted.empty])
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
        unsent=tuple((os.fsencode(name).decode(errors="replace"), why) for name, why in wanted.left_out[:MAX_NAMED]),
        notes=tuple(filter(None, (wanted.note, left_out_words(secret), _unexpected_words(wanted)))),
        commit=commit_of(folder),
    )
    return described, blob


def names_in(blob: bytes) -> list[str]:
    """The files of a packed folder; empty folders end with `/`."""
    with tarfile.open(fileobj=io.BytesIO(blob), mode="r:") as tar:  # ours: it is not compressed
        return [f"{member.name}/" if member.isdir() else member.name for member in tar]


def digests_in(blob: bytes) -> dict[str, str]:
    """The SHA-256 of each file of a packed folder."""
    with tarfile.open(fileobj=io.BytesIO(blob), mode="r:") as tar:
        files = [(member.name, tar.extractfile(member)) for member in tar if member.isreg()]
        return {name: hashlib.sha256(content.read()).hexdigest() for name, content in files if content}


def _unexpected_words(wanted: WantedFiles) -> str:
    """What a person would think is shipped; what an ignore file names is not among it."""
    unexpected = [f"{name} ({why})" for name, why in wanted.left_out if why != "ignored"]
    return f"not shipped: {some(unexpected, 5)}" if unexpected else ""


def unsent_words(code: CodeFolder, line: str) -> str:
    """Why the file or module that this line of an error log misses is not on the host, though it is here; "" if not."""
    found = MISSING.search(line)
    if not found:
        return ""
    path, module = found["path"] or "", (found["module"] or "").replace(".", "/")
    inside = path.rpartition("/src/")[2] if path.startswith("/") else path
    wanted = os.path.normpath(inside) if path else module
    for name, why in [*code.unsent, *((name, "it looks like a secret") for name in code.left_out)]:
        plain = name.rstrip("/")
        is_it = wanted == plain or (name.endswith("/") and wanted.startswith(name))
        is_module = module and re.fullmatch(rf"{re.escape(module.split('/')[0])}(/.*|\.py|\.[\w.-]*so|\.pyd)?", plain)
        if is_it or is_module:
            back = (
                f"; a line `!{plain}` in .orchignore ships it" if why in ("ignored", "it looks like a secret") else ""
            )
            return f"{plain} is in {code.source}, but was not shipped ({why}){back}"
    return ""


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


def _tar(files: Mapping[str, Path], folders: Sequence[str] = ()) -> bytes:
    """files: by their names in it. folders: those that hold nothing."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, path in files.items():
            content = path.read_bytes()
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            tar.addfile(info, io.BytesIO(content))
        for name in folders:
            info = tarfile.TarInfo(name.rstrip("/"))
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
    return buffer.getvalue()
