"""Named experiments: the settings that each chooses, and the facts of their data sets. Imports no torch.

>>> CHOSEN["mnist_lenet"]["batch"]
64
>>> DATA_SETS["cifar10"].shape
(3, 32, 32)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DataSet:
    """What is known of a data set."""

    shape: tuple[int, int, int]
    """Channels, height, width of one image."""
    classes: int
    train_samples: int
    test_samples: int
    mean: tuple[float, ...]
    """Each channel's mean, in parts of full brightness."""
    std: tuple[float, ...]
    """Each channel's standard deviation, in parts of full brightness."""


DATA_SETS = {
    "mnist": DataSet((1, 28, 28), 10, 60_000, 10_000, (0.1307,), (0.3081,)),
    "cifar10": DataSet((3, 32, 32), 10, 50_000, 10_000, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "imagenet": DataSet((3, 224, 224), 1000, 1_281_167, 50_000, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
IN_FOLDERS = ("folder", "imagenet")
"""Data that are read from DATA_DIR/train/CLASS/* and DATA_DIR/val/CLASS/*."""

SCRIPT = "script"
"""The experiment of a script of one's own."""
OWN = "own"
"""As model and data: a script's own, which the trainer cannot see."""

# mnist_lenet: a rate that warms up and falls to 0 came to 99.3 to 99.4 % after 10 epochs (docs/recipes.md), 0.02
# throughout to 99.1 % (docs/strategies.md).
# resnet50_imagenet: rate 0.1 for 256 samples, momentum 0.9, weight decay 1e-4 (He et al. 2016, section 3.4); 90 epochs,
# a rate that falls after 30, 60 and 80 of them, 5 of warm-up (Goyal et al. 2017, section 5.1). The random crops of
# many sizes that both have are missing here.
# resnet152_cifar: what is usual on CIFAR-10. Rate 0.1 for 128 samples, momentum 0.9, crops with a margin of 4 and flips
# (He et al. 2016, section 4.2); weight decay 5e-4 and 200 epochs (Zagoruyko and Komodakis 2016, section 3); a cosine in
# place of steps (Loshchilov and Hutter 2017); scaled to the batch, with 5 epochs of warm-up (Goyal et al. 2017).
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
"""The values of each experiment that are not a setting's default. `script` is a script of one's own that is joined by
`trainer.join`: its values for settings that it brings itself are never read.
"""
NAMED = tuple(exp for exp in CHOSEN if exp != SCRIPT)


# The networks that a run may train, by name: ours, and torchvision's for classification. Imports no torch.
#
# torchvision's are those of 0.29 (`torchvision.models.list_models(module=torchvision.models)`), less `inception_v3`,
# `alexnet`, `maxvit_t` and `vit_h_14`, which cannot take images of 32 pixels.

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
"""Channels of an image that a model insists on; None: any."""
LENET_PIXELS = 32
"""The height and width that LeNet sees."""
