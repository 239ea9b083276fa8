"""Pipeline stages: their text form, the order of a stage's tasks, and its micro-batches. Imports no torch.

    >>> pipelines = parse_stages("v100:0-31,a2000:32-51")
    >>> pipelines[0][1]
    Stage(node='a2000', first=32, last=51)

`|` separates parallel pipelines. A stage may be a single rank of a host (`a16:0:0-12`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

_STAGE = re.compile(r"([^:,|=\s]+(?::\d{1,6})?):(\d{1,6})(?:-(\d{1,6}))?")


@dataclass(frozen=True)
class Stage:
    """A host, or a rank of it (`a16:0`), and its blocks `first` to `last`, inclusive."""

    node: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.node}:{self.first}-{self.last}"


ALONE = "fidelity=local: averages several pipelines; cut several (with a | between them), or use exact"
Pipelines = tuple[tuple[Stage, ...], ...]
"""The stages of each pipeline, in the order of the network."""


def parse_stages(text: str) -> Pipelines:
    """Empty for an empty text. Raises ValueError."""
    if not text:
        return ()
    pipelines = tuple(tuple(_stage(item) for item in pipeline.split(",")) for pipeline in text.split("|"))
    nodes = [stage.node for stages in pipelines for stage in stages]
    if twice := next((node for node in nodes if nodes.count(node) > 1), None):
        raise ValueError(f"{twice!r} holds two stages of {text!r}: a host, or a rank of it, holds one stage")
    for stages in pipelines:
        _check_order(stages, text)
    return pipelines


def _stage(item: str) -> Stage:
    match = _STAGE.fullmatch(item.strip())
    if not match:
        raise ValueError(f"{item!r}: expected a host and its blocks, like v100:0-31,a2000:32-51")
    node, first, last = match[1], int(match[2]), int(match[3] or match[2])
    if last < first:
        raise ValueError(f"{item!r}: the blocks end before they begin")
    return Stage(node, first, last)


def _check_order(stages: Sequence[Stage], text: str) -> None:
    expected = 0
    for stage in stages:
        if stage.first > expected:
            raise ValueError(f"block {expected} is in no stage of {text!r}; each block must be in one, in their order")
        if stage.first < expected:
            raise ValueError(f"block {stage.first} is in two stages of {text!r}; each block must be in one, in order")
        expected = stage.last + 1


def stage_names(nodes: Sequence[str]) -> list[str]:
    """The name of each rank in `stages`: its host, or its number if all ranks share a host.

    >>> stage_names(["v100", "a16", "a16"]), stage_names(["a16", "a16"])
    (['v100', 'a16', 'a16'], ['0', '1'])
    """
    return list(nodes) if len(set(nodes)) > 1 else [str(rank) for rank in range(len(nodes))]


def ranks_of(name: str, nodes: Sequence[str]) -> tuple[int, ...]:
    """The ranks of a stage. nodes: each rank's host.

    >>> nodes = ["a16", "a16", "a2000"]
    >>> ranks_of("a16", nodes), ranks_of("a16:1", nodes), ranks_of("v100", nodes)
    ((0, 1), (1,), ())
    """
    of_host = tuple(rank for rank, known in enumerate(stage_names(nodes)) if known == name)
    host, _, number = name.rpartition(":")
    single = [rank for rank, known in enumerate(nodes) if known == host]
    return of_host or tuple(single[int(number) :][:1] if host and number.isdecimal() else ())


def check_stages(pipelines: Pipelines, blocks: int) -> None:
    """Raises ValueError if a pipeline does not end with the last block."""
    for stages in pipelines:
        last = stages[-1].last
        if last != blocks - 1:
            what = f"block {last + 1} is in no stage" if last < blocks - 1 else f"there is no block {last}"
            whole = format_stages(pipelines)
            raise ValueError(f"{what} of {whole!r}; each of the {blocks} blocks must be in one, in their order")


def format_stages(pipelines: Pipelines) -> str:
    return "|".join(",".join(map(str, stages)) for stages in pipelines)


class Task(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    """For the stage's inputs, which the stage before waits for."""
    WEIGHTS = "weights"
    """For the stage's own weights."""


