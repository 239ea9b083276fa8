"""Imports what a kind of program needs, and then forks one for each request: `forks.py` says what for.

python forks_server.py KIND DESCRIPTOR         in a fresh process
be_server(kind, requests)                      in a process that was forked for it

Ends with the test run that started it, and everything that it forked with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def orch() -> Callable[[list[str]], Any]:
    """With what its commands import, read or make when they come to it."""
    names = (
        "controller",
        "planning.variables",
        "planning.variables",
        "forecast.imagined",
        "hosts.occupied",
        "views.following",
        "views.host_tables",
        "views.dry_run",
        "views.plan_rows",
        "views.documents",
        "views.host_tables",
        "jobs.collect",
        "views.report",
        "results.analyse",
        "measuring.study_run",
        "transport.ssh",
        "transport.shell",
        "transport.sources",
    )
    made = {name: import_module(f"orchestrator.{name}") for name in names}
    import_module("rich._emoji_codes")
    made["planning.variables"].is_secret(Path(__file__).parent, "forks.py")
    made["views.report"]._environment().get_template("report.html.j2")
    sources = made["transport.sources"]
    for program in ("probe", "prepare", "control", "reader", "belongings"):
        sources.pack(program, sources.shipped_sources())
    from orchestrator.cli import main

    return lambda words: main(words, prog_name="orch")


def crash() -> Callable[[list[str]], Any]:
    orch()
    from tests.support.crash_driver import main

    return main


def trainer() -> Callable[[list[str]], Any]:
    import_module("tests.support.ranks_import")
    from trainer.__main__ import main

    return main


def torchrun() -> Callable[[list[str]], Any]:
    import_module("tests.support.ranks_import")
    from torch.distributed.run import main

    return main


KINDS = {"orch": orch, "trainer": trainer, "torchrun": torchrun, "crash": crash}


def be_server(kind: str, requests: socket.socket) -> NoReturn:
    program = KINDS[kind]()
    multiprocessing.set_start_method(None, force=True)  # the default again, where multiprocessing has forked this
    gc.collect()
    gc.freeze()  # no fork looks through what was imported, which would copy all of it
    serve(program, requests)
    os._exit(0)  # torch takes most of a second to clear away


def serve(program: Callable[[list[str]], Any], requests: socket.socket) -> None:
    ended: dict[int, int] = {}
    """Where to write how it ended, by process."""
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([requests, wake], [], [])
        if wake in ready:
            os.read(wake, 512)
            bury(ended)
        if requests in ready:
            text, handles, _, _ = socket.recv_fds(requests, 1 << 20, 4)
            if not text:
                return
            pid = os.fork()
            if pid == 0:
                become(program, json.loads(text), handles)
            ended[pid] = handles.pop()
            for handle in handles:
                os.close(handle)
            requests.send(str(pid).encode())


def bury(ended: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            handle = ended.pop(found[0])
            with contextlib.suppress(BrokenPipeError):
                os.write(handle, str(os.waitstatus_to_exitcode(found[1])).encode())
            os.close(handle)


def become(program: Callable[[list[str]], Any], request: dict[str, Any], handles: list[int]) -> NoReturn:
    """The forked process: what a fresh one would be."""
    code = 1
    try:  # a mistake in here ends it with 1 and its traceback, on our own standard error
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, handle in enumerate(handles[:3]):
            os.dup2(handle, number)
        os.closerange(3, 1024)
        if request["session"]:
            os.setsid()
        if request["network"]:
            enter(request["network"])
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
        sys.argv = ["-", *request["words"]]
        code = exit_code(program, request["words"])
        sys.stdout.flush()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def exit_code(program: Callable[[list[str]], Any], words: list[str]) -> int:
    try:
        return program(words) or 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1


def enter(network: str) -> None:
    handle = os.open(network, os.O_RDONLY)
    if _libc.setns(handle, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns {network}")
    os.close(handle)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    be_server(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
