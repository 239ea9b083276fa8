"""Processes that compute on this host's GPUs, with owner and program.

    occupants("GPU-5f3a9c1e-..., 4711, 8192, /usr/bin/python3\\n")
    {"GPU-5f3a9c1e-...": [{"pid": 4711, "memory_bytes": 8589934592, "user": "alice", "command": "python3 train.py",
                           "job": None}]}

The text is nvidia-smi's answer to QUERY. Command lines are cut after the script: arguments may be secrets. In a
container nvidia-smi shows nothing, or nameless processes with pids of the host, whose owners are unknown.
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
MOST = 256  # most lines to read


def occupants(answer: str) -> dict[str, list[dict[str, Any]]]:
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
    known: dict[str, str | None] = {"user": None, "command": None, "job": None}
    with contextlib.suppress(OSError):
        known["user"] = user_name(os.stat(f"/proc/{pid}").st_uid)
    with contextlib.suppress(OSError):
        known["command"] = shown_program(Path(f"/proc/{pid}/cmdline").read_bytes()) or None
    with contextlib.suppress(OSError):  # another user's cannot be read
        known["job"] = _job(Path(f"/proc/{pid}/environ").read_bytes())
    return known


def shown_program(command_line: bytes) -> str:
    words = [word.decode(errors="replace") for word in command_line.split(b"\0") if word]
    program, following = words[:1], words[1:3]
    if following[:1] == ["-m"]:
        return " ".join([*map(os.path.basename, program), *following])
    script = [word for word in following[:1] if not word.startswith("-")]
    return " ".join(map(os.path.basename, program + script))


def _job(environment: bytes) -> str | None:
    mark = f"{MARK}=".encode()
    folders = [entry.removeprefix(mark) for entry in environment.split(b"\0") if entry.startswith(mark)]
    return os.path.basename(folders[0].decode(errors="replace")) if folders else None


def peer_of(connection: socket.socket) -> tuple[int, int]:
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def user_name(uid: int) -> str:
    # The uid if it has no name, as in some containers.
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
