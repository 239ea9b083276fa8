"""Timeline of one pipeline step on a common clock: each rank's tasks, and the messages between them. Pure.

    line = read_timeline(plan, events)
    line.lanes[0].bars[0]                       # Bar(task="forward", number=0, begin_ms=0.6, end_ms=2.1)
    line.messages[0]                            # Message(source=1, target=0, task="forward", sent_ms=2.0, came_ms=2.4)

Ranks record one step in many (`tasks` events), each by its own clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import OrchError
from orchestrator.jobs.metric_lines import count
from orchestrator.planning.launch_plan import LaunchPlan, read_settings
from orchestrator.record import Record, RecordError, read_record, write_record
from orchestrator.results.events import Events
from trainer.shared.metrics import LARGEST, MOST_TASKS, TASKS
from trainer.shared.stages import Pipelines, parse_stages, ranks_of

MOST_RANKS = 64
MOST_EVENTS = 20
"""Per rank: one per power of ten of steps."""
FORWARD, BACKWARD = TASKS[:2]


class Bar(Record):
    """number: of the micro-batch; None for a task once per step."""

    task: str
    number: int | None
    begin_ms: float
    end_ms: float


class Message(Record):
    """The result of a task, sent for the same task of another rank."""

    source: int
    target: int
    task: str
    number: int
    sent_ms: float
    came_ms: float


class TimelineLane(Record):
    rank: int
    node: str
    pipeline: int
    stage: int
    first_block: int
    last_block: int
    begin_ms: float
    bars: tuple[Bar, ...]


class Timeline(Record):
    """Milliseconds since the first rank began the step, or a forward pass of it."""

    step: int
    """From 0."""
    within_ms: float
    """Largest clock error."""
    lanes: tuple[TimelineLane, ...]
    """In the order of the samples."""
    messages: tuple[Message, ...]
    left_out: int = 0
    """Tasks beyond a record's limit."""


Row = tuple[str, int | None, float, float, float | None, float | None]
"""Task, micro-batch, begin, end, arrival, sending; ms by the rank's own clock."""


def read_timeline(plan: LaunchPlan, events: Events) -> Timeline | None:
    """The latest step recorded by all ranks; None if clocks cannot be aligned."""
    places = read_places(plan, events.latest("start"))
    found = events.since_start("tasks", MOST_EVENTS) if places else {}
    if not 0 < len(places) <= MOST_RANKS or places.keys() != {r for node in plan.nodes for r in node.rank_numbers}:
        return None
    by_step = [{count(event, "step"): event for event in found.get(rank, ())} for rank in places]
    steps = set.intersection(*(set(each) for each in by_step)) - {None}
    if not steps:
        return None
    step = max(one for one in steps if one is not None)
    rows = {rank: list(_rows(each[step])) for rank, each in zip(places, by_step, strict=True)}
    left_out = sum(count(each[step], "left_out") or 0 for each in by_step)
    return timeline(step, places, rows, {r: n.name for n in plan.nodes for r in n.rank_numbers}, left_out)


def write_timeline(line: Timeline | None, path: Path) -> None:
    if line:
        write_record(path, line)
    else:
        path.unlink(missing_ok=True)


def load_timeline(path: Path) -> Timeline | None:
    """None if unreadable."""
    try:
        return read_record(path, Timeline)
    except (OSError, RecordError, OrchError):
        return None


def timeline(
    step: int, places: Mapping[int, Place], rows: Mapping[int, Sequence[Row]], nodes: Mapping[int, str], left_out: int
) -> Timeline | None:
    """rows, nodes: by rank."""
    order = sorted(places, key=lambda rank: (places[rank].pipeline, places[rank].stage, rank))
    pairs = list(_matched(places, rows))
    clocks = align(_bounds(pairs, places, rows), order)
    if clocks is None or not any(rows.values()):
        return None
    # Each rank counts from the begin of its step; a late stage begins some tasks earlier.
    firsts = {rank: min([0.0, *(row[2] for row in of_rank)]) for rank, of_rank in rows.items()}
    begin_ms = min(offset + firsts[rank] for rank, offset in clocks.offsets_ms.items())
    shift = {rank: offset - begin_ms for rank, offset in clocks.offsets_ms.items()}
    return Timeline(
        step=step,
        within_ms=clocks.within_ms,
        lanes=tuple(_lane(rank, places[rank], nodes[rank], rows[rank], shift[rank]) for rank in order),
        messages=tuple(
            one.model_copy(
                update={"sent_ms": one.sent_ms + shift[one.source], "came_ms": one.came_ms + shift[one.target]}
            )
            for one in pairs
        ),
        left_out=left_out,
    )


