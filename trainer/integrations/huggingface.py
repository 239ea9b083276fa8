"""A callback for Hugging Face's Trainer: `Trainer(..., callbacks=[OrchCallback()])`.

The loss is the value that the Trainer logs every `logging_steps` updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_pt_utils import find_batch_size

from trainer.integrations import records
from trainer.integrations.records import Records


class OrchCallback(TrainerCallback):
    """accuracy: its name in the metrics, if not `eval_accuracy`."""

    def __init__(self, accuracy: str | None = None) -> None:
        self._accuracy = accuracy
        self._records = Records()
        self._epoch = 0
        self._samples = 0
        """Since the last update."""
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._records.begin(state.global_step, state.max_steps or None, counts_samples=True)
        if self._records.is_on and self._hook is None:
            self._hook = named["model"].register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model: Any, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if model.training:
            main = named.get(getattr(model, "main_input_name", "input_ids"))
            self._samples += find_batch_size([main, named, inputs]) or 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._epoch = int(state.epoch or 0)
        self._records.begin_epoch()

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if self._records.has_untold:
            self._records.tell(epoch=self._epoch, samples=self._samples)
            self._samples = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
        self._records.tell(loss=(logs or {}).get("loss"))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._records.end_epoch(self._epoch)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **named: Any) -> None:
        values = metrics or {}
        accuracy = records.found(values, self._accuracy, records.ACCURACY)
        self._records.evaluated(self._epoch, accuracy, values.get("eval_loss"), values.get("eval_runtime"))

    def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
