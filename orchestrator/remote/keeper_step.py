"""A step of a Slurm job on each of its hosts, for as long as the job lasts: owner of all that outlives a command.

    python -m orchestrator.remote.keeper_step [SCRATCH]     # prints {"host", "env"}, or {"host", "error"}; then waits

SCRATCH: a folder of the host's own disk. A folder in it is TMPDIR of the job's ranks, and removed at the end.

Slurm ends every process that a step has started when that step ends, so a supervisor cannot be started by the step
that asks for it. It asks this one, by a socket in a folder of its user: `start`. Slurm signals only the steps' own
processes when a job has to end: this one passes it on, and waits until all supervisors have written their last record.
The end of its standard input means the same: the batch step has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ANSWER = "{answer}"
"""Stands for the number of the inherited descriptor."""
ASK_S = 10.0
MAX_BYTES = 1 << 20


def place() -> Path | None:
    """The socket of this host's keeper step; None outside a Slurm job."""
    job, host = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURMD_NODENAME")
    return Path(f"/tmp/orch-{os.getuid()}", f"{job}.{host}") if job and host else None


def start(keeper: Path, argv: Sequence[str], folder: Path, env: Mapping[str, str], answer: int, log: int) -> None:
    """argv: ANSWER in it becomes the number of `answer`, which the process inherits. Raises OSError."""
    asked = json.dumps({"argv": list(argv), "folder": str(folder), "env": dict(env)}).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(ASK_S)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_BYTES)
        line.connect(str(keeper))
        socket.send_fds(line, [asked], [answer, log])
        said = line.recv(4096)
    if said != b"started":
        raise OSError(said.decode(errors="replace") or "no answer")


def main() -> None:
    path = place()
    if path is None:
        sys.exit("keeper_step: needs a step of a Slurm job")
    _own_folder(path.parent)
    path.unlink(missing_ok=True)
    own = Path(sys.argv[1], f"orch-{os.getuid()}-{path.name}") if sys.argv[1:] else None
    about = _about(own)
    children: list[subprocess.Popen[bytes]] = []
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda number, frame: None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(path))
        server.listen(16)
        os.write(1, json.dumps(about).encode() + b"\n")
        try:
            _serve(server, woken, children)
        finally:
            if own:
                shutil.rmtree(own, ignore_errors=True)
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another job's socket is in it
                path.parent.rmdir()


def _own_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        sys.exit(f"keeper_step: {folder} is not a folder that only this user can enter: remove it")


def _about(scratch: Path | None) -> dict[str, Any]:
    host, env = os.environ["SLURMD_NODENAME"], {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "")}
    if not scratch:
        return {"host": host, "env": env}
    try:
        shutil.rmtree(scratch, ignore_errors=True)  # of this job, before Slurm queued it again
        scratch.mkdir(mode=0o700)
    except OSError as error:
        return {"host": host, "error": f"{scratch} cannot be made ({error.strerror})"}
    return {"host": host, "env": {**env, "TMPDIR": str(scratch)}}


def _serve(server: socket.socket, woken: int, children: list[subprocess.Popen[bytes]]) -> None:
    is_ending = False
    with selectors.DefaultSelector() as selector:
        for source in (server, woken, sys.stdin):
            selector.register(source, selectors.EVENT_READ)
        while not is_ending or children:
            sources = [key.fileobj for key, _ in selector.select()]
            if server in sources:
                _answer(server, children, is_ending)
            asked = woken in sources and bool({signal.SIGTERM, signal.SIGINT} & {*os.read(woken, 4096)})
            if sys.stdin in sources and not os.read(0, 4096):
                selector.unregister(sys.stdin)
                asked = True
            if asked and not is_ending:
                is_ending = True
                for child in children:
                    child.send_signal(signal.SIGTERM)  # nothing happens if it has ended
            children[:] = [child for child in children if child.poll() is None]


def _answer(server: socket.socket, children: list[subprocess.Popen[bytes]], is_ending: bool) -> None:
    line, _ = server.accept()
    with line:
        line.settimeout(ASK_S)
        try:
            asked, inherited, _, _ = socket.recv_fds(line, MAX_BYTES, 2)
            if is_ending or len(inherited) != 2:
                line.send(b"the job is ending")
                return
            try:
                children.append(_started(json.loads(asked), *inherited))
            finally:
                for each in inherited:
                    os.close(each)
            line.send(b"started")
        except (OSError, ValueError, KeyError) as error:
            try:
                line.send(str(error).encode()[:4096])
            except OSError:
                return


def _started(asked: dict[str, Any], answer: int, log: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [word.replace(ANSWER, str(answer)) for word in asked["argv"]],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd=asked["folder"],
        env=asked["env"],
        pass_fds=[answer],
        start_new_session=True,
    )


if __name__ == "__main__":
    main()
