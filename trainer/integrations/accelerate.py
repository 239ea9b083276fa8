"""A tracker for Accelerate, which records logged values.

accelerator = Accelerator(log_with=OrchTracker())
accelerator.log({"train_loss": accelerator.reduce(loss, "mean"), "epoch": epoch})     # after optimizer.step()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.tracking import GeneralTracker

from trainer.integrations import records
from trainer.integrations.records import Records, finite


class OrchTracker(GeneralTracker):
    """accuracy, eval_loss, loss: unusual names of the logged values."""

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
        """step is ignored: scripts count from 0 or 1."""
        if not self._records.is_on:
            return
        number = finite(values.get("epoch"))
        epoch = None if number is None else int(number)
        loss = records.found(values, self._loss, records.TRAINING_LOSS)
        if loss is not None:
            self._records.tell(epoch=epoch, loss=loss)
        accuracy = records.found(values, self._accuracy, records.ACCURACY)
        self._records.evaluated(epoch, accuracy, records.found(values, self._eval_loss, records.LOSS), None)
