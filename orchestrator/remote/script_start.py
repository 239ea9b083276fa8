"""What Python runs before a rank's script, as its `sitecustomize`: steps are to be watched once torch is there.

Python imports `sitecustomize` by itself, from a folder that stands in PYTHONPATH for this alone (`watched`). It undoes
that at once: what the script and its children see is as if it had not been, and the host's own `sitecustomize`, where
there is one, follows. A script that imports no torch never loads more than this file.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "orch_remote"
WATCH = "ORCH_STEP_METRICS"
"""Holds the number of the process that starts the script to be watched, so that nobody but its child is."""


class OnTorch:
    """Finds torch as everybody else does, and has its import watched to the end."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path)
        spec = next((spec for spec in found if spec), None)
        loader: Any = spec and spec.loader
        if hasattr(loader, "exec_module") and hasattr(loader, "__dict__"):
            load = loader.exec_module

            def load_and_watch(module: ModuleType) -> None:
                del loader.exec_module
                load(module)
                watch(module)

            loader.exec_module = load_and_watch
        return spec


def watch(torch: ModuleType) -> None:
    """Never makes the import fail."""
    try:
        folder = os.path.dirname(os.path.realpath(__file__))
        spec = importlib.util.spec_from_file_location(
            PACKAGE, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
        )
        assert spec
        sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
        importlib.import_module(f"{PACKAGE}.step_hooks").install(torch)
    except Exception as error:
        sys.stderr.write(f"orch: steps are not measured: {type(error).__name__}: {error}\n")


def leave_no_trace() -> bool:
    """Whether this is the process that is to be watched."""
    here = os.path.dirname(os.path.abspath(__file__))
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if here in paths:
        paths.remove(here)
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    else:
        os.environ.pop("PYTHONPATH", None)
    sys.path[:] = [path for path in sys.path if path != here]
    return os.environ.pop(WATCH, "") == str(os.getppid())


if __name__ == "sitecustomize":
    if leave_no_trace():
        sys.meta_path.insert(0, OnTorch())
    del sys.modules["sitecustomize"]
    importlib.import_module("sitecustomize")  # the host's; Python takes its absence as it takes that of any
