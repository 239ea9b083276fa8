"""Micro-batches under every strategy: their gradients add up to that of the whole share, and one exchange follows."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")
import torch
from torch import nn

from tests.support.gloo_ranks import group_of
from tests.support.sums import UNAVAILABLE
from trainer.compute.timer import CpuTimer
from trainer.shared import STRATEGIES, parse_settings
from trainer.strategies import build_strategy, local_loss

FOR_RANKS = [
    name for name in STRATEGIES if name not in ("none", "dp", "pipeline", "tensor") and name not in UNAVAILABLE
]
SHARES, UPDATES = (7, 4), 3


def trained(rank, case):
    """The weights after a few updates whose parts were cut into so many micro-batches."""
    name, pieces = case
    group = group_of(2)
    if rank > 1:
        return None
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    settings = parse_settings("mnist_lenet", {"strategy": name, "bucket_mib": "0.0001"})
    strategy = build_strategy(settings, model, group, CpuTimer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sent = []
    for update in range(UPDATES):
        generator = torch.Generator().manual_seed(update)
        images = torch.randn(sum(SHARES), 1, 3, 4, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, 3, (sum(SHARES),), generator=generator)
        begin = sum(SHARES[:rank])
        own = slice(begin, begin + SHARES[rank])
        parts = list(zip(images[own].tensor_split(pieces), labels[own].tensor_split(pieces), strict=True))
        optimizer.zero_grad()
        for part in parts[:-1]:
            with strategy.without_sync():
                strategy.accumulate(local_loss(strategy.model, *part), SHARES[rank], sum(SHARES))
        exchange = strategy.backward(local_loss(strategy.model, *parts[-1]), SHARES[rank], sum(SHARES))
        sent.append(len(exchange.collectives))
        optimizer.step()
        strategy.after_update()
    weights = torch.cat([parameter.detach().flatten() for parameter in strategy.whole().parameters()])
    return weights, sent[1:]  # torch cuts the buckets of ddp again after the first update


@pytest.mark.parametrize("name", FOR_RANKS)
def test_micro_batches_make_the_same_update_and_no_further_exchange(gang, name):
    (whole, sent), *_ = gang.run(trained, (name, 1))
    (cut, sent_cut), *_ = gang.run(trained, (name, 3))
    assert (cut - whole).norm() <= 1e-12 * whole.norm()
    assert sent_cut == sent
