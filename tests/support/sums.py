"""Training by every way to synchronise, and in one process with the whole batch, over real Gloo."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from tests.support.gloo_ranks import Gang, group_of
from trainer.compute.timer import CpuTimer
from trainer.data import SampleStream
from trainer.shared import AFTER_BACKWARD, parse_settings
from trainer.strategies import after_backward, build_strategy, fsdp, horovod, local_loss, single, without_effect

NEWEST_FSDP = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)
HAS_HOROVOD = importlib.util.find_spec("horovod") is not None
UNAVAILABLE = {*(() if NEWEST_FSDP else ("fsdp",)), *(() if HAS_HOROVOD else ("horovod",))}
"""Strategies for which this torch is too old, or whose package is missing."""
GRADIENTS = tuple(name for name in ("ddp", *AFTER_BACKWARD, "fsdp", "horovod") if name not in UNAVAILABLE)
UPDATES = 10
TENTH = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}
PLAIN = {"lr": 0.1}


@dataclass(frozen=True)
class Case:
    """shares: of a full batch, one a rank. last: samples of the short batch that ends each epoch of `steps` updates.
    weight: False leaves out what makes unequal ranks count right. asked: further settings. nodes: of each rank.
    """

    shares: tuple[int, ...]
    last: int = 0
    steps: int = 4
    seed: int = 0
    channels: int = 2
    side: int = 4
    dtype: str = "float64"
    batch_norm: bool = False
    strategies: tuple[str, ...] = GRADIENTS
    optimizer: Any = None
    local_steps: int = 1
    weight: bool = True
    asked: tuple[tuple[str, str], ...] = ()
    nodes: tuple[str, ...] = ()

    @property
    def stream(self) -> SampleStream:
        batch = sum(self.shares)
        return SampleStream(batch * (self.steps - 1) + (self.last or batch), batch, self.shares, self.seed)


def network(case: Case, seed: int) -> nn.Module:
    """Every rank begins with weights and buffers of its own: only rank 0's may count."""
    torch.manual_seed(seed)
    features = (case.side - 1) ** 2 * 3
    inner: list[nn.Module] = [
        nn.Conv2d(case.channels, 3, 2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(features, 5),
        nn.Tanh(),
    ]
    if case.batch_norm:
        inner.insert(1, nn.BatchNorm2d(3))
        inner.insert(5, nn.BatchNorm1d(5, momentum=None))
        inner[1].running_mean.normal_()
    return nn.Sequential(nn.Sequential(*inner), nn.Linear(5, 3)).to(getattr(torch, case.dtype))


def data_of(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.stream.size, case.channels, case.side, case.side)
    images = torch.randn(shape, generator=generator, dtype=torch.float64)
    return images.to(getattr(torch, case.dtype)), torch.randint(0, 3, (case.stream.size,), generator=generator)


def settings_for(case: Case, name: str) -> Any:
    sync_bn = case.batch_norm and name not in ("none", "parameter_average")
    asked = dict(case.asked) if name != "none" else {}
    if case.local_steps > 1 and name == "parameter_average":
        asked = {"fidelity": "local", **asked}
    if asked.get("fidelity") == "local":
        asked = {"local_steps": str(case.local_steps), **asked}
    pairs = {"strategy": name, "bucket_mib": "0.0001", "sync_bn": str(sync_bn).lower()}
    return parse_settings("mnist_lenet", {**pairs, **asked})


@dataclass(frozen=True)
class Trained:
    """before, after: the weights, one after the other. seen: what the network makes of some images in eval mode."""

    before: torch.Tensor
    after: torch.Tensor
    seen: torch.Tensor
    names: tuple[str, ...]


def vector(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def train(case: Case, name: str, group: Any, rank: int, seed: int) -> Trained:
    model = network(case, seed)
    strategy = build_strategy(settings_for(case, name), model, group, CpuTimer(), nodes=case.nodes)
    optimizer = torch.optim.SGD(model.parameters(), **(case.optimizer or TENTH))
    before = vector(strategy.whole())
    images, labels = data_of(case)
    for update in range(UPDATES):
        epoch, step = divmod(update, case.stream.steps)
        own = case.stream.indices(epoch, step, rank)
        optimizer.zero_grad()
        weighing = contextlib.nullcontext() if case.weight else weight_of_one(len(own), len(case.shares))
        with loss_of(strategy, model, images[own], labels[own]) as loss, weighing:
            strategy.backward(loss, len(own), case.stream.batch_at(step))
        optimizer.step()
        strategy.after_update()
    whole = strategy.whole()
    whole.eval()
    return Trained(before, vector(whole), whole(images[:5]).detach(), tuple(whole.state_dict()))


@contextlib.contextmanager
def loss_of(strategy: Any, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Iterator[torch.Tensor]:
    """To be differentiated inside. A rank without samples makes a forward pass only if the ranks meet in it."""
    if len(labels):
        yield local_loss(strategy.model, images, labels)
    elif strategy.meets_in_forward:
        with without_effect(model):
            yield local_loss(strategy.model, images.new_full((2, *images.shape[1:]), torch.inf), labels.new_zeros(2))
    else:
        yield strategy.no_loss()


@contextlib.contextmanager
def weight_of_one(samples: int, world_size: int) -> Iterator[None]:
    """m_j/n becomes 1/W: each rank's mean loss counts alike."""
    with contextlib.ExitStack() as stack:
        alike = max(1, samples) * world_size
        for module in (after_backward, single, fsdp, horovod):
            stack.enter_context(patch.object(module, "weighted", lambda loss_sum, _: loss_sum / alike))
        yield


def distances(rank: int, case: Case) -> dict[str, tuple[float, float, bool]]:
    """For each strategy norm(dw - dw_ref) / norm(dw_ref); the distance of what is seen in eval mode, which running
    statistics decide, too; and whether all ranks have the same weights.
    """
    size = len(case.shares)
    if rank >= size:
        return {}
    group = group_of(size)
    found = {}
    alone = replace(case, shares=(sum(case.shares),), weight=True)
    reference = train(alone, "none", group_of(1), 0, seed=0) if rank == 0 else None
    for name in case.strategies:
        trained = train(case, name, group, rank, seed=rank)
        firsts = trained.after.clone()
        dist.broadcast(firsts, src=0, group=group)
        result = (0.0, 0.0, torch.equal(firsts, trained.after))
        if reference is not None:
            assert torch.equal(trained.before, reference.before), "rank 0's weights were not given to all"
            assert trained.names == reference.names
            step = reference.after - reference.before
            seen = (trained.seen - reference.seen).norm() / reference.seen.norm()
            result = (float((trained.after - reference.after).norm() / step.norm()), float(seen), result[2])
        found[name] = result
    return found


def worst(gang: Gang, case: Case) -> dict[str, float]:
    """Of each strategy over all ranks; infinite where ranks have drifted apart."""
    answers = gang.run(distances, case)[: len(case.shares)]
    return {
        name: max(max(answer[name][:2]) if answer[name][2] else float("inf") for answer in answers)
        for name in case.strategies
    }


EXAMPLE = Case(shares=(4, 0, 2, 1), last=3)
