"""Stages one behind the other compute what the whole network computes, whatever the order in which gradients come."""

import pytest
import torch

from trainer.compute.models import build_model, stages_of
from trainer.compute.precision import Bf16, Full
from trainer.pipeline.part import part_of
from trainer.pipeline.stage import StageWork
from trainer.shared.stages import parse_stages
from trainer.strategies.base import local_loss, weighted

pytestmark = pytest.mark.computes
SHAPES = {"lenet": ((1, 28, 28), "a:0,b:1"), "resnet152": ((3, 32, 32), "a:0-20,b:21-51")}
PARTS, SAMPLES = 3, 4


@pytest.fixture(autouse=True)
def same_kernels():
    """Those that add up in one order."""
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


def micro_batches(name, device):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(PARTS, SAMPLES, *SHAPES[name][0], generator=generator).to(device)
    labels = torch.randint(0, 10, (PARTS, SAMPLES), generator=generator).to(device)
    return list(zip(images, labels, strict=True))


def network(name, device, channels_last):
    torch.manual_seed(0)
    model = build_model(name, SHAPES[name][0], 10).to(device)
    return model.to(memory_format=torch.channels_last) if channels_last else model


def whole(model, precision, given):
    for images, labels in given:
        with precision.autocast():
            loss = local_loss(model, images, labels)
        weighted(loss, PARTS * SAMPLES).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def in_stages(models, stages, precision, given, splits):
    """Activations and gradients pass the host, as between two ranks."""
    parts = [part_of(model, stage) for model, stage in zip(models, stages, strict=True)]
    first, last = (StageWork(part, precision, reads=number == 0, splits=splits) for number, part in enumerate(parts))
    for images, labels in given:
        passed = first.forward(images, None, 0.0)
        last.forward(passed.cpu().to(images.device), labels, 0.0)
    for _ in given:
        gradient = last.backward(None, PARTS * SAMPLES, 0.0)
        first.backward(gradient.cpu().to(gradient.device), PARTS * SAMPLES, 0.0)
    for _ in given if splits else ():
        first.weights()
        last.weights()
    return {name: weight.grad for part in parts for name, weight in part.named_parameters()}


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("in_16_bits", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_two_stages_leave_the_gradients_of_the_whole_network(name, in_16_bits, channels_last, splits, device="cuda"):
    device = torch.device(device)
    if in_16_bits and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip("this GPU has no bf16")
    precision = Bf16(device) if in_16_bits else Full()
    given, stages = micro_batches(name, device), parse_stages(SHAPES[name][1])[0]
    assert len(stages_of(network(name, "meta", False))) == stages[-1].last + 1
    plain = whole(network(name, device, channels_last), precision, given)
    models = [network(name, device, channels_last) for _ in stages]
    found = in_stages(models, stages, precision, given, splits)
    assert found.keys() == plain.keys()
    for weight, gradient in plain.items():
        assert found[weight].stride() == gradient.stride(), weight
        assert torch.allclose(found[weight], gradient, rtol=1e-6, atol=1e-9), weight
