"""One file to this host or from it: whole and as its SHA-256 has it, or not at all.

Request to take one: {"action": "take", "path", "name", "size", "sha256", "mode"}, and the bytes follow it. To give one:
{"action": "give", "path", "most_bytes"}. It reports (see `talk`):

    {"size", "mode"} {"piece": BASE64} ...                   of a file that is given
    {"end": {"path", "size", "sha256"}}

A path counts from the home folder. What is taken lies beside its place until it is whole, then it replaces what is
there; a folder is never replaced: the file goes into it by its name. No link of another user is followed on the way.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import secrets
import stat
import sys
from pathlib import Path
from typing import Any

from .answer import Refused
from .beneath import UnsafeError, chosen_file
from .talk import ControllerLeft, Talk, serve

PIECE_BYTES = 1 << 18


def main(request: dict[str, Any]) -> None:
    umask = os.umask(0o077)
    serve(request, lambda request, talk: give(request, talk) if request["action"] == "give" else take(request, umask))


def take(request: dict[str, Any], umask: int) -> dict[str, Any]:
    path = expanded(request["path"])
    try:
        with chosen_file(path, request["name"], inside=request["path"].endswith("/")) as (folder, last):
            path = Path(os.readlink(f"/proc/self/fd/{folder}")) / last
            if os.path.lexists(path) and not path.is_file():
                raise Refused(f"{path} is no regular file", "name another file")
            _write(request, folder, last, umask)
    except UnsafeError as error:
        raise Refused(
            f"{error.filename} {error.strerror}", "choose a place in which nobody but you decides what lies there"
        ) from error
    except IsADirectoryError as error:
        raise Refused(f"{error.filename} is a folder", "name a file, or another folder") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        folder_there = path if request["path"].endswith("/") else path.parent
        raise Refused(f"{folder_there} is no folder", "make it first: orch exec -- mkdir -p FOLDER") from error
    return {"path": str(path), "size": request["size"], "sha256": request["sha256"]}


def _write(request: dict[str, Any], folder: int, last: str, umask: int) -> None:
    temporary = f".orch-{secrets.token_hex(8)}.part"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            receive(file, request["size"], request["sha256"])
            os.fchmod(file.fileno(), request["mode"] & 0o777 & ~umask)
            os.fsync(file.fileno())
        os.replace(temporary, last, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        raise
    os.fsync(folder)


def expanded(named: str) -> Path:
    return Path.home() / Path(named).expanduser()


def receive(file: Any, size: int, sha256: str) -> None:
    digest = hashlib.sha256()
    while size:
        data = sys.stdin.buffer.read(min(PIECE_BYTES, size))
        if not data:
            raise ControllerLeft
        file.write(data)
        digest.update(data)
        size -= len(data)
    file.flush()
    if digest.hexdigest() != sha256:
        raise Refused("it arrived damaged", "copy it again")


def give(request: dict[str, Any], talk: Talk) -> dict[str, Any]:
    path = expanded(request["path"])
    if path.is_dir():
        raise Refused(f"{path} is a folder", "pack it first: orch exec -- tar -cf FILE FOLDER")
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer would wait for one
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise Refused(f"{path} is no regular file", "name a file")
        if found.st_size > request["most_bytes"]:
            raise Refused(f"{path} has {found.st_size} bytes, more than {request['most_bytes']}", "use rsync or scp")
        talk.say({"size": found.st_size, "mode": stat.S_IMODE(found.st_mode)})
        digest, left = hashlib.sha256(), found.st_size
        while left:
            data = file.read(min(PIECE_BYTES, left))
            if not data:
                raise Refused(f"{path} became shorter while it was read", "copy it again")
            digest.update(data)
            left -= len(data)
            talk.say({"piece": base64.b64encode(data).decode()})
    return {"path": str(path), "size": found.st_size, "sha256": digest.hexdigest()}
