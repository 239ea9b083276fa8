"""Named experiments with their settings, data sets and networks. Imports no torch.

>>> CHOSEN["mnist_lenet"]["batch"]
64
>>> DATA_SETS["cifar10"].shape
(3, 32, 32)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class DataSet:
    shape: tuple[int, int, int]
    """Channels, height, width."""
    classes: int
    train_samples: int
    test_samples: int
    mean: tuple[float, ...]
    """Per channel, as a part of full brightness; also `std`."""
    std: tuple[float, ...]
    is_text: bool = False
    """A sample is a row of tokens, and its labels are the next ones."""
    bytes_per_token: float = 1.0
    """Mean over the labels of all test samples."""

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Per sample."""
        return self.shape[2:] if self.is_text else ()


TOKENS = 256
"""Per sample of text, unless set."""
BYTES = 256
"""Different ones: the tokens of text without a vocabulary of its own."""
DATA_SETS = {
    "mnist": DataSet((1, 28, 28), 10, 60_000, 10_000, (0.1307,), (0.3081,)),
    "cifar10": DataSet((3, 32, 32), 10, 50_000, 10_000, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "imagenet": DataSet((3, 224, 224), 1000, 1_281_167, 50_000, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    # As many samples as paced ranks take; others count their files.
    "text": DataSet((1, 1, TOKENS), BYTES, 100_000, 1_000, (), (), is_text=True),
}
IN_FOLDERS = ("folder", "imagenet")
"""Read from DATA_DIR/train/CLASS/* and DATA_DIR/val/CLASS/*."""

SCRIPT = "script"
"""The experiment of a user's own script."""
OWN = "own"
"""The model and data of a user's own script."""

# mnist_lenet: a warm-up and cosine reached 99.3 to 99.4 % after 10 epochs (docs/recipes.md), a constant 0.02 99.1 %
# (docs/strategies.md). resnet50_imagenet: rate 0.1 per 256 samples, momentum 0.9, weight decay 1e-4 (He et al. 2016,
# section 3.4); 90 epochs, steps after 30, 60 and 80, 5 epochs of warm-up (Goyal et al. 2017, section 5.1). Their random
# crops of many sizes are missing here. resnet152_cifar: usual on CIFAR-10. Rate 0.1 per 128 samples, momentum 0.9,
# crops with a margin of 4 and flips (He et al. 2016, section 4.2); weight decay 5e-4 and 200 epochs (Zagoruyko and
# Komodakis 2016, section 3); a cosine (Loshchilov and Hutter 2017); scaled to the batch, with 5 epochs of warm-up
# (Goyal et al. 2017).
CHOSEN: dict[str, dict[str, Any]] = {
    "mnist_lenet": {
        "model": "lenet",
        "data": "mnist",
        "augment": "affine",
        "batch": 64,
        "epochs": 10,
        "lr": 0.05,
        "lr_schedule": "cosine",
        "lr_warmup": 1.0,
        "momentum": 0.9,
        "weight_decay": 0.0,
    },
    "resnet152_cifar": {
        "model": "resnet152",
        "data": "cifar10",
        "augment": "crop_flip",
        "batch": 256,
        "epochs": 200,
        "lr": 0.1,
        "lr_batch": 128,
        "lr_schedule": "cosine",
        "lr_warmup": 5.0,
        "momentum": 0.9,
        "weight_decay": 5e-4,
    },
    "resnet50_imagenet": {
        "model": "resnet50",
        "data": "imagenet",
        "augment": "crop_flip",
        "batch": 256,
        "epochs": 90,
        "lr": 0.1,
        "lr_batch": 256,
        "lr_schedule": "step",
        "lr_steps": "30,60,80",
        "lr_warmup": 5.0,
        "momentum": 0.9,
        "weight_decay": 1e-4,
    },
    "gpt_text": {
        "model": "gpt_small",
        "data": "text",
        "augment": "none",
        "batch": 64,
        "epochs": 1,
        "lr": 1e-3,
        "lr_schedule": "cosine",
        "lr_warmup": 0.05,
        "momentum": 0.0,
        "weight_decay": 0.1,
        "optimizer": "adamw",
        "clip_norm": 1.0,
    },
    "script": {
        "model": OWN,
        "data": OWN,
        "data_dir": "-",
        "augment": "none",
        "batch": 64,
        "epochs": 1,
        "lr": 1.0,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "cuda_graph": "off",
        "loader": "workers",
        "fused_sgd": "off",
    },
}
"""Values that differ from a setting's default. `script`: values for settings that a script
brings itself are not read.
"""
NAMED = tuple(exp for exp in CHOSEN if exp != SCRIPT)


# Our networks, and torchvision 0.29's for classification (`torchvision.models.list_models(module=torchvision.models)`)
# without `inception_v3`, `alexnet`, `maxvit_t` and `vit_h_14`, which cannot take images of 32 pixels.

_TORCHVISION = """
convnext_base convnext_large convnext_small convnext_tiny densenet121 densenet161 densenet169 densenet201
efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3 efficientnet_b4 efficientnet_b5 efficientnet_b6
efficientnet_b7 efficientnet_v2_l efficientnet_v2_m efficientnet_v2_s googlenet mnasnet0_5 mnasnet0_75 mnasnet1_0
mnasnet1_3 mobilenet_v2 mobilenet_v3_large mobilenet_v3_small regnet_x_16gf regnet_x_1_6gf regnet_x_32gf regnet_x_3_2gf
regnet_x_400mf regnet_x_800mf regnet_x_8gf regnet_y_128gf regnet_y_16gf regnet_y_1_6gf regnet_y_32gf regnet_y_3_2gf
regnet_y_400mf regnet_y_800mf regnet_y_8gf resnet101 resnet152 resnet18 resnet34 resnet50 resnext101_32x8d
resnext101_64x4d resnext50_32x4d shufflenet_v2_x0_5 shufflenet_v2_x1_0 shufflenet_v2_x1_5 shufflenet_v2_x2_0
squeezenet1_0 squeezenet1_1 swin_b swin_s swin_t swin_v2_b swin_v2_s swin_v2_t vgg11 vgg11_bn vgg13 vgg13_bn vgg16
vgg16_bn vgg19 vgg19_bn vit_b_16 vit_b_32 vit_l_16 vit_l_32 wide_resnet101_2 wide_resnet50_2
"""

OURS = ("lenet", "small_resnet")
MODEL_CHANNELS: dict[str, int | None] = {**dict.fromkeys(OURS), **dict.fromkeys(_TORCHVISION.split(), 3)}
"""Image channels that a model requires; None: any."""


@dataclass(frozen=True)
class GptSize:
    layers: int
    width: int
    heads: int
    vocabulary: int = BYTES


# gpt_small: 10.9 million parameters. gpt2_small: GPT-2's 12 layers of 768 (124 million, and a head of its own: 162).
TEXT_MODELS = {
    "gpt_tiny": GptSize(2, 64, 2),
    "gpt_small": GptSize(6, 384, 6),
    "gpt2_small": GptSize(12, 768, 12, 50_257),
}


def gpt_size(model: str, classes: int) -> GptSize:
    """classes: tokens of the data. Bytes leave a network its own vocabulary."""
    size = TEXT_MODELS[model]
    return size if classes == BYTES else replace(size, vocabulary=classes)


LENET_PIXELS = 32
"""LeNet's height and width."""
