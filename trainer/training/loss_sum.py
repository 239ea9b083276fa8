"""Refuses faulty losses of a script, applies the weights it gives its batches, and reports NaN or infinity."""

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
"""A `trainer.training.run.Run`; that module imports this one."""


def checked(loss_sum: Tensor) -> Tensor:
    """Raises TrainError unless the network can learn from this sum."""
    wanted = "step expects the sum of a batch's losses as a tensor with one number"
    if not isinstance(loss_sum, Tensor):
        raise TrainError(f"{wanted}, not a {type(loss_sum).__name__}")
    if loss_sum.dim():
        raise TrainError(f'{wanted}, not {tuple(loss_sum.shape)}: reduction="sum"')
    if not loss_sum.requires_grad:
        raise TrainError(
            f"{wanted}, which depends on the network's weights: this tensor was detached, or made in no_grad"
        )
    if is_mean(loss_sum):
        raise TrainError(
            f'{wanted}, but this is their mean: use reduction="sum". A mean counts samples of small parts more'
        )
    return loss_sum


def is_mean(loss: Tensor) -> bool:
    """Whether `.mean()`, or a torch loss with reduction="mean" (1), was last."""
    last = loss.grad_fn
    return type(last).__name__.startswith("MeanBackward") or getattr(last, "_saved_reduction", None) == 1


def report_not_finite(run: Run, step: int, epoch: int, loss: float, of: Literal["loss", "test loss"] = "loss") -> None:
    """Once per rank. Raises TrainError with not_finite=stop."""
    if not run.metrics.mark_not_finite(step, epoch, loss, of):
        return
    words = f"{of} is {loss} in update {step + 1} (epoch {epoch + 1}), rank {run.info.rank} on {run.info.node}"
    if run.settings.not_finite == "stop":
        raise TrainError(f"{words}: the run stops (not_finite=stop)")
    run.console.aside(f"warning: {words}; the run goes on (not_finite=stop ends it)")


class Weights:
    """Divides losses by the samples of the whole batch, or by the script's weights.

    counts: whether this rank's samples count.
    """

    # Gradients are computed for the mean over samples, and scaled when all weights are known.

    def __init__(self, settings: Settings, group: dist.ProcessGroup, *, counts: bool) -> None:
        self._group, self._counts = group, counts
        averages = settings.fidelity == "local" or settings.strategy == "parameter_average"
        self._is_exact = not averages and settings.fidelity != "compressed"
        self._own: list[Weight | None] = []
        self._are_given: bool | None = None
        """Agreed on in the first update."""

    def take(self, weight: Weight | None, *, is_counted: bool) -> None:
        """is_counted: False if samples only take part. Raises TrainError."""
        expected = self._own[0] is not None if self._own else self._are_given
        if expected is not None and expected != (weight is not None):
            raise TrainError("weight: step(loss_sum, weight=...) is given for some batches only: give it for all")
        if weight is not None:
            if not self._is_exact:
                raise TrainError(
                    "weight: with fidelity local or compressed, and strategy parameter_average, ranks weigh exchanges "
                    "by samples over several updates;  use strategy ddp and fidelity exact or half"
                )
            weight = _checked_weight(weight)
        self._own.append(weight if is_counted or weight is None else 0.0)

    def factor(self, batch: int) -> Tensor | None:
        """For an update's gradients and losses; None without weights. A collective call."""
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
    """In place. With fsdp this rank's piece."""
    held = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in gradients if grad is not None]
    if held:
        # Another type would cost a kernel per gradient; 16 bits would round the factor.
        kind = held[0].dtype if held[0].dtype in (torch.float32, torch.float64) else torch.float32
        torch._foreach_mul_(held, factor.to(held[0].device, kind))
