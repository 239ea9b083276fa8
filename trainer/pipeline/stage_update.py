"""One update of one rank of a pipeline: `loss_sum, done = yield from PipelineUpdate(pipeline, own, ...).run()`.

Its micro-batches in the order that `trainer.shared.turns` gives them, as soon as what each task needs has come.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from trainer.pipeline.stage_layout import MicroBatch
from trainer.shared.turns import Task, Turns


@dataclass(frozen=True)
class Done:
    """One task of an update, with the marks of its begin and end. number: of the micro-batch."""

    task: Task
    number: int
    begin: Any
    end: Any
    since: Any
    """The mark from which the rank waited for what the task needs; None where it did not wait."""
    came_s: float | None
    """When that came from another rank, by time.perf_counter; None where it did not come from one."""
    sent: Any
    """The mark before its result was handed over to another rank; None where it was not."""


class PipelineUpdate:
    """The rank's micro-batches, what has come and what is due."""

    def __init__(self, pipeline: Any, own: Sequence[MicroBatch], images: Tensor, labels: Tensor, batch: int) -> None:
        """pipeline: a Pipeline, which has made this one. The others: as of its `update`."""
        self.of, self.own, self.batch = pipeline, own, batch
        sizes = [one.size for one in self.own]
        self.parts = list(zip(images.split(sizes), labels.split(sizes), strict=True)) if pipeline.is_first else []
        self.turns = Turns(len(self.own), pipeline.in_flight, pipeline.stage.splits)
        self.losses: list[Tensor] = []
        self.done: list[Done] = []

    def run(self) -> Generator[tuple[Tensor, Tensor], Tensor, tuple[Tensor, list[Done]]]:
        """Yields inputs and labels of the last stage's micro-batches, and is sent the sum of each one's losses."""
        timer = self.of.timer
        if not self.own:
            self.of.tell(self.loss_sum)
        while not self.turns.is_over:
            task, since = self._take()
            begin = timer.mark()
            number, came_s, sent = yield from self._do(task)
            self.done.append(Done(task, number, begin, timer.mark(), since, came_s, sent))
            if len(self.done) > 1:
                timer.wait_for(self.done[-2].end)  # so that what comes next is chosen when the device is ready for it
        return self.loss_sum, self.done

    @property
    def loss_sum(self) -> Tensor:
        """Of what has gone forward."""
        return sum(self.losses[1:], self.losses[0]) if self.losses else torch.zeros((), device=self.of.device)

    def _take(self) -> tuple[Task, Any]:
        """The next task, when there is one, and the mark from which it was waited for."""
        with self.of.news:
            if task := self._next():
                return task, None
            since = self.of.timer.mark()
            while not (task := self._next()):
                self.of.news.wait()
            return task, since

    def _next(self) -> Task | None:
        turns = self.turns
        return turns.take(
            has_input=turns.forwards < turns.count and self._has_input(self.own[turns.forwards]),
            has_gradient=turns.backwards < turns.forwards and self._has_gradient(self.own[turns.backwards]),
        )

    def _has_input(self, one: MicroBatch) -> bool:
        of = self.of
        images: bool = of.is_first or of.inputs[one.ranks[of.number - 1]].has_arrived
        labels: bool = not of.labels or of.labels[one.ranks[0]].has_arrived
        return images and labels

    def _has_gradient(self, one: MicroBatch) -> bool:
        came: bool = self.of.is_last or self.of.gradients[one.ranks[self.of.number + 1]].has_arrived
        return came

    def _do(self, task: Task) -> Generator[tuple[Tensor, Tensor], Tensor, tuple[int, float | None, Any]]:
        """The number of its micro-batch, when what it needs came, and the mark before its result was handed over."""
        if task is Task.FORWARD:
            return (yield from self._forward(self.own[self.turns.forwards - 1], self.turns.forwards - 1))
        if task is Task.BACKWARD:
            return self._backward(self.own[self.turns.backwards - 1])
        self.of.stage.weights()
        return self.own[self.turns.weights - 1].number, None, None

    def _forward(
        self, one: MicroBatch, index: int
    ) -> Generator[tuple[Tensor, Tensor], Tensor, tuple[int, float | None, Any]]:
        of, labels, there_s, sent = self.of, None, 0.0, None
        if of.is_first:
            inputs, labels = self.parts[index]
            if of.to_last:
                of.to_last[one.ranks[-1]].send(of.cuts.check_labels(labels, one.size))
        else:
            incoming = of.inputs[one.ranks[of.number - 1]]
            there_s, inputs = incoming.arrived_s, incoming.take()
            labels = of.labels[one.ranks[0]].take() if of.labels else None
        if of.is_last and of.stage.learns:
            inputs = of.stage.enter(inputs)
            output = of.stage.judge(inputs, (yield inputs, cast(Tensor, labels)), there_s)
        else:
            output = of.stage.forward(inputs, there_s)
        if of.is_last:
            self.losses.append(output)
            if self.turns.forwards == self.turns.count:
                of.tell(self.loss_sum)
        else:
            sent = of.timer.mark()
            of.to_next[one.ranks[of.number + 1]].send(of.cuts.check_output(output, one.size).to(of.cuts.dtype))
        return one.number, there_s or None, sent

    def _backward(self, one: MicroBatch) -> tuple[int, float | None, Any]:
        of = self.of
        if one is self.own[0]:
            of.brake.pause("backward")
        gradient, there_s, sent = None, 0.0, None
        if not of.is_last:
            incoming = of.gradients[one.ranks[of.number + 1]]
            there_s, gradient = incoming.arrived_s, incoming.take()
        gradient = of.stage.backward(gradient, self.batch, there_s)
        if gradient is not None and not of.is_first:
            sent = of.timer.mark()
            of.to_before[one.ranks[of.number - 1]].send(gradient.to(of.cuts.dtype))
        return one.number, there_s or None, sent
