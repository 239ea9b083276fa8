"""The records of this rank's steps, for a framework's callback to add to.

    records = Records()
    records.begin(first=0, steps=938, counts_samples=True)
    if records.has_untold:
        records.tell(epoch=0, samples=32, loss=tensor)
    records.evaluated(epoch=0, accuracy=0.97, loss=None, seconds=1.2)

The records are written by the watch that `orch run` loads into a script's process; `orchestrator/remote/step_watch.py`
has it. Where there is none, every call does nothing.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

WATCH = "orch_remote.step_watch"
"""The module whose `current` is the watch of this process."""


class Records:
    def __init__(self) -> None:
        self._epoch_began_s: float | None = None
        self._paused_s = 0.0
        self._updates = 0

    @property
    def _watch(self) -> Any:
        watch = getattr(sys.modules.get(WATCH), "current", None)
        return watch if watch is not None and watch.is_on else None

    @property
    def is_on(self) -> bool:
        """Are this rank's steps measured?"""
        return self._watch is not None

    @property
    def has_untold(self) -> bool:
        """Has an optimiser taken a step that nothing was told of?"""
        watch = self._watch
        return watch is not None and watch.has_untold

    def begin(self, first: int, steps: int | None, *, counts_samples: bool) -> None:
        """Before the first step. first: the number of updates that were made before, where a run is resumed; steps: of
        the whole run; counts_samples: whether those of each step will be told.
        """
        if watch := self._watch:
            watch.expects(first, steps, counts_samples)

    def tell(self, *, epoch: int | None = None, samples: int | None = None, loss: Any = None) -> None:
        """Of the newest step. samples: this rank's; loss: the mean over them, a number or a tensor of one. What is None
        is not known, and stays as it is.
        """
        watch = self._watch
        given = {"epoch": epoch, "samples": samples, "loss": single(loss) if watch else None}
        facts = {name: fact for name, fact in given.items() if fact is not None}
        if watch and facts:
            self._updates += watch.has_untold
            watch.tells(facts)

    def evaluated(self, epoch: int | None, accuracy: Any, loss: Any, seconds: float | None) -> None:
        """After the newest step. accuracy: 0..1; loss: the mean over the test data. Without both it is not recorded."""
        self._paused_s += seconds or 0.0
        if (watch := self._watch) is None:
            return
        values = {"accuracy": finite(accuracy), "loss": finite(loss)}
        if set(values.values()) != {None} and (step := watch.last_step()) is not None:
            watch.writes("eval", {"epoch": epoch, "step": step, **values, "eval_s": seconds})

    def begin_epoch(self) -> None:
        self._epoch_began_s, self._paused_s, self._updates = time.monotonic(), 0.0, 0

    def end_epoch(self, epoch: int) -> None:
        """Its time is that of its updates, evaluations left out."""
        if (watch := self._watch) and self._epoch_began_s is not None and watch.last_step() is not None:
            spent_s = time.monotonic() - self._epoch_began_s - self._paused_s
            watch.writes("epoch", {"epoch": epoch, "steps": self._updates, "epoch_s": max(0.0, spent_s)})


def single(value: Any) -> Any:
    """A float, or of a tensor on a GPU the copy that is under way to the host: nobody waits for the device here.
    None for what is no single number.
    """
    if getattr(value, "is_cuda", False) and value.numel() == 1:
        return value.detach().to("cpu", non_blocking=True)
    return _number(value)


def finite(value: Any) -> float | None:
    """Waits for the device. None for what is no single finite number."""
    number = _number(value)
    return number if number is not None and math.isfinite(number) else None


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


# The batches that one update is made of: their samples, and the mean loss over all of them. Pure.
#
# batches = Batches()
# batches.add(16, 0.7); batches.add(8, 0.4)
# batches.samples, batches.loss      24, 0.6


class Batches:
    def __init__(self) -> None:
        self._batches: list[tuple[int | None, Any]] = []

    def add(self, samples: int | None, loss: Any) -> None:
        """loss: the mean over the samples, a number or a tensor; None each where it is not known."""
        self._batches.append((samples, loss))

    @property
    def samples(self) -> int | None:
        """None where those of one batch are not known."""
        counts = [samples for samples, _ in self._batches if samples is not None]
        return sum(counts) if 0 < len(self._batches) == len(counts) else None

    @property
    def loss(self) -> Any:
        """None where that of one batch is not known. Batches count alike where their samples are not known."""
        losses = [loss for _, loss in self._batches]
        if not losses or any(loss is None for loss in losses):
            return None
        if len(losses) == 1:
            return losses[0]  # on a GPU as it is: arithmetic would cost it a kernel
        weights = [samples or 0 for samples, _ in self._batches] if self.samples else [1] * len(losses)
        return sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)


# Which of the values that a script logs is its accuracy, which its loss, by the names that people give them. Pure.
#
# found({"val_loss": 0.3, "val_acc": 0.9}, None, ACCURACY)      0.9
# found({"val_loss": 0.3, "val/f1": 0.8}, "val/f1", ACCURACY)   0.8

_EVALUATED = r"(?:val|valid|validation|eval|evaluation|test)[/_.]"
ACCURACY = re.compile(rf"{_EVALUATED}(?:accuracy|acc)")
LOSS = re.compile(rf"{_EVALUATED}loss")
"""Both of an evaluation: without its prefix, an accuracy may be that of a batch that was trained on."""
TRAINING_LOSS = re.compile(r"(?:(?:train|training)[/_.])?loss")


def found(values: Mapping[str, Any], name: str | None, pattern: re.Pattern[str]) -> Any:
    """The value of this name; without one, the first whose name is of the pattern. None where there is none."""
    if name is not None:
        return values.get(name)
    return next((value for key, value in values.items() if pattern.fullmatch(str(key).lower())), None)
