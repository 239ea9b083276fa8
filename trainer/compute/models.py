"""The networks: `build_model("lenet", (1, 28, 28), classes=10)`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainer.shared.errors import TrainError


class LeNet(nn.Module):
    """LeNet-5 (LeCun et al. 1998) with ReLU and max pooling. It sees 32x32; smaller images get a border of zeros.

    61,706 parameters for 1x28x28 and 1x32x32, 62,006 for 3x32x32.
    """

    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(channels, 6, 5, padding=(32 - size) // 2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        )
        self.classifier = nn.Sequential(
            *(nn.Flatten(), nn.Linear(16 * 5 * 5, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()),
            nn.Linear(84, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images))
        return logits


def build_model(name: str, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """A model with fresh random weights for images of `shape` (channels, height, width).

    Raises TrainError where this torchvision has none of that name, or it cannot take such images.
    """
    if name == "lenet":
        return LeNet(shape[0], shape[1], classes)
    if name == "small_resnet":
        from trainer.compute.small_resnet import SmallResNet

        return SmallResNet(shape[0], classes)
    from torchvision import __version__, models

    further: dict[str, Any] = {"image_size": shape[1]} if name.startswith("vit_") else {}
    if name == "googlenet":
        further = {"aux_logits": False, "init_weights": True}  # its side outputs would have losses of their own
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torchvision's about its own ways to begin
            model: nn.Module = getattr(models, name)(weights=None, num_classes=classes, **further)
    except AttributeError as error:
        raise TrainError(f"model: torchvision {__version__} has no {name}; a newer one may") from error
    except AssertionError as error:
        raise TrainError(f"model: {name} cannot take images of {shape[1]} pixels ({error})") from error
    return model


def skeleton_of(name: str, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The same without numbers."""
    return without_numbers(lambda: build_model(name, shape, classes))


def without_numbers(build: Callable[[], nn.Module]) -> nn.Module:
    """A network on torch's meta device: names and shapes. Draws nothing from torch's generator."""
    try:
        with torch.device("meta"):
            return build()
    except NotImplementedError:  # RegNets compute their widths by tensors
        with torch.random.fork_rng(devices=[]):
            return build().to("meta")


def stages_of(model: nn.Module) -> list[nn.Module]:
    """Modules whose chain is the model's forward pass, none of which changes its input; [] of an unknown network."""
    if isinstance(model, LeNet):
        return [model.features, model.classifier]
    if isinstance(model, nn.Sequential):
        return _joined(list(_flat(model)))
    from torchvision.models import ResNet

    if not isinstance(model, ResNet):
        return []
    layers = [block for layer in (model.layer1, model.layer2, model.layer3, model.layer4) for block in layer]
    stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
    return [stem, *layers, nn.Sequential(model.avgpool, nn.Flatten(), model.fc)]


def _flat(model: nn.Sequential) -> Iterator[nn.Module]:
    for module in model:
        if type(module) is nn.Sequential:
            yield from _flat(module)
        else:
            yield module


def _joined(modules: list[nn.Module]) -> list[nn.Module]:
    """What has weights begins a block; others (activations, which may change their input) go with what is before."""
    blocks: list[list[nn.Module]] = []
    for module in modules:
        if not blocks or (any(True for _ in module.parameters()) and _has_weights(blocks[-1])):
            blocks.append([])
        blocks[-1].append(module)
    return [nn.Sequential(*block) for block in blocks]


def _has_weights(modules: list[nn.Module]) -> bool:
    return any(True for module in modules for _ in module.parameters())


def gradient_bytes(model: nn.Module) -> int:
    """Bytes that one whole gradient has, before any compression."""
    return sum(parameter.numel() * parameter.element_size() for parameter in trainable(model))


def gradients_of(model: nn.Module) -> list[Tensor]:
    """The gradients of all trained parameters, in their order, when backward has given each its own."""
    return [cast(Tensor, parameter.grad) for parameter in trainable(model)]


def fill_gradients(model: nn.Module) -> None:
    """Gives zeros to each trained parameter that no backward has reached."""
    for parameter in trainable(model):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def running_statistics(model: nn.Module) -> list[torch.Tensor]:
    """The buffers that training moves by averaging: BatchNorm's means and variances."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]
