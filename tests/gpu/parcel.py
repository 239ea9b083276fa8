"""The one file to send back: result.json, logs and records, without names of machines, people or networks.

    write_result(folder, result)            folder/result.json, whole or not at all
    pack(folder)                            folder.tar.gz beside it

Environment variables are in none of the files, but for those that NCCL prints by itself.
"""

from __future__ import annotations

import getpass
import io
import json
import re
import socket
import tarfile
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.files import write_atomic

from .here import ROOT

_MOST_BYTES = 4 << 20
"""Of one file; of a longer one its end is left out."""
_ADDRESS = re.compile(r"\b(?!127\.|0\.0\.0\.0)\d{1,3}(?:\.\d{1,3}){3}\b|\b[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{0,4}){4,7}\b")
"""IPv4 but for the machine's own, IPv6 and hardware addresses."""
_UUID = re.compile(r"\b(GPU-|MIG-)[0-9a-fA-F-]{8,}")
_COMMON = {"root", "localhost", "user", "ubuntu", "gpu", "host", "node"}
"""Names that say nothing of whom they belong to, and are words of our own files."""


def write_result(folder: Path, result: dict[str, Any]) -> None:
    write_atomic(folder / "result.json", json.dumps(masked(result), indent=1).encode() + b"\n")


def pack(folder: Path) -> Path:
    """Every file of the folder, masked."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as archive:
        for file in sorted(folder.iterdir()):
            if file.is_file() and not file.is_symlink():
                content = _masked_file(file)
                entry = tarfile.TarInfo(f"{folder.name}/{file.name}")
                entry.size, entry.mode = len(content), 0o600
                archive.addfile(entry, io.BytesIO(content))
    target = folder.with_name(f"{folder.name}.tar.gz")
    write_atomic(target, held.getvalue())
    return target


def _masked_file(file: Path) -> bytes:
    text = file.read_bytes()[:_MOST_BYTES].decode("utf-8", errors="replace")
    if file.suffix != ".jsonl":
        return masked(text).encode()
    return "".join(json.dumps(masked(record)) + "\n" for record in _records(text)).encode()


def _records(text: str) -> list[Any]:
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # the last one of a run that was ended
    return found


def masked(value: Any) -> Any:
    """Strings at any depth; keys are ours."""
    if isinstance(value, dict):
        return {key: masked(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(item) for item in value]
    if not isinstance(value, str):
        return value
    for mask in _masks():
        value = mask(value)
    return value


@cache
def _masks() -> tuple[Callable[[str], str], ...]:
    """Paths first: they hold the names."""
    paths = [(str(ROOT), "."), (str(Path.home()), "~"), (tempfile.gettempdir(), "/tmp")]
    words = {socket.gethostname(): "HOST", socket.gethostname().split(".")[0]: "HOST", _user(): "USER"}
    return (
        *(lambda text, path=path, by=by: text.replace(path, by) for path, by in paths if len(path) > 1),
        *(
            lambda text, word=word, by=by: re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", by, text)
            for word, by in words.items()
            if len(word) > 1 and word.lower() not in _COMMON
        ),
        lambda text: _ADDRESS.sub("ADDRESS", text),
        lambda text: _UUID.sub(r"\1UUID", text),
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return ""
