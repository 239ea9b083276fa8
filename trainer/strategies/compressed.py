"""`fidelity=compressed`: gradients travel through PowerSGD.

strategy = Compressed(model, sums, timer, brake, rank=2)
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.compute.brake import Brake
from trainer.compute.models import trainable
from trainer.compute.timer import Timer
from trainer.strategies.after_backward import AfterBackward
from trainer.strategies.base import first_rank
from trainer.strategies.gradient_sum import GradientSum
from trainer.strategies.power_sgd import PowerSgd

TOGETHER = 500
"""Updates after which all ranks take rank 0's weights: so seldom that they add less to an update than one more exchange
of P would, which would leave the rounding of P Q^T in place besides.
"""


class Compressed(AfterBackward):
    """All of a gradient at once, after backward: so little is left to send that there is nothing to hide."""

    def __init__(self, model: nn.Module, sums: GradientSum, timer: Timer, brake: Brake, rank: int) -> None:
        self.power_sgd = PowerSgd(trainable(model), rank)
        super().__init__(model, sums, timer, brake, self.power_sgd)
        self.updates = torch.zeros(1)

    def after_update(self) -> None:
        self.updates += 1
        if self.updates % TOGETHER == 0:
            self._share_rank_0s(self.model)

    def own_state(self) -> dict[str, Tensor]:
        return {"updates.compressed": self.updates, **self.power_sgd.state()}

    def whole(self) -> nn.Module:
        """A copy with rank 0's weights: a look brings no ranks together that would have stayed apart without it."""
        network = copy.deepcopy(self.model)
        self._share_rank_0s(network)
        return network

    def _share_rank_0s(self, network: nn.Module) -> None:
        """Devices of different kinds orthogonalise P and round P Q^T differently, and nothing else would bring the
        ranks together again.
        """
        for parameter in trainable(network):
            dist.broadcast(parameter.detach(), src=first_rank(self.sums.group), group=self.sums.group)
