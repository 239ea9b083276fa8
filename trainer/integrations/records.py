"""Adds a framework's facts to the records of `orch run`'s watch (`orchestrator/remote/step_watch.py`)."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

WATCH = "orch_remote.step_watch"
"""Its `current` is this process's watch."""


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
        """Whether this rank's steps are measured."""
        return self._watch is not None

    @property
    def has_untold(self) -> bool:
        watch = self._watch
        return watch is not None and watch.has_untold

    def begin(self, first: int, steps: int | None, *, counts_samples: bool) -> None:
        """first: updates before a resumed run. counts_samples: `tell` will have them."""
        if watch := self._watch:
            watch.expects(first, steps, counts_samples)

    def tell(self, *, epoch: int | None = None, samples: int | None = None, loss: Any = None) -> None:
        """Facts of the newest step; None: unknown. loss: the mean."""
        watch = self._watch
        given = {"epoch": epoch, "samples": samples, "loss": single(loss) if watch else None}
        facts = {name: fact for name, fact in given.items() if fact is not None}
        if watch and facts:
            self._updates += watch.has_untold
            watch.tells(facts)

    def evaluated(self, epoch: int | None, accuracy: Any, loss: Any, seconds: float | None) -> None:
        """accuracy: 0..1. Recorded if one value is known."""
        self._paused_s += seconds or 0.0
        if (watch := self._watch) is None:
            return
        values = {"accuracy": finite(accuracy), "loss": finite(loss)}
        if set(values.values()) != {None} and (step := watch.last_step()) is not None:
            watch.writes("eval", {"epoch": epoch, "step": step, **values, "eval_s": seconds})

    def begin_epoch(self) -> None:
        self._epoch_began_s, self._paused_s, self._updates = time.monotonic(), 0.0, 0

    def end_epoch(self, epoch: int) -> None:
        """Without the time of evaluations."""
        if (watch := self._watch) and self._epoch_began_s is not None and watch.last_step() is not None:
            spent_s = time.monotonic() - self._epoch_began_s - self._paused_s
            watch.writes("epoch", {"epoch": epoch, "steps": self._updates, "epoch_s": max(0.0, spent_s)})


def single(value: Any) -> Any:
    """A float, or on a GPU a copy in transfer to the host, or None."""
    if getattr(value, "is_cuda", False) and value.numel() == 1:
        return value.detach().to("cpu", non_blocking=True)
    return _number(value)


def finite(value: Any) -> float | None:
    """Waits for the device. None unless a finite number."""
    number = _number(value)
    return number if number is not None and math.isfinite(number) else None


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


class Batches:
    def __init__(self) -> None:
        self._batches: list[tuple[int | None, Any]] = []

    def add(self, samples: int | None, loss: Any) -> None:
        """loss: the mean; None: unknown."""
        self._batches.append((samples, loss))

    @property
    def samples(self) -> int | None:
        counts = [samples for samples, _ in self._batches if samples is not None]
        return sum(counts) if 0 < len(self._batches) == len(counts) else None

    @property
    def loss(self) -> Any:
        """By samples if known. None if unknown for a batch."""
        losses = [loss for _, loss in self._batches]
        if not losses or any(loss is None for loss in losses):
            return None
        if len(losses) == 1:
            return losses[0]  # unchanged: arithmetic would cost a GPU kernel
        weights = [samples or 0 for samples, _ in self._batches] if self.samples else [1] * len(losses)
        return sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)


_EVALUATED = r"(?:val|valid|validation|eval|evaluation|test)[/_.]"
ACCURACY = re.compile(rf"{_EVALUATED}(?:accuracy|acc)")
LOSS = re.compile(rf"{_EVALUATED}loss")
"""The prefix distinguishes evaluations from training batches."""
TRAINING_LOSS = re.compile(r"(?:(?:train|training)[/_.])?loss")


def found(values: Mapping[str, Any], name: str | None, pattern: re.Pattern[str]) -> Any:
    """The value of this name, or the first whose name matches."""
    if name is not None:
        return values.get(name)
    return next((value for key, value in values.items() if pattern.fullmatch(str(key).lower())), None)
