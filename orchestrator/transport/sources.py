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
from pathlib import Path

from orchestrator.transport.bytecode import bytecode

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
        names += [module] if module else [name.strip() for name in listed.split(",")]
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
