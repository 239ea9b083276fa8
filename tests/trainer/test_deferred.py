"""Gradients of weights that come later are those that autograd would have left."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.pipeline import Later, split_backward

FORMATS = {"plain": torch.contiguous_format, "channels last": torch.channels_last}


@pytest.mark.parametrize("of_images", FORMATS)
@pytest.mark.parametrize("of_weights", FORMATS)
@pytest.mark.parametrize("size", [1, 3])
def test_a_gradient_lies_in_memory_as_its_weight_does(of_images: str, of_weights: str, size: int) -> None:
    """Fused SGD goes through both side by side, and would take one for another's element."""
    layer = nn.Conv2d(8, 16, size, bias=False).to(memory_format=FORMATS[of_weights])
    images = torch.randn(4, 8, 6, 6).contiguous(memory_format=FORMATS[of_images])
    layer(images).square().sum().backward()
    plain, layer.weight.grad = layer.weight.grad, None
    split_backward(layer, later := Later())
    layer(images).square().sum().backward()
    for work in later.cut():
        work()
    assert layer.weight.grad is not None and plain is not None
    assert torch.equal(layer.weight.grad, plain)
    assert layer.weight.grad.stride() == layer.weight.stride()
