"""One `orch` command in a process of its own, forked where all that it imports is there already: half of what a short
command takes of the processor is its imports.

    done = types(["down", "--yes"], home=Path("/tmp/ada/home"), folder=Path("/tmp/ada"))

Call it where only the forked processes have threads of `orch`: the server that forks them never has any.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import orchestrator.collect
import orchestrator.console
import orchestrator.controller
import orchestrator.report
import orchestrator.transport.ssh  # noqa: F401
from orchestrator.cli import main

LONGEST_S = 240.0
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


def types(words: Sequence[str], home: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as said:
        streams = [Path(said, name) for name in ("out", "err")]
        process = _processes.Process(target=_run, args=(list(words), str(home), str(folder), *map(str, streams)))
        process.start()
        process.join(LONGEST_S)
        if process.exitcode is None:
            process.kill()
            process.join()
        out, err = (stream.read_text() for stream in streams)
        return subprocess.CompletedProcess(list(words), process.exitcode, out, err)


def _run(words: list[str], home: str, folder: str, out: str, err: str) -> None:
    for number, path in ((1, out), (2, err)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, number)
        os.close(handle)
    os.environ |= {"ORCH_HOME": home, "ORCH_SSH_CONFIG": "/dev/null", "COLUMNS": "400"}
    os.environ.pop("SSH_AUTH_SOCK", None)
    os.chdir(folder)
    main(words, prog_name="orch")
