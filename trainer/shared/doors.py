"""Public names of a package without the module that defines them: `from orchestrator.jobs import Collected`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

_DEFINED = re.compile(r"^(?:(?:async )?def |class |)([A-Za-z]\w*)(?=\(|:|\[| = )", re.MULTILINE)


def door(package: str, folder: str) -> Callable[[str], Any]:
    """The package's `__getattr__`: looks for the one module in its folder that defines a name, and imports only that.
    Raises AttributeError if no module or several define it.
    """

    @cache
    def modules_of(name: str) -> tuple[str, ...]:
        files = sorted(Path(folder).glob("*.py"))
        return tuple(file.stem for file in files if name in _DEFINED.findall(file.read_text(encoding="utf-8")))

    def attribute(name: str) -> Any:
        modules = () if name.startswith("_") else modules_of(name)
        if len(modules) != 1:
            where = f"several modules define it: {', '.join(modules)}" if modules else "no module of it defines it"
            raise AttributeError(f"{package} has no public name {name!r}: {where}")
        return getattr(import_module(f"{package}.{modules[0]}"), name)

    return attribute