def _lane(rank: int, place: Place, node: str, rows: Iterable[Row], shift_ms: float) -> TimelineLane:
    bars = (Bar(task=row[0], number=row[1], begin_ms=row[2] + shift_ms, end_ms=row[3] + shift_ms) for row in rows)
    return TimelineLane(
        rank=rank,
        node=node,
        pipeline=place.pipeline,
        stage=place.stage,
        first_block=place.first,
        last_block=place.last,
        begin_ms=shift_ms,
        bars=tuple(bars),
    )


def _matched(places: Mapping[int, Place], rows: Mapping[int, Sequence[Row]]) -> Iterator[Message]:
    """Pairs of sending and arrival, each by its own rank's clock."""
    sent = {
        (places[rank].pipeline, places[rank].stage, task, number): (rank, sent_ms)
        for rank in places
        for task, number, _, _, _, sent_ms in rows[rank]
        if sent_ms is not None
    }
    for rank, place in places.items():
        for task, number, _, _, came_ms, _ in rows[rank]:
            source_stage = place.stage - 1 if task == FORWARD else place.stage + 1
            source = sent.get((place.pipeline, source_stage, task, number))
            if source and came_ms is not None and number is not None and task in (FORWARD, BACKWARD):
                yield Message(
                    source=source[0], target=rank, task=task, number=number, sent_ms=source[1], came_ms=came_ms
                )


def _bounds(
    messages: Iterable[Message], places: Mapping[int, Place], rows: Mapping[int, Sequence[Row]]
) -> Mapping[tuple[int, int], float]:
    bounds: dict[tuple[int, int], float] = {}

    def add(earlier: int, earlier_ms: float, later: int, later_ms: float) -> None:
        """An event of one rank precedes an event of another."""
        key, most_ms = (later, earlier), later_ms - earlier_ms
        bounds[key] = min(bounds.get(key, most_ms), most_ms)

    for one in messages:
        add(one.source, one.sent_ms, one.target, one.came_ms)
    sums = {rank: row for rank in places for row in rows[rank] if row[0] == "sum"}
    for a, joined in sums.items():
        for b, over in sums.items():
            if a != b and (places[a].first, places[a].last) == (places[b].first, places[b].last):
                add(a, joined[2], b, over[3])
    return bounds


def _rows(event: Mapping[str, Any]) -> Iterator[Row]:
    rows = event.get("tasks")
    for row in rows[:MOST_TASKS] if isinstance(rows, list) else ():
        if not (isinstance(row, list) and len(row) == 6 and row[0] in TASKS):
            continue
        task, number, *times = row
        is_number = number is None or (type(number) is int and 0 <= number < 1 << 31)
        known = [one for one in times if one is not None]
        if is_number and all(map(_is_time, known)) and None not in times[:2] and times[0] <= times[1]:
            yield (task, number, *(None if one is None else float(one) for one in times))


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= LARGEST  # NaN is not


# Alignment of the hosts' clocks, from the order of events. Pure.
#
#     clocks = align({(0, 1): 3.0, (1, 0): -1.0}, ranks=[0, 1])
#     clocks.offsets_ms[1], clocks.within_ms          # 2.0, 1.0: rank 1's times plus 2 are rank 0's, to within 1 ms
#
# A bound (a, b): the offset of b exceeds that of a by at most this. A message sent by a at s and received by b at r
# (each by its own clock) gives offset(a) - offset(b) <= r - s. Messages both ways give an interval; its middle assumes
# that the fastest message took equally long either way, as NTP does (RFC 5905, section 8). Over several hosts the
# tightest interval is a shortest path (Floyd and Warshall), and the middles of the intervals to one rank break no
# bound.

