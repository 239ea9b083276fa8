"""Snapshots of each rank of a job on this host, twice a moment apart: threads, processes, pipes, connections.

Request: {"workdir", "job"}. The answer:

    {"state": "running", "alive": true, "src": FOLDER, "frozen": [],
     "gpu_lines": [the first and the last lines of gpu.jsonl],
     "ranks": [{"rank": 0, "ended": false, "exit_code": null, "signal": null,
                "does": "waits", "grew": false, "quiet_s": 75.2, "step": 120, "step_s": 0.4,
                "wrapper": "S", "wrapper_pid": 4710, "full_pipes": [], "net_bytes": 0,
                "processes": [...],         the script itself, then its descendants (`why.row`)
                "more": 0,                  number of descendants left out
                "connections": [{"to": ADDRESS, "port": 29500, "unsent": 0, "unread": 0, "retransmits": 0}, ...]}, ...]}

`does` is from `stillness`. Nothing is changed, and the rights of the job's user are enough.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import stat
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from .agent import agent_state, stopped
from .answer import Refused, reply
from .layout import JobFolder, WorkFolder
from .meeting import ESTABLISHED, connections, sockets_of
from .processes import descendants, uses
from .safe_open import READ
from .stacks import RankProgress, Thread, asking, carried, disk_bytes, progress_of
from .stillness import Sample, what_it_does

LOOKS, LOOK_S = 7, 0.25  # CPU use is measured over this many looks, this far apart
AT_ONCE = 8
MOST_CONNECTIONS = 16
ANSWER_BYTES = 1 << 19
DEPTHS = ((12, 40), (4, 25), (1, 12), (1, 3), (0, 0))
"""(threads per process, frames per thread): the first pair with which the answer fits."""
GPU_HEAD, GPU_TAIL = 1 << 12, 1 << 13


def main(request: dict[str, Any]) -> None:
    reply({"action": "why", **request}, why)


def why(request: dict[str, Any]) -> dict[str, Any]:
    job = WorkFolder(request["workdir"]).job(request["job"])
    if not job.root.is_dir():
        raise Refused(f"{job.id} has no folder there", "it was removed: `orch jobs`")
    agent = agent_state(job)
    ranks = {int(number): record for number, record in agent.get("ranks", {}).items()}
    found = _looks(job, {number: record for number, record in ranks.items() if _runs(record)})
    answer = {
        "state": agent.get("state"),
        "alive": agent.get("alive"),
        "src": str(job.src),
        "frozen": sorted(stopped(agent)),
        "gpu_lines": _gpu_lines(job.gpu_log),
    }
    for threads, frames in DEPTHS:
        listed = [_rank(job, number, record, found.get(number), threads, frames) for number, record in ranks.items()]
        answer["ranks"] = listed
        if len(json.dumps(answer)) <= ANSWER_BYTES:
            break
    return answer


def _runs(record: Mapping[str, Any]) -> bool:
    return bool(record.get("pid") and "ended" not in record)


class RankLooks:
    def __init__(self, job: JobFolder, number: int, record: Mapping[str, Any]) -> None:
        self._job, self._number, self._record = job, number, record
        self._before: dict[int, SeenProcess] = {}
        self._carried: dict[int, int] = {}
        self._progress: RankProgress | None = None
        self.samples: deque[Sample] = deque()
        self.row: dict[str, Any] = {}
        self.seen: list[SeenProcess] = []
        self.more = 0

    def first(self) -> None:
        self._progress, self._carried = progress_of(self._job, self._number), carried()
        self._before = {one.pid: one for one in see(self._job, self._number, self._record["pid"])[0]}

    def second(self) -> None:
        pid, after = self._record["pid"], progress_of(self._job, self._number)
        seen, self.more = see(self._job, self._number, pid)
        self.seen = [one.compared(self._before.get(one.pid)) for one in seen]
        sockets = sockets_of([one.pid for one in self.seen])
        self.row = {
            "does": what_it_does(self.samples) if len(self.samples) > 1 else "waits",
            "grew": after.sizes != (self._progress and self._progress.sizes),
            "quiet_s": after.quiet_s,
            "step": after.step,
            "step_s": after.step_s,
            "wrapper": state_of(self._record.get("wrapper") or 0),
            "wrapper_pid": self._record.get("wrapper") or 0,
            "full_pipes": full_pipes(pid),
            "net_bytes": sum(now - self._carried.get(inode, 0) for inode, now in carried().items() if inode in sockets),
            "connections": _connections(sockets),
        }


def _looks(job: JobFolder, ranks: Mapping[int, Mapping[str, Any]]) -> dict[int, RankLooks]:
    found = {number: RankLooks(job, number, record) for number, record in ranks.items()}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(RankLooks.first, found.values()))
        for look in range(LOOKS):
            time.sleep(LOOK_S if look else 0)
            used = uses({record["pid"]: record.get("parent") or record["wrapper"] for record in ranks.values()})
            for number, record in ranks.items():
                if use := used.get(record["pid"]):
                    found[number].samples.append(Sample(time.monotonic(), use))
        list(pool.map(RankLooks.second, found.values()))
    return found


def _rank(
    job: JobFolder, number: int, record: Mapping[str, Any], found: RankLooks | None, threads: int, frames: int
) -> dict[str, Any]:
    known = {"rank": number, "ended": "ended" in record, **{key: record.get(key) for key in ("exit_code", "signal")}}
    if found is None:
        return known
    processes = [row(one, job.src, threads, frames) for one in found.seen]
    return {**known, **found.row, "processes": processes, "more": found.more}


def _connections(inodes: set[int]) -> list[dict[str, Any]]:
    rows = [row for row in connections() if row.inode in inodes and row.state == ESTABLISHED]
    waiting = sorted((row for row in rows if row.unsent or row.unread), key=lambda row: (row.retransmits, row.unsent))
    names = ("unsent", "unread", "retransmits")
    return [
        {"to": row.theirs[0], "port": row.theirs[1], **{name: getattr(row, name) for name in names}}
        for row in reversed(waiting[-MOST_CONNECTIONS:])
    ]


def _gpu_lines(log: Path) -> list[str]:
    # Whole lines only. A GPU's limits are in its first line.
    try:
        with open(log, "rb") as file:
            head = file.read(GPU_HEAD)
            file.seek(max(len(head), log.stat().st_size - GPU_TAIL))
            tail = file.read(GPU_TAIL)
    except OSError:
        return []
    parts = [head.rpartition(b"\n")[0], tail.rpartition(b"\n")[0]]
    return [line for part in parts for line in part.decode(errors="replace").split("\n") if line]


#     seen, more = see(job, 0, 4711)                      the script first; more: number left out
#     row(seen[0], job.src, threads=12, frames=40)        as in the answer
#
# A program that is not Python has no threads here, only its state and the kernel function it waits in (proc(5):
# `wchan`).

MOST_PROCESSES = 24  # of one rank
STOPPED = ("T", "t")
IDLE_TICKS = 3  # between two looks; writing its stacks takes part of a tick
PIPES = {1: "stdout", 2: "stderr"}
SOURCE_BYTES = 1 << 20
TEXT = 120
SHORT, NAME = 64, 500  # longest path or function name, as in `faulthandler`


class SeenProcess(NamedTuple):
    """One process at one moment; after `compared` also its changes since then."""

    pid: int
    name: str
    state: str
    wchan: str
    ticks: int  # CPU time so far
    moved_bytes: int
    """Read and written so far, or since the earlier look after `compared`, stacks included; 0 if hidden."""
    threads: list[Thread] | None  # None if it was not asked or did not answer
    same: bool = False  # its main thread has not moved
    idle: bool = False  # it has used almost no CPU since

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
    """The script, then its descendants, the oldest first; and the number left out."""
    pids = [pid, *(one.pid for one in sorted(descendants(pid), key=lambda one: one.start_time))]
    with asking(job.stacks(rank)) as ask:
        found = [_seen(one, None if state_of(one) in STOPPED else ask(one)) for one in pids[:MOST_PROCESSES]]
    return [one for one in found if one], max(0, len(pids) - MOST_PROCESSES)


def _seen(pid: int, threads: list[Thread] | None) -> SeenProcess | None:
    name, _, rest = _text(pid, "stat").rpartition(") ")
    fields = rest.split()
    if len(fields) < 13 or fields[0] in "ZX":
        return None
    ticks = int(fields[11]) + int(fields[12])
    name = name.partition("(")[2]
    return SeenProcess(pid, name, fields[0], _wchan(pid), ticks, _moved_bytes(pid, fields[0]), threads or None)


def state_of(pid: int) -> str:
    return _text(pid, "stat").rpartition(") ")[2][:1]


def _wchan(pid: int) -> str:
    found = _text(pid, "wchan").strip()
    return "" if found == "0" else found


def _moved_bytes(pid: int, state: str) -> int:
    # By read(2), write(2) and the like, and from and to disks; if it waits for a disk, also that disk's bytes.
    lines = [line.split() for line in _text(pid, "io").splitlines()]
    names = ("rchar:", "wchar:", "read_bytes:", "write_bytes:")
    return sum(int(line[1]) for line in lines if line[0] in names) + (disk_bytes(pid) if state == "D" else 0)


def _text(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def full_pipes(pid: int) -> list[str]:
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
