"""Networks: built by name, cut into blocks, and analysed without computing."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

from trainer.compute.gpt import build_gpt
from trainer.shared.errors import TrainError
from trainer.shared.experiments import TEXT_MODELS, gpt_size


class LeNet(nn.Module):
    """LeNet-5 (LeCun et al. 1998) with ReLU and max pooling for 32x32; 61,706 parameters for one channel."""

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
    """shape: (channels, height, width), for text (1, 1, tokens). Raises TrainError."""
    if name == "lenet":
        return LeNet(shape[0], shape[1], classes)
    if name == "small_resnet":
        return SmallResNet(shape[0], classes)
    if name in TEXT_MODELS:
        return build_gpt(gpt_size(name, classes), shape[2])
    from torchvision import __version__, models

    further: dict[str, Any] = {"image_size": shape[1]} if name.startswith("vit_") else {}
    if name == "googlenet":
        further = {"aux_logits": False, "init_weights": True}  # side outputs would need their own losses
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchvision's warning about its initialisation
            model: nn.Module = getattr(models, name)(weights=None, num_classes=classes, **further)
    except AttributeError as error:
        raise TrainError(f"model: torchvision {__version__} has no {name}; a newer one may") from error
    except AssertionError as error:
        raise TrainError(f"model: {name} cannot take images of {shape[1]} pixels ({error})") from error
    return model


def skeleton_of(name: str, shape: tuple[int, int, int], classes: int) -> nn.Module:
    return without_numbers(lambda: build_model(name, shape, classes))


def without_numbers(build: Callable[[], nn.Module]) -> nn.Module:
    """A network on torch's meta device. Keeps torch's random generator as it is."""
    try:
        with torch.device("meta"):
            return build()
    except NotImplementedError:  # RegNets compute their widths with tensors
        with torch.random.fork_rng(devices=[]):
            return build().to("meta")


def meta_copy(model: nn.Module) -> nn.Module:
    """On torch's meta device; keeps shared memory shared, unlike `to("meta")`. Raises RuntimeError."""
    memo: dict[int, Any] = {}
    places: dict[tuple[int, torch.dtype], Tensor] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.grad_fn is None:
                memo[id(tensor)] = _without_numbers(tensor, places)
    return copy.deepcopy(model, memo).to("meta")


def _without_numbers(tensor: Tensor, places: dict[tuple[int, torch.dtype], Tensor]) -> Tensor:
    key = storage_of(tensor), tensor.dtype
    if key not in places:
        numbers = tensor.untyped_storage().nbytes() // tensor.element_size()
        places[key] = torch.empty(numbers, dtype=tensor.dtype, device="meta")
    found = places[key].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def stages_of(model: nn.Module) -> list[nn.Module]:
    """Modules whose chain is the forward pass and which share no weights; [] if there is no such chain."""
    return [] if why_whole(model) else _untied(_chain_of(model))


