"""The gradients of a network in two stages, beside those of the whole one: for a GPU's test and for a CPU's.

plain, in_stages = gradients(Case("lenet"), torch.device("cpu"))          by the weights' names
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.compute.arithmetic import Full
from trainer.compute.models import build_model, stages_of
from trainer.pipeline import StageWork, part_of
from trainer.shared import Stage, parse_stages
from trainer.strategies import local_loss, weighted

SHAPES = {"lenet": ((1, 28, 28), "a:0,b:1"), "resnet152": ((3, 32, 32), "a:0-20,b:21-51")}
PARTS, SAMPLES = 3, 4

Gradients = dict[str, Tensor | None]
MicroBatches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """splits: whether the stages put their weights' gradients off."""

    model: str
    channels_last: bool = False
    splits: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return SHAPES[self.model][0]

    @property
    def stages(self) -> tuple[Stage, ...]:
        return parse_stages(SHAPES[self.model][1])[0]

    def network(self, device: torch.device | str) -> nn.Module:
        torch.manual_seed(0)
        model = build_model(self.model, self.shape, 10).to(device)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model


def gradients(case: Case, device: torch.device, precision: Full | None = None) -> tuple[Gradients, Gradients]:
    """Of the whole network, and of its stages."""
    given, precision = _micro_batches(case, device), precision or Full()
    assert len(stages_of(case.network("meta"))) == case.stages[-1].last + 1
    return _whole(case.network(device), precision, given), _in_stages(case, device, precision, given)


def _micro_batches(case: Case, device: torch.device) -> MicroBatches:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(PARTS, SAMPLES, *case.shape, generator=generator).to(device)
    labels = torch.randint(0, 10, (PARTS, SAMPLES), generator=generator).to(device)
    return list(zip(images, labels, strict=True))


def _whole(model: nn.Module, precision: Full, given: MicroBatches) -> Gradients:
    for images, labels in given:
        with precision.autocast():
            loss = local_loss(model, images, labels)
        weighted(loss, PARTS * SAMPLES).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def _in_stages(case: Case, device: torch.device, precision: Full, given: MicroBatches) -> Gradients:
    """Activations and gradients pass the host, as between two ranks."""
    parts = [part_of(case.network(device), stage) for stage in case.stages]
    first, last = (
        StageWork(part, precision, reads=number == 0, splits=case.splits) for number, part in enumerate(parts)
    )
    for images, labels in given:
        inputs = last.enter(first.forward(images, 0.0).cpu().to(device))
        with precision.autocast():
            loss = local_loss(last.part, inputs, labels)
        last.judge(inputs, loss, 0.0)
    for _ in given:
        gradient = last.backward(None, PARTS * SAMPLES, 0.0)
        assert gradient is not None
        first.backward(gradient.cpu().to(device), PARTS * SAMPLES, 0.0)
    for _ in given if case.splits else ():
        first.weights()
        last.weights()
    return {name: weight.grad for part in parts for name, weight in part.named_parameters()}


def _laid_out(gradient: Tensor) -> list[int]:
    """Strides of dimensions that have more than one place: of others any stride is right."""
    return [stride for stride, size in zip(gradient.stride(), gradient.shape, strict=True) if size > 1]


def assert_alike(plain: Gradients, found: Gradients) -> None:
    assert found.keys() == plain.keys()
    for weight, gradient in plain.items():
        other = found[weight]
        assert gradient is not None, weight
        assert other is not None, weight
        assert _laid_out(other) == _laid_out(gradient), weight
        assert torch.allclose(other, gradient, rtol=1e-6, atol=1e-9), weight
