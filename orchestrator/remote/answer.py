"""One request, one answer: a JSON object between two markers, so that a shell's banner does no harm.

    reply(request, lambda request: {"jobs": 2})      # prints MARKER{"jobs": 2}MARKER

A refusal is answered as {"error", "remedy"}.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Refused(Exception):
    """Arguments: message and remedy, one line each."""


def reply(request: dict[str, Any], action: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    os.umask(0o077)
    try:
        answer = action(request)
    except (OSError, ValueError, Refused) as error:
        answer = refusal(error, f"{request['action']}: ", request.get("workdir", ""))
    sys.stdout.write(request["marker"] + json.dumps(answer) + request["marker"])


def refusal(error: OSError | ValueError | Refused, doing: str = "", where: str = "") -> dict[str, str]:
    if isinstance(error, Refused):
        return {"error": error.args[0], "remedy": error.args[1]}
    if isinstance(error, OSError):
        other = f"see `orch up` for this host's work folder, or {WORKDIR}"
        return {"error": doing + words(error, where), "remedy": remedy(error, where) or other}
    return {"error": f"{doing}{error}", "remedy": ""}


# A system error as a person reads it:
#
#     words(error)        # "No space left on device (/data/jobs): no inode is free there (`df -i`)"
#     remedy(error)       # "delete files there, or set `workdir:` in the inventory to another folder"

WORKDIR = "set `workdir:` in the inventory to another folder"
_DISK = "that disk or its server fails: look at `dmesg` there, and"
_FULL = "free space there, or"
# {elsewhere}: how to choose another folder.
_REMEDIES = {
    errno.EACCES: "give this host's user that folder, or {elsewhere}",
    errno.EPERM: "give this host's user that folder, or {elsewhere}",
    errno.EROFS: "it is mounted read-only (after an error, perhaps: see `dmesg` there); {elsewhere}",
    errno.ENOSPC: f"{_FULL} {{elsewhere}}",
    errno.EDQUOT: "this user's quota there is used up: free some of it, or {elsewhere}",
    errno.ENOLCK: "that file system has no locks (NFS without a lock server?): {elsewhere}",
    errno.EOPNOTSUPP: "that file system lacks what this needs: {elsewhere}",
    errno.EIO: f"{_DISK} {{elsewhere}}",
    errno.ESTALE: f"{_DISK} {{elsewhere}}",
    errno.ENODEV: f"{_DISK} {{elsewhere}}",
    errno.ENOTCONN: f"{_DISK} {{elsewhere}}",
    errno.EAGAIN: "end some of this user's processes on that host, or raise `ulimit -u` (or its cgroup's pids.max)",
    errno.ENOMEM: "end something on that host that takes memory",
    errno.EMFILE: "raise `ulimit -n` for this user on that host",
    errno.ENFILE: "end something on that host: all of it together has too many files open",
}
_MEANS = {
    errno.EAGAIN: "this user may start no further process or thread there",
    errno.ENOMEM: "too little memory is free there",
    errno.EMFILE: "a process may open no further file there",
}


def words(error: OSError, where: object = "") -> str:
    problem = error.strerror or str(error) or type(error).__name__
    place = _place(error, where)
    more = "no inode is free there (`df -i`)" if _lacks_inodes(error, place) else _MEANS.get(error.errno or 0, "")
    return problem + (f" ({place})" if place else "") + (f": {more}" if more else "")


def remedy(error: OSError, where: object = "", elsewhere: str = WORKDIR) -> str:
    """One line; "" if unknown. elsewhere: the end of the sentence, how to choose another folder."""
    if _lacks_inodes(error, _place(error, where)):
        return f"delete files there, or {elsewhere}"
    return _REMEDIES.get(error.errno or 0, "").format(elsewhere=elsewhere)


def describe(error: OSError) -> str:
    return "; ".join(filter(None, (words(error), remedy(error))))


def _place(error: OSError, where: object) -> str:
    if isinstance(error.filename, (str, bytes)):
        return os.fsdecode(error.filename)
    return "" if error.errno in _MEANS else str(where)  # process and memory limits belong to no folder


def _lacks_inodes(error: OSError, place: str) -> bool:
    # No inode is left, rather than no space. btrfs creates inodes on demand and reports a total of 0.
    if error.errno != errno.ENOSPC or not place:
        return False
    there = Path(place).expanduser().absolute()
    try:
        disk = os.statvfs(next(folder for folder in (there, *there.parents) if folder.exists()))
    except OSError:
        return False
    return disk.f_files > 0 and disk.f_favail == 0


# Ends a program whose connection is dead: a write to a link that drops packets blocks for ever.
#
#     wind()          # before each message: without the next one within STUCK_S the process ends
#
# Uses the kernel's alarm, which ends a blocked process; child processes do not inherit it. While a program is starting,
# `orchestrator/transport/shell.py` sets the alarm; `loader` sets it for programs with a deadline. sshd ends its own
# process by ClientAliveInterval.

STUCK_S = 120


def wind() -> None:
    signal.alarm(STUCK_S)
