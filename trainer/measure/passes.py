"""Times a network's blocks on the device, as stages of a pipeline compute them.

    passes = Passes(trainee)
    passes.take(16, (0, 1, 2))              a lap per stretch: blocks 0, 1, and all others

Marks follow each other without waiting, so the stretches add up to one pass.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from trainer.compute.models import stages_of
from trainer.compute.timer import Mark
from trainer.measure.block_times import Cut, Lap, micro_batches, time_blocks
from trainer.measure.ladder import Ladder, Measuring, median
from trainer.measure.updates import Trainee
from trainer.pipeline.chain import Block
from trainer.pipeline.stage import StageWork

MARKS = 50
"""Pairs of marks to measure noise."""


class Passes:
    """The network can take no more whole updates: its weight gradients are delayed."""

    def __init__(self, trainee: Trainee) -> None:
        self.trainee, self.blocks = trainee, stages_of(trainee.model)
        self.cut: Cut = ()
        self.stages: list[StageWork] = []
        trainee.optimizer.zero_grad(set_to_none=True)

    def noise_ms(self) -> float:
        """Between adjacent marks."""
        timer = self.trainee.timer
        marks = [timer.mark() for _ in range(MARKS + 1)]
        timer.wait()
        return statistics.median(timer.ms(first, second) for first, second in itertools.pairwise(marks))

    def take(self, samples: int, cut: Cut) -> list[Lap]:
        """Raises NoMemory."""
        if cut != self.cut:
            self.cut, self.stages = cut, self._stages(cut)
        return self.trainee.attempt(samples, lambda: self._take(samples))

    def _stages(self, cut: Cut) -> list[StageWork]:
        ends = (*cut[1:], len(self.blocks))
        return [
            StageWork(nn.Sequential(*self.blocks[first:end]), self.trainee.precision, reads=first == 0, splits=True)
            for first, end in zip(cut, ends, strict=True)
        ]

    def _take(self, samples: int) -> list[Lap]:
        timer = self.trainee.timer
        passed, targets = self.trainee.batch(samples)
        last = len(self.stages) - 1
        forward = [timer.mark()]
        for number, stage in enumerate(self.stages):
            passed = stage.forward(passed, 0.0) if number < last else self._judged(stage, passed, targets)
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

    def _judged(self, stage: StageWork, inputs: Tensor, targets: Tensor) -> Tensor:
        # Like a run's last stage, with its loss.
        inputs = stage.enter(inputs)
        with stage.precision.autocast():
            loss_sum = self.trainee.loss_sum(stage.part(inputs), targets)
        return stage.judge(inputs, loss_sum, 0.0)


def record_blocks(
    trainee: Trainee, blocks: Sequence[Block], ladder: Ladder, batch: int, budget_s: float
) -> Measuring[dict[str, Any] | None]:
    """None if memory is too small. Measures the whole network again just before its blocks, for the same load."""
    sizes = micro_batches({size: times.step_ms for size, times in ladder.times.items()}, batch, budget_s)
    yield sizes[-1]
    whole = yield from median(sizes[-1], budget_s / 4)
    passes = Passes(trainee)
    found = time_blocks(passes.take, blocks, sizes, passes.noise_ms(), budget_s)
    return found.record(sizes[-1], whole.step_ms - whole.optim_ms) if found else None
