"""Micro-batches through a network block by block, as stages of a pipeline pass them on, on the device's own clock.

    passes = Passes(subject)
    passes.take(16, (0, 1, 2))              a lap for each stretch: blocks 0, 1, and all others
    passes.noise_ms()

Each stretch is what a stage of a run is (`trainer.pipeline.stage`), so that it takes what it will take there. Marks lie
between stretches on one time line without any wait: together they take what one pass takes.
"""

from __future__ import annotations

import itertools
import statistics

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainer.compute.models import stages_of
from trainer.compute.timer import Mark
from trainer.measure.block_times import Cut, Lap
from trainer.measure.updates import Subject
from trainer.pipeline.stage import Stage

MARKS = 50
"""Pairs of marks that the clock's noise is taken from."""


class Passes:
    """The subject takes no whole updates any more: its weights' gradients wait for their turn."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.blocks = subject, stages_of(subject.model)
        self.cut: Cut = ()
        self.stages: list[Stage] = []
        subject.optimizer.zero_grad(set_to_none=True)

    def noise_ms(self) -> float:
        """Between two marks with nothing between them."""
        timer = self.subject.timer
        marks = [timer.mark() for _ in range(MARKS + 1)]
        timer.wait()
        return statistics.median(timer.ms(first, second) for first, second in itertools.pairwise(marks))

    def take(self, samples: int, cut: Cut) -> list[Lap]:
        """Raises NoMemory."""
        if cut != self.cut:
            self.cut, self.stages = cut, self._stages(cut)
        return self.subject.attempt(lambda: self._take(samples))

    def _stages(self, cut: Cut) -> list[Stage]:
        ends = (*cut[1:], len(self.blocks))
        return [
            Stage(nn.Sequential(*self.blocks[first:end]), self.subject.precision, reads=first == 0, splits=True)
            for first, end in zip(cut, ends, strict=True)
        ]

    def _take(self, samples: int) -> list[Lap]:
        timer = self.subject.timer
        passed, labels = self.subject.batch(samples)
        last = len(self.stages) - 1
        forward = [timer.mark()]
        for number, stage in enumerate(self.stages):
            passed = stage.forward(passed, 0.0) if number < last else judged(stage, passed, labels)
            forward.append(timer.mark())
        gradient: Tensor | None = None
        back: list[tuple[Mark, Mark, Mark]] = []
        begin = forward[-1]
        for stage in reversed(self.stages):
            gradient = stage.backward(gradient, samples, 0.0)
            of_inputs = timer.mark()
            stage.weights()
            back.append((begin, of_inputs, timer.mark()))
            begin = back[-1][2]
        timer.wait()
        return [
            Lap(timer.ms(*ahead), timer.ms(behind[0], behind[1]), timer.ms(behind[1], behind[2]))
            for ahead, behind in zip(itertools.pairwise(forward), reversed(back), strict=True)
        ]


def judged(stage: Stage, inputs: Tensor, labels: Tensor) -> Tensor:
    """As a run's last stage is: with the loss that its loop computes."""
    inputs = stage.enter(inputs)
    with stage.precision.autocast():
        loss_sum = cross_entropy(stage.part(inputs), labels, reduction="sum")
    return stage.judge(inputs, loss_sum)
