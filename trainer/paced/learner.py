"""A stand-in that learns: a small network makes its real updates within the time of a large one that is stood in for.

    learner = Learner(dissect("resnet152", (3, 32, 32), 10), stopwatch, build_model("lenet", (1, 28, 28), 10))
    cross_entropy(learner(images), labels).backward()       the small network's gradients, at the large one's moments

To the other ranks it is the large one: as many bytes are exchanged, when its backward would have them. These are zeros,
so that no norm and no average of gradients differs from the small network's. A run is valid where the CPU did the small
network's work within the large one's time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.paced.anatomy import Anatomy
from trainer.paced.executor import StandInExecutor
from trainer.paced.part import LearningPart
from trainer.paced.standin import StandIn, StandInOptimizer
from trainer.paced.stopwatch import Stopwatch


class Learner(StandIn):
    """anatomy: of the network that is stood in for. network: the one that learns; its weights come last, so that their
    gradients are among the first that backward has.
    """

    def __init__(self, anatomy: Anatomy, stopwatch: Stopwatch, network: nn.Module, classes: int) -> None:
        super().__init__(anatomy, stopwatch, classes)
        with torch.no_grad():
            for weight in self.weights:
                weight.zero_()  # a stand-in's gradients are its weights
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().forward(images)
        logits: Tensor = self.network(images)  # evaluation, and statistics that are estimated again
        return logits

    def answer(self, images: Tensor, blank: Tensor) -> Tensor:
        """Backward visits first what forward did last, which is this: its arithmetic is done before anything is due."""
        logits: Tensor = self.network(images)
        return blank + logits


class LearnerExecutor(StandInExecutor):
    """Does the work on gradients, and keeps the time that the GPU would take for it."""

    def do(self, arithmetic: Callable[[], object]) -> None:
        arithmetic()

    def beside(self) -> LearnerExecutor:
        return LearnerExecutor(self.stopwatch, is_beside=True)


class LearnerOptimizer(StandInOptimizer):
    """Updates the network that learns, within the time of the large one's update."""

    def __init__(self, model: Learner | LearningPart, own: torch.optim.Optimizer) -> None:
        super().__init__(model)
        self.own = own

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.own.param_groups

    def step(self) -> None:
        began_s = self.model.stopwatch.clock.now()
        self.own.step()
        self.model.stopwatch.optimise(began_s)
