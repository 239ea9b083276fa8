"""A run's live progress: one row per host, from the ranks' metrics as they arrive. Pure.

    view = LiveView(plan)
    if view.take("v100", piece):  # of `rank-<r>/metrics.jsonl`
        view.progress(90.0).rows  # (HostRow(node="v100", step=120, steps=938, samples_per_s=833.0, ...),)

A large piece's newest lines are read, and some older lines for `course`. Unusable values are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from orchestrator.jobs.frames import FilePiece
from orchestrator.jobs.metric_lines import (
    WholeLines,
    bubble_and_sync,
    count,
    duration,
    number,
    parse_event,
    wait_and_sync,
)
from orchestrator.planning.launch_plan import LaunchPlan, NodePlan
from trainer.shared.metrics import LARGEST, STEP_COUNTS

WINDOW_STEPS = 20
KEPT_STEPS = 256
"""Files arrive one after another, and a mean needs the steps that all ranks have."""
OLDER_STEPS = 240
"""Read of a large piece, besides."""


@dataclass(frozen=True)
class Notice:
    text: str


@dataclass(frozen=True)
class HostRow:
    """Figures are None if the ranks report too little."""

    node: str
    step: int
    """Completed by all its ranks; the first is 1."""
    steps: int | None
    """The whole run's."""
    samples_per_s: float | None
    loss: float | None
    wait_share: float | None
    """0..1: waiting for slower ranks."""
    sync_share: float | None = None
    """0..1: limited by the network only, not hidden by compute."""
    step_ms: float | None = None
    parts_ms: Mapping[str, float] | None = None
    """load, compute, sync, wait, optimiser."""


@dataclass(frozen=True)
class RunProgress:
    rows: tuple[HostRow, ...]
    """Without hosts before their first step."""
    elapsed_s: float | None = None
    together: HostRow | None = None
    """A pipeline's hosts together: every sample passes all of them. None without a pipeline, or before every rank has
    reported a step.
    """
    still_s: float = 0.0
    """Since the last step, once that is long."""

    @property
    def left_s(self) -> float | None:
        """At the current pace, without evaluation and checkpoints."""
        lasts = [(row.steps - row.step) * row.step_ms / 1000 for row in self.rows if row.steps and row.step_ms]
        return max(0.0, *lasts) if lasts else None


@dataclass(frozen=True)
class Silence:
    """No rank has printed a line or reported a step yet."""

    ranks: int
    elapsed_s: float


@dataclass(frozen=True)
class Standstill:
    """Why no rank prints; without words once that is over."""

    words: str = ""
    is_alarm: bool = False


class CoursePoint(NamedTuple):
    """Means over some steps and all ranks. step: the last one."""

    step: int
    samples_per_s: float | None
    loss: float | None


