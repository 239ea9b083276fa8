"""Detects hosts that share a work folder: each leaves a trial file and looks for the others'.

Requests, by `action`, each with {"workdir", "token"}: `leave` ({"made": folders}), `look` (with "tokens"; {"seen":
tokens}) and `remove` (with "made"). The next probe removes files left by a broken connection, since they are named like
its own trial file (`workfolder`).
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from .answer import reply

TRIAL = ".probe-"


def main(request: dict[str, Any]) -> None:
    reply(request, {action.__name__: action for action in (leave, look, remove)}[request["action"]])


def leave(request: dict[str, Any]) -> dict[str, Any]:
    root = Path(request["workdir"]).expanduser()
    made = [folder for folder in (root, *root.parents) if not os.path.lexists(folder)]
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(_trial(request), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    return {"made": [str(folder) for folder in made]}


def look(request: dict[str, Any]) -> dict[str, Any]:
    root = _trial(request).parent
    with contextlib.suppress(OSError):
        names = set(os.listdir(root))  # listed, because NFS may cache a missing name
        return {"seen": [token for token in request["tokens"] if f"{TRIAL}{token}" in names]}
    return {"seen": []}


def remove(request: dict[str, Any]) -> dict[str, Any]:
    trial = _trial(request)
    with contextlib.suppress(OSError):
        trial.unlink()
    for folder in (trial.parent, *trial.parent.parents):
        if str(folder) in request["made"]:
            with contextlib.suppress(OSError):
                folder.rmdir()  # only if empty
    return {}


def _trial(request: dict[str, Any]) -> Path:
    if not re.fullmatch(r"[0-9a-f]{16}", request["token"]):
        raise ValueError("no token")
    return Path(request["workdir"]).expanduser() / f"{TRIAL}{request['token']}"
