"""Losses: what a training loop's body may hand over, and what happens if one is not a finite number.

loss_sum = checked(loss_sum)
report_not_finite(run, step=24, epoch=2, loss=math.nan)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor

from trainer.shared.errors import TrainError

if TYPE_CHECKING:
    from trainer.training.run import Run


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


def report_not_finite(run: Run, step: int, epoch: int, loss: float, of: Literal["loss", "test loss"] = "loss") -> None:
    """Once for each rank. Raises TrainError if the run is to stop then. loss: NaN or infinite, of update `step`."""
    if not run.metrics.mark_not_finite(step, epoch, loss, of):
        return
    words = f"{of} is {loss} in update {step + 1} (epoch {epoch + 1}), rank {run.info.rank} on {run.info.node}"
    if run.settings.not_finite == "stop":
        raise TrainError(f"{words}: the run stops (not_finite=stop)")
    run.console.aside(f"warning: {words}; the run goes on (not_finite=stop ends it)")
