"""The view of one job in `orch top`: the rows of `live`, plus GPU readings and silent hosts. Pure."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import HostError
from orchestrator.jobs.frames import Agent, FilePiece, Frame
from orchestrator.jobs.job_store import JobRecord
from orchestrator.jobs.live import CoursePoint, HostRow, LiveView, RunProgress
from orchestrator.jobs.metric_lines import WholeLines, count, number, parse_event
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.units import format_percent

# GPU readings from the lines of gpu.jsonl, which `remote/gpus.py` writes. Pure; impossible values are dropped.

# Largest plausible values.
MOST = {"utilisation": 100, "memory_bytes": 2**50, "sm_mhz": 1e5, "watts": 1e5, "celsius": 1e3, "slowed_by": 2**64}
MOST_LIMITS = {"max_sm_mhz": 1e5, "limit_watts": 1e5}

# Bits of NVML (nvml.h, nvmlClocksEventReasons). The first match is the reason: a thermal slowdown sets the bit of a
# hardware slowdown, too.
POWER_CAP, SYNC_BOOST = 0x04, 0x10
REASONS = {
    0x40: "heat",  # HwThermalSlowdown
    0x20: "heat",  # SwThermalSlowdown
    0x80: "the power brake of its host",  # HwPowerBrakeSlowdown
    POWER_CAP: "its power cap",  # SwPowerCap
    SYNC_BOOST: "a slower GPU that its clocks follow (sync boost)",  # SyncBoost
    0x08: "its hardware's own protection",  # HwSlowdown
}


@dataclass(frozen=True)
class Reading:
    """None: not reported by the driver."""

    rank: int
    index: int | None
    """In nvidia-smi's order."""
    wall: float | None
    utilisation: float | None
    """0..100."""
    memory_bytes: float | None
    sm_mhz: float | None
    watts: float | None
    celsius: float | None
    slowed_by: int | None
    """nvmlClocksEventReasons."""
    max_sm_mhz: float | None
    limit_watts: float | None


class GpuLines:
    """A limit holds until the next report of it."""

    def __init__(self) -> None:
        self._limits: dict[tuple[int, int | None], dict[str, float | None]] = {}

    def reading(self, event: Mapping[str, Any] | None) -> Reading | None:
        if event is None or event.get("event") != "gpu":
            return None
        rank, index = count(event, "rank") or 0, count(event, "index")
        if event.keys() & MOST_LIMITS.keys() or (rank, index) not in self._limits:
            self._limits[rank, index] = {name: _within(event, name, most) for name, most in MOST_LIMITS.items()}
        values = {name: _within(event, name, most) for name, most in MOST.items()}
        slowed_by = count(event, "slowed_by") if values.pop("slowed_by") is not None else None
        wall, limits = number(event, "wall"), self._limits[rank, index]
        return Reading(rank=rank, index=index, wall=wall, slowed_by=slowed_by, **values, **limits)


def slowed_by_words(slowed_by: int) -> str:
    """ "" if it is not slowed down."""
    return next((words for bit, words in REASONS.items() if slowed_by & bit), "")


def _within(event: Mapping[str, Any], name: str, most: float) -> float | None:
    value = number(event, name)
    return value if value is not None and 0 <= value <= most else None


FRESH_S = 10.0
"""Hosts send readings every two seconds."""
KEPT = 600
"""Per host, one per call of `now`."""
DOES = {
    "load": "loads data",
    "compute": "computes",
    "sync": "exchanges over the network",
    "optimiser": "updates weights",
}
WAITS = 0.1
"""Waiting share worth reporting."""


@dataclass(frozen=True)
class HostNow:
    """row: None before the first step. gpus: newest, by index. speeds: samples/s at each call of `now`. silent: why the
    host sends nothing.
    """

    node: str
    row: HostRow | None
    gpus: tuple[Reading, ...]
    speeds: tuple[float | None, ...]
    silent: str = ""


