"""Reads what `scontrol show nodes -o` and `scontrol show job -o` print, and names Slurm's states in our words. Pure.

Both print an object a line, as `Key=Value` words. A value may hold blanks and `=` (`OS=Linux 6.1 #1 SMP`,
`CfgTRES=cpu=1,mem=4G`), so the next key ends it. The first of two equal keys counts: texts that people choose come
later in the line than the state.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from orchestrator.units import one_line

_KEY = re.compile(r"(?:^|(?<=\s))([A-Z][A-Za-z0-9_/:]*)=")
_NONE = ("", "(null)", "None", "N/A", "Unknown")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class Broken(ValueError):
    """A line without the words that are needed."""


def fields(line: str) -> dict[str, str]:
    found = list(_KEY.finditer(line))
    ends = [*(match.start() for match in found[1:]), len(line)]
    read: dict[str, str] = {}
    for match, end in zip(found, ends, strict=False):
        read.setdefault(match[1], line[match.end() : end].strip())
    return read


# ---- hosts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GpuCount:
    """kind: Slurm's type of GPU; None if the cluster declares no types."""

    kind: str | None
    count: int


_NO_NEW_JOBS = frozenset({"drain", "drained", "draining", "fail", "failing", "invalid_reg", "not_responding"})
"""Flags of a state, next to what the host does now."""


@dataclass(frozen=True)
class DeclaredHost:
    """A host as Slurm declares it. state: without flags, in lower case."""

    name: str
    gpus: tuple[GpuCount, ...]
    partitions: tuple[str, ...]
    features: tuple[str, ...]
    state: str
    reason: str

    @property
    def is_up(self) -> bool:
        base, *flags = self.state.split("+")
        return base in ("idle", "mixed", "allocated", "completing", "planned") and not _NO_NEW_JOBS & {*flags}


def read_hosts(text: str) -> tuple[list[DeclaredHost], list[str]]:
    """The hosts, and the lines that describe none, with the reason."""
    hosts, broken = list[DeclaredHost](), list[str]()
    for line in filter(str.strip, text.splitlines()):
        try:
            hosts.append(_host(fields(line)))
        except Broken as error:
            broken.append(f"{one_line(line, 60)!r}: {error}")
    return hosts, broken


def _host(read: dict[str, str]) -> DeclaredHost:
    name = read.get("NodeName", "")
    if not NAME.fullmatch(name):
        raise Broken(f"NodeName is {one_line(name, 40)!r}")
    if not read.get("State"):
        raise Broken("it has no State")
    flags = read["State"].lower().split("+")
    return DeclaredHost(
        name,
        gpu_counts(read.get("Gres", "")),
        _listed(read.get("Partitions", "")),
        _listed(read.get("ActiveFeatures", read.get("Features", ""))),
        "+".join(flag.rstrip("*~#$@^!%-") for flag in flags),
        one_line(_or_empty(read.get("Reason", "")), 200),
    )


def gpu_counts(text: str) -> tuple[GpuCount, ...]:
    """`gpu:a16:2(S:0-1),gpu:v100:1,shard:8` and `gpu:4`; () without GPUs. Raises Broken."""
    found = []
    for part in filter(None, re.sub(r"\([^()]*\)", "", _or_empty(text)).split(",")):
        name, *rest = part.split(":")
        if name != "gpu":
            continue
        count = rest.pop() if rest and rest[-1].isdecimal() else "1"
        if len(rest) > 1 or len(count) > 4:
            raise Broken(f"Gres has {one_line(part, 40)!r}")
        found.append(GpuCount(rest[0] if rest else None, int(count)))
    return tuple(found)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(one_line(part, 64) for part in _or_empty(text).split(",") if part)


def _or_empty(text: str) -> str:
    return "" if text in _NONE else text


# ---- jobs -------------------------------------------------------------------------------------------------------

Phase = Literal["queued", "held", "runs", "ending", "cancelled", "time", "hosts", "memory", "failed", "done", "unknown"]
"""hosts: it ended because of its hosts, or for another job, so trying again helps."""

PHASES: dict[str, Phase] = {
    "PENDING": "queued",
    "CONFIGURING": "queued",
    "REQUEUED": "queued",
    "REQUEUE_FED": "queued",
    "RESV_DEL_HOLD": "held",
    "REQUEUE_HOLD": "held",
    "SPECIAL_EXIT": "held",
    "SUSPENDED": "runs",
    "STOPPED": "runs",
    "RUNNING": "runs",
    "RESIZING": "runs",
    "SIGNALING": "runs",
    "STAGE_OUT": "ending",
    "COMPLETING": "ending",
    "CANCELLED": "cancelled",
    "TIMEOUT": "time",
    "DEADLINE": "time",
    "PREEMPTED": "hosts",
    "NODE_FAIL": "hosts",
    "BOOT_FAIL": "hosts",
    "LAUNCH_FAILED": "hosts",
    "RECONFIG_FAIL": "hosts",
    "REVOKED": "hosts",
    "OUT_OF_MEMORY": "memory",
    "FAILED": "failed",
    "COMPLETED": "done",
}
OVER: frozenset[Phase] = frozenset({"cancelled", "time", "hosts", "memory", "failed", "done", "unknown"})
"""The allocation is gone. unknown: Slurm has forgotten the job."""

