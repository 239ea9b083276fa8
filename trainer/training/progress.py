"""A run's position and random generators."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.compute.batch_norm_kernels import REMEMBERED


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
