"""Who is on this host's GPUs: every process that computes on one, its owner and what it runs.

    occupants("GPU-5f3a9c1e-..., 4711, 8192, /usr/bin/python3\\n")
    {"GPU-5f3a9c1e-...": [{"pid": 4711, "memory_bytes": 8589934592, "user": "alice", "command": "python3 train.py",
                           "job": None}]}

The text is nvidia-smi's answer to QUERY. Of a command line only the program and its script are reported: what follows
may be a secret. In a container nvidia-smi shows nothing, or processes of the machine around it, whose pids mean nothing
here and which have no name for it: their owners are not known.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import struct
from pathlib import Path
from typing import Any

from .processes import MARK

QUERY = ("--query-compute-apps=gpu_uuid,pid,used_gpu_memory,process_name", "--format=csv,noheader,nounits")
_CREDENTIALS = struct.Struct("3i")
MOST = 256
"""Lines that are read."""


def occupants(answer: str) -> dict[str, list[dict[str, Any]]]:
    """By the GPU's uuid."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in answer.splitlines()[:MOST]:
        fields = [field.strip() for field in line.split(",", 3)]
        if len(fields) != 4 or not fields[1].isdecimal():
            continue
        gpu, pid, mebibytes, name = fields
        known = _of_process(int(pid)) if not name.startswith("[") else {"user": None, "command": None, "job": None}
        memory_bytes = int(mebibytes) << 20 if mebibytes.isdecimal() else None
        found.setdefault(gpu, []).append({"pid": int(pid), "memory_bytes": memory_bytes, **known})
    return found


def _of_process(pid: int) -> dict[str, str | None]:
    """What its system lets us see; None for the rest."""
    known: dict[str, str | None] = {"user": None, "command": None, "job": None}
    with contextlib.suppress(OSError):
        known["user"] = user_name(os.stat(f"/proc/{pid}").st_uid)
    with contextlib.suppress(OSError):
        known["command"] = _program(Path(f"/proc/{pid}/cmdline").read_bytes()) or None
    with contextlib.suppress(OSError):  # of another user's process it cannot be read
        known["job"] = _job(Path(f"/proc/{pid}/environ").read_bytes())
    return known


def _program(command_line: bytes) -> str:
    """`python3 train.py` or `python3 -m mypackage.train` of a longer one."""
    words = [word.decode(errors="replace") for word in command_line.split(b"\0") if word]
    program, following = words[:1], words[1:3]
    if following[:1] == ["-m"]:
        return " ".join([*map(os.path.basename, program), *following])
    script = [word for word in following[:1] if not word.startswith("-")]
    return " ".join(map(os.path.basename, program + script))


def _job(environment: bytes) -> str | None:
    """The job of ours that it belongs to, by the mark that all of a job's processes carry."""
    mark = f"{MARK}=".encode()
    folders = [entry.removeprefix(mark) for entry in environment.split(b"\0") if entry.startswith(mark)]
    return os.path.basename(folders[0].decode(errors="replace")) if folders else None


def peer_of(talk: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket, as the kernel has them. Raises OSError."""
    pid, uid, _ = _CREDENTIALS.unpack(talk.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def user_name(uid: int) -> str:
    """A container may run as a uid that no passwd file knows."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
