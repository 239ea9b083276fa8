"""Stages one behind the other compute what the whole network computes, whatever the order in which gradients come."""

import pytest
import torch

from tests.support.cut_in_two import SHAPES, Case, assert_alike, gradients
from trainer.compute.arithmetic import Bf16, Full

pytestmark = pytest.mark.computes


@pytest.fixture(autouse=True)
def same_kernels():
    """Those that add up in one order."""
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("in_16_bits", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_two_stages_leave_the_gradients_of_the_whole_network(name, in_16_bits, channels_last, splits):
    device = torch.device("cuda")
    if in_16_bits and torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip("this GPU has no bf16")
    precision = Bf16(device) if in_16_bits else Full()
    assert_alike(*gradients(Case(name, channels_last, splits), device, precision))
