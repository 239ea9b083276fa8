"""One job per GPU of this machine, across logins and work folders.

    claim("GPU-5f3a9c1e-0b7d-4c52-9f0e-3a1d5b6c7e8f", job="mnist-1", share=False)      # until this process ends

The claim is an abstract Unix socket (unix(7)) named after the GPU: the first process to bind the name has it, and the
kernel frees it with the last process that holds it, so there is no file to replace or leave behind. Limits: containers
with their own network namespace do not see each other; a sharing job claims nothing if the name is taken; any login can
take a name, as with a lock in /tmp.
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
"""UUIDs, since an index may mean another GPU to another login."""
_ASKING = 4096  # most connections that wait for the holder


_LISTENS_S, _PAUSE_S = 1.0, 0.02  # time from binding the name to listening


class Holder(NamedTuple):
    """A GPU's holder; "" and 0 for unknown values."""

    user: str = ""
    job: str = ""
    pid: int = 0


def claim(uuid: str, job: str, *, share: bool) -> int | None:
    """Held until the returned descriptor is closed here and in all forks. Raises Refused if another job has the GPU.

    share: use the GPU together with its holder.
    """
    if not _UUID.fullmatch(uuid):
        return None
    until = time.monotonic() + _LISTENS_S
    while (taken := _bind(uuid)) is None and not share and not (holder := holder_of(uuid)):
        if time.monotonic() > until:  # a bound name without a listener is no claim
            return None
        time.sleep(_PAUSE_S)
    if taken is not None or share:
        return taken or None
    assert holder
    if holder.job != job:  # two nodes of one job may share a machine
        whose = f"{holder.user}'s " if holder.user else "another "
        raise Refused(f"GPU {uuid} is in use by {whose}job {holder.job}".rstrip(), REMEDY)
    return None


def _bind(uuid: str) -> int | None:
    # None if the name is taken; 0 if the system has no such names: then the job runs without a claim.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as claimed:
        try:
            claimed.bind(_name(uuid))
            claimed.listen(_ASKING)
            return claimed.detach()
        except OSError as error:
            return None if error.errno == errno.EADDRINUSE else 0


def holder_of(uuid: str) -> Holder | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(_name(uuid))
            pid, uid = peer_of(asking)
        except ConnectionRefusedError:
            return None
        except OSError:  # too many connections wait
            return Holder()
    return Holder(user_name(uid), *_claimed_by(pid))


def hang_up(claimed: int) -> None:
    """Takes the connection of an asker (`holder_of`) out of the claim's queue, which has few places."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(claimed)) as listener:
        listener.settimeout(0)
        listener.accept()[0].close()


def _name(uuid: str) -> str:
    return f"\0orch-{uuid}"


def _claimed_by(pid: int) -> tuple[str, int]:
    # Job and keeper's pid, from the keeper's public command line `python -S -m orch_remote.keeper JOB_FOLDER
    # DESCRIPTOR`.
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        before, _, after = command.partition("\0orch_remote.keeper\0")
        if before.endswith("\0-m"):
            return os.path.basename(after.partition("\0")[0]), pid
    return "", pid