@dataclass(frozen=True)
class JobNow:
    """held_up_by: the host for which others wait, and the largest waiting share (0..1)."""

    record: JobRecord
    hosts: tuple[HostNow, ...]
    speeds: tuple[float | None, ...]
    progress: RunProgress
    held_up_by: tuple[str, float] | None
    course: tuple[CoursePoint, ...] = ()

    @property
    def slow_words(self) -> str:
        """The slow host and the reason, as far as live figures show it; "" if unknown."""
        rows = {host.node: host.row for host in self.hosts if host.row and host.row.parts_ms}
        if not rows or len(rows) < len(self.hosts):
            return ""
        if self.held_up_by:
            slow, share = self.held_up_by
            others = [name for name in rows if name != slow]
            waits = f"{others[0]} waits" if len(others) == 1 else "The other hosts wait"
            return f"{waits} for {slow}, up to {format_percent(share)} of each step: {slow} {self._most(rows[slow])}."
        least = min(rows, key=lambda name: rows[name].wait_share or 0.0)
        begin = "No host holds the others up. " if len(rows) > 1 else ""
        return f"{begin}{least} {self._most(rows[least])}."

    def _most(self, row: HostRow | None) -> str:
        parts = dict(row.parts_ms or {}) if row else {}
        parts.pop("wait", None)
        part = max(parts, key=lambda name: parts[name])
        share = parts[part] / max(sum(parts.values()), 1e-9)
        return f"{DOES[part]} for {format_percent(share)} of its own time"

    @property
    def step(self) -> int | None:
        """Completed by all hosts."""
        return min((row.step for row in self.progress.rows), default=None)

    @property
    def steps(self) -> int | None:
        return max((row.steps for row in self.progress.rows if row.steps), default=None)

    @property
    def samples_per_s(self) -> float | None:
        return total_speed(self.progress)

    @property
    def loss(self) -> float | None:
        """Over the samples of all hosts, weighted by speed."""
        if self.progress.together:
            return self.progress.together.loss
        known = [(row.loss, row.samples_per_s) for row in self.progress.rows if row.loss is not None]
        if len(known) < len(self.progress.rows) or not all(speed for _, speed in known):
            return None
        total = sum(speed or 0 for _, speed in known)
        return sum((loss or 0) * (speed or 0) for loss, speed in known) / total if total else None


class Gauge:
    FILES = ("metrics.jsonl", "gpu.jsonl")

    def __init__(self, plan: LaunchPlan, record: JobRecord) -> None:
        self.record, self._lock = record, threading.Lock()
        self._view = LiveView(plan)
        self._names = [node.name for node in plan.nodes]
        self._gpus = {name: _Gpus() for name in self._names}
        self._silent: dict[str, str] = {}
        self._left = set(self._names)
        self._speeds = {name: deque[float | None](maxlen=KEPT) for name in (*self._names, "")}

    @property
    def has_received_all(self) -> bool:
        """Each host has sent its record or an error; its earlier metrics come before that."""
        return not self._left

    def take(self, name: str, item: Frame | HostError, now_s: float) -> None:
        with self._lock:
            if name not in self._gpus:
                return
            if isinstance(item, (Agent, HostError)):
                self._left.discard(name)
            if isinstance(item, HostError):
                self._silent[name] = str(item)
            elif isinstance(item, (FilePiece, Agent)):
                self._silent.pop(name, None)
            if isinstance(item, FilePiece) and item.file == "gpu.jsonl":
                self._gpus[name].take(item, now_s)
            elif isinstance(item, FilePiece):
                self._view.take(name, item)

    def know(self, record: JobRecord) -> None:
        with self._lock:
            self.record = record

    def now(self, elapsed_s: float, now_s: float) -> JobNow:
        """Each call appends to the speeds."""
        with self._lock:
            progress = self._view.progress(elapsed_s)
            rows = {row.node: row for row in progress.rows}
            for name in self._names:
                self._speeds[name].append(rows[name].samples_per_s if name in rows else None)
            self._speeds[""].append(total_speed(progress))
            hosts = tuple(self._host(name, rows.get(name), now_s) for name in self._names)
            speeds, course = tuple(self._speeds[""]), self._view.course.points()
            return JobNow(self.record, hosts, speeds, progress, held_up_by(progress.rows), course)

    def _host(self, name: str, row: HostRow | None, now_s: float) -> HostNow:
        gpus, speeds = self._gpus[name].fresh(now_s), tuple(self._speeds[name])
        return HostNow(name, row, gpus, speeds, self._silent.get(name, ""))


def total_speed(progress: RunProgress) -> float | None:
    """None until all hosts with a step report a speed."""
    if progress.together:
        return progress.together.samples_per_s
    speeds = [row.samples_per_s for row in progress.rows]
    return sum(speed or 0 for speed in speeds) if speeds and None not in speeds else None


def held_up_by(rows: Sequence[HostRow]) -> tuple[str, float] | None:
    """The host that waits least, if another waits for a relevant share of its time, and twice as long."""
    known = [(row.wait_share, row.node) for row in rows if row.wait_share is not None]
    if len(known) < 2 or len(known) < len(rows):
        return None
    (least, slowest), (most, _) = min(known), max(known)
    return (slowest, most) if most >= max(WAITS, 2 * least) else None


class _Gpus:
    def __init__(self) -> None:
        self._lines, self._readings = WholeLines(), GpuLines()
        self._newest: dict[tuple[int, int | None], tuple[float, Reading]] = {}

    def take(self, piece: FilePiece, now_s: float) -> None:
        for line in self._lines.of(piece.offset, piece.data).split(b"\n"):
            if reading := self._readings.reading(parse_event(line)):
                self._newest[reading.rank, reading.index] = now_s, reading

    def fresh(self, now_s: float) -> tuple[Reading, ...]:
        newest = (reading for came_s, reading in self._newest.values() if now_s - came_s <= FRESH_S)
        return tuple(sorted(newest, key=lambda reading: (reading.index or 0, reading.rank)))