@dataclass
class StageSchedule:
    """Decides a stage's next task; ranks and forecasts follow the same rule. One update of one rank.

    >>> late = StageSchedule(count=1, in_flight=4, splits=False, following=1)
    >>> [late.take(has_input=True, has_gradient=False) for _ in range(3)]     # the next update's too, then it waits
    [<Task.FORWARD: 'forward'>, <Task.FORWARD: 'forward'>, None]
    >>> late.take(has_input=False, has_gradient=True), late.is_over, late.ahead
    (<Task.BACKWARD: 'backward'>, True, 1)
    """

    # A gradient goes back first, because the stage before waits for it. Then a further micro-batch goes forward, if
    # memory allows, before a second gradient, because the stage behind waits for it. Gradients of the stage's own
    # weights fill the waiting time: the zero-bubble schedule of Qi et al. 2023, decided as data arrive, since arrival
    # times are unknown on slow links between unequal hosts. Each kind of task takes the micro-batches in their order,
    # so sums are reproducible.

    count: int
    """Micro-batches of the rank."""
    in_flight: int
    """The most micro-batches between forward and their last task."""
    splits: bool = True
    """Whether BACKWARD leaves the weights to WEIGHTS."""
    following: int = 0
    """Micro-batches of the next update that may go forward during this one."""
    forwards: int = 0
    """In both updates; at the begin, micro-batches that went forward during the update before."""
    backwards: int = 0
    weights: int = 0
    owes_forward: bool = field(init=False)
    """Whether BACKWARD was more recent than FORWARD."""

    def __post_init__(self) -> None:
        # An update that was begun early follows another update's BACKWARD: with one micro-batch per update, a forward
        # pass goes before its gradient, or the stage behind waits in every second update.
        self.owes_forward = self.forwards > 0

    @property
    def is_over(self) -> bool:
        return self.weights == self.count

    @property
    def ahead(self) -> int:
        """Micro-batches of the next update that have gone forward."""
        return max(0, self.forwards - self.count)

    @property
    def may_forward(self) -> bool:
        """Whether memory and a micro-batch are left."""
        return self.forwards < self.count + self.following and self.forwards - self.weights < self.in_flight

    @property
    def may_backward(self) -> bool:
        """Whether a micro-batch of this update waits for its gradient."""
        return self.backwards < min(self.forwards, self.count)

    def take(self, *, has_input: bool, has_gradient: bool) -> Task | None:
        """The next task, counted as done; None to wait. has_input, has_gradient: whether the data for FORWARD and
        BACKWARD are there.
        """
        goes_forward = self.may_forward and has_input
        if self.may_backward and has_gradient and not (goes_forward and self.owes_forward):
            self.backwards += 1
            self.weights += not self.splits
            self.owes_forward = True
            return Task.BACKWARD
        if goes_forward:
            self.forwards += 1
            self.owes_forward = False
            return Task.FORWARD
        if self.weights < self.backwards:
            self.weights += 1
            return Task.WEIGHTS
        return None


def in_flight_of(asked: int, stages: int, stage: int) -> int:
    """The most micro-batches that a stage holds. asked: the setting `in_flight`."""
    # Later stages need fewer, since their gradients come back sooner.
    return max(1, (asked or stages + SPARE) - stage)


def in_flight_of_rank(asked: int, stages: int, stage: int, lanes: int) -> int:
    """For each of the ranks (lanes) that share a stage."""
    return -(-in_flight_of(asked, stages, stage) // lanes)


PER_STAGE = 4
"""Default number of micro-batches per stage."""
# Filling and draining the pipeline then takes about a fifth of an update, and less with zero_bubble.
SPARE = 4
"""Additional micro-batches in transfer."""
# In a model of these racks' links, four was the best of 0 to 4.


@dataclass(frozen=True)
class Route:
    """A micro-batch's samples, and its lane (rank) in each stage."""

    size: int
    lanes: tuple[int, ...]


def routes(sizes: Sequence[Sequence[int]], later: Sequence[int]) -> tuple[Route, ...]:
    """The micro-batches of an update, in the order of every stage.

    sizes: per lane of the first stage. later: number of lanes of each later stage.
    """
    order = interleaved([len(of_lane) for of_lane in sizes])
    left = [iter(of_lane) for of_lane in sizes]
    behind = [interleaved(even(len(order), lanes)) for lanes in later]
    return tuple(Route(next(left[lane]), (lane, *(of[number] for of in behind))) for number, lane in enumerate(order))


def even(count: int, lanes: int) -> list[int]:
    """Micro-batches per lane."""
    return [count // lanes + (lane < count % lanes) for lane in range(lanes)]


def interleaved(counts: Sequence[int]) -> list[int]:
    """Lanes, repeated as often as they have micro-batches and mixed evenly.

    >>> interleaved([4, 2])
    [0, 1, 0, 0, 1, 0]
    """
    turns = [((2 * turn + 1) / (2 * count), lane) for lane, count in enumerate(counts) for turn in range(count)]
    return [lane for _, lane in sorted(turns)]
