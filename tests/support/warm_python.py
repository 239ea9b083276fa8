"""A Python whose programs begin with torch imported: each is forked where it is, for hundredths of the processor in
place of seconds. Everything else about them is as the one who started them has it: arguments, environment,
descriptors, folder, user, namespaces (`warm_server.py`).

listen_at(folder / "warm")      # there, a Python that has just begun asks for such a process (`warm_client.py`)
"""

from __future__ import annotations

import atexit
import functools
import os
import socket
import subprocess
import sys
from pathlib import Path

SERVER = Path(__file__).with_name("warm_server.py")


def listen_at(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"/proc/self/fd/{folder}/{path.name}")  # a path of its own may be too long for a socket
            path.chmod(0o777)
            listener.listen(64)
            socket.send_fds(server()[0], [b"."], [listener.fileno()])
    finally:
        os.close(folder)


@functools.cache
def server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """One for each test run, and all processes forked from here, started when it is first needed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        words = [sys.executable, str(SERVER), str(theirs.fileno())]
        process = subprocess.Popen(words, pass_fds=[theirs.fileno()])

    def end() -> None:
        ours.send(b"end")  # others may hold our end as well: to close it says nothing
        process.wait()

    atexit.register(end)
    return ours, process
