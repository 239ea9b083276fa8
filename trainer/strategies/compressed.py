"""`fidelity=compressed`: exact at first, while gradients change fast, then through PowerSGD.

strategy = Compressed(model, wire, timer, brake, exact, rank=2, after=100)
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.models import trainable
from trainer.strategies.after_backward import AfterBackward
from trainer.strategies.power_sgd import PowerSgd
from trainer.strategies.seam import Base, Exchange, Strategy, first_rank
from trainer.strategies.wire import Wire
from trainer.timing import Brake, Timer

TOGETHER = 500
"""Updates after which all ranks take rank 0's weights: so seldom that they add less to an update than one more exchange
of P would, which would leave the rounding of P Q^T in place besides.
"""


class Compressed(Base):
    """exact: the strategy of the first `after` updates; None where there are none.

    All of a gradient is compressed at once, after backward: so little is left to send that there is nothing to hide.
    """

    def __init__(
        self, model: nn.Module, wire: Wire, timer: Timer, brake: Brake, exact: Strategy | None, rank: int, after: int
    ) -> None:
        self.network = model
        self.wire = wire
        self.exact = exact
        self.power_sgd = PowerSgd(trainable(model), rank)
        self.thin = AfterBackward(model, wire, timer, brake, self.power_sgd)
        self.after = after
        self.updates = torch.zeros(1)

    @property
    def model(self) -> nn.Module:
        return self._current.model

    @property
    def _current(self) -> Strategy:
        if self.updates >= self.after:
            self.exact = None  # with its buckets, which take as much memory as all weights
        return self.exact or self.thin

    def backward(self, loss_sum: Tensor, samples: int, batch: int) -> Exchange:
        return self._current.backward(loss_sum, samples, batch)

    def without_sync(self) -> AbstractContextManager[object]:
        return self._current.without_sync()

    def after_update(self) -> None:
        self.updates += 1
        if self.updates > self.after and self.updates % TOGETHER == 0:
            self._share_rank_0s(self.network)

    def own_state(self) -> dict[str, Tensor]:
        return {"updates": self.updates, **self.power_sgd.state()}

    def whole(self) -> nn.Module:
        """A copy with rank 0's weights: a look brings no ranks together that would have stayed apart without it."""
        network = copy.deepcopy(self.network)
        self._share_rank_0s(network)
        return network

    def _share_rank_0s(self, network: nn.Module) -> None:
        """Devices of different kinds orthogonalise P and round P Q^T differently, and nothing else would bring the
        ranks together again.
        """
        for parameter in trainable(network):
            dist.broadcast(parameter.detach(), src=first_rank(self.wire.group), group=self.wire.group)
