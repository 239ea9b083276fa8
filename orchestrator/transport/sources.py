"""Selects and packs the modules of `orchestrator/remote/` that a request needs, with their bytecode.

    needed("control", shipped_sources())         # {"orch_remote.control": text, "orch_remote.agent": text, ...}
    pack("control", shipped_sources())           # texts and bytecode for `remote/loader.py`
    bytecode(Path("orchestrator/remote/control.py"))      # the content of an unchecked .pyc

Bytecode saves hosts the compilation. Its header has a format number, so that other versions of Python compile the text.
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
_STARTED = {"prepare": ("keeper", "launch", "rank", "gpus", "step_hooks", "preload")}
"""Programs that this one starts from the job's folder."""
_IMPORT = re.compile(r"^ *from \.(\w*) import (.*)", re.MULTILINE)


@cache
def shipped_sources() -> dict[str, str]:
    """Module name on the host -> text: all of `orchestrator/remote/` except the loader."""
    folder = resources.files("orchestrator.remote")
    modules = [entry for entry in folder.iterdir() if entry.name.endswith(".py") and entry.name != "loader.py"]
    names = {entry.name: f"{PACKAGE}.{entry.name[:-3]}" for entry in modules} | {"__init__.py": PACKAGE}
    return {names[entry.name]: entry.read_text() for entry in sorted(modules, key=lambda entry: entry.name)}


def needed(program: str, sources: Mapping[str, str]) -> dict[str, str]:
    found, waiting = {PACKAGE: sources[PACKAGE]}, [program, *_STARTED.get(program, ())]
    while waiting:
        name = f"{PACKAGE}.{waiting.pop()}"
        if name not in found:
            found[name] = sources[name]
            waiting += _imported(sources[name])
    return found


@cache
def _imported(text: str) -> tuple[str, ...]:
    names: list[str] = []
    for module, listed in _IMPORT.findall(text):
        names += [module] if module else [name.split()[0] for name in listed.split(",")]
    return tuple(names)


@dataclass(frozen=True)
class Package:
    """sizes: bytes of text and bytecode of each module. content: all of them, compressed."""

    sizes: Mapping[str, tuple[int, int]]
    content: bytes


def pack(program: str, sources: Mapping[str, str]) -> Package:
    return packed(tuple(needed(program, sources).items()))


@lru_cache
def packed(modules: tuple[tuple[str, str], ...]) -> Package:
    parts = {name: (text.encode(), bytecode_of(name, text)) for name, text in modules}
    sizes = {name: (len(text), len(code)) for name, (text, code) in parts.items()}
    # A higher level takes twice the time and saves a tenth.
    return Package(sizes, zlib.compress(b"".join(part for pair in parts.values() for part in pair), level=1))


def bytecode_of(name: str, text: str) -> bytes:
    entry = resources.files("orchestrator.remote").joinpath(f"{name.partition('.')[2] or '__init__'}.py")
    return bytecode(entry) if isinstance(entry, Path) and shipped_sources()[name] == text else b""


_HEADER_BYTES = 16
_UNCHECKED = (1).to_bytes(4, "little") + bytes(8)  # replaces date and size: the bytecode is used unchecked (PEP 552)


def bytecode(file: Path) -> bytes:
    """b"" if it is missing and Python must not write it (PYTHONDONTWRITEBYTECODE)."""
    keeper = _Keeper(file.stem, str(file))
    keeper.get_code(file.stem)
    kept = keeper.bytecode
    return kept[:4] + _UNCHECKED + kept[_HEADER_BYTES:] if kept else b""


class _Keeper(SourceFileLoader):
    bytecode = b""

    def get_data(self, path: str) -> bytes:
        data = super().get_data(path)
        self.bytecode = b"" if path == self.path else data
        return data

    def set_data(self, path: str, data: Any, **more: Any) -> None:
        self.bytecode = bytes(data)
        super().set_data(path, data, **more)
