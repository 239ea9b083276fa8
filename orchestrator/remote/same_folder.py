"""Whether hosts share a work folder: one leaves a trial file there, the others look for it.

Requests, by `action`, each with {"workdir", "token"}: `leave`, `look` ({"there": bool}) and `remove`. The file is named
as a probe's own trial is, so that what a broken link leaves goes with the next probe (`workfolder`).
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from .answer import reply


def main(request: dict[str, Any]) -> None:
    reply(request, {action.__name__: action for action in (leave, look, remove)}[request["action"]])


def leave(request: dict[str, Any]) -> dict[str, Any]:
    root = Path(request["workdir"]).expanduser()
    made = [folder for folder in (root, *root.parents) if not os.path.lexists(folder)]
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(_trial(request), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    return {"made": [str(folder) for folder in made]}


def look(request: dict[str, Any]) -> dict[str, Any]:
    trial = _trial(request)
    with contextlib.suppress(OSError):
        return {"there": trial.name in os.listdir(trial.parent)}  # listed: NFS may still have that a name is not there
    return {"there": False}


def remove(request: dict[str, Any]) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        _trial(request).unlink()
        for folder in map(Path, request["made"]):
            folder.rmdir()  # only an empty one goes
    return {}


def _trial(request: dict[str, Any]) -> Path:
    if not re.fullmatch(r"[0-9a-f]{16}", request["token"]):
        raise ValueError("no token")
    return Path(request["workdir"]).expanduser() / f".probe-{request['token']}"
