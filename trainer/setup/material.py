"""What a run trains, and on what: an experiment's network and data (`Experiment`), or a script's own (`own.Own`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

from trainer.compute.models import build_model, without_numbers
from trainer.data.loading import Opened, choose_loader, open_batches
from trainer.data.sample_stream import RankBatches
from trainer.data.sets import find_facts
from trainer.paced.standin import StandInOptimizer
from trainer.pipeline.cuts import Form
from trainer.ranks.rank_info import RankInfo
from trainer.setup.optimizer import build_optimizer
from trainer.shared.experiments import DataSet
from trainer.shared.settings import Settings

EXAMPLES = 2
"""Samples of an example: BatchNorm refuses a single value a channel."""


class Material(Protocol):
    """The same on all ranks."""

    name: str
    """Of the network, for people."""
    train_samples: int

    def skeleton(self) -> nn.Module:
        """The whole network on torch's meta device: names and shapes without numbers."""

    def example(self) -> Tensor:
        """What the network is called with, of EXAMPLES samples, on the meta device."""

    def labels(self) -> Form:
        """What a pipeline's first stage sends its last one. Raises TrainError if batches are no inputs and labels."""

    def network(self) -> nn.Module:
        """With its first weights."""

    def optimizer(self, settings: Settings, model: nn.Module) -> torch.optim.Optimizer | StandInOptimizer:
        """For what this rank holds of the network. Raises TrainError where it has none for it."""

    def with_loader(self, settings: Settings, info: RankInfo, device: torch.device) -> Settings:
        """`loader` and `num_workers` as they turn out on this host. Raises TrainError."""

    def open(self, settings: Settings, order: RankBatches, info: RankInfo, device: torch.device) -> Opened:
        """All ranks of all hosts take part. Raises TrainError, on every rank."""

    def mark(self, settings: Settings) -> str:
        """Differs for different data, as far as one can tell without reading them all."""


class Experiment:
    """One of `trainer.shared.experiments`. facts: as all ranks have agreed on them. weights: what the network begins
    with in place of fresh ones, by name.
    """

    def __init__(
        self, settings: Settings, facts: DataSet, weights: Mapping[str, Tensor] = MappingProxyType({})
    ) -> None:
        self.facts, self.name, self.train_samples = facts, settings.model, facts.train_samples
        self._weights = weights

    def skeleton(self) -> nn.Module:
        return without_numbers(self._fresh)

    def example(self) -> Tensor:
        return torch.zeros(EXAMPLES, *self.facts.shape, device="meta")

    def labels(self) -> Form:
        return Form()

    def network(self) -> nn.Module:
        model = self._fresh()
        model.load_state_dict(self._weights, strict=False)
        return model

    def _fresh(self) -> nn.Module:
        return build_model(self.name, self.facts.shape, self.facts.classes)

    def optimizer(self, settings: Settings, model: nn.Module) -> torch.optim.Optimizer | StandInOptimizer:
        return build_optimizer(settings, model)

    def with_loader(self, settings: Settings, info: RankInfo, device: torch.device) -> Settings:
        return choose_loader(settings, self.facts, info, device)

    def mark(self, settings: Settings) -> str:
        return find_facts(settings)[1]  # lists a folder once more; the hosts have agreed on it by now

    def open(self, settings: Settings, order: RankBatches, info: RankInfo, device: torch.device) -> Opened:
        return open_batches(settings, self.facts, order, info, device)
