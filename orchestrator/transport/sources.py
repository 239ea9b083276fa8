"""Which modules of `orchestrator/remote/` travel with a request: the program's own, and what those import in turn.

needed("control", shipped_sources())         # {"orch_remote.control": text, "orch_remote.agent": text, ...}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources

PACKAGE = "orch_remote"
_STARTED = {"prepare": ("keeper", "launch", "rank", "gpus")}
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
