"""An update that is being made, half of it by the training loop's body.

making = Making(update(run, batch, progress, begin))
for part in making.parts():
    making.take(loss_sum)
    making.optimise()
step = making.step()
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from torch import Tensor

from trainer.shared.errors import TrainError
from trainer.training.step_log import Step


class Making:
    """steps: as `trainer.training.update` makes them."""

    def __init__(self, steps: Generator[Any, Any, Step]) -> None:
        self._steps = steps
        self._due: Any = None
        """The micro-batch whose loss comes next; None where it is the optimiser's turn, or all is over."""
        self._step: Step | None = None
        self._go_on(None)

    def parts(self) -> Iterator[Any]:
        """Those whose loss this rank computes. Raises TrainError where the body has not done its part."""
        while self._step is None:
            part = self._due
            if part is None:  # nothing of this update is the body's any more
                self._go_on(None)
                continue
            yield part
            if self._due is part:
                raise TrainError("a batch's loss is missing: the loop's body calls step(loss_sum) for each batch")
            if self._step is None and self._due is None:
                raise TrainError("an update is missing: after backward(loss_sum) the loop's body calls update()")

    def take(self, loss_sum: Tensor) -> None:
        """Of the micro-batch that came last. Raises TrainError for a second one, and for what is no sum."""
        if self._due is None:
            raise TrainError("step was called twice for one batch: add the losses up, and call it with their sum")
        self._go_on(checked(loss_sum))

    def optimise(self) -> None:
        if self._step is None and self._due is None:
            self._go_on(None)

    def step(self) -> Step:
        """When all parts have been taken."""
        assert self._step is not None  # noqa: S101 - for the type checker
        return self._step

    def _go_on(self, value: Any) -> None:
        try:
            self._due = self._steps.send(value)
        except StopIteration as end:
            self._step, self._due = end.value, None


def checked(loss_sum: Tensor) -> Tensor:
    """As it is. Raises TrainError where the network cannot learn from it, or would learn something else."""
    wanted = "step takes the sum of a batch's losses as a tensor with one number"
    if not isinstance(loss_sum, Tensor):
        raise TrainError(f"{wanted}, not a {type(loss_sum).__name__}")
    if loss_sum.dim():
        raise TrainError(f'{wanted}, not {tuple(loss_sum.shape)}: reduction="sum"')
    if not loss_sum.requires_grad:
        raise TrainError(f"{wanted}, which depends on the network's weights: this one was detached, or made in no_grad")
    if is_mean(loss_sum):
        raise TrainError(
            f'{wanted}, and this is their mean: reduction="sum". A mean would count samples of small parts more'
        )
    return loss_sum


def is_mean(loss: Tensor) -> bool:
    """Whether its last operation was one: `.mean()`, or a loss of torch's with reduction="mean" (its number is 1)."""
    last = loss.grad_fn
    return type(last).__name__.startswith("MeanBackward") or getattr(last, "_saved_reduction", None) == 1
