"""How far a run has come: what a checkpoint holds beside the network and its optimiser."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.compute.batch_norm_kernels import REMEMBERED

# The generators that a rank draws from: `state = random_state()`, `set_random_state(state)`.


class RandomState(NamedTuple):
    torch: Tensor
    """Bytes of torch's generator of the CPU, then of the GPU if there is one."""
    others: dict[str, Any]
    """Of the modules `random` and, if it is loaded, `numpy.random`: their global states, in plain values."""


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
    """How far a run has come: what changes from update to update beside the network and its optimiser."""

    epoch: int = 0
    """The next update's epoch."""
    step: int = 0
    """The next update's number within its epoch."""
    loss_sum: float = 0.0
    """The sum over this rank's samples of this epoch so far."""
    samples: int = 0
    """This rank's samples of this epoch so far."""
    recent: float = 0.0
    """This rank's samples, those of older updates counted less, as BatchNorm's running statistics count them."""
    random: RandomState | None = None
    """The generators' states, to be restored once the epoch's batches have been opened."""

    def advance(self, samples: int) -> None:
        """After an update with so many samples of this rank. Its loss follows when the device has come to it."""
        self.step += 1
        self.samples += samples
        self.recent = REMEMBERED * self.recent + samples

    def begin_epoch(self) -> None:
        self.epoch, self.step, self.loss_sum, self.samples = self.epoch + 1, 0, 0.0, 0

    def restore_random(self) -> None:
        """To open an epoch's batches draws from the generator, and that has been done before."""
        if self.random is not None:
            set_random_state(self.random)
            self.random = None
