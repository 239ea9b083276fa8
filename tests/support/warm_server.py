"""Imports torch once, and then forks a process for each Python that asks for one: `warm_python.py` says what for.

python warm_server.py DESCRIPTOR

The descriptor brings listening sockets, one a message. Each connection to one of these is a Python that has just begun
(`warm_client.py`). Its request is what makes it that program and no other, and its descriptors; beside a process that
becomes this program there is one that waits for its end, and ends it where the one who asked is gone.

Ends with the test run that started it, and everything that it forked with it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import importlib.util
import json
import multiprocessing.spawn
import os
import runpy
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

os.environ["OMP_NUM_THREADS"] = "1"
import numpy
import torch
import torch._dynamo  # which a script's optimiser asks for
import torch.distributed.run
from cheap_forks import make_forks_cheap

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_libc = ctypes.CDLL(None, use_errno=True)


def serve(listeners: socket.socket) -> dict[str, Any]:
    """Comes back in the forked processes alone: with what each is to run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that wait beside the programs are nobody's to wait for
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    make_forks_cheap()
    asked: list[socket.socket] = []
    while True:
        for one in select.select([listeners, *asked], [], [])[0]:
            if one is not listeners:
                connection = one.accept()[0]
                if os.fork() == 0:
                    for other in (listeners, *asked):
                        other.close()
                    return attend(connection)
                connection.close()
            elif handles := socket.recv_fds(listeners, 1, 1)[1]:
                asked.append(socket.socket(fileno=handles[0]))
            else:
                os._exit(0)  # torch takes most of a second to clear away


def attend(connection: socket.socket) -> dict[str, Any]:
    """One request: comes back in the process that becomes the program."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    text, handles, _, _ = socket.recv_fds(connection, 1 << 20, 100)
    if not text:  # it has ended before it could ask
        os._exit(0)
    request = json.loads(text)
    places = request["namespaces"]
    for name, handle in zip(places, handles[: len(places)], strict=True):
        enter(name, handle)
    handles = handles[len(places) :]
    pid = os.fork()  # the first process in the program's own process namespace
    if pid:
        for handle in handles:
            os.close(handle)
        wait(pid, connection)
    become(request, handles, connection)
    return request


def wait(pid: int, connection: socket.socket) -> NoReturn:
    """Says how it ended. Whoever asked says nothing more: what can be read is its own end."""
    program = os.pidfd_open(pid)
    if connection in select.select([program, connection], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        connection.send(str(code).encode())
    os._exit(0)


def enter(name: str, handle: int) -> None:
    """A namespace, where it is not ours anyway: only root may."""
    if os.fstat(handle).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino and _libc.setns(handle, 0):
        raise OSError(ctypes.get_errno(), f"setns {name}")
    os.close(handle)


def become(request: dict[str, Any], handles: list[int], connection: socket.socket) -> None:
    """What Python and the kernel keep of a process, as the one who asked has it."""
    _, user, group = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if (user, group) != (os.getuid(), os.getgid()):
        os.setgroups([])
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)
        _prctl(_PR_SET_DUMPABLE, 1)  # else its own user could not look at it in /proc
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    connection.send(str(os.getpid()).encode())
    connection.close()  # before its number is another's
    _take(handles, request["handles"])
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
    sys.stdout.reconfigure(write_through=request["unbuffered"])
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    sys.executable, sys.path[:] = request["executable"], request["path"]
    multiprocessing.spawn.set_executable(sys.executable)
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    if request["finders"]:
        let_torch_be_imported_again(request["finders"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    numpy.random.seed()


class Imported:
    """Finds a module that is there already, and loads it in no time."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name == self._module.__name__ else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def let_torch_be_imported_again(finders: Sequence[tuple[str, str]]) -> None:
    """For finders that wait for it: files and names of their classes."""
    sys.meta_path.insert(0, Imported(torch))
    for file, name in reversed(finders):
        spec = importlib.util.spec_from_file_location(f"its_{name}", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.meta_path.insert(0, vars(module)[name]())
    del sys.modules["torch"]


def _take(handles: list[int], numbers: list[int]) -> None:
    """Descriptors, by the numbers that they had; no other one stays."""
    above = max([*handles, *numbers]) + 1
    kept = [os.dup2(handle, above + place) for place, handle in enumerate(handles)]
    os.closerange(0, above)
    for handle, number in zip(kept, numbers, strict=True):
        os.dup2(handle, number)
    os.closerange(above, above + len(kept))


def run(words: list[str]) -> None:
    """`-m MODULE ...` or `SCRIPT ...`, as Python itself begins it."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        sys.modules.pop(words[1], None)  # what torch is started with may be among what is imported
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
        script = os.path.abspath(words[0])
        vars(main).update(__file__=script, __builtins__=__builtins__)
        exec(compile(Path(script).read_bytes(), script, "exec"), vars(main))


def end(words: list[str]) -> NoReturn:
    """Runs it, and ends as Python does, but takes nothing apart: that would copy all of torch."""
    code, number = 0, 0
    try:
        run(words)
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
        if isinstance(asked.code, str):
            print(asked.code, file=sys.stderr)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
        code, number = 1, signal.SIGINT if isinstance(error, KeyboardInterrupt) else 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()  # which closes its files
    sys.stdout.flush()
    if number:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(code & 0xFF)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    end(serve(socket.socket(fileno=int(sys.argv[1])))["words"])
