"""Runs before a rank's script, as `sitecustomize`: enables stack dumps on request (`stacks`), and measures steps.

Python imports it from a folder that `forked` puts into PYTHONPATH. It removes that folder for the script and its
children, then imports the host's own `sitecustomize`. Without torch nothing else is loaded. In a program that is not
Python itself, any Python that it starts is measured; the folder stays in the environment until torch is imported.
"""

from __future__ import annotations

import importlib
import os
import sys

TYPE_CHECKING = False  # `typing` takes as long to import as all of this
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

PACKAGE = "orch_remote"
WATCH = "ORCH_STEP_METRICS"  # pid of the process that starts the script, so that only its child is measured
ANY = "any"  # in its place for a program: any Python that imports torch
STACKS = "ORCH_STACKS"  # that pid and the file for stacks: `4711:/.../rank-0/stacks`
PRELOAD = "ORCH_PRELOAD"  # this is no script yet (`preload`)
FIRST_HANDLE = 100  # lowest descriptor for the file, so that the script's own numbers do not change


class OnTorch:
    """Finds torch as usual, and calls `watch` after its import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec), None)
        loader: Any = spec and spec.loader
        if hasattr(loader, "exec_module") and hasattr(loader, "__dict__"):
            load = loader.exec_module

            def load_and_watch(module: ModuleType) -> None:  # a script may look for torch without importing it
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                forget()
                del loader.exec_module
                load(module)
                watch(module)

            loader.exec_module = load_and_watch
        return spec


def watch(torch: ModuleType) -> None:
    try:
        module_of_ours("step_hooks").install(torch)
    except Exception as error:
        sys.stderr.write(f"orch: steps are not measured: {type(error).__name__}: {error}\n")


def module_of_ours(name: str) -> Any:
    import importlib.util

    if PACKAGE not in sys.modules:
        folder = os.path.dirname(os.path.realpath(__file__))
        spec = importlib.util.spec_from_file_location(
            PACKAGE, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
        )
        assert spec
        sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{PACKAGE}.{name}")


# ---- stacks ---------------------------------------------------------------------------------------------------------


def write_stacks_when_asked(path: str) -> None:
    """Registers faulthandler for SIGURG: the thread that receives it writes its stack; forked processes share file and
    handler.

    Python ignores SIGURG without a handler. If the script sets its own, the file is closed, which `stacks` detects.
    """
    try:
        signals: Any = importlib.import_module("_signal")  # `signal` is slow to import
        faults: Any = importlib.import_module("faulthandler")
        handle = open_stacks(path)
    except (OSError, ImportError):
        return  # only the process's state will be known
    try:
        faults.register(signals.SIGURG, handle, all_threads=False)
    except (OSError, RuntimeError):
        os.close(handle)
        return

    def leave(signalnum: Any) -> None:
        if signalnum == signals.SIGURG and faults.unregister(signalnum):
            os.close(handle)

    for module, name in ((signals, "signal"), (faults, "register")):  # `signal.signal` calls that of `_signal`
        setattr(module, name, after(leave, getattr(module, name)))


def after(before: Callable[[Any], None], call: Any) -> Any:
    def called(*args: Any, **more: Any) -> Any:
        before(args[0] if args else more.get("signum"))
        return call(*args, **more)

    for name in ("__doc__", "__module__", "__name__", "__qualname__"):
        setattr(called, name, getattr(call, name))
    return called


def open_stacks(path: str) -> int:
    """Returns a descriptor of the file, whose first line has pid and descriptor."""
    fcntl = importlib.import_module("fcntl")
    opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        handle: int = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, FIRST_HANDLE)
    finally:
        os.close(opened)
    try:
        os.write(handle, b"%d %d\n" % (os.getpid(), handle))
    except OSError:
        os.close(handle)
        raise
    return handle


# ---- before the script ----------------------------------------------------------------------------------------------


HERE = os.path.dirname(os.path.abspath(__file__))


def leave_no_trace() -> tuple[bool, str]:
    """Whether to measure this process's steps, and the file for its stacks or ""."""
    sys.path[:] = [path for path in sys.path if path != HERE]
    parent, watch = str(os.getppid()), os.environ.get(WATCH, "")
    who, _, file = os.environ.get(STACKS, "").partition(":")
    if watch != ANY:
        forget()
    return watch in (ANY, parent), file if who == parent else ""


def forget() -> None:
    """Removes what our variables mean to the children of this process."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if HERE in paths:
        paths.remove(HERE)
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    else:
        os.environ.pop("PYTHONPATH", None)
    for name in (WATCH, STACKS):
        os.environ.pop(name, None)


if __name__ == "sitecustomize":
    if PRELOAD in os.environ:
        module_of_ours("preload").main()
    is_measured, stacks = leave_no_trace()
    if stacks:
        write_stacks_when_asked(stacks)
    if is_measured and "torch" in sys.modules:
        watch(sys.modules["torch"])
    elif is_measured:
        sys.meta_path.insert(0, OnTorch())
    del sys.modules["sitecustomize"]
    importlib.import_module("sitecustomize")  # the host's; Python ignores its absence
