"""A callback for Lightning: `Trainer(callbacks=[OrchCallback()])`. Validations log `val_acc` and `val_loss`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainer.integrations import records
from trainer.integrations.records import Batches, Records

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities.data import extract_batch_size
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
except ModuleNotFoundError:  # under its older name
    from pytorch_lightning import Callback
    from pytorch_lightning.utilities.data import extract_batch_size
    from pytorch_lightning.utilities.exceptions import MisconfigurationException


def samples_in(batch: Any) -> int | None:
    """Lightning's count; None without tensors."""
    try:
        return int(extract_batch_size(batch))
    except MisconfigurationException:
        return None


class OrchCallback(Callback):
    """accuracy, loss: unusual names in validations. samples: counts a batch that Lightning cannot count."""

    def __init__(
        self,
        accuracy: str | None = None,
        loss: str | None = None,
        samples: Callable[[Any], int | None] = samples_in,
    ) -> None:
        self._accuracy, self._loss, self._samples = accuracy, loss, samples
        self._records, self._batches = Records(), Batches()
        self._validation_began_s = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not self._records.is_on:
            return
        steps = trainer.estimated_stepping_batches
        known = int(steps) if steps > 0 and math.isfinite(steps) else None
        self._records.begin(trainer.global_step, known, counts_samples=True)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._records.begin_epoch()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._records.is_on:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None and pl_module.automatic_optimization and trainer.accumulate_grad_batches > 1:
            loss = loss * trainer.accumulate_grad_batches  # Lightning has divided it
        self._batches.add(self._samples(batch), loss)
        if self._records.has_untold:
            told, self._batches = self._batches, Batches()
            self._records.tell(epoch=trainer.current_epoch, samples=told.samples, loss=told.loss)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._records.end_epoch(trainer.current_epoch)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._validation_began_s = time.monotonic()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.sanity_checking:
            return
        values = trainer.callback_metrics
        self._records.evaluated(
            trainer.current_epoch,
            records.found(values, self._accuracy, records.ACCURACY),
            records.found(values, self._loss, records.LOSS),
            time.monotonic() - self._validation_began_s,
        )
