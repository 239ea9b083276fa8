"""When no rank here has written for a minute: what each does (waits, busy, disk, stopped).

    still = Stillness(job)
    still.look(ranks, time.monotonic())     # {"0": "waits", "1": "busy"}; {} while a rank prints or writes metrics

Activity is judged by the main thread's state and the CPU time of all the rank's processes (proc(5), stat):

    waits       sleeps with almost no CPU use: for other ranks, a download, a lock, a timer
    busy        uses the CPU; NCCL does too while it waits on a GPU
    disk        waits in the kernel, mostly for a disk or its server
    stopped     by a signal (SIGSTOP), or held by a debugger
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .layout import JobFolder, size_of
from .processes import Use, uses

LOOK_S = 5.0
QUIET_S = 60.0
IDLE = 0.03
"""A rank is idle below this fraction of one core. Waiting in Gloo used 0.2 to 0.3 % (torch 2.15); timers add little."""
RUNNABLE = 2  # a rank found ready to run more often than this is busy, even if a crowded host gives it no CPU
FILES = ("stdout.log", "stderr.log", "metrics.jsonl")  # a rank's output: it is still while none of these grows


class Sample(NamedTuple):
    at_s: float
    use: Use


class Stillness:
    def __init__(self, job: JobFolder) -> None:
        self._job = job
        self._printed: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._samples: dict[str, deque[Sample]] = {}

    def look(self, ranks: Mapping[str, Mapping[str, Any]], now_s: float) -> dict[str, str]:
        """ranks: the supervisor's records; ended ranks are left out. now_s: on a monotonic clock."""
        running = {rank: record for rank, record in ranks.items() if record.get("pid") and "ended" not in record}
        found = uses({record["pid"]: record.get("parent") or record["wrapper"] for record in running.values()})
        for rank, record in running.items():
            printed = (record["pid"], self._sizes(rank))
            if self._printed.get(rank) != printed or record["pid"] not in found:
                self._printed[rank] = printed
                self._samples[rank] = deque()
            if use := found.get(record["pid"]):
                self._samples[rank].append(Sample(now_s, use))
        return self._activity(list(running), now_s)

    def _activity(self, running: list[str], now_s: float) -> dict[str, str]:
        done = {}
        for rank in running:
            samples = self._samples[rank]
            while len(samples) > 1 and samples[1].at_s <= now_s - QUIET_S:
                samples.popleft()
            if not samples or samples[0].at_s > now_s - QUIET_S:
                return {}
            done[rank] = what_it_does(samples)
        return done

    def has_files(self, ranks: Iterable[str]) -> bool:
        return all(max(self._sizes(rank)) >= 0 for rank in ranks)

    def _sizes(self, rank: str) -> tuple[int, ...]:
        return tuple(size_of(self._job.rank(int(rank)) / name) for name in FILES)


def what_it_does(samples: deque[Sample]) -> str:
    first, last = samples[0], samples[-1]
    if last.use.state in "Tt":
        return "stopped"
    if [sample.use.state for sample in samples].count("D") > len(samples) / 2:
        return "disk"
    used_s = (last.use.cpu_ticks - first.use.cpu_ticks) / os.sysconf("SC_CLK_TCK")
    if used_s >= IDLE * (last.at_s - first.at_s):
        return "busy"
    return "busy" if [sample.use.state for sample in samples].count("R") > RUNNABLE else "waits"
