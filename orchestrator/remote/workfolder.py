"""Checks a work folder before use: who may write there, what it contains, and whether it is ours.

    danger(Path("/srv/orch"))      # None, or what is wrong with it and what to try
    content(Path("/srv/orch"))     # "absent", "empty", "ours" or "other"

A user who can write into a work folder or replace it can run code as its owner. So it has to be the user's own and
closed to others; every folder above has to belong to the user or root, and be closed to others or sticky like /tmp
(StrictModes of sshd_config(5)). A folder is ours if it contains our mark, a file that `touch` can create.

Imports only the standard library: the probe runs this text in a process of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import json
import os
import pwd
import re
import shlex
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARK = ".orch-work"
MAX_LINKS = 40  # as Linux (path_resolution(7))
TRIALS = 100  # attempts to write while other probes create and remove the folder
_TRIAL = re.compile(r"\.probe-[0-9a-f]{16}")


def danger(root: Path) -> tuple[str, str] | None:
    """Why other users could write into this folder or replace it, and what to try. None if safe, or not there yet."""
    elsewhere = "set `workdir:` to a folder of your own"
    for path, found in way_to(root):
        is_root = path == os.path.realpath(root)
        if found.st_uid != os.getuid() and (is_root or found.st_uid != 0):
            return f"{path} belongs to {_user(found.st_uid)}", elsewhere
        is_sticky = bool(found.st_mode & stat.S_ISVTX) and not is_root
        if not stat.S_ISLNK(found.st_mode) and not is_sticky and (others := _writers(found)):
            mode = stat.S_IMODE(found.st_mode)
            change = "go-w" if mode & stat.S_IWOTH else "g-w"
            words = (
                f"{path} (mode {mode:04o}) may be written by {others}, who could have code run as {_user(os.getuid())}"
            )
            return words, f"`chmod {change} {shlex.quote(path)}` there, or {elsewhere}"
    return None


def way_to(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every existing folder and link from / to `root`, inclusive."""
    at, todo, links = "/", [part for part in root.parts if part != "/"], 0
    yield at, os.lstat(at)
    while todo:
        part = todo.pop(0)
        if part == "..":
            at = os.path.dirname(at)
            continue
        step = os.path.join(at, part)
        try:
            found = os.lstat(step)
        except FileNotFoundError:
            return
        yield step, found
        if not stat.S_ISLNK(found.st_mode):
            at = step
            continue
        links += 1
        if links > MAX_LINKS:
            return  # opening it gives the system's error
        target = os.readlink(step)
        at = "/" if target.startswith("/") else at
        todo = [part for part in target.split("/") if part not in ("", ".")] + todo


def content(root: Path) -> str:
    """`absent`, `empty`, `ours` (with our mark) or `other`. Other programs of ours may change it meanwhile."""
    while True:
        try:
            there = names(root)
        except (FileNotFoundError, NotADirectoryError):
            return "absent"
        mark = _mark(root)
        if mark and _is_ours(mark):
            return "ours"
        if not there:
            return "empty"
        if mark or MARK not in there:
            return "other"
        # The mark was removed between the two checks.


def _mark(root: Path) -> os.stat_result | None:
    try:
        return os.lstat(root / MARK)
    except OSError:
        return None


def _is_ours(mark: os.stat_result) -> bool:
    return stat.S_ISREG(mark.st_mode) and mark.st_uid == os.getuid()


def names(root: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(root) if not _TRIAL.fullmatch(entry.name))


def unfit(root: Path) -> tuple[str, str] | None:
    """Why this must not be a work folder, and what to try; None if it may."""
    if found := danger(root):
        return found
    if content(root) != "other":
        return None
    there = names(root)
    shown = ", ".join(there[:3]) + (", ..." if len(there) > 3 else "")
    mark = f"if an older orch made this one: `touch {shlex.quote(str(root / MARK))}` there"
    return f"{root} is no work folder of orch and holds {shown}", f"set `workdir:` to another folder; {mark}"


def _writers(found: os.stat_result) -> str:
    if found.st_mode & stat.S_IWOTH:
        return "every user"
    if found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid):
        return f"group {_group(found.st_gid)}"
    return ""


def _is_private(gid: int) -> bool:
    # A group only of this user and root: Debian gives each user such a group, and makes their files group-writable.
    try:
        members = set(grp.getgrgid(gid).gr_mem)
    except KeyError:
        return False
    members |= {entry.pw_name for entry in pwd.getpwall() if entry.pw_gid == gid}
    return bool(members) and members <= {_user(os.getuid()), "root"}


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


# ---- the probe's trial ----------------------------------------------------------------------------------------


def trial(workdir: str) -> dict[str, Any]:
    """The work folder's facts for `NodeFacts`. Inodes are None if the file system creates them on demand (btrfs).
    Removes everything it creates.
    """
    root = Path(workdir).expanduser().absolute()
    problem = _written(root)
    _remove_old_trials(root)
    space, inode = _space(root)
    return {
        "workdir": str(root),
        "disk_free_bytes": space.f_bavail * space.f_frsize,
        "disk_free_inodes": space.f_favail if space.f_files else None,
        "workdir_inode": inode,
        "workdir_error": problem,
        "workdir_unfit": unfit(root),
    }


def _space(root: Path) -> tuple[os.statvfs_result, int]:
    # Uses the nearest existing folder. Its inode is equal on all hosts that mount it.
    for there in (root, *root.parents):
        with contextlib.suppress(FileNotFoundError):  # another probe has just removed its own
            if there.is_dir():
                return os.statvfs(there), there.stat().st_ino
    raise FileNotFoundError(root)


def _written(root: Path) -> str | None:
    problem = None
    for _ in range(TRIALS):
        problem = _tried(root)
        if not isinstance(problem, (FileNotFoundError, FileExistsError)):
            break
        # Hosts may share a home: another probe has just removed a folder that it had created.
    return f"{problem.filename or root}: {problem.strerror}" if problem else None


def _tried(root: Path) -> OSError | None:
    made: list[Path] = []
    try:
        folder = root
        while not os.path.lexists(folder):
            made.append(folder)
            folder = folder.parent
        for folder in reversed(made):
            os.makedirs(folder, 0o700, exist_ok=True)
        file, fifo = (root / f".probe-{os.urandom(8).hex()}" for _ in range(2))
        os.mkfifo(fifo, 0o600)
        made.insert(0, fifo)
        with open(file, "xb") as handle:
            made.insert(0, file)
            handle.write(b"x" * 4096)
            handle.flush()
            os.fsync(handle.fileno())
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as problem:
        return problem
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                os.unlink(path) if _TRIAL.fullmatch(path.name) else os.rmdir(path)
    return None


def _remove_old_trials(root: Path) -> None:
    long_ago = time.time() - 600  # longer than any running probe takes
    with contextlib.suppress(OSError):
        for entry in os.scandir(root):
            is_trial = _TRIAL.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False)
            if is_trial and entry.stat().st_mtime < long_ago:
                os.unlink(entry)


if __name__ == "__main__":  # as the probe runs it
    sys.stdout.write(json.dumps(trial(sys.argv[1])) + "\n")
