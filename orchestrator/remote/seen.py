"""What is seen of a rank's processes from outside, without root: the script, and whatever it has started.

    seen, more = see(job, 0, 4711)                      the script first; so many are left out
    row(seen[0], job.src, threads=12, frames=40)        as it stands in the answer

A program that is no Python has no threads here, and is known by its state and by what in the kernel it waits for
(proc(5): `wchan`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import stat
from pathlib import Path
from typing import Any, NamedTuple

from .beneath import READ
from .carried import disk_bytes
from .layout import JobFolder
from .processes import descendants
from .stacks import Thread, asking

MOST_PROCESSES = 24
"""Of one rank."""
STOPPED = ("T", "t")
IDLE_TICKS = 3
"""Between two looks; to write its stacks takes a part of one."""
PIPES = {1: "stdout", 2: "stderr"}
SOURCE_BYTES = 1 << 20
TEXT = 120
SHORT, NAME = 64, 500
"""A path or the name of a function has at most so many characters; so it is with `faulthandler`."""


class SeenProcess(NamedTuple):
    """One process at one moment; of a `compared` one also what has changed since the moment before."""

    pid: int
    name: str
    state: str
    wchan: str
    ticks: int
    """CPU time so far."""
    moved_bytes: int
    """Read and written so far, of one that is `compared` since then; 0 where nobody may know. Its stacks are among it.
    """
    threads: list[Thread] | None
    """None where it is not asked, or does not answer."""
    same: bool = False
    """Whether its main thread stands where it stood."""
    idle: bool = False
    """Whether it has used next to no CPU since."""

    def compared(self, before: SeenProcess | None) -> SeenProcess:
        if before is None:
            return self._replace(moved_bytes=0)
        return self._replace(
            same=self.state == before.state and self.main == before.main,
            idle=self.ticks - before.ticks <= IDLE_TICKS,
            moved_bytes=max(0, self.moved_bytes - before.moved_bytes),
        )

    @property
    def main(self) -> Thread | None:
        return self.threads[0] if self.threads else None


def see(job: JobFolder, rank: int, pid: int) -> tuple[list[SeenProcess], int]:
    """The script first, then what it has started, the oldest first; and how many more of those there are."""
    pids = [pid, *(one.pid for one in sorted(descendants(pid), key=lambda one: one.start_time))]
    with asking(job.stacks(rank)) as ask:
        found = [_seen(one, None if state_of(one) in STOPPED else ask(one)) for one in pids[:MOST_PROCESSES]]
    return [one for one in found if one], max(0, len(pids) - MOST_PROCESSES)


def _seen(pid: int, threads: list[Thread] | None) -> SeenProcess | None:
    """None where it has ended."""
    name, _, rest = _text(pid, "stat").rpartition(") ")
    fields = rest.split()
    if len(fields) < 13 or fields[0] in "ZX":
        return None
    ticks = int(fields[11]) + int(fields[12])
    name = name.partition("(")[2]
    return SeenProcess(pid, name, fields[0], _wchan(pid), ticks, _moved_bytes(pid, fields[0]), threads or None)


def state_of(pid: int) -> str:
    """A letter of proc(5); "" where there is no such process."""
    return _text(pid, "stat").rpartition(") ")[2][:1]


def _wchan(pid: int) -> str:
    found = _text(pid, "wchan").strip()
    return "" if found == "0" else found


def _moved_bytes(pid: int, state: str) -> int:
    """By read(2), write(2) and the like, and from and to disks; of who waits for a disk also what that itself moves."""
    lines = [line.split() for line in _text(pid, "io").splitlines()]
    names = ("rchar:", "wchar:", "read_bytes:", "write_bytes:")
    return sum(int(line[1]) for line in lines if line[0] in names) + (disk_bytes(pid) if state == "D" else 0)


def _text(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def full_pipes(pid: int) -> list[str]:
    """Which of its two streams is a pipe that takes nothing more now: whoever reads it has stopped."""
    found = []
    for number, name in PIPES.items():
        path = f"/proc/{pid}/fd/{number}"
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith("pipe:"):
                pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                try:
                    poll = select.poll()
                    poll.register(pipe, select.POLLOUT)
                    found += [] if poll.poll(0) else [name]
                finally:
                    os.close(pipe)
    return found


# ---- for the answer -----------------------------------------------------------------------------------------------


def row(one: SeenProcess, src: Path, threads: int, frames: int) -> dict[str, Any]:
    """threads, frames: so many of each at most."""
    return {
        **{key: getattr(one, key) for key in ("pid", "state", "same", "idle", "moved_bytes")},
        "name": one.name[:SHORT],
        "wchan": one.wchan[:SHORT],
        "threads": one.threads and [_thread(thread, src, frames) for thread in one.threads[:threads]],
    }


def _thread(thread: Thread, src: Path, most: int) -> dict[str, Any]:
    frames = [[file[:NAME], line, name[:NAME], _line(src, file, line)] for file, line, name in thread.frames[:most]]
    return {"main": thread.is_main, "frames": frames}


def _line(src: Path, file: str, line: int) -> str:
    """The text of a line of the job's own code; "" of any other file."""
    path, top = os.path.realpath(src / file), os.path.realpath(src)
    lines = _lines(path) if path.startswith(f"{top}/") else ()
    return lines[line - 1].decode(errors="replace").strip()[:TEXT] if 0 < line <= len(lines) else ""


@functools.cache
def _lines(path: str) -> tuple[bytes, ...]:
    try:
        source = os.open(path, READ)
        with open(source, "rb") as file:
            is_plain = stat.S_ISREG(os.fstat(source).st_mode)
            return tuple(file.read(SOURCE_BYTES).splitlines()) if is_plain else ()
    except OSError:
        return ()