def why_whole(model: nn.Module) -> str:
    """Why the model cannot be cut, to follow its name; empty if it can."""
    known = _known(model)
    if known is None:
        return "is not a known chain of blocks"
    for name in ("forward", "_forward_impl", "__call__"):
        if hasattr(known, name) and _method(model, name) is not getattr(known, name):
            return "has its own forward pass, which is not a chain of its blocks"
    if has_hooks(model):
        return "has hooks, which its blocks would not call"
    held = {id(tensor) for block in _chain_of(model) for tensor in (*block.parameters(), *block.buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in held:
            return f"cannot be cut: {name} belongs to no block"
    return ""


def _known(model: nn.Module) -> type[nn.Module] | None:
    if isinstance(model, (LeNet, nn.Sequential)):
        return LeNet if isinstance(model, LeNet) else nn.Sequential
    from torchvision.models import ResNet

    return ResNet if isinstance(model, ResNet) else None


def _method(model: nn.Module, name: str) -> Any:
    # the original forward of a network that replays CUDA graphs
    if name == "forward" and "plain_forward" in vars(model):
        return model.plain_forward
    return vars(model).get(name, getattr(type(model), name, None))


def has_hooks(module: nn.Module) -> bool:
    of = module
    return bool(of._forward_hooks or of._forward_pre_hooks or of._backward_hooks or of._backward_pre_hooks)


def has_weight_hooks(weight: Tensor) -> bool:
    return bool(weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None))


def _chain_of(model: Any) -> list[nn.Module]:
    if isinstance(model, LeNet):
        return [model.features, model.classifier]
    if isinstance(model, nn.Sequential):
        return _joined([module for child in model for module in _flat(child)])
    layers = [block for layer in (model.layer1, model.layer2, model.layer3, model.layer4) for block in _opened(layer)]
    stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
    return [stem, *layers, nn.Sequential(model.avgpool, nn.Flatten(), model.fc)]


def _opened(module: nn.Module) -> list[nn.Module]:
    """Children of a plain nn.Sequential, otherwise the module."""
    is_plain = type(module) is nn.Sequential and "forward" not in vars(module) and not has_hooks(module)
    return list(cast(nn.Sequential, module)) if is_plain else [module]


def _flat(module: nn.Module) -> Iterator[nn.Module]:
    inner = _opened(module)
    if inner == [module]:
        yield module
    else:
        for child in inner:
            yield from _flat(child)


def _untied(blocks: list[nn.Module]) -> list[nn.Module]:
    """Joins blocks that share a weight, so that its gradients add up on one rank."""
    last = {key: number for number, block in enumerate(blocks) for key, _ in _weights_of(block)}
    groups: list[list[nn.Module]] = []
    reach = -1
    for number, block in enumerate(blocks):
        if number > reach:
            groups.append([])
        groups[-1].append(block)
        reach = max([reach, *(last[key] for key, _ in _weights_of(block))])
    return [
        group[0] if len(group) == 1 else nn.Sequential(*(one for block in group for one in _flat(block)))
        for group in groups
    ]


def _weights_of(module: nn.Module) -> Iterator[tuple[int, str]]:
    """Weights by memory, and modules with buffers: they can belong to one rank only."""
    # Buffers that modules share are left out: most are constants, like masks.
    for prefix, one in module.named_modules(remove_duplicate=False):
        before = f"{prefix}." if prefix else ""
        for name, weight in one.named_parameters(recurse=False):
            yield storage_of(weight), before + name
        if buffer := next(one.named_buffers(recurse=False), None):
            yield id(one), before + buffer[0]


def ties_of(model: nn.Module) -> str:
    """Names a shared weight; empty without one."""
    first: dict[int, str] = {}
    if len(chain := _chain_of(model)) == len(_untied(chain)):
        return ""
    for key, name in _weights_of(model):
        if first.setdefault(key, name) != name:
            again = name.rpartition(".")[0]
            return (
                f"{first[key]} is used again in {again}, and one block holds everything from its first use to its last"
            )
    return ""


def storage_of(tensor: Tensor) -> int:
    """Equal for tensors that share memory."""
    return int(tensor.untyped_storage()._cdata)


def _joined(modules: Sequence[nn.Module]) -> list[nn.Module]:
    # Each module with weights begins a block. Others join the block before: activations may work in place.
    blocks: list[list[nn.Module]] = []
    for module in modules:
        if not blocks or (any(True for _ in module.parameters()) and _has_weights(blocks[-1])):
            blocks.append([])
        blocks[-1].append(module)
    return [nn.Sequential(*block) for block in blocks]


def _has_weights(modules: list[nn.Module]) -> bool:
    return any(True for module in modules for _ in module.parameters())


def gradient_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in trainable(model))


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [cast(Tensor, parameter.grad) for parameter in trainable(model)]


