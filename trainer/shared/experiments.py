"""Named experiments, each a complete set of settings, and the facts of their data sets. Imports no torch.

>>> EXPERIMENTS["mnist_lenet"]["batch"]
64
>>> DATA_SETS["cifar10"].shape
(3, 32, 32)
"""

from __future__ import annotations

from collections.abc import Mapping
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

_COMMON: dict[str, Any] = {
    "data_dir": "~/data",
    "weights": "",
    "steps": 0,
    "samples": 0,
    "optimizer": "sgd",
    "lr_schedule": "constant",
    "lr_warmup": 0.0,
    "lr_steps": "",
    "lr_factor": 0.1,
    "lr_batch": 0,
    "clip_norm": 0.0,
    "label_smoothing": 0.0,
    "ema": 0.0,
    "seed": 0,
    "device": "auto",
    "backend": "auto",
    "timeout_s": 600.0,
    "strategy": "ddp",
    "bucket_mib": 0.0,
    "fidelity": "exact",
    "wire": "auto",
    "compress_rank": 2,
    "compress_after": -1,
    "local_steps": 32,
    "local_overlap": -1,
    "local_after": 0,
    "local_batch": 0,
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
    "shares": "profiled",
    "speeds": "",
    "accumulate": 0,
    "stages": "",
    "in_flight": 0,
    "schedule": "zero_bubble",
    "profile_s": 0.0,
    "unused_parameters": "refuse",
    "sync_bn": False,
    "amp": "none",
    "tf32": "auto",
    "channels_last": "auto",
    "cudnn_benchmark": "auto",
    "fused_sgd": "auto",
    "cuda_graph": "auto",
    "loader": "auto",
    "num_workers": -1,
    "slow": "",
    "warmup_steps": 3,
    "checkpoint_every": 0,
    "checkpoint_dir": "",
    "resume": "",
    "target_accuracy": 0.0,
    "not_finite": "report",
    "eval_every": 1,
}

# mnist_lenet: a rate that warms up and falls to 0 came to 99.3 to 99.4 % after 10 epochs (docs/recipes.md), 0.02
# throughout to 99.1 % (docs/strategies.md).
# resnet50_imagenet: rate 0.1 for 256 samples, momentum 0.9, weight decay 1e-4 (He et al. 2016, section 3.4); 90 epochs,
# a rate that falls after 30, 60 and 80 of them, 5 of warm-up (Goyal et al. 2017, section 5.1). The random crops of
# many sizes that both have are missing here.
# resnet152_cifar: what is usual on CIFAR-10. Rate 0.1 for 128 samples, momentum 0.9, crops with a margin of 4 and flips
# (He et al. 2016, section 4.2); weight decay 5e-4 and 200 epochs (Zagoruyko and Komodakis 2016, section 3); a cosine in
# place of steps (Loshchilov and Hutter 2017); scaled to the batch, with 5 epochs of warm-up (Goyal et al. 2017).
TRAINING: dict[str, dict[str, Any]] = {
    "mnist_lenet": {
        **_COMMON,
        "exp": "mnist_lenet",
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
        **_COMMON,
        "exp": "resnet152_cifar",
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
        **_COMMON,
        "exp": "resnet50_imagenet",
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
}

OWN = "own"
"""As model and data: a script's own, which the trainer knows nothing of."""

SCRIPT: dict[str, Any] = {
    **_COMMON,
    "exp": "script",
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
}
"""What a script of one's own begins with, that is joined by `trainer.join`. What it brings itself (BROUGHT) is in here
so that there is one kind of settings, and nobody looks at it.
"""
BROUGHT = (
    *(
        "model",
        "weights",
        "data",
        "data_dir",
        "samples",
        "augment",
        "loader",
        "optimizer",
        "lr",
        "momentum",
        "weight_decay",
    ),
    *("fused_sgd", "label_smoothing", "eval_every"),
)

EXPERIMENTS: dict[str, dict[str, Any]] = {
    **TRAINING,
    "collectives": {
        "exp": "collectives",
        "operations": "all",
        "min_bytes": 2**10,
        "max_bytes": 2**28,
        "factor": 4,
        "budget_s": 60.0,
        "links": True,
        "iterations": 50,
        "dtype": "float32",
        "device": "auto",
        "backend": "auto",
        "seed": 0,
    },
}
"""TRAINING, and what measures instead of training."""


def begun_with(exp: str) -> Mapping[str, Any]:
    """The values that nobody has set; of an unknown experiment none."""
    return SCRIPT if exp == SCRIPT["exp"] else TRAINING.get(exp, {})
