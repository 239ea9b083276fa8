"""How far a run has come: what a checkpoint holds beside the network and its optimiser."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.compute.running_statistics import REMEMBERED
from trainer.training.random_state import RandomState, set_random_state


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
