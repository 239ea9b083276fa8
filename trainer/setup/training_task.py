"""The network and data that a run trains: an experiment's (`Experiment`), or a user's own (`CustomScript`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainer.compute.models import build_model, meta_copy, without_numbers
from trainer.data.augment import tensors_of
from trainer.data.loading import Opened, choose_loader, loader_processes, open_batches
from trainer.data.sample_stream import RankBatches
from trainer.data.script_data import Collate, ScriptBatches
from trainer.data.sets import find_facts
from trainer.paced.standin import StandInOptimizer
from trainer.pipeline.chain import Form
from trainer.ranks.rank_info import RankInfo
from trainer.setup.weights import build_optimizer
from trainer.shared.errors import TrainError
from trainer.shared.experiments import DataSet
from trainer.shared.settings import Settings

EXAMPLES = 2
"""Samples of an example: BatchNorm needs two."""


class TrainingTask(Protocol):
    """Equal on all ranks."""

    name: str
    """The network's, for users."""
    train_samples: int

    def skeleton(self) -> nn.Module:
        """The whole network on torch's meta device."""

    def example(self) -> Tensor:
        """EXAMPLES inputs on the meta device."""

    def labels(self) -> Form:
        """The form of labels, which a pipeline sends. Raises TrainError for other batches than inputs and labels."""

    def network(self) -> nn.Module:
        """With its initial weights."""

    def optimizer(self, settings: Settings, model: nn.Module) -> torch.optim.Optimizer | StandInOptimizer:
        """For this rank's part of the network. Raises TrainError."""

    def with_loader(self, settings: Settings, info: RankInfo, device: torch.device) -> Settings:
        """Sets `loader` and `num_workers` for this host. Raises TrainError."""

    def open(self, settings: Settings, order: RankBatches, info: RankInfo, device: torch.device) -> Opened:
        """A collective call. Raises TrainError on every rank."""

    def mark(self, settings: Settings) -> str:
        """Differs for different data, as far as visible without reading all."""


class Experiment:
    """facts: agreed on by all ranks. weights: initial weights by name, instead of random ones."""

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
        return Form(self.facts.label_shape)

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
        return find_facts(settings)[1]  # lists a folder again; the hosts have agreed on it

    def open(self, settings: Settings, order: RankBatches, info: RankInfo, device: torch.device) -> Opened:
        return open_batches(settings, self.facts, order, info, device)


