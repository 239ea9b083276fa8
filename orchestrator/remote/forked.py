"""Has a rank's script forked by its host's `preload`, which has imported torch. For the rank wrapper.

script = fork_script(job, rank, environment, streams) or subprocess.Popen(...)
script.pid, script.poll(), script.wait()
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .layout import JobFolder
from .script_start import PACKAGE, PRELOAD, STACKS, WATCH

__all__ = ["PRELOAD", "Forked", "at_folder", "fork_script", "watched"]
SOCKET = "preload"  # in the job's `bin/`
MOST_BYTES = 1 << 20
READY_S = 20.0


class Forked:
    """The part of `subprocess.Popen` that a wrapper needs. parent: the script's own, with no other child."""

    def __init__(self, connection: socket.socket, pid: int, parent: int) -> None:
        self.pid, self.parent = pid, parent
        self.returncode: int | None = None
        self.was_lost = False
        """Its parent was killed, and it with it."""
        self._connection = connection

    def fileno(self) -> int:
        return self._connection.fileno()

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self], [], [], 0)[0]:
            said = self._connection.recv(16)
            self.was_lost = not said
            self.returncode = int(said or -signal.SIGKILL)
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            select.select([self], [], [])
        return code

    def close(self) -> None:
        """Its parent ends everything that is left below it, and itself."""
        self._connection.close()


def fork_script(job: JobFolder, rank: int, environment: Mapping[str, str], streams: Sequence[int]) -> Forked | None:
    """None if this host has no server, or it refuses: then the script begins by itself."""
    request = {
        "rank": rank,
        "env": dict(environment),
        "folder": str(job.src),
        "of_parent": [WATCH, STACKS],
        "ignored": [int(number) for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN],
    }
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(READY_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
        with at_folder(job.bin) as place:
            connection.connect(f"{place}/{SOCKET}")
        socket.send_fds(connection, [json.dumps(request).encode()], streams)
        if connection.recv(MOST_BYTES) == b"ready":
            connection.send(b"go")  # from here on it runs: no way back
            connection.settimeout(None)
            pids = connection.recv(64).split()
            if pids:
                return Forked(connection, *map(int, pids))
    except OSError:
        pass
    connection.close()
    return None


@contextlib.contextmanager
def at_folder(folder: Path | str) -> Iterator[str]:
    """A short path of it: that of a socket may have 107 bytes."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}"
    finally:
        os.close(handle)


def watched(
    job: JobFolder, environment: Mapping[str, str], *, watch: str = "", steps: bool = True, stacks: Path | None = None
) -> dict[str, str]:
    """Variables that make Python run `script_start` first, from a folder of its own. For a child of this process. {} if
    a full disk has no room for the folder. watch: ANY, or "" for a child of this process.
    """
    folder = job.bin / "start"
    try:
        folder.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another rank of this host created it
            os.symlink(f"../{PACKAGE}/script_start.py", folder / "sitecustomize.py")
    except OSError:
        return {}
    paths = filter(None, (str(folder), environment.get("PYTHONPATH")))
    found = {"PYTHONPATH": os.pathsep.join(paths)}
    if steps:
        found[WATCH] = watch or str(os.getpid())
    if stacks:
        found[STACKS] = f"{os.getpid()}:{stacks}"
    return found
