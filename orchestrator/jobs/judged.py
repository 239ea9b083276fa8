"""Whose the cause of a failed job was: its hosts', its own, or a person's. Pure.

    judge(record)       Judged("hosts", "v100: no word for 20 s: host down, frozen or cut off", without="v100")

What the hosts caused may go well on other hosts, or a second time. A script's own failure comes again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from orchestrator.jobs.record import FirstFailure, JobRecord
from orchestrator.text import one_line

Whose = Literal["hosts", "script", "person"]

_OF_HOSTS = {"lost", "network", "supervisor", "port"}
"""Kinds of failures that no script brings about."""
_OF_PERSONS = {"folder", "time"}
"""Somebody removed the job's folder, or had set it a limit."""
_LOSES_HOST = {"lost", "network", "supervisor"}
"""Kinds after which that host is not to be counted on."""
_FROM_OUTSIDE = {"SIGKILL", "SIGTERM", "SIGHUP", "SIGINT", "SIGPWR"}
"""What a process does not do to itself: the kernel, out of memory, a host that shuts down, somebody on it."""
_KILLED = 128 + 9
"""What a shell says of a child that SIGKILL ended."""
_GPU_GONE = re.compile(
    r"fallen off the bus|GPU is lost|ECC error|ECC_UNCORRECTABLE|busy or unavailable|no CUDA-capable device|"
    r"CUDA_ERROR_(NO_DEVICE|DEVICE_UNAVAILABLE)|device handle for GPU",
    re.IGNORECASE,
)
_WORKER_KILLED = re.compile(r"worker \(pid \S+\) is killed by signal: Killed")
_MISSED = re.compile(r"watchdog|collective operation|wait timeout|timed out waiting", re.IGNORECASE)
"""A rank waited in vain for another one, which mostly was busy with something else: the script's doing."""
_NOT_STARTED = re.compile(r"(rank \d+|torchrun|the `prepare` command) did not start: ")


@dataclass(frozen=True)
class Judged:
    whose: Whose
    why: str
    """One line."""
    without: str | None = None
    """The host that an attempt does without, unless it may rejoin."""


def judge(record: JobRecord) -> Judged | None:
    """None where it did not fail, or a person ended it."""
    if record.state not in ("failed", "lost"):
        return None
    failure = record.first_failure
    if failure is None:
        return Judged("script", "its first cause is not known")
    why = f"{failure.node}: {one_line(failure.reason, 200)}"
    if record.state == "lost":  # its hosts, all of them, know of no end: they went down, or somebody removed its files
        return Judged("person" if "its files are gone" in failure.reason else "hosts", why)
    if failure.kind in _OF_PERSONS:
        return Judged("person", why)
    if failure.kind in _OF_HOSTS:
        return Judged("hosts", why, failure.node if failure.kind in _LOSES_HOST else None)
    if _GPU_GONE.search(f"{failure.reason} {failure.log_line or ''}"):
        return Judged("hosts", why, failure.node)
    return Judged("hosts" if _is_from_outside(failure) else "script", why)


def _is_from_outside(failure: FirstFailure) -> bool:
    """Of a program that ran on a host, or should have: whether it ended by what was done to it."""
    line = failure.log_line or ""
    if failure.secondary:
        return not _MISSED.search(line)
    if failure.signal:
        return failure.signal in _FROM_OUTSIDE
    killed = failure.exit_code == _KILLED or _WORKER_KILLED.search(line)
    return bool(killed or _NOT_STARTED.match(failure.reason))
