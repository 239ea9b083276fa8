"""Where a network is cut for a pipeline: which host holds which of its blocks. Imports no torch.

>>> pipelines = parse_stages("v100:0-31,a2000:32-51")
>>> pipelines[0][1]
Stage(node='a2000', first=32, last=51)
>>> format_stages(pipelines)
'v100:0-31,a2000:32-51'
>>> check_stages(parse_stages("v100:0-31,a2000:32-50"), blocks=52)
Traceback (most recent call last):
ValueError: block 51 is in no stage of 'v100:0-31,a2000:32-50'; each of the 52 blocks is in one, in their order

Several pipelines beside each other, which take parts of each batch, have a `|` between them. The ranks of a host may
hold a stage each:

>>> parse_stages("a16:0:0-12,a16:1:13-28,a2000:29-51")[0][1]
Stage(node='a16:1', first=13, last=28)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

_STAGE = re.compile(r"([^:,|=\s]+(?::\d{1,6})?):(\d{1,6})(?:-(\d{1,6}))?")


@dataclass(frozen=True)
class Stage:
    """A host, or one rank of it (`a16:0`), and the blocks of the network that it holds: `first` to `last`, both
    included. All ranks of a host share its stage.
    """

    node: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.node}:{self.first}-{self.last}"


ALONE = "fidelity=local: a single pipeline has none to average with; cut several (with a | between them), or use exact"
Pipelines = tuple[tuple[Stage, ...], ...]
"""The stages of each pipeline, in the order in which samples pass them."""


def parse_stages(text: str) -> Pipelines:
    """Empty for an empty text. Raises ValueError."""
    if not text:
        return ()
    pipelines = tuple(tuple(_stage(item) for item in one.split(",")) for one in text.split("|"))
    nodes = [stage.node for stages in pipelines for stage in stages]
    if twice := next((node for node in nodes if nodes.count(node) > 1), None):
        raise ValueError(f"{twice!r} holds two stages of {text!r}: a host, or a rank of it, holds one")
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
            raise ValueError(f"block {expected} is in no stage of {text!r}; each block is in one, in their order")
        if stage.first < expected:
            raise ValueError(f"block {stage.first} is in two stages of {text!r}; each block is in one, in their order")
        expected = stage.last + 1


def stage_names(nodes: Sequence[str]) -> list[str]:
    """What `stages` calls each rank's host; where all ranks are on one host, each rank by its number.

    >>> stage_names(["v100", "a16", "a16"]), stage_names(["a16", "a16"])
    (['v100', 'a16', 'a16'], ['0', '1'])
    """
    return list(nodes) if len(set(nodes)) > 1 else [str(rank) for rank in range(len(nodes))]


def ranks_of(name: str, nodes: Sequence[str]) -> tuple[int, ...]:
    """Those that a stage with this name has. nodes: each rank's host.

    >>> nodes = ["a16", "a16", "a2000"]
    >>> ranks_of("a16", nodes), ranks_of("a16:1", nodes), ranks_of("v100", nodes)
    ((0, 1), (1,), ())
    """
    of_host = tuple(rank for rank, known in enumerate(stage_names(nodes)) if known == name)
    host, _, number = name.rpartition(":")
    single = [rank for rank, known in enumerate(nodes) if known == host]
    return of_host or tuple(single[int(number) :][:1] if host and number.isdecimal() else ())


def check_stages(pipelines: Pipelines, blocks: int) -> None:
    """Raises ValueError where a pipeline does not end with the last of so many blocks."""
    for stages in pipelines:
        last = stages[-1].last
        if last != blocks - 1:
            what = f"block {last + 1} is in no stage" if last < blocks - 1 else f"there is no block {last}"
            whole = format_stages(pipelines)
            raise ValueError(f"{what} of {whole!r}; each of the {blocks} blocks is in one, in their order")


def format_stages(pipelines: Pipelines) -> str:
    return "|".join(",".join(map(str, stages)) for stages in pipelines)


# What a stage of a pipeline does next: the one rule that ranks and forecasts follow. Imports no torch.
#
#     >>> turns = Turns(count=2, in_flight=2)
#     >>> turns.take(has_input=True, has_gradient=False), turns.take(has_input=False, has_gradient=False)
#     (<Task.FORWARD: 'forward'>, None)
#     >>> turns.take(has_input=True, has_gradient=True)
#     <Task.BACKWARD: 'backward'>
#     >>> turns.take(has_input=True, has_gradient=True)
#     <Task.FORWARD: 'forward'>
#
# A gradient that has come goes back first, since the stage before waits for it; then a further micro-batch goes
# forward,
# as far as memory allows, and does so before a second gradient: where several have come at once, the stage behind would
# wait for its next input meanwhile. What nobody waits for, the gradients of the stage's own weights, fills the time
# that
# would be spent waiting (the zero-bubble schedule of Qi et al. 2023, decided as data arrive and not from a table: on a
# slow link, between unequal hosts, nobody knows beforehand when they do).
#
# In whatever order tasks interleave, each kind of them goes through the micro-batches in their order: the sums that a
# stage forms do not depend on who came when.


class Task(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    """For the stage's inputs: what the stage before waits for."""
    WEIGHTS = "weights"
    """For the stage's own weights."""


