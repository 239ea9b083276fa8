"""GPUs that one may not have: their figures, which of them are estimates, and what follows for a network. Pure.

    gpu = find_gpu("Tesla V100-16GB")
    gpu.gb_per_s, gpu.unsure                 900.0, {"fp32_tflops", "half_tflops"}
    estimate_speed(gpu, layers)              Speed(fixed_ms=33.6, sample_ms=0.128, cap=...): an estimate, see ERROR
    failures(hosts=1000, state_bytes=7e8)    how often such a cluster stops, and what that costs

A GPU's rate on convolutional networks follows its memory bandwidth far better than its TFLOPS: ResNet-50 at 224 px in
fp32 runs at 0.50 images/s per GB/s (standard deviation 0.06 over 16 cards, from Lambda's published logs; leave one out:
11 % mean error). Other networks are scaled by their multiplications. To this comes what a step costs whatever its
batch: starting kernels, layer by layer, and moving the weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.forecast.layers import FLOAT_BYTES, Layer, gradient_bytes
from trainer.shared.shares import Speed

IMAGES_PER_GB = 0.50
RESNET50_WORK = 4.09e9
"""Multiplications of one 224 px image forward."""
LAUNCH_MS = 0.1
"""Of one layer: some ten kernels for forward, backward and update at about 10 us each. Assumed."""
WEIGHT_PASSES = 9
"""Times that a step reads or writes all weights: forward 1, backward 3, SGD with momentum 5. Counted."""
RESERVED_BYTES = 2**30
"""Of a GPU's memory, for CUDA and the allocator. Assumed."""
ERROR = "sample time +-25 % (worst card of the rule: 28 %), more for images below 224 px; fixed time +-50 %"

READ = "read: performance notes of this project, datasheet or log named there"
KNOWN = "remembered from the vendor's data sheet, not verified"


@dataclass(frozen=True)
class Gpu:
    """half_tflops: fp16 tensor cores with fp32 sums, dense. unsure: figures that are estimates or not verified."""

    name: str
    fp32_tflops: float
    half_tflops: float | None
    gb_per_s: float
    memory_gib: float
    watts: int | None
    unsure: frozenset[str]
    source: str


_ALL = frozenset({"fp32_tflops", "half_tflops", "gb_per_s", "memory_gib", "watts"})


def _remembered(name: str, fp32: float, half: float | None, gb_per_s: float, gib: float, watts: int) -> Gpu:
    return Gpu(name, fp32, half, gb_per_s, gib, watts, _ALL, KNOWN)


_TENSOR = frozenset({"half_tflops"})
CATALOGUE: tuple[Gpu, ...] = (
    Gpu("A2000", 7.99, 31.9, 288, 12, 70, _TENSOR, READ),
    Gpu("A2000 6GB", 7.99, 31.9, 288, 6, 70, _TENSOR, READ),
    Gpu("A16", 4.34, 17.4, 200, 16, 62, frozenset({"gb_per_s"}), READ + "; one of the board's four GPUs"),
    Gpu("V100", 15.7, 125, 900, 16, 300, frozenset({"fp32_tflops", "half_tflops"}), READ + "; SXM2"),
    Gpu("3090", 35.6, 71, 936, 24, 350, frozenset({"fp32_tflops", "half_tflops"}), READ),
    _remembered("V100 32GB", 15.7, 125, 900, 32, 300),
    _remembered("A100", 19.5, 312, 1555, 40, 400),
    _remembered("A100 80GB", 19.5, 312, 2039, 80, 400),
    _remembered("H100", 66.9, 989, 3350, 80, 700),
    _remembered("H200", 66.9, 989, 4800, 141, 700),
    _remembered("P100", 10.6, None, 732, 16, 300),
    _remembered("T4", 8.1, 65, 320, 16, 70),
    _remembered("L4", 30.3, 121, 300, 24, 72),
    _remembered("L40S", 91.6, 362, 864, 48, 350),
    _remembered("A10", 31.2, 125, 600, 24, 150),
    _remembered("A4000", 19.2, 76.7, 448, 16, 140),
    _remembered("A5000", 27.8, 111, 768, 24, 230),
    _remembered("A6000", 38.7, 155, 768, 48, 300),
    _remembered("1080Ti", 11.3, None, 484, 11, 250),
    _remembered("2080Ti", 13.4, 53.8, 616, 11, 250),
    _remembered("3080", 29.8, 59.5, 760, 10, 320),
    _remembered("4090", 82.6, 165, 1008, 24, 450),
)


def find_gpu(label: str) -> Gpu | None:
    """The card that this label means: `RTX A2000`, `Tesla V100-16GB`, `NVIDIA GeForce RTX 3090`. None: not known."""
    words = _words(label)
    fitting = [gpu for gpu in CATALOGUE if _words(gpu.name) <= words]
    return max(fitting, key=lambda gpu: len(_words(gpu.name)), default=None)


def _words(label: str) -> frozenset[str]:
    joined = re.sub(r"(\d)\s+(ti|gb)\b", r"\1\2", label.lower())
    return frozenset(re.sub(r"^(rtx|gtx)(?=.)", "", word) for word in re.split(r"[^a-z0-9]+", joined))


def estimate_speed(gpu: Gpu, layers: Sequence[Layer]) -> Speed:
    """By memory bandwidth; see ERROR. cap: by an estimate of what forward keeps for backward."""
    work = sum(layer.work for layer in layers)
    images_per_s = IMAGES_PER_GB * gpu.gb_per_s * RESNET50_WORK / work
    weights_ms = WEIGHT_PASSES * gradient_bytes(layers) / (1e6 * gpu.gb_per_s)
    free = gpu.memory_gib * 2**30 - RESERVED_BYTES - 3 * gradient_bytes(layers)
    cap = max(0, int(free // activation_bytes(layers)))
    return Speed(LAUNCH_MS * len(layers) + weights_ms, 1000 / images_per_s, cap)


def activation_bytes(layers: Sequence[Layer]) -> int:
    """Of one sample: what every layer gives, kept for backward."""
    return round(sum(FLOAT_BYTES * layer.shapes[0][0] * layer.work / math.prod(layer.shapes[0]) for layer in layers))


# ---- failures -------------------------------------------------------------------------------------------------------

HOST_DAYS = 365.0
"""Mean time between failures of one host. Assumed; 419 unexpected interruptions of 16,384 H100s in 54 days (Llama 3,
2024; remembered) are one in 2,100 days for each GPU, in a data centre."""
RESTART_S = 120.0
"""From a failure to the first step after it, by hand or by a script. Assumed."""
DISK_BYTES_PER_S = 500e6
"""At which the master writes a checkpoint. Assumed."""


@dataclass(frozen=True)
class Failures:
    """a_day: expected. checkpoint_s: writes one. every_s: the best time between two. lost: the part of all time that
    goes to writing, to work done again and to starting again.
    """

    a_day: float
    checkpoint_s: float
    every_s: float
    lost: float


def failures(hosts: int, state_bytes: float, host_days: float = HOST_DAYS) -> Failures:
    """Checkpoints at Young's interval (1974), sqrt(2 * cost * time between failures): half of one is lost each time."""
    between_s = 86_400 * host_days / hosts
    checkpoint_s = max(0.01, state_bytes / DISK_BYTES_PER_S)
    every_s = math.sqrt(2 * checkpoint_s * between_s)
    lost = checkpoint_s / every_s + (every_s / 2 + RESTART_S) / between_s
    return Failures(hosts / host_days, checkpoint_s, every_s, min(1.0, lost))
