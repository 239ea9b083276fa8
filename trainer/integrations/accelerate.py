"""For Accelerate: a tracker, which takes what the script logs.

    from trainer.integrations.accelerate import OrchTracker
    accelerator = Accelerator(log_with=OrchTracker())
    accelerator.init_trackers("mine")
    accelerator.log({"train_loss": accelerator.reduce(loss, "mean"), "epoch": epoch})     # after optimizer.step()
    accelerator.log({"eval_accuracy": correct / total, "eval_loss": mean})

A loss that is logged is that of the update before it. Accelerate logs on its main process alone, so the loss of all
ranks is what the script has put together there. Samples are those that each rank's DataLoader gave: Accelerate knows no
others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.tracking import GeneralTracker

from trainer.integrations import records
from trainer.integrations.records import Records, finite


class OrchTracker(GeneralTracker):
    """accuracy, eval_loss, loss: the names under which the script logs the evaluation's and the training's, where they
    are others than the usual ones.
    """

    name = "orch"
    requires_logging_directory = False

    def __init__(self, accuracy: str | None = None, eval_loss: str | None = None, loss: str | None = None) -> None:
        super().__init__()
        self._accuracy, self._eval_loss, self._loss = accuracy, eval_loss, loss
        self._records = Records()

    @property
    def tracker(self) -> Records:
        return self._records

    def start(self) -> None:
        self._records.begin(0, None, counts_samples=False)

    def log(self, values: Mapping[str, Any], step: int | None = None, **named: Any) -> None:
        """step is not used: scripts count from 0 or from 1, and the newest update is known."""
        if not self._records.is_on:
            return
        number = finite(values.get("epoch"))
        epoch = None if number is None else int(number)
        loss = records.found(values, self._loss, records.TRAINING_LOSS)
        if loss is not None:
            self._records.tell(epoch=epoch, loss=loss)
        accuracy = records.found(values, self._accuracy, records.ACCURACY)
        self._records.evaluated(epoch, accuracy, records.found(values, self._eval_loss, records.LOSS), None)
