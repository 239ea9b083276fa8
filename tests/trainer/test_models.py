"""torchvision's networks by name, and first weights out of a file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")

import torch
import torchvision
from torch import nn

from orchestrator.forecast import blocks_of
from tests.support.trainer_ranks import of_event, started, trained
from trainer.checkpoints import read_file
from trainer.compute.models import build_model, has_batch_norm, skeleton_of, stages_of
from trainer.measure import blocks_on_paper
from trainer.paced import dissect
from trainer.pipeline import survey
from trainer.setup import fitting
from trainer.setup.weights import build_optimizer
from trainer.shared import MODEL_CHANNELS, TEXT_MODELS, SettingsError, TrainError, parse_settings
from trainer.shared.strategy_table import OPTIMIZERS

CIFAR = (3, 32, 32)
FAMILIES = ("convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "mnasnet0_5", "mobilenet_v3_small")
FAMILIES += ("regnet_x_400mf", "resnet18", "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t", "vgg11", "vit_b_16")

CONVOLUTIONS = tuple(name for name in FAMILIES if not name.startswith(("swin", "vit")))

SHORT = ["--exp", "resnet152_cifar", "--data", "synthetic", "--device", "cpu", "--samples", "24", "--batch", "8"]
SHORT += ["--epochs", "1", "--eval_every", "0", "--augment", "none", "--num_workers", "0"]
SMALL = [*SHORT, "--model", "shufflenet_v2_x0_5"]


@pytest.mark.parametrize("name", ["lenet", "resnet50", "resnet152", "gpt_tiny", *CONVOLUTIONS])
def test_a_network_seen_without_numbers_is_the_one_that_plans_have_written_down(name):
    """If this fails with a new torchvision: `python deploy/networks.py`."""
    shape = {"lenet": (1, 28, 28), "gpt_tiny": (1, 1, 64)}.get(name, CIFAR)
    seen, written = blocks_on_paper(name, shape, 10), blocks_of(name, shape, 10)
    assert [block["outputs"] for block in seen] == [block.outputs for block in written]
    for one, other in zip(seen, written, strict=True):
        shapes = [tuple(map(tuple, layer["shapes"])) for layer in one["layers"]]
        assert sorted(shapes) == sorted(layer.shapes for layer in other.layers)
        work = sum(layer["work"] for layer in one["layers"])
        if name == "gpt_tiny" and not sum(layer.work for layer in other.layers):
            continue  # of the embedding, which looks up
        attention = 2 * 64**2 * 64 if name == "gpt_tiny" and len(other.layers) > 4 else 0  # has no weights
        assert sum(layer.work for layer in other.layers) - attention == pytest.approx(work)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_seen_whole_without_numbers(name):
    weights = [list(weight.shape) for weight in skeleton_of(name, CIFAR, 10).parameters()]
    layers = [layer for block in blocks_on_paper(name, CIFAR, 10) for layer in block["layers"]]
    assert sorted(shape for layer in layers for shape in layer["shapes"]) == sorted(weights)
    assert sum(layer["work"] for layer in layers) > sum(map(math.prod, weights)) / 2


def test_a_network_of_very_many_layers_is_not_described():
    assert blocks_on_paper("efficientnet_v2_l", CIFAR, 10) is None


def test_the_names_are_torchvisions() -> None:
    there = set(torchvision.models.list_models(module=torchvision.models))
    left_out = {"alexnet", "inception_v3", "maxvit_t", "vit_h_14"}
    assert set(MODEL_CHANNELS) - {"lenet", "small_resnet"} == there - left_out


@pytest.mark.parametrize("name", FAMILIES)
def test_one_of_each_family_takes_the_datas_images_and_gives_its_classes(name: str) -> None:
    network = skeleton_of(name, CIFAR, 7)
    assert network(torch.zeros(2, *CIFAR, device="meta")).shape == (2, 7)


def test_the_small_residual_network_is_a_chain_that_sends_little() -> None:
    network = build_model("small_resnet", (1, 28, 28), 10)
    assert sum(weight.numel() for weight in network.parameters()) == 19_810 and has_batch_norm(network)
    shapes = [block.behind for block in survey("small_resnet", (1, 28, 28), 10)]
    assert shapes == [(8, 14, 14), (8, 14, 14), (16, 7, 7), (32, 4, 4), (10,)]
    images = torch.randn(4, 1, 28, 28)
    outputs = images
    for block in stages_of(network):
        outputs = block(outputs)
    assert outputs.shape == (4, 10) and outputs.std() > 0.01


def test_a_skeleton_draws_no_numbers_and_is_the_networks() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for name in ("regnet_x_400mf", "resnet18"):
        skeleton = skeleton_of(name, CIFAR, 10)
        assert all(tensor.is_meta for tensor in skeleton.state_dict().values())
        assert torch.equal(torch.get_rng_state(), before)
        torch.random.set_rng_state(before)
    real, skeleton = build_model("resnet18", CIFAR, 10), skeleton_of("resnet18", CIFAR, 10)
    assert {name: one.shape for name, one in real.state_dict().items()} == {
        name: one.shape for name, one in skeleton.state_dict().items()
    }


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings("resnet152_cifar", {"model": "resnet5"})
    (mistake,) = caught.value.mistakes
    assert mistake.startswith(f"model: 'resnet5' is not one of {len(MODEL_CHANNELS) + len(TEXT_MODELS)} known names")
    assert "resnet50" in mistake and mistake.count(" or ") == 2


def test_what_this_torchvision_does_not_have_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torchvision.models, "swin_t")
    with pytest.raises(TrainError, match=r"model: torchvision .* has no swin_t; a newer one may"):
        build_model("swin_t", CIFAR, 10)
    with pytest.raises(TrainError, match="vit_b_16 cannot take images of 28 pixels"):
        build_model("vit_b_16", (3, 28, 28), 10)


def test_a_network_without_blocks_trains_and_what_needs_blocks_says_so(tmp_path: Path) -> None:
    for lines in trained(tmp_path, [*SMALL, "--shares", "node0=3,node1=1"], 2):
        assert of_event(lines, "start")[0]["model"] == "shufflenet_v2_x0_5"
        assert len(of_event(lines, "step")) == 3
    assert "shufflenet_v2_x0_5 is not a known chain of blocks; use ddp" in refusal(
        tmp_path, [*SMALL, "--strategy", "pipeline"]
    )
    with pytest.raises(TrainError, match="paced: vit_b_16 is not a chain of blocks"):
        dissect("vit_b_16", CIFAR, 10)


def refusal(folder: Path, arguments: list[str], of_ranks: Any = ()) -> str:
    """The one line that each of two ranks says."""
    with started(folder, arguments, 2, of_ranks=of_ranks) as ranks:
        said = {rank.communicate(timeout=120)[1] for rank in ranks}
        assert [rank.returncode for rank in ranks] == [1, 1], said
    (line,) = said
    assert line.startswith("error: ") and line.count("\n") == 1
    return line


def test_statistics_that_belong_to_averaged_weights_are_those_of_one_process(tmp_path: Path) -> None:
    """Of slices all ranks read the same images; of one process too. The statistics of the weights are others."""
    found = []
    for name, way, ranks in (("alone", "none", 1), ("sliced", "tensor", 2)):
        (tmp_path / name).mkdir()
        asked = ["--ema", "0.5", "--checkpoint_every", "3", "--checkpoint_dir", str(tmp_path / name), "--lr", "0.001"]
        trained(tmp_path / name, [*SMALL, *asked, "--strategy", way], ranks)
        found.append(read_file(tmp_path / name).checkpoint)
    alone, sliced = found
    for name, tensor in alone.ema.items():
        assert torch.allclose(tensor.double(), sliced.ema[name].double(), rtol=1e-2, atol=1e-3), name
        if name == "conv1.1.running_var":
            assert not torch.allclose(tensor, alone.model[name], rtol=1e-2, atol=1e-3), name


# ---- weights --------------------------------------------------------------------------------------------------------


def kept(folder: Path, classes: int = 10, **changed: Any) -> Path:
    """A file with weights of shufflenet, some of them changed."""
    torch.manual_seed(5)
    path = folder / "weights.pt"
    torch.save({**build_model("shufflenet_v2_x0_5", CIFAR, classes).state_dict(), **changed}, path)
    return path


@pytest.mark.parametrize("strategy", ["ddp", "tensor"])
def test_a_run_begins_with_the_files_weights_and_a_head_of_its_own(tmp_path: Path, strategy: str) -> None:
    path = kept(tmp_path, classes=1000)
    asked = ["--weights", str(path), "--lr", "1e-9", "--checkpoint_every", "1", "--checkpoint_dir", str(tmp_path)]
    trained(tmp_path, [*SMALL, *asked, "--steps", "1", "--strategy", strategy], 2)
    begun, ended = torch.load(path, weights_only=True), read_file(tmp_path).checkpoint.model
    weights = [name for name in begun if name.endswith(".weight") and not name.startswith("fc.")]
    assert weights and all(torch.allclose(begun[name], ended[name], atol=1e-6) for name in weights)
    assert ended["fc.weight"].shape == (10, 1024)


def test_a_checkpoints_network_is_found_and_ddps_prefix_left_out(tmp_path: Path) -> None:
    state = build_model("shufflenet_v2_x0_5", CIFAR, 10).state_dict()
    settings = parse_settings("resnet152_cifar", {"model": "shufflenet_v2_x0_5", "weights": "w.pt"})
    found, fresh = fitting(state, skeleton_of("shufflenet_v2_x0_5", CIFAR, 10), 10, settings)
    assert (found.keys(), fresh) == (state.keys(), [])
    path = tmp_path / "wrapped.pt"
    torch.save({"epoch": 3, "model": {f"module.{name}": tensor for name, tensor in state.items()}}, path)
    trained(tmp_path, [*SMALL, "--weights", str(path), "--steps", "1"], 2)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read"),
        (b"text", "is not in the form of torch.save since torch 1.6"),
        ([1, 2], "holds no state dict"),
        ({"fc.weight": torch.ones(10, 1024)}, "does not fit shufflenet_v2_x0_5; missing: conv1.0.weight, conv1.1.bias"),
        ({"fc.weight": torch.ones(10, 7)}, "of another shape: fc.weight"),
        ({"more": torch.ones(3)}, "unknown: more"),
    ],
)
def test_a_file_that_does_not_fit_is_one_line(tmp_path: Path, content: Any, words: str) -> None:
    path = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, dict) and "missing" not in words:
        kept(tmp_path, **content)
    elif content is not None:
        torch.save(content, path)
    line = refusal(tmp_path, [*SMALL, "--weights", str(path)])
    assert words in line


def test_hosts_with_different_files_are_refused(tmp_path: Path) -> None:
    homes = []
    for number in range(2):
        home = tmp_path / f"home{number}"
        home.mkdir()
        kept(home, **({"conv1.1.bias": torch.ones(24)} if number else {}))
        homes.append({"HOME": str(home)})
    line = refusal(tmp_path, [*SMALL, "--weights", "~/weights.pt"], of_ranks=homes)
    assert "weights: ~/weights.pt differs between hosts" in line


def test_what_would_run_code_is_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, Any]:
            return (tmp_path / "sprung").touch, ()

    torch.save({"fc.weight": Trap()}, tmp_path / "weights.pt")
    line = refusal(tmp_path, [*SMALL, "--weights", str(tmp_path / "weights.pt")])
    assert "holds no plain tensors that can be read" in line
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_memory_counts_what_an_optimiser_keeps(name: str) -> None:
    settings, layer = parse_settings("mnist_lenet", {"optimizer": name}), nn.Linear(64, 64)
    optimizer = build_optimizer(settings, layer)
    layer(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    kept = [tensor for state in optimizer.state.values() for tensor in state.values() if tensor is not None]
    numbers = sum(tensor.numel() for tensor in kept if tensor.dim())
    assert settings.states == 2 + numbers / (64 * 64 + 64)
