"""Losses: what a training loop's body may hand over, what all of them are divided by, and what happens if one is not a
finite number.

loss_sum = checked(loss_sum)
factor = Weights(settings, group, counts=True).factor(batch)
report_not_finite(run, step=24, epoch=2, loss=math.nan)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.ranks.agreement import sum_over_ranks
from trainer.shared.errors import TrainError
from trainer.shared.settings import Settings

Weight = Tensor | float

Run = Any
"""A `trainer.training.run.Run`, whose file imports this one."""


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


class Weights:
    """Losses are divided by the samples of the whole batch, or by the sum of what the script gives with each: then
    gradients, which are those of the mean over samples, are scaled once more when all is known.

    group: of all ranks. counts: whether this rank's samples are its own.
    """

    def __init__(self, settings: Settings, group: dist.ProcessGroup, *, counts: bool) -> None:
        self._group, self._counts = group, counts
        averages = settings.fidelity == "local" or settings.strategy == "parameter_average"
        self._is_exact = not averages and settings.fidelity != "compressed"
        self._own: list[Weight | None] = []
        self._are_given: bool | None = None
        """Whether the script gives weights, as all ranks have agreed in the first update."""

    def take(self, weight: Weight | None, *, is_counted: bool) -> None:
        """Of a micro-batch. is_counted: not if its samples are only there to take part. Raises TrainError."""
        expected = self._own[0] is not None if self._own else self._are_given
        if expected is not None and expected != (weight is not None):
            raise TrainError("weight: step(loss_sum, weight=...) is given for some batches only: give it for all")
        if weight is not None:
            if not self._is_exact:
                raise TrainError(
                    "weight: with fidelity local or compressed, and strategy parameter_average, what ranks exchange is "
                    "counted by samples from one update to the next; use strategy ddp and fidelity exact or half"
                )
            weight = _checked_weight(weight)
        self._own.append(weight if is_counted or weight is None else 0.0)

    def factor(self, batch: int) -> Tensor | None:
        """What gradients and losses of an update with so many samples are multiplied by; None if no weights are given.
        Waits for all ranks.
        """
        given = [weight for weight in self._own if weight is not None]
        if self._are_given is None:
            with_weight, without = sum_over_ranks([float(bool(given)), float(len(given) < len(self._own))])
            if with_weight and without:
                raise TrainError("weight: step(loss_sum, weight=...) is given on some ranks only: give it on all")
            self._are_given = with_weight > 0
        self._own = []
        if not self._are_given:
            return None
        on_gpu = dist.get_backend(self._group) == "nccl"
        total = torch.zeros((), dtype=torch.float64, device=torch.device("cuda") if on_gpu else "cpu")
        for weight in given if self._counts else ():
            total += weight.to(total) if isinstance(weight, Tensor) else weight
        dist.all_reduce(total, group=self._group)
        return torch.where(total == 0, 0.0, batch / total)


def _checked_weight(weight: Weight) -> Weight:
    if isinstance(weight, Tensor) and weight.numel() == 1:
        return weight.detach().reshape(())
    if isinstance(weight, (int, float)) and 0 <= weight < float("inf"):
        return weight
    raise TrainError(f"weight: a number of 0 or more is expected, like the tokens of the batch, not {weight!r:.60}")


@torch.no_grad()
def scale(gradients: Iterable[Any], factor: Tensor) -> None:
    """In place. Of fsdp's gradients the piece that this rank has."""
    held = [one.to_local() if hasattr(one, "to_local") else one for one in gradients if one is not None]
    if held:
        # A factor of another type would cost a kernel for each gradient; 16 bits would round it.
        kind = held[0].dtype if held[0].dtype in (torch.float32, torch.float64) else torch.float32
        torch._foreach_mul_(held, factor.to(held[0].device, kind))
