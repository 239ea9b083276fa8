"""What a training loop's body hands over of a micro-batch: `loss_sum = checked(loss_sum)`."""

from __future__ import annotations

from torch import Tensor

from trainer.shared.errors import TrainError


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
