"""Which modules of `orchestrator/remote/` travel with a request: the program's own, and what those import in turn.

needed("control", shipped_sources())         # {"orch_remote.control": text, "orch_remote.agent": text, ...}
pack("control", shipped_sources())           # those texts and their bytecode, as `remote/loader.py` takes them
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

PACKAGE = "orch_remote"
_STARTED = {"prepare": ("keeper", "launch", "rank", "gpus", "step_hooks")}
"""What a program puts into the job's folder, to be started from there."""
_IMPORT = re.compile(r"^ *from \.(\w*) import (.*)", re.MULTILINE)


@cache
def shipped_sources() -> dict[str, str]:
    """Module name on the host -> its text: all of `orchestrator/remote/` but the loader."""
    folder = resources.files("orchestrator.remote")
    modules = [entry for entry in folder.iterdir() if entry.name.endswith(".py") and entry.name != "loader.py"]
    names = {entry.name: f"{PACKAGE}.{entry.name[:-3]}" for entry in modules} | {"__init__.py": PACKAGE}
    return {names[entry.name]: entry.read_text() for entry in sorted(modules, key=lambda entry: entry.name)}


def needed(program: str, sources: Mapping[str, str]) -> dict[str, str]:
    """Those of the sources that this program takes."""
    found, waiting = {PACKAGE: sources[PACKAGE]}, [program, *_STARTED.get(program, ())]
    while waiting:
        name = f"{PACKAGE}.{waiting.pop()}"
        if name not in found:
            found[name] = sources[name]
            waiting += _imported(sources[name])
    return found


@cache
def _imported(text: str) -> tuple[str, ...]:
    """The modules beside it that this module imports, also within its functions."""
    names: list[str] = []
    for module, listed in _IMPORT.findall(text):
        names += [module] if module else [name.split()[0] for name in listed.split(",")]
    return tuple(names)


@dataclass(frozen=True)
class Package:
    """What is sent: sizes gives, for each module, the bytes of its text and of its bytecode; content is all of them
    one behind the other, compressed.
    """

    sizes: Mapping[str, tuple[int, int]]
    content: bytes


def pack(program: str, sources: Mapping[str, str]) -> Package:
    """Those of the sources that this program takes."""
    return _packed(tuple(needed(program, sources).items()))


@lru_cache
def _packed(modules: tuple[tuple[str, str], ...]) -> Package:
    parts = {name: (text.encode(), _bytecode(name, text)) for name, text in modules}
    sizes = {name: (len(text), len(code)) for name, (text, code) in parts.items()}
    # To press harder takes twice the time and saves a tenth.
    return Package(sizes, zlib.compress(b"".join(part for pair in parts.values() for part in pair), level=1))


def _bytecode(name: str, text: str) -> bytes:
    """b"" for a text that is not the one of the file."""
    entry = resources.files("orchestrator.remote").joinpath(f"{name.partition('.')[2] or '__init__'}.py")
    return bytecode(entry) if isinstance(entry, Path) and shipped_sources()[name] == text else b""


# The bytecode of a file as Python keeps it beside it, so that hosts need not compile what they are sent.
#
#     bytecode(Path("orchestrator/remote/control.py"))      # the content of a .pyc that belongs to no date
#
# It begins with the number of its format: a Python of another version sees that it is not its own, and compiles.

_HEADER_BYTES = 16
_UNCHECKED = (1).to_bytes(4, "little") + bytes(8)
"""In place of the text's date and size: the bytecode is taken as it is (PEP 552)."""


def bytecode(file: Path) -> bytes:
    """b"" where there is none, and this Python was told to write none (PYTHONDONTWRITEBYTECODE)."""
    keeper = _Keeper(file.stem, str(file))
    keeper.get_code(file.stem)
    kept = keeper.bytecode
    return kept[:4] + _UNCHECKED + kept[_HEADER_BYTES:] if kept else b""


class _Keeper(SourceFileLoader):
    """Keeps the bytecode that is up to date: what it has read, or what it has made."""

    bytecode = b""

    def get_data(self, path: str) -> bytes:
        data = super().get_data(path)
        self.bytecode = b"" if path == self.path else data
        return data

    def set_data(self, path: str, data: Any, **more: Any) -> None:
        self.bytecode = bytes(data)
        super().set_data(path, data, **more)