SLACKS_MS = (0.0, 0.1, 1.0, 10.0)
"""Allowed contradictions: a GPU's clock and its host's are compared through a call."""


@dataclass(frozen=True)
class Clocks:
    """offsets_ms: to add to each rank's times. within_ms: the largest error."""

    offsets_ms: dict[int, float]
    within_ms: float


def align(bounds: Mapping[tuple[int, int], float], ranks: Sequence[int]) -> Clocks | None:
    """bounds: (a, b) -> the most by which b's offset exceeds a's, ms. None if a rank is not connected to the first both
    ways, or bounds contradict each other.
    """
    for slack_ms in SLACKS_MS:
        most = _tightest(bounds, ranks, slack_ms)
        if all(most[rank, rank] >= 0 for rank in ranks):
            return _middles(most, ranks)
    return None


def _tightest(
    bounds: Mapping[tuple[int, int], float], ranks: Sequence[int], slack_ms: float
) -> dict[tuple[int, int], float]:
    most = {(a, b): bounds.get((a, b), math.inf) + slack_ms for a in ranks for b in ranks}
    most |= {(rank, rank): 0.0 for rank in ranks}
    for over in ranks:
        for a in ranks:
            for b in ranks:
                most[a, b] = min(most[a, b], most[a, over] + most[over, b])
    return most


def _middles(most: Mapping[tuple[int, int], float], ranks: Sequence[int]) -> Clocks | None:
    first = ranks[0]
    if not all(math.isfinite(most[first, rank] + most[rank, first]) for rank in ranks):
        return None
    offsets = {rank: (most[first, rank] - most[rank, first]) / 2 for rank in ranks}
    return Clocks(offsets, max((most[first, rank] + most[rank, first]) / 2 for rank in ranks))


# Stages of a pipeline, from the setting `stages` in the ranks' `start` events. Pure.
#
#     read_places(plan, starts)           # {0: Place(pipeline=0, stage=0, name="v100", first=0, last=36), ...}

Starts = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True)
class Place:
    """name: the stage's, from the setting `stages`. first, last: its blocks."""

    pipeline: int
    stage: int
    name: str
    first: int
    last: int


class StageSummary(Record):
    """Times are means over its ranks and the measured steps."""

    pipeline: int
    stage: int
    """In the order of the samples, from 0."""
    node: str
    name: str
    """`a16:1`, `rank 1` if a host's ranks have stages of their own."""
    ranks: tuple[int, ...]
    first_block: int
    last_block: int
    work: float | None = None
    """0..1 of the network's work."""
    compute_ms: float | None = None
    bubble_ms: float | None = None
    """Waiting for a neighbour."""
    waits_for: str | None = None
    """The stage's name."""
    waits_for_ms: float | None = None
    wire_ms: float | None = None
    """With an outgoing message in transfer, next to compute."""

    @property
    def blocks(self) -> str:
        return f"{self.first_block}-{self.last_block}"


def is_pipeline(plan: LaunchPlan) -> bool:
    return plan.recorded.strategy == "pipeline"


def read_places(plan: LaunchPlan, starts: Starts) -> dict[int, Place]:
    """By rank. Empty outside a pipeline, or if not reported."""
    if not is_pipeline(plan):
        return {}
    nodes = [node.name for node in plan.nodes for _ in node.rank_numbers]
    return {
        rank: Place(pipeline, stage, one.node, one.first, one.last)
        for pipeline, stages in enumerate(_pipelines(starts))
        for stage, one in enumerate(stages)
        for rank in ranks_of(one.node, nodes)
    }


def _pipelines(starts: Starts) -> Pipelines:
    for start in starts.values():
        try:
            if found := parse_stages(read_settings(start.get("settings")).stages or ""):
                return found
        except ValueError:
            continue
    return ()
