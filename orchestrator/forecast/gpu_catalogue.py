"""Estimates a GPU's training speed from the catalogue of cards, and time that a cluster loses to failures. Pure.

found = estimate(find_card("Tesla V100-16GB"), layers, amp="none")
found.speed, found.launch_ms, found.error       Speed(fixed_ms=10.7, sample_ms=0.187, cap=...), 24.3, 0.10
failures(hosts=1000, state_bytes=7e8)           failures a day and their cost
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.forecast.layers import FLOAT_BYTES, Layer, gradient_bytes
from orchestrator.hosts.cards import Card, all_cards
from orchestrator.units import format_percent
from trainer.shared.settings import Settings
from trainer.shared.shares import Speed
from trainer.shared.strategy_table import STATES

# The rate of convolutional networks follows a GPU's memory bandwidth far better than its TFLOPS. Other networks are
# scaled by their multiplications: RESNET50_WORK for one image of 224 px, forward.
RESNET50_WORK = 4.09e9
SMALL_PIXELS = 64
"""Images below it have maps of few pixels in later layers."""
# Reads and writes of all weights per step: forward 1, backward 3, SGD with momentum 5. Counted.
WEIGHT_PASSES = 9
# GPU memory kept for CUDA and the allocator. Assumed.
RESERVED_BYTES = 2**30


@dataclass(frozen=True)
class Estimate:
    """speed: with CUDA graphs. launch_ms: the least time of a micro-batch without them, spent by the host. error: of a
    sample's time, relative.
    """

    speed: Speed
    launch_ms: float
    error: float
    source: str

    def launched_ms(self, settings: Settings) -> float:
        """launch_ms, or 0 with CUDA graphs."""
        return self.launch_ms if settings.cuda_graph == "off" else 0.0


def estimate(card: Card, layers: Sequence[Layer], amp: str, states: int = STATES["sgd"]) -> Estimate:
    """cap: from estimated activations and `states` copies of the weights. Raises UsageError for bf16 on a card that
    only emulates it.
    """
    card.check_amp(amp)
    rate, rule = card.rate(amp), card.rule
    images_per_s = rate.images_per_s * RESNET50_WORK / sum(layer.work for layer in layers)
    sample_ms = 1000 / images_per_s * (card.small_maps if _is_small(layers) else 1.0)
    weights_ms = WEIGHT_PASSES * gradient_bytes(layers) / (1e6 * card.gb_per_s)
    kernels_ms = len(layers) * rule.layer_us["fp32" if amp == "none" else "half"] / 1000
    free = card.memory_gib * 2**30 - RESERVED_BYTES - states * gradient_bytes(layers)
    kept = activation_bytes(layers) * (1.0 if amp == "none" else 0.5)
    speed = Speed(kernels_ms + weights_ms, sample_ms, max(0, int(free // kept)))
    return Estimate(speed, len(layers) * rule.launch_us / 1000, rate.error, rate.source)


def error_words(found: Sequence[Estimate]) -> str:
    """The largest error; "" without estimates."""
    if not found:
        return ""
    worst, table = max(each.error for each in found), all_cards()
    fixed = format_percent(table.rule.fixed_error)
    return f"version {table.version}: a sample's time +-{format_percent(worst)}, fixed time +-{fixed}"


def _is_small(layers: Sequence[Layer]) -> bool:
    """By the first layer's inputs, of three channels at most."""
    return 0 < layers[0].inputs < 3 * SMALL_PIXELS**2


def activation_bytes(layers: Sequence[Layer]) -> int:
    """Kept for backward, per sample."""
    return round(FLOAT_BYTES * sum(layer.outputs if layer.kept is None else layer.kept for layer in layers))


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
