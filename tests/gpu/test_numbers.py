"""What a GPU computes is what a CPU computes, up to the order of sums; a faster way is the same way."""

import inspect

import pytest
import torch
from torch.nn.functional import cross_entropy

from trainer.compute.models import build_model

pytestmark = pytest.mark.computes
CASES = {
    "lenet": ((1, 28, 28), 64, 10, torch.float32, 2e-4),
    "resnet152": ((3, 32, 32), 8, 1, torch.float64, 1e-6),
}
"""shape, batch, updates, type, and how far the update may be off, as a part of it.

On a CPU LeNet's in fp32 lies 2e-5 from that in fp64. ResNet-152 with fresh weights turns fp32's rounding into 8 to 16 %
of its first update (batch 32, by whether oneDNN computes): only fp64 shows whether it is the same network.
"""


@pytest.fixture(autouse=True)
def full_precision():
    """TF32 keeps 10 bits of a factor: that is no order of sums."""
    if hasattr(torch.backends.cudnn, "conv"):  # from torch 2.9 on, which refuses to mix these with the names before
        name, full, places = "fp32_precision", "ieee", (torch.backends.cudnn.conv, torch.backends.cuda.matmul)
    else:
        name, full, places = "allow_tf32", False, (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [getattr(place, name) for place in places]
    for place in places:
        setattr(place, name, full)
    yield
    for place, value in zip(places, before, strict=True):
        setattr(place, name, value)


def updated(name, device, **options):
    """The whole change of the weights, as one vector of doubles."""
    shape, batch, updates, dtype, _ = CASES[name]
    torch.manual_seed(0)
    model = build_model(name, shape, 10).to(dtype)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(updates, batch, *shape, generator=generator).to(device, dtype)
    labels = torch.randint(0, 10, (updates, batch), generator=generator).to(device)
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, **options)
    for step in range(updates):
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(model(images[step]), labels[step]).backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu().double() - before.double()


def distance(update, reference):
    return ((update - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("name", CASES)
def test_updates_equal_those_of_a_cpu(name):
    assert distance(updated(name, "cuda"), updated(name, "cpu")) < CASES[name][-1]


@pytest.mark.skipif("fused" not in inspect.signature(torch.optim.SGD).parameters, reason="this torch has no fused SGD")
@pytest.mark.parametrize("name", CASES)
def test_fused_sgd_equals_plain_sgd(name, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    plain = updated(name, "cuda", fused=False)
    assert distance(updated(name, "cuda", fused=True), plain) < CASES[name][-1]