AnyOptimizer = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class CustomScript:
    """Arguments as in `trainer.session.join.Ranks.prepare`. A pipeline removes other hosts' parts from the network."""

    def __init__(self, model: nn.Module, optimizer: AnyOptimizer, dataset: Any, collate: Collate) -> None:
        if not isinstance(model, nn.Module):
            raise TrainError(f"prepare expects the network first, a torch.nn.Module, not a {type(model).__name__}")
        self.name, self.train_samples = type(model).__name__, samples_of(dataset)
        self._model, self._optimizer, self._dataset, self.collate = model, optimizer, dataset, collate
        if not isinstance(optimizer, torch.optim.Optimizer) and not callable(optimizer):
            raise TrainError(
                f"prepare expects a single optimiser, or a function that makes it from parameters, not a "
                f"{type(optimizer).__name__}: give one optimiser several groups of parameters"
            )
        try:
            self._skeleton = meta_copy(model)
        except RuntimeError as error:  # torch copies no tensors that were computed
            raise TrainError(
                f"{self.name} cannot be copied ({_computed(model)} was computed, and is no parameter): use "
                "torch.nn.utils.parametrizations.weight_norm in place of torch.nn.utils.weight_norm, or keep no such "
                "tensor in the network before prepare"
            ) from error
        self._names = {id(weight): name for name, weight in model.named_parameters()}

    def skeleton(self) -> nn.Module:
        return meta_copy(self._skeleton)

    def labels(self) -> Form:
        batch = self._example
        parts = list(batch) if isinstance(batch, (tuple, list)) else []
        if len(parts) != 2 or not all(isinstance(part, Tensor) and part.shape[:1] == (EXAMPLES,) for part in parts):
            found = f"a {type(batch).__name__}" + (
                f" of {', '.join(type(part).__name__ for part in parts)}" if parts else ""
            )
            raise TrainError(
                "strategy pipeline: needs batches of inputs and labels, a tensor each with the samples along its first "
                f"dimension, but `collate` gives {found}; use ddp"
            )
        return Form(tuple(parts[1].shape[1:]), parts[1].dtype)

    @functools.cached_property
    def _example(self) -> Any:
        return self.collate(self.first(EXAMPLES))

    def example(self) -> Tensor:
        batch = self._example
        inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
        if len(tensors_of(inputs)) != 1:
            raise TrainError(
                f"{self.name} takes several tensors per sample, but a network that is cut takes only one; use ddp"
            )
        return tensors_of(inputs)[0].to("meta")

    def first(self, samples: int) -> list[Any]:
        """From the beginning of the data set; repeats if it has fewer."""
        return [self._dataset[index % self.train_samples] for index in range(samples)]

    def network(self) -> nn.Module:
        return self._model

    def optimizer(self, settings: Settings, model: nn.Module) -> torch.optim.Optimizer | StandInOptimizer:
        if not isinstance(self._optimizer, torch.optim.Optimizer):
            made = self._optimizer(model.parameters())
            _check_exact(settings, made)
            return made
        _check_exact(settings, self._optimizer)
        held = dict(model.named_parameters())  # a stage's weights, or slices and pieces
        for group in self._optimizer.param_groups:
            group["params"] = [held[name] for name in map(self._name_of, group["params"]) if name in held]
        return self._optimizer

    def _name_of(self, weight: Tensor) -> str:
        if id(weight) not in self._names:
            raise TrainError("the optimiser has weights that are not the network's: make it of model.parameters()")
        return self._names[id(weight)]

    def with_loader(self, settings: Settings, info: RankInfo, device: torch.device) -> Settings:
        return dataclasses.replace(settings, num_workers=loader_processes(settings.num_workers, info, device))

    def open(self, settings: Settings, order: RankBatches, info: RankInfo, device: torch.device) -> Opened:
        def batches(of: RankBatches) -> ScriptBatches:
            return ScriptBatches(self._dataset, of, settings.seed, self.collate, settings.num_workers, device)

        return Opened(batches(order), None, batches)

    def mark(self, settings: Settings) -> str:
        return f"{type(self._dataset).__name__} of {self.train_samples} samples"


def _check_exact(settings: Settings, optimizer: torch.optim.Optimizer) -> None:
    """Raises TrainError if weights are averaged, but updates do not add up like gradients."""
    if settings.strategy != "parameter_average" or settings.fidelity != "exact":
        return
    if not isinstance(optimizer, torch.optim.SGD):
        raise TrainError(
            "strategy parameter_average is exact only if updates add up as gradients do, and "
            f"{type(optimizer).__name__}'s do not; use ddp, torch.optim.SGD or fidelity=local"
        )
    if settings.shares == "auto" and any(group["momentum"] for group in optimizer.param_groups):
        raise TrainError(
            "shares: auto changes the weight of each rank's momentum, so parameter_average is not exact; use "
            "ddp, shares=measured, momentum=0 or fidelity=local"
        )


def _computed(model: nn.Module) -> str:
    """The name of a computed tensor, for instance by weight_norm."""
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                return f"{prefix}.{name}".removeprefix(".")
    return "a tensor in it"


def samples_of(dataset: Any) -> int:
    """Raises TrainError if it has no length, or no samples."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TrainError(
            f"{type(dataset).__name__} is no map-style data set: it needs len(dataset) and dataset[index], so that "
            "each rank can get its own samples"
        )
    if not len(dataset):
        raise TrainError(f"{type(dataset).__name__} has no samples")
    return len(dataset)