def fill_gradients(model: nn.Module) -> None:
    for parameter in trainable(model):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def batch_norms(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def has_batch_norm(model: nn.Module) -> bool:
    return bool(batch_norms(model))


def needs_pairs_of_samples(model: nn.Module) -> bool:
    """Whether some BatchNorm normalises by its batch, not by running statistics."""
    return any(norm.training or norm._buffers.get("running_mean") is None for norm in batch_norms(model))


def moves_statistics(model: nn.Module) -> bool:
    """Whether training moves the statistics of some BatchNorm."""
    return any(norm.training and norm._buffers.get("running_mean") is not None for norm in batch_norms(model))


def running_statistics(model: nn.Module) -> list[torch.Tensor]:
    """BatchNorm's means and variances. Other buffers (masks, queues, codebooks) cannot be averaged."""
    found = [norm._buffers.get(name) for norm in batch_norms(model) for name in ("running_mean", "running_var")]
    return [statistic for statistic in found if statistic is not None]


@contextlib.contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


# A residual network that a CPU core trains at some thousand 28x28 images per second: torchvision's ResNet in the form
# of He et al. (2016) for small images (section 4.2), with one block per group and a first convolution of stride 2.
# 19,810 parameters for one channel and ten classes.

WIDTHS = (8, 16, 32)


class SmallResNet(ResNet):  # type: ignore[misc]  # torchvision is untyped
    def __init__(self, channels: int, classes: int) -> None:
        nn.Module.__init__(self)  # torchvision's begins with 64 channels
        self._norm_layer, self.inplanes, self.dilation = nn.BatchNorm2d, WIDTHS[0], 1
        self.groups, self.base_width = 1, 64
        self.conv1 = nn.Conv2d(channels, WIDTHS[0], 3, stride=2, padding=1, bias=False)
        self.bn1, self.relu, self.maxpool = nn.BatchNorm2d(WIDTHS[0]), nn.ReLU(inplace=True), nn.Identity()
        self.layer1 = self._make_layer(BasicBlock, WIDTHS[0], 1)
        self.layer2 = self._make_layer(BasicBlock, WIDTHS[1], 1, stride=2)
        self.layer3 = self._make_layer(BasicBlock, WIDTHS[2], 1, stride=2)
        self.layer4 = nn.Sequential()
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(WIDTHS[2], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Visit:
    """One pass through a layer with weights."""

    parameters: tuple[nn.Parameter, ...]
    work: float
    """Multiplications: weights times positions."""


@dataclass(frozen=True)
class Taken:
    output: Any
    visits: tuple[Visit, ...]
    kept: Mapping[int, Tensor]
    """Tensors kept for backward, by storage."""


def meta_pass(module: nn.Module, inputs: Tensor, held: Collection[int] = ()) -> Taken:
    """Records a pass on the meta device. held: storages not to count."""
    visits: list[Visit] = []
    kept: dict[int, Tensor] = {}
    elsewhere = {storage_of(tensor) for tensor in [*module.parameters(), *module.buffers()]}.union(held)

    def visit(layer: nn.Module, inputs: Any, output: Any) -> None:
        visits.append(Visit(tuple(layer.parameters(recurse=False)), work_of(layer, numbers(inputs), numbers(output))))

    def keep(tensor: Tensor) -> Tensor:
        if storage_of(tensor) not in elsewhere:
            kept[storage_of(tensor)] = tensor  # holds the tensor, so that no later storage reuses its address
        return tensor

    layers = [one for one in module.modules() if next(one.parameters(recurse=False), None) is not None]
    hooks = [layer.register_forward_hook(visit) for layer in layers]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(inputs)
    for hook in hooks:
        hook.remove()
    return Taken(output, tuple(visits), kept)


def how_it_failed(error: Exception) -> str:
    """Why a network fails on the meta device, to follow its name."""
    first = (str(error).splitlines() or [""])[0][:200]
    return f"fails on torch's meta device ({type(error).__name__}: {first})"


def numbers(values: Any) -> int:
    """Elements of the first tensor: recurrent layers and attention return several."""
    if isinstance(values, Tensor):
        return values.numel()
    parts = values.values() if isinstance(values, Mapping) else values if isinstance(values, (tuple, list)) else ()
    return next((found for found in map(numbers, parts) if found), 0)


def work_of(layer: nn.Module, inputs: int, outputs: int) -> float:
    """Multiplications of a forward pass. inputs, outputs: numbers of elements."""
    weight = max(layer.parameters(recurse=False), key=torch.numel)
    if weight.dim() < 2 or isinstance(layer, (nn.Embedding, nn.LayerNorm)):
        return float(outputs)
    return weight.numel() * (inputs if isinstance(layer, _TRANSPOSED) else outputs) / weight.shape[0]
