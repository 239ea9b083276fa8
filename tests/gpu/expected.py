"""What each figure should be, and who says so.

All of it was written before anything had run on a GPU (docs/gpu.md has what was measured since): the ranges come from
the hardware catalogue, from what a wire of 2.5 Gbps allows, from counts on the stand-in for CUDA, and from runs on
CPUs. A figure outside of its range is a finding, not an error.
"""

from __future__ import annotations

from orchestrator.forecast import estimate, gradient_bytes, layers_of
from orchestrator.hosts import find_card

from .network import GBPS
from .row import Range

_LAYERS = layers_of("resnet152", (3, 32, 32), 10)
GRADIENT_BYTES = gradient_bytes(_LAYERS)
_LAUNCH_BOUND = Range(0.4, 1.5, "between tensor cores and launches: 16 bits add 47 % of these, counted on the stand-in")
_FASTER = Range(None, 0.8, "tensor cores, and half the bytes: large batches should be clearly faster")


def step_ms(gpu: str, batch: int) -> Range | None:
    """A whole update in fp32; None for a card that the catalogue does not know."""
    card = find_card(gpu)
    if card is None:
        return None
    found = estimate(card, _LAYERS, "none")
    fixed_ms, samples_ms, fixed_off = found.speed.fixed_ms, batch * found.speed.sample_ms, card.rule.fixed_error
    low = (1 - fixed_off) * fixed_ms + (1 - found.error) * samples_ms
    high = (1 + fixed_off) * fixed_ms + (1 + found.error) * samples_ms
    errors = f"sample +-{found.error:.0%}, fixed +-{fixed_off:.0%}"
    return Range(round(low, 1), round(high, 1), f"the catalogue's estimate for {card.name}, fp32: {errors}")


def half_of_full(batch: int) -> Range | None:
    """A step in 16 bits as a part of the same in fp32."""
    return _LAUNCH_BOUND if batch == 256 else _FASTER if batch == 2048 else None


STEP_OF_SWITCHED_OFF = Range(None, 1.05, "each switch is there to make a step shorter")
STEP_OF_BARE = Range(None, 1.1, "counts on the stand-in: the trainer adds 0.5 ms at most; graphs save launches")
PROFILE_ERROR = Range(None, 0.02, "a profile's line goes through sizes that lie on it to 2 %")
SHARE_BESIDE = Range(0.3, 1.0, "backward is two thirds of a step's kernels, and a bucket is under way in most of it")
"""Of all kernels' time, what lay beside an all-reduce."""
WIRE_IN_COMPUTE = Range(None, 0.25, "buckets travel in a stream of their own: none of the wire is in compute_ms")
"""(compute_ms of ddp - compute_ms of allreduce_flat) / comm_ms of ddp: about 1 where the computing stream waits."""
LOSS_OFF = Range(None, 1e-4, "the same micro-batches: on CPUs a pipeline's are the same to the last bit")
CUT_STEP = Range(None, 1.15, "both ranks' work on one GPU, without 1,350 launches for each micro-batch")
CUT_LAUNCHES = Range(None, 6, "with graphs; on the stand-in at most 6 with four micro-batches per update, here eight")
MNIST_ACCURACY = Range(99.2, 99.6, "99.38 % after 10 epochs on CPUs, mean of three seeds (docs/recipes.md)")
SYNTHETIC_ACCURACY = Range(99.0, None, "made-up classes are easy to tell apart")
BUS_GBPS = Range(0.8 * GBPS / 2, GBPS / 2, "both ranks' bytes share one lo of 2.5 Gbps")
"""Of an all-reduce of two ranks, whose bus bandwidth is the algorithm's."""


def comm_ms(part_of_fp32: float = 1.0) -> Range:
    """Of a gradient's all-reduce between two ranks on the shaped `lo`."""
    least = 1000 * 2 * GRADIENT_BYTES * part_of_fp32 * 8 / (GBPS * 1e9)
    return Range(
        round(0.95 * least),
        round(1.25 * least),
        f"2 x {GRADIENT_BYTES * part_of_fp32 / 1e6:.0f} MB over one lo of 2.5 Gbps",
    )
