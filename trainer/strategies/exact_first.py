"""Exact at first, while weights change fast, and a less exact strategy from then on: `compress_after`, `local_after`.

strategy = ExactFirst(exact, Compressed(...), after=100)
strategy = ExactFirst(exact, ParameterAverage(...), after=100)       post-local SGD (Lin et al. 2020)
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from trainer.strategies.base import Exchange, Strategy, WholeNetwork


class ExactFirst(WholeNetwork):
    """exact: the strategy of the first `after` updates. later: that of all others."""

    def __init__(self, exact: Strategy, later: Strategy, after: int) -> None:
        self.exact: Strategy | None = exact
        self.later = later
        self.after = after
        self.updates = torch.zeros(1)

    @property
    def _current(self) -> Strategy:
        if self.updates >= self.after:
            self.exact = None  # with its buckets, which take as much memory as all weights
        return self.exact or self.later

    @property
    def model(self) -> nn.Module:
        return self._current.model

    @property
    def keeps_statistics(self) -> bool:
        return self._current.keeps_statistics

    @property
    def updates_alone(self) -> bool:
        return self._current.updates_alone

    @property
    def meets_in_forward(self) -> bool:
        return self._current.meets_in_forward

    def no_loss(self) -> Tensor:
        return self._current.no_loss()

    def without_sync(self) -> AbstractContextManager[object]:
        return self._current.without_sync()

    def accumulate(self, loss_sum: Tensor, samples: int, batch: int) -> None:
        self._current.accumulate(loss_sum, samples, batch)

    def backward_alone(self, loss_sum: Tensor, samples: int) -> None:
        self._current.backward_alone(loss_sum, samples)

    def backward(self, loss_sum: Tensor, samples: int, batch: int) -> Exchange:
        return self._current.backward(loss_sum, samples, batch)

    def after_update(self) -> None:
        self._current.after_update()
        self.updates += 1

    def settle(self) -> None:
        self._current.settle()

    def own_state(self) -> dict[str, Tensor]:
        return {"updates.first": self.updates, **self.later.own_state()}

    def expect(self, kept: Mapping[str, Tensor]) -> None:
        if "updates.first" in kept:
            self.updates.fill_(kept["updates.first"].sum())
        if self.updates >= self.after:  # else the exact updates begin with the mean, which all have
            self.later.expect(kept)

    def regroup(self, part: float) -> None:
        self.later.regroup(part)

    def whole(self) -> nn.Module:
        return self._current.whole()