class LiveCourse:
    """Speed and loss since the first step, in equal stretches, whose length doubles at 2 * POINTS."""

    POINTS = 60

    def __init__(self) -> None:
        self.width = 1
        self._stretches: dict[int, dict[int, _Stretch]] = {}
        """By number and rank."""

    def add(self, rank: int, number: int, step: _Step) -> None:
        self._of(number // self.width, rank).add(step)
        while number // self.width >= 2 * self.POINTS:  # the others lie below
            before, self._stretches = self._stretches, {}
            self.width *= 2
            for place, ranks in before.items():
                for name, stretch in ranks.items():
                    self._of(place // 2, name).join(stretch)

    def _of(self, place: int, rank: int) -> _Stretch:
        return self._stretches.setdefault(place, {}).setdefault(rank, _Stretch())

    def drop(self, rank: int) -> None:
        for ranks in self._stretches.values():
            ranks.pop(rank, None)

    def points(self) -> tuple[CoursePoint, ...]:
        return tuple(
            CoursePoint((place + 1) * self.width, _speed(ranks.values()), _loss(ranks.values()))
            for place, ranks in sorted(self._stretches.items())
            if ranks
        )


@dataclass
class _Stretch:
    samples: int = 0
    lasted_ms: float = 0.0
    loss: float = 0.0
    of_loss: int = 0
    """Samples with a loss."""
    steps: int = 0
    """With a loss."""

    def add(self, step: _Step) -> None:
        if step.t_ms is not None:
            self.samples += step.samples
            self.lasted_ms += step.t_ms
        if step.loss is not None:
            self.loss += step.loss
            self.of_loss += step.samples
            self.steps += 1

    def join(self, other: _Stretch) -> None:
        self.samples += other.samples
        self.lasted_ms += other.lasted_ms
        self.loss += other.loss
        self.of_loss += other.of_loss
        self.steps += other.steps


def _speed(ranks: Iterable[_Stretch]) -> float | None:
    speeds = [1000 * rank.samples / rank.lasted_ms for rank in ranks if rank.lasted_ms]
    return sum(speeds) or None


def _loss(ranks: Iterable[_Stretch]) -> float | None:
    """A mean over steps if samples are not counted."""
    known = [rank for rank in ranks if rank.steps]
    weight = sum(rank.of_loss for rank in known) or sum(rank.steps for rank in known)
    return sum(rank.loss for rank in known) / weight if weight else None


class LiveView:
    def __init__(self, plan: LaunchPlan) -> None:
        self.course = LiveCourse()
        self._nodes = {node.name: node for node in plan.nodes}
        self._ranks = {rank: _Rank() for node in plan.nodes for rank in node.rank_numbers}

    def take(self, node: str, piece: FilePiece) -> bool:
        """Whether the piece held a step."""
        if piece.rank is None or not piece.file.endswith("/metrics.jsonl"):
            return False
        if node not in self._nodes or piece.rank not in self._nodes[node].rank_numbers:
            return False
        if piece.offset == 0:  # the first piece, or the file was rewritten
            self._ranks[piece.rank] = _Rank()
            self.course.drop(piece.rank)
        found = self._ranks[piece.rank].take(piece.offset, piece.data)
        for place, step in found:
            self.course.add(piece.rank, place, step)
        return bool(found)

    def progress(self, elapsed_s: float | None = None) -> RunProgress:
        shares = _exchange_shares(self._ranks)
        rows = tuple(row for node in self._nodes.values() if (row := self._row(node, shares)))
        if not any(rank.is_stage for rank in self._ranks.values()):
            return RunProgress(rows, elapsed_s)
        rows = tuple(replace(row, samples_per_s=None, loss=None) for row in rows)
        return RunProgress(rows, elapsed_s, self._together())

    def _together(self) -> HostRow | None:
        ranks = list(self._ranks.values())
        if not all(rank.steps for rank in ranks):
            return None
        steps = _common_steps(ranks)
        return HostRow(
            node="together",
            step=min(rank.last for rank in ranks) + 1,
            steps=max((rank.total for rank in ranks if rank.total), default=None),
            samples_per_s=_samples_per_s(ranks, steps),
            loss=_mean_loss(ranks, steps),
            wait_share=None,
            step_ms=_step_ms(ranks, steps),
        )

    def _row(self, node: NodePlan, shares: Mapping[int, _Exchange]) -> HostRow | None:
        numbers = node.rank_numbers
        ranks = [self._ranks[rank] for rank in numbers if self._ranks[rank].steps]
        if not ranks:
            return None
        together = _common_steps(ranks)
        return HostRow(
            node=node.name,
            step=min(rank.last for rank in ranks) + 1,
            steps=max((rank.total for rank in ranks if rank.total), default=None),
            samples_per_s=_samples_per_s(ranks, together),
            loss=_mean_loss(ranks, together),
            wait_share=sum(shares[rank].wait for rank in numbers) / node.ranks if shares else None,
            sync_share=sum(shares[rank].sync for rank in numbers) / node.ranks if shares else None,
            step_ms=_step_ms(ranks, together),
            parts_ms=_parts_ms([self._ranks[rank] for rank in numbers], [shares[rank] for rank in numbers])
            if shares
            else None,
        )


OWN_PARTS = {"load": "load_ms", "compute": "compute_ms", "optimiser": "optim_ms"}
"""Parts of a step that a rank reports."""


class _Exchange(NamedTuple):
    """Shares (0..1) of a rank's time."""

    wait: float
    sync: float


class _Step(NamedTuple):
    samples: int
    t_ms: float | None
    exposed_ms: float | None
    comm_ms: float | None
    """exposed_ms if not reported."""
    loss: float | None
    has_loss: bool = True
    """The line has a `loss` field, valid or not."""
    bubble_ms: float | None = None
    """A pipeline stage's wait for its neighbours."""
    own_ms: Mapping[str, float | None] = MappingProxyType({})
    """Load, compute, optimiser."""


class _Rank:
    """Newest steps in order of arrival."""

    def __init__(self) -> None:
        self.steps: dict[int, _Step] = {}
        self.last = -1
        self.total: int | None = None
        self._wall: float | None = None
        self._is_watched = False
        """A script that is only observed: the start of its first step is unknown, so its time does not count."""
        self.lines = WholeLines()

    @property
    def is_stage(self) -> bool:
        return self.last in self.steps and self.steps[self.last].bubble_ms is not None

    def take(self, offset: int, data: bytes) -> list[tuple[int, _Step]]:
        """Its steps by number. Reads the first line (it may be `start`), some of many older ones, and the newest."""
        older, *lines = self.lines.of(offset, data).rsplit(b"\n", KEPT_STEPS)
        first, *rest = older.split(b"\n")
        found = []
        for line in (first, *rest[:: 1 + len(rest) // OLDER_STEPS], *lines):
            event = parse_event(line)
            if event is None:
                continue
            if event.get("event") == "step" and (step := self._add(event)):
                found.append(step)
            elif event.get("event") == "start":
                self.steps.clear()
                self._is_watched = event.get("samples_from") is not None
                self.total = count(event, "steps", LARGEST) or None
        return found

    def _add(self, event: Mapping[str, Any]) -> tuple[int, _Step] | None:
        number_of_step, samples = (count(event, key, LARGEST) for key in STEP_COUNTS)
        if number_of_step is None or samples is None:
            return None
        wall, before = number(event, "wall", LARGEST), self._wall
        self._wall = wall
        t_ms, exposed_ms = duration(event, "t_ms"), duration(event, "exposed_ms")
        if t_ms is None and wall is not None and before is not None and wall > before:
            t_ms = 1000 * (wall - before)
        comm_ms = duration(event, "comm_ms")
        if self._is_watched and not self.steps:
            t_ms = exposed_ms = comm_ms = None
        self.steps.pop(number_of_step, None)  # a step that is reported again is the newest
        step = self.steps[number_of_step] = _Step(
            samples,
            t_ms,
            exposed_ms,
            exposed_ms if comm_ms is None else comm_ms,
            number(event, "loss", LARGEST),
            "loss" in event,
            _bubble_ms(event),
            {part: duration(event, key) for part, key in OWN_PARTS.items()},
        )
        if len(self.steps) > KEPT_STEPS:
            del self.steps[next(iter(self.steps))]
        self.last = number_of_step
        return number_of_step, step


def _bubble_ms(event: Mapping[str, Any]) -> float | None:
    before_ms, behind_ms = duration(event, "bubble_before_ms"), duration(event, "bubble_behind_ms")
    return None if before_ms is None or behind_ms is None else before_ms + behind_ms


def _common_steps(ranks: Sequence[_Rank]) -> list[int]:
    """The newest steps that all these ranks have reported."""
    found: list[int] = []
    for step in reversed(ranks[0].steps):
        if all(step in rank.steps for rank in ranks):
            found.append(step)
            if len(found) == WINDOW_STEPS:
                break
    return found


def _samples_per_s(ranks: Sequence[_Rank], steps: Sequence[int]) -> float | None:
    """The sum of each rank's samples over its own time."""
    speed = 0.0
    for rank in ranks:
        timed = [rank.steps[step] for step in steps if rank.steps[step].t_ms is not None]
        total_ms = sum(step.t_ms or 0 for step in timed)
        if not total_ms:
            return None
        speed += 1000 * sum(step.samples for step in timed) / total_ms
    return speed if speed and math.isfinite(speed) else None


def _mean_loss(ranks: Sequence[_Rank], steps: Sequence[int]) -> float | None:
    """None if any reported value is not a number; a mean of the rest would hide that."""
    lines = [line for rank in ranks for step in steps if (line := rank.steps[step]).has_loss]
    samples = sum(line.samples for line in lines)
    losses = [line.loss for line in lines if line.loss is not None]
    return sum(losses) / (samples or len(losses)) if losses and len(losses) == len(lines) else None


def _step_ms(ranks: Sequence[_Rank], steps: Sequence[int]) -> float | None:
    """The slowest rank's."""
    means = []
    for rank in ranks:
        times_ms = [t_ms for step in steps if (t_ms := rank.steps[step].t_ms) is not None]
        if times_ms:
            means.append(sum(times_ms) / len(times_ms))
    return max(means, default=None)


def _parts_ms(ranks: Sequence[_Rank], shares: Sequence[_Exchange]) -> dict[str, float] | None:
    """Means over a host's ranks and their newest common steps; None if a rank does not report its own parts."""
    steps = [rank.steps[step] for step in _common_steps(ranks) for rank in ranks]
    own = {part: [ms for step in steps if (ms := step.own_ms.get(part)) is not None] for part in OWN_PARTS}
    lasted = [step.t_ms for step in steps if step.t_ms is not None]
    if not lasted or any(len(known) < len(lasted) for known in own.values()):
        return None
    step_ms = sum(lasted) / len(lasted)
    sync, wait = (sum(getattr(each, name) for each in shares) / len(shares) * step_ms for name in ("sync", "wait"))
    mean = {part: sum(known) / len(known) for part, known in own.items()}
    return {
        "load": mean["load"],
        "compute": mean["compute"],
        "sync": sync,
        "wait": wait,
        "optimiser": mean["optimiser"],
    }


def _exchange_shares(ranks: Mapping[int, _Rank]) -> dict[int, _Exchange]:
    """{} unless every rank reports its times."""
    waited, wired, lasted = (dict.fromkeys(ranks, 0.0) for _ in range(3))
    if not all(rank.steps for rank in ranks.values()):
        return {}
    for step in _common_steps(list(ranks.values())):
        lines = {name: rank.steps[step] for name, rank in ranks.items()}
        under_way = [line.comm_ms for line in lines.values() if line.comm_ms is not None]
        if len(under_way) < len(lines):
            continue
        least = min(under_way)
        for name, line in lines.items():
            exposed_ms = line.exposed_ms or 0.0
            if line.bubble_ms is None:
                wait_ms, sync_ms = wait_and_sync(exposed_ms, line.comm_ms or 0.0, least)
            else:
                wait_ms, sync_ms = bubble_and_sync(exposed_ms, line.bubble_ms)
            waited[name] += wait_ms
            wired[name] += sync_ms
            lasted[name] += line.t_ms or 0.0
    if not all(lasted.values()):
        return {}
    return {
        name: _Exchange(min(1.0, waited[name] / lasted[name]), min(1.0, wired[name] / lasted[name])) for name in ranks
    }
