"""Estimates a GPU's training speed from its memory bandwidth, and time that a cluster loses to failures. Pure.

estimate_speed(find_card("Tesla V100-16GB"), layers)      Speed(fixed_ms=33.6, sample_ms=0.128, cap=...), see ERROR
failures(hosts=1000, state_bytes=7e8)                     failures a day and their cost
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.forecast.layers import FLOAT_BYTES, Layer, gradient_bytes
from orchestrator.hosts.election import Card
from trainer.shared.shares import Speed

# The rate of convolutional networks follows a GPU's memory bandwidth far better than its TFLOPS: ResNet-50 at 224 px in
# fp32 runs at 0.50 images/s per GB/s (standard deviation 0.06 over 16 cards, from Lambda's published logs; leave one
# out: 11 % mean error). Other networks are scaled by their multiplications: RESNET50_WORK for one image, forward.
IMAGES_PER_GB = 0.50
RESNET50_WORK = 4.09e9
# Per layer: some ten kernels for forward, backward and update at about 10 us each. Assumed. An H100 took 0.06 ms with
# CUDA graphs, 0.35 without (docs/gpu.md, "Measured").
LAUNCH_MS = 0.1
# Reads and writes of all weights per step: forward 1, backward 3, SGD with momentum 5. Counted.
WEIGHT_PASSES = 9
# GPU memory kept for CUDA and the allocator. Assumed.
RESERVED_BYTES = 2**30
ERROR = "sample time +-25 % (worst card of the rule: 28 %), more for images below 224 px; fixed time +-50 %"


def estimate_speed(card: Card, layers: Sequence[Layer]) -> Speed:
    """By memory bandwidth; see ERROR. cap: from estimated activations."""
    work = sum(layer.work for layer in layers)
    images_per_s = IMAGES_PER_GB * card.gb_per_s * RESNET50_WORK / work
    weights_ms = WEIGHT_PASSES * gradient_bytes(layers) / (1e6 * card.gb_per_s)
    free = card.memory_gib * 2**30 - RESERVED_BYTES - 3 * gradient_bytes(layers)
    cap = max(0, int(free // activation_bytes(layers)))
    return Speed(LAUNCH_MS * len(layers) + weights_ms, 1000 / images_per_s, cap)


def activation_bytes(layers: Sequence[Layer]) -> int:
    """Outputs of all layers, kept for backward, per sample."""
    return round(sum(FLOAT_BYTES * layer.outputs for layer in layers))


# ---- failures -------------------------------------------------------------------------------------------------------

# Mean time between failures of one host. Assumed; 419 unexpected interruptions of 16,384 H100s in 54 days (Llama 3,
# 2024; remembered) are one in 2,100 days per GPU, in a data centre.
HOST_DAYS = 365.0
# From a failure to the next step. Assumed.
RESTART_S = 120.0
# Checkpoint writing by the master. Assumed.
DISK_BYTES_PER_S = 500e6


@dataclass(frozen=True)
class FailureCosts:
    a_day: float
    """Expected."""
    checkpoint_s: float
    every_s: float
    """Between two checkpoints."""
    lost: float
    """Part of all time: writing, repeated work, restarts."""


def failures(hosts: int, state_bytes: float, host_days: float = HOST_DAYS) -> FailureCosts:
    """Checkpoints at Young's interval (1974), sqrt(2 * cost * time between failures)."""
    between_s = 86_400 * host_days / hosts
    checkpoint_s = max(0.01, state_bytes / DISK_BYTES_PER_S)
    every_s = math.sqrt(2 * checkpoint_s * between_s)
    lost = checkpoint_s / every_s + (every_s / 2 + RESTART_S) / between_s
    return FailureCosts(hosts / host_days, checkpoint_s, every_s, min(1.0, lost))
