"""One job on a GPU of this machine, whoever started it and wherever its work folder lies.

    claim("GPU-5f3a9c1e-0b7d-4c52-9f0e-3a1d5b6c7e8f", job="mnist-1", share=False)      # for as long as we live

The claim is a Unix socket of Linux's abstract namespace (unix(7)), named after the GPU. Who binds the name has it, and
the kernel frees it with the last process that holds it: there is no file that somebody could own, replace or leave
behind. It reaches as far as the network namespace, so that two containers do not see each other; a job that shares a
GPU with one that was there before claims nothing; and whoever has a login can take a name, as with a lock in /tmp.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import time
from pathlib import Path
from typing import NamedTuple

from .answer import Refused
from .occupants import peer_of, user_name

REMEDY = "wait for it (`--wait`), cancel it, take other hosts (`--nodes`, `--hosts`), or `--share` the GPU"
_UUID = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.I)
"""What names one GPU everywhere: an index may mean another one to another login."""
_ASKING = 4096
"""So many may ask who holds it before the kernel lets no more."""


_LISTENS_S, _PAUSE_S = 1.0, 0.02
"""So long a claim may take from its name to listening there."""


class Holder(NamedTuple):
    """Who has a GPU; "" and 0 for unknown values."""

    user: str = ""
    job: str = ""
    pid: int = 0


def claim(uuid: str, job: str, *, share: bool) -> None:
    """For as long as this process lives, or one that it forks. Raises Refused where another job has the GPU.

    share: go on beside one that has it.
    """
    if not _UUID.fullmatch(uuid):
        return
    until = time.monotonic() + _LISTENS_S
    while not (taken := _bind(uuid)) and not share and not (holder := holder_of(uuid)):
        if time.monotonic() > until:  # a name at which nobody listens is no claim, whoever keeps it
            return
        time.sleep(_PAUSE_S)
    if taken or share:
        return
    assert holder
    if holder.job != job:  # of this job another node may be on the same machine
        whose = f"{holder.user}'s " if holder.user else "another "
        raise Refused(f"GPU {uuid} is in use by {whose}job {holder.job}".rstrip(), REMEDY)


def _bind(uuid: str) -> bool:
    """Whether the name is ours now, or the system has no such names: the job goes on as it would without us."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as claimed:
        try:
            claimed.bind(_name(uuid))
            claimed.listen(_ASKING)
            claimed.detach()
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def holder_of(uuid: str) -> Holder | None:
    """None where nobody claims it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(_name(uuid))
            pid, uid = peer_of(asking)
        except ConnectionRefusedError:
            return None
        except OSError:  # so many ask that the kernel lets no more
            return Holder()
    return Holder(user_name(uid), *_claimed_by(pid))


def _name(uuid: str) -> str:
    return f"\0orch-{uuid}"


def _claimed_by(pid: int) -> tuple[str, int]:
    """The job and its keeper's pid. Every login can read the keeper's command line:
    `python -S -m orch_remote.keeper JOB_FOLDER DESCRIPTOR`.
    """
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        before, _, after = command.partition("\0orch_remote.keeper\0")
        if before.endswith("\0-m"):
            return os.path.basename(after.partition("\0")[0]), pid
    return "", pid
