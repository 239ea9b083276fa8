"""What each rank of a job is at on this host, seen twice a moment apart: threads, processes, pipes, connections.

Request: {"workdir", "job"}. The answer:

    {"state": "running", "alive": true, "src": FOLDER, "frozen": [],
     "gpu_lines": [the first and the last lines of gpu.jsonl],
     "ranks": [{"rank": 0, "ended": false, "exit_code": null, "signal": null,
                "does": "waits", "grew": false, "quiet_s": 75.2, "step": 120, "step_s": 0.4,
                "wrapper": "S", "wrapper_pid": 4710, "full_pipes": [], "net_bytes": 0,
                "processes": [...],         the script itself, then those that it started (`seen.row`)
                "more": 0,                  and so many that are left out
                "connections": [{"to": ADDRESS, "port": 29500, "unsent": 0, "unread": 0, "retransmits": 0}, ...]}, ...]}

`does` is as of `stillness`. It changes nothing and needs no rights but those of the job's own user.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .agent import agent_state, stopped
from .answer import Refused, reply
from .carried import carried
from .layout import JobFolder, WorkFolder
from .meeting import ESTABLISHED, connections, sockets_of
from .processes import uses
from .progress import RankProgress, progress_of
from .seen import SeenProcess, full_pipes, row, see, state_of
from .stillness import Sample, what_it_does

LOOKS, LOOK_S = 7, 0.25
"""CPU use is measured over so many looks, so far apart."""
AT_ONCE = 8
MOST_CONNECTIONS = 16
ANSWER_BYTES = 1 << 19
DEPTHS = ((12, 40), (4, 25), (1, 12), (1, 3), (0, 0))
"""Threads of a process, and frames of a thread: the first that makes the answer fit."""
GPU_HEAD, GPU_TAIL = 1 << 12, 1 << 13


def main(request: dict[str, Any]) -> None:
    reply({"action": "why", **request}, why)


def why(request: dict[str, Any]) -> dict[str, Any]:
    job = WorkFolder(request["workdir"]).job(request["job"])
    if not job.root.is_dir():
        raise Refused(f"{job.id} has no folder there", "it was removed: `orch jobs`")
    agent = agent_state(job)
    ranks = {int(number): record for number, record in agent.get("ranks", {}).items()}
    found = _looked_at(job, {number: record for number, record in ranks.items() if _runs(record)})
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


class Found:
    """What two looks saw of one rank."""

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


def _looked_at(job: JobFolder, ranks: Mapping[int, Mapping[str, Any]]) -> dict[int, Found]:
    found = {number: Found(job, number, record) for number, record in ranks.items()}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(Found.first, found.values()))
        for look in range(LOOKS):
            time.sleep(LOOK_S if look else 0)
            used = uses({record["pid"]: record["wrapper"] for record in ranks.values()})
            for number, record in ranks.items():
                if use := used.get(record["pid"]):
                    found[number].samples.append(Sample(time.monotonic(), use))
        list(pool.map(Found.second, found.values()))
    return found


def _rank(
    job: JobFolder, number: int, record: Mapping[str, Any], found: Found | None, threads: int, frames: int
) -> dict[str, Any]:
    known = {"rank": number, "ended": "ended" in record, **{key: record.get(key) for key in ("exit_code", "signal")}}
    if found is None:
        return known
    processes = [row(one, job.src, threads, frames) for one in found.seen]
    return {**known, **found.row, "processes": processes, "more": found.more}


def _connections(inodes: set[int]) -> list[dict[str, Any]]:
    """Those on which something waits, in either direction; the most first."""
    rows = [row for row in connections() if row.inode in inodes and row.state == ESTABLISHED]
    waiting = sorted((row for row in rows if row.unsent or row.unread), key=lambda row: (row.retransmits, row.unsent))
    names = ("unsent", "unread", "retransmits")
    return [
        {"to": row.theirs[0], "port": row.theirs[1], **{name: getattr(row, name) for name in names}}
        for row in reversed(waiting[-MOST_CONNECTIONS:])
    ]


def _gpu_lines(log: Path) -> list[str]:
    """Whole lines alone. A GPU's limits stand in its first one."""
    try:
        with open(log, "rb") as file:
            head = file.read(GPU_HEAD)
            file.seek(max(len(head), log.stat().st_size - GPU_TAIL))
            tail = file.read(GPU_TAIL)
    except OSError:
        return []
    parts = [head.rpartition(b"\n")[0], tail.rpartition(b"\n")[0]]
    return [line for part in parts for line in part.decode(errors="replace").split("\n") if line]