@dataclass
class Turns:
    """One update of one rank."""

    count: int
    """Micro-batches that the rank takes."""
    in_flight: int
    """The most that have gone forward and hold memory for what is to come."""
    splits: bool = True
    """Whether BACKWARD leaves the weights to a task of their own; else it does both."""
    forwards: int = 0
    backwards: int = 0
    weights: int = 0
    owes_forward: bool = False
    """Was the last of FORWARD and BACKWARD a BACKWARD?"""

    @property
    def is_over(self) -> bool:
        return self.weights == self.count

    @property
    def may_forward(self) -> bool:
        """Is there memory, and a micro-batch left?"""
        return self.forwards < self.count and self.forwards - self.weights < self.in_flight

    def take(self, *, has_input: bool, has_gradient: bool) -> Task | None:
        """The next task, which counts as done from here on; None where it has to wait.

        has_input: is the next micro-batch there? has_gradient: and what BACKWARD of the oldest one needs?
        """
        goes_forward = self.may_forward and has_input
        if self.backwards < self.forwards and has_gradient and not (goes_forward and self.owes_forward):
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
    """The most micro-batches that a stage holds. asked: the setting `in_flight`, 0 for what hides a link's delay: one
    for each stage and SPARE more. Later stages need fewer, since gradients come back to them sooner.
    """
    return max(1, (asked or stages + SPARE) - stage)


def in_flight_of_rank(asked: int, stages: int, stage: int, lanes: int) -> int:
    """The same of each of so many ranks that share a stage."""
    return -(-in_flight_of(asked, stages, stage) // lanes)


PER_STAGE = 4
"""Micro-batches of an update for each stage, where nobody has said how many: with them filling and draining the
pipeline takes about a fifth of an update, and less with zero_bubble."""
SPARE = 4
"""Micro-batches on their way over the links. Of 0 to 4, four reached most in a model of these racks' links."""


# Micro-batches over the ranks of one stage, its lanes: the rule that ranks and forecasts follow. Imports no torch.


@dataclass(frozen=True)
class Route:
    """A micro-batch's. size: its samples. lanes: the one that takes it, in each stage."""

    size: int
    lanes: tuple[int, ...]


def routes(sizes: Sequence[Sequence[int]], later: Sequence[int]) -> tuple[Route, ...]:
    """An update's micro-batches, in the order in which every stage takes them.

    sizes: of those that each lane of the first stage reads. later: the number of lanes of each stage behind it.

    >>> [route.lanes for route in routes([(8, 8), (8,)], later=[2])]
    [(0, 0), (1, 1), (0, 0)]
    """
    order = interleaved([len(of_lane) for of_lane in sizes])
    left = [iter(of_lane) for of_lane in sizes]
    behind = [interleaved(even(len(order), lanes)) for lanes in later]
    return tuple(Route(next(left[lane]), (lane, *(of[number] for of in behind))) for number, lane in enumerate(order))


def even(count: int, lanes: int) -> list[int]:
    """So many micro-batches over so many lanes."""
    return [count // lanes + (lane < count % lanes) for lane in range(lanes)]


def interleaved(counts: Sequence[int]) -> list[int]:
    """Lanes, each as often as it has micro-batches, as evenly mixed as that goes.

    >>> interleaved([4, 2])
    [0, 1, 0, 0, 1, 0]
    """
    turns = [((2 * turn + 1) / (2 * count), lane) for lane, count in enumerate(counts) for turn in range(count)]
    return [lane for _, lane in sorted(turns)]
