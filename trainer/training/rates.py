"""Learning rates during a run, clipping of gradients, and the run's position and random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.compute.batch_norm_kernels import REMEMBERED
from trainer.data.sample_stream import SampleStream
from trainer.shared.learning_rate import Schedule, parse_lr_steps
from trainer.shared.settings import Settings


class Rates:
    """Keeps the proportions of groups. scale: of all rates."""

    # Constant rates are never set, because a script may have its own schedule.

    def __init__(self, optimizer: Any, schedule: Schedule, scale: float = 1.0) -> None:
        self.schedule = schedule
        self._groups = optimizer.param_groups
        for group in self._groups if scale != 1 else ():
            group["lr"] = group["lr"] * scale
        self._full = [group["lr"] for group in self._groups]

    def before_update(self, stream: SampleStream, progress: Progress) -> None:
        if not self.schedule.is_constant:
            self.set(middle_of_update(stream, progress))

    def set(self, seen: float) -> None:
        """seen: see `Schedule.factor`."""
        factor = self.schedule.factor(seen)
        for group, full in zip(self._groups, self._full, strict=True):
            group["lr"] = full * factor


def rates_of(settings: Settings, optimizer: Any, stream: SampleStream) -> Rates:
    """Over all epochs, even if `steps` ends the run early."""
    schedule = Schedule(
        settings.lr_schedule,
        epoch_samples=stream.size,
        run_samples=settings.epochs * stream.size,
        warmup_epochs=settings.lr_warmup,
        steps=parse_lr_steps(settings.lr_steps),
        step_factor=settings.lr_factor,
    )
    # Linear scaling: k times the samples per update, k times the rate (Goyal et al. 2017, section 2.1).
    return Rates(optimizer, schedule, scale=settings.batch / settings.lr_batch if settings.lr_batch else 1.0)


def samples_before(stream: SampleStream, epoch: int, step: int) -> int:
    return epoch * stream.size + min(step * stream.batch, stream.size)


def middle_of_update(stream: SampleStream, progress: Progress) -> float:
    return samples_before(stream, progress.epoch, progress.step) + stream.batch_at(progress.step) / 2


class Clipping:
    """Limits the norm of the whole network's gradient, however it is cut (Pascanu et al. 2013, algorithm 1).

    counted: names of weights whose squares count on this rank; None: all. group: ranks whose squares are summed.
    """

    def __init__(
        self, model: nn.Module, limit: float, counted: Collection[str] | None, group: dist.ProcessGroup | None
    ) -> None:
        self.model, self.limit, self.group = model, limit, group
        self.counted = {name for name, _ in model.named_parameters()} if counted is None else set(counted)

    def __call__(self) -> None:
        """Scales .grad in place."""
        weights = self.model.named_parameters()
        gradients = {name: _held(weight.grad) for name, weight in weights if weight.grad is not None}
        device = next(self.model.parameters()).device
        counted = [gradient for name, gradient in gradients.items() if name in self.counted and gradient.numel()]
        norms = [torch.zeros((), device=device), *(torch._foreach_norm(counted) if counted else ())]
        squares = torch.stack(norms).double().square().sum()  # a cast of each would be a launch per weight
        if self.group is not None:
            squares = squares.to(device if dist.get_backend(self.group) == "nccl" else "cpu")
            dist.all_reduce(squares, group=self.group)
        factor = (self.limit / (squares.sqrt() + 1e-6)).clamp(max=1.0).to(device)
        if gradients:
            torch._foreach_mul_(list(gradients.values()), factor)


def _held(gradient: Any) -> Tensor:
    """With fsdp this rank's piece."""
    held: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return held


# A run's position and random generators.


class RandomState(NamedTuple):
    torch: Tensor
    """torch's CPU generator, then the GPU's."""
    others: dict[str, Any]
    """Global states of `random` and, if loaded, `numpy.random`."""


def random_state() -> RandomState:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    others: dict[str, Any] = {"random": random.getstate()}
    if numpy := sys.modules.get("numpy"):
        name, keys, *rest = numpy.random.get_state()
        others["numpy"] = (name, keys.tolist(), *rest)
    return RandomState(torch.cat(states), others)


def set_random_state(state: RandomState) -> None:
    own = torch.get_rng_state().numel()
    torch.set_rng_state(state.torch[:own].clone())
    if state.torch.numel() > own and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state.torch[own:].clone())
    if "random" in state.others:
        random.setstate(state.others["random"])
    if "numpy" in state.others and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(state.others["numpy"])


@dataclass
class Progress:
    epoch: int = 0
    """The next update's."""
    step: int = 0
    """The next update's, in its epoch."""
    loss_sum: float = 0.0
    """This rank's, in this epoch."""
    samples: int = 0
    """This rank's, in this epoch."""
    recent: float = 0.0
    """A decaying sum, like BatchNorm's running statistics."""
    random: RandomState | None = None
    """Restored after the epoch's batches are opened."""

    def advance(self, samples: int) -> None:
        """samples: of this rank. The loss follows later."""
        self.step += 1
        self.samples += samples
        self.recent = REMEMBERED * self.recent + samples

    def begin_epoch(self) -> None:
        self.epoch, self.step, self.loss_sum, self.samples = self.epoch + 1, 0, 0.0, 0

    def restore_random(self) -> None:
        # Opening an epoch's batches draws from the generator, which the interrupted run had done already.
        if self.random is not None:
            set_random_state(self.random)
            self.random = None