NEVER = {
    "BadConstraints": "no host has what it asks for",
    "PartitionNodeLimit": "the partition is not that large",
    "PartitionTimeLimit": "the partition does not allow that time",
    "Nodes_required_for_job_are_DOWN": "hosts that it needs are down, drained or reserved",
    "ReqNodeNotAvail": "a host that it needs is down or reserved",
    "QOSMaxWallDurationPerJob": "the QOS does not allow that time",
    "AssocMaxWallDurationPerJob": "the account does not allow that time",
    "AssocMaxJobsLimit": "the account's limit of jobs is reached",
    "QOSMaxGRESPerUser": "your QOS allows fewer GPUs than it and your other jobs use: it waits for them, or for ever",
    "InvalidAccount": "the account may not run jobs there",
    "InvalidQOS": "the account may not use that QOS",
    "JobHeldUser": "you have held it: `scontrol release` lets it go",
    "JobHeldAdmin": "the administrator has held it",
}
"""Reasons that waiting may not change, by the beginning of Slurm's word."""


@dataclass(frozen=True)
class SlurmJob:
    """A job as Slurm reports it; the components of a heterogeneous job are one.

    state, reason: Slurm's own words. start: expected while it waits, ISO 8601 without a zone; "" if unknown.
    """

    id: str
    state: str
    phase: Phase
    reason: str = ""
    start: str = ""
    exit_code: int | None = None
    left_s: float = math.inf
    """The rest of its time limit, now or at its end."""

    @property
    def is_over(self) -> bool:
        return self.phase in OVER

    @property
    def words(self) -> str:
        """`PENDING (Resources), expected start 2026-11-28T21:00:00`."""
        why = f" ({self.reason})" if self.reason and self.phase in ("queued", "held") else ""
        never = next((words for word, words in NEVER.items() if self.reason.startswith(word)), "") if why else ""
        due = f", expected start {self.start}" if self.start and self.phase == "queued" else ""
        return f"{self.state}{why}{f': {never}' if never else ''}{due}"


def read_job(text: str, job: str) -> SlurmJob:
    """text: of `scontrol show job -o JOB`; a line a component. Raises Broken."""
    lines = [fields(line) for line in text.splitlines() if line.strip()]
    own = [line for line in lines if job in (line.get("JobId"), line.get("HetJobId"))]
    if not own:
        raise Broken(f"no line is about job {one_line(job, 40)}")
    for line in own:
        if not line.get("JobState"):
            raise Broken("it has no JobState")
    # A component that waits holds back the job; after that the leader, which has the batch script, speaks for all.
    waits = [line for line in own if phase_of(line["JobState"]) in ("queued", "held")]
    chosen = next(iter(waits), own[0])
    state = re.split(r"[ +]", chosen["JobState"])[0]
    start = _or_empty(chosen.get("StartTime", ""))
    return SlurmJob(
        job,
        one_line(state, 30),
        phase_of(state),
        one_line(_or_empty(chosen.get("Reason", "")), 100),
        start if re.fullmatch(r"[0-9T:-]{19}", start) else "",
        _exit_code(chosen.get("ExitCode", "")),
        _seconds(own[0].get("TimeLimit", "")) - min(_seconds(own[0].get("RunTime", "")), 1e9),
    )


ACCOUNT = "State,ExitCode,TimelimitRaw,ElapsedRaw"


def read_account(text: str, job: str) -> SlurmJob:
    """text: of `sacct -nXP -o ACCOUNT -j JOB`, for a job that scontrol has forgotten; "" if there are no accounts."""
    line = text.partition("\n")[0]
    state, _, rest = line.partition("|")
    times = re.search(r"\|(\d{1,9})\|(\d{1,9})$", line)
    left_s = int(times[1]) * 60.0 - int(times[2]) if times else math.inf
    code = _exit_code(rest.partition("|")[0])
    return SlurmJob(job, one_line(state, 40) or "unknown", phase_of(state), exit_code=code, left_s=left_s)


def _exit_code(text: str) -> int | None:
    """`7:0`, or `0:9` for a signal."""
    code = re.fullmatch(r"(\d{1,3}):(\d{1,3})", text)
    return (int(code[1]) or (128 + int(code[2]) if int(code[2]) else 0)) if code else None


def _seconds(text: str) -> float:
    """`1-12:00:00`; infinite for UNLIMITED and the like."""
    match = re.fullmatch(r"(?:(\d{1,5})-)?(\d{1,3}):(\d\d):(\d\d)", text)
    if not match:
        return math.inf
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def phase_of(state: str) -> Phase:
    """state: like `CANCELLED by 1001` of sacct, too."""
    return PHASES.get(re.split(r"[ +]", state)[0].upper(), "unknown")
