"""What a network is made of, against the network itself."""

from __future__ import annotations

from math import prod

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")
import torch

from orchestrator.forecast import blocks_of
from orchestrator.forecast.pipeline import chain_from
from trainer.compute.models import build_model
from trainer.paced import Anatomy, dissect
from trainer.pipeline import survey

NETWORKS = {"lenet": (1, 28, 28), "resnet152": (3, 32, 32)}


@pytest.fixture(scope="module", params=NETWORKS)
def network(request: pytest.FixtureRequest) -> tuple[str, Anatomy]:
    return request.param, dissect(request.param, NETWORKS[request.param], 10)


def bytes_kept_by_a_real_forward_pass(name: str, samples: int) -> int:
    """Of the storages that autograd keeps for backward, those that are neither weights nor buffers."""
    model = build_model(name, NETWORKS[name], 10)
    state = {tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.randn(samples, *NETWORKS[name]))
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in state)


def test_every_parameter_belongs_to_exactly_one_layer(network: tuple[str, Anatomy]) -> None:
    _, anatomy = network
    positions = [position for layer in anatomy.layers for position in layer.parameters]
    assert sorted(positions) == list(range(len(list(anatomy.model.parameters()))))


def test_the_work_of_all_layers_is_the_whole_and_no_layer_is_coarse(network: tuple[str, Anatomy]) -> None:
    name, anatomy = network
    assert sum(layer.work for layer in anatomy.layers) == pytest.approx(1)
    assert min(layer.work for layer in anatomy.layers) > 0
    assert name == "lenet" or (len(anatomy.layers) > 32 and max(layer.work for layer in anatomy.layers) < 0.05)


def test_the_work_of_lenet_is_what_its_products_come_to() -> None:
    products = [6 * 25 * 28 * 28, 16 * 6 * 25 * 10 * 10, 400 * 120, 120 * 84, 84 * 10]
    layers = dissect("lenet", (1, 28, 28), 10).layers
    assert [layer.work for layer in layers] == pytest.approx([product / sum(products) for product in products])
    assert [layer.parameters for layer in layers] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]


def test_a_sample_takes_the_memory_that_a_real_forward_pass_keeps(network: tuple[str, Anatomy]) -> None:
    name, anatomy = network
    assert anatomy.activation_bytes == bytes_kept_by_a_real_forward_pass(name, 2) // 2


def test_the_model_is_the_real_one_without_its_numbers(network: tuple[str, Anatomy]) -> None:
    name, anatomy = network
    parameters = sum(parameter.numel() for parameter in anatomy.model.parameters())
    buffers = sum(buffer.nbytes for buffer in anatomy.model.buffers())
    assert parameters == {"lenet": 61_706, "resnet152": 58_164_298}[name]
    assert anatomy.state_bytes == 3 * 4 * parameters + buffers
    assert {parameter.device.type for parameter in anatomy.model.parameters()} == {"meta"}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_chain_that_forecasts_cut_is_the_networks_own(name: str) -> None:
    """Blocks, their work, kernels and weights, and what crosses each cut: by arithmetic, and by the network itself."""
    chain = chain_from(blocks_of(name, NETWORKS[name], 10)).blocks
    blocks = survey(name, NETWORKS[name], 10)
    assert len(chain) == len(blocks)
    for told, real in zip(chain, blocks, strict=True):
        assert 3 * told.forward == pytest.approx(real.work, rel=1e-3)
        assert told.fixed == pytest.approx(real.kernels)
        assert told.cut_bytes == 4 * prod(real.behind)
        assert told.weight_bytes == real.weight_bytes
        assert real.buffer_bytes < 0.15 * real.weight_bytes
    kept = sum(block.activation_bytes for block in blocks)
    assert name == "lenet" or sum(block.kept_bytes for block in chain) == pytest.approx(kept, rel=0.1)
