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
    def modules() -> dict[str, set[str]]:
        """By each module, its names."""
        files = sorted(Path(folder).glob("*.py"))
        return {file.stem: {*_DEFINED.findall(file.read_text(encoding="utf-8"))} for file in files}

    def attribute(name: str) -> Any:
        found = [module for module, names in modules().items() if name in names]
        if len(found) != 1:
            where = f"several modules define it: {', '.join(found)}" if found else "no module of it defines it"
            raise AttributeError(f"{package} has no public name {name!r}: {where}")
        return getattr(import_module(f"{package}.{found[0]}"), name)

    return attribute
