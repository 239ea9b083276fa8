"""The batches that one update is made of: their samples, and the mean loss over all of them. Pure.

batches = Batches()
batches.add(16, 0.7); batches.add(8, 0.4)
batches.samples, batches.loss      24, 0.6
"""

from __future__ import annotations

from typing import Any


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
