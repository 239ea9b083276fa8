"""What GPUs that one may not have would do: the speed of a network on a card, and how often a cluster fails. Pure.

    estimate_speed(find_card("Tesla V100-16GB"), layers)      Speed(fixed_ms=33.6, sample_ms=0.128, cap=...), see ERROR
    failures(hosts=1000, state_bytes=7e8)    how often such a cluster stops, and what that costs

A GPU's rate on convolutional networks follows its memory bandwidth far better than its TFLOPS: ResNet-50 at 224 px in
fp32 runs at 0.50 images/s per GB/s (standard deviation 0.06 over 16 cards, from Lambda's published logs; leave one out:
11 % mean error). Other networks are scaled by their multiplications. To this comes what a step costs whatever its
batch: starting kernels, layer by layer, and moving the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.forecast.layers import FLOAT_BYTES, Layer, gradient_bytes
from orchestrator.hosts.cards import Card
from trainer.shared.shares import Speed

IMAGES_PER_GB = 0.50
RESNET50_WORK = 4.09e9
"""Multiplications of one 224 px image forward."""
LAUNCH_MS = 0.1
"""Time of one layer whatever the batch: some ten kernels for forward, backward and update at about 10 us each. Assumed.
An H100 took 0.06 ms by CUDA graphs, and its host's launches 0.35 without (docs/gpu.md, "Measured").
"""
WEIGHT_PASSES = 9
"""Times that a step reads or writes all weights: forward 1, backward 3, SGD with momentum 5. Counted."""
RESERVED_BYTES = 2**30
"""The part of a GPU's memory that is kept for CUDA and the allocator. Assumed."""
ERROR = "sample time +-25 % (worst card of the rule: 28 %), more for images below 224 px; fixed time +-50 %"


def estimate_speed(card: Card, layers: Sequence[Layer]) -> Speed:
    """By memory bandwidth; see ERROR. cap: by an estimate of what forward keeps for backward."""
    work = sum(layer.work for layer in layers)
    images_per_s = IMAGES_PER_GB * card.gb_per_s * RESNET50_WORK / work
    weights_ms = WEIGHT_PASSES * gradient_bytes(layers) / (1e6 * card.gb_per_s)
    free = card.memory_gib * 2**30 - RESERVED_BYTES - 3 * gradient_bytes(layers)
    cap = max(0, int(free // activation_bytes(layers)))
    return Speed(LAUNCH_MS * len(layers) + weights_ms, 1000 / images_per_s, cap)


def activation_bytes(layers: Sequence[Layer]) -> int:
    """Bytes that one sample needs: the output of every layer, kept for backward."""
    return round(sum(FLOAT_BYTES * layer.outputs for layer in layers))


# ---- failures -------------------------------------------------------------------------------------------------------

HOST_DAYS = 365.0
"""Mean time between failures of one host. Assumed; 419 unexpected interruptions of 16,384 H100s in 54 days (Llama 3,
2024; remembered) are one in 2,100 days for each GPU, in a data centre."""
RESTART_S = 120.0
"""From a failure to the first step after it, by hand or by a script. Assumed."""
DISK_BYTES_PER_S = 500e6
"""At which the master writes a checkpoint. Assumed."""


@dataclass(frozen=True)
class FailureCosts:
    """What failures of hosts cost a long run."""

    a_day: float
    """How many are expected."""
    checkpoint_s: float
    """How long writing one checkpoint takes."""
    every_s: float
    """The best time between two checkpoints."""
    lost: float
    """The part of all time that goes to writing, to work done again and to starting again."""


def failures(hosts: int, state_bytes: float, host_days: float = HOST_DAYS) -> FailureCosts:
    """Checkpoints at Young's interval (1974), sqrt(2 * cost * time between failures): half of one is lost each time."""
    between_s = 86_400 * host_days / hosts
    checkpoint_s = max(0.01, state_bytes / DISK_BYTES_PER_S)
    every_s = math.sqrt(2 * checkpoint_s * between_s)
    lost = checkpoint_s / every_s + (every_s / 2 + RESTART_S) / between_s
    return FailureCosts(hosts / host_days, checkpoint_s, every_s, min(1.0, lost))
