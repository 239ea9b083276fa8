"""What a stage of a pipeline does next: the one rule that ranks and forecasts follow. Imports no torch.

    >>> turns = Turns(count=2, in_flight=2)
    >>> turns.take(has_input=True, has_gradient=False), turns.take(has_input=False, has_gradient=False)
    (<Task.FORWARD: 'forward'>, None)
    >>> turns.take(has_input=True, has_gradient=True)
    <Task.BACKWARD: 'backward'>
    >>> turns.take(has_input=True, has_gradient=True)
    <Task.FORWARD: 'forward'>

A gradient that has come goes back first, since the stage before waits for it; then a further micro-batch goes forward,
as far as memory allows, and does so before a second gradient: where several have come at once, the stage behind would
wait for its next input meanwhile. What nobody waits for, the gradients of the stage's own weights, fills the time that
would be spent waiting (the zero-bubble schedule of Qi et al. 2023, decided as data arrive and not from a table: on a
slow link, between unequal hosts, nobody knows beforehand when they do).

In whatever order tasks interleave, each kind of them goes through the micro-batches in their order: the sums that a
stage forms do not depend on who came when.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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
