"""Predicted step of `strategy=tensor`: each layer's output channels are cut over the ranks. Pure. A test simulates it
message by message (tests/support/simulate.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import trainer.shared.gpu_work as gpu_work
from orchestrator.forecast.gpu_catalogue import activation_bytes
from orchestrator.forecast.layers import FLOAT_BYTES, Layer, gradient_bytes
from orchestrator.forecast.links import LinkCosts
from trainer.shared.pace import BACKWARD, FORWARD, OPTIMISER
from trainer.shared.shares import Speed, scale_shares
from trainer.shared.strategy_table import STATES

MOST_RANKS = 8
"""With more, each has few channels of a narrow layer (ResNet's have 64) and waits for all."""


@dataclass(frozen=True)
class Sent:
    """Bytes per number. casts: rounded from fp32."""

    outputs: int = FLOAT_BYTES
    gradients: int = FLOAT_BYTES
    casts: bool = False


@dataclass(frozen=True)
class Meeting:
    """own_s: since the last meeting, by rank. parts_bytes: outputs that each rank sends to each other. sum_bytes: or
    gradients to add up. cast_bytes: of fp32 to round, and back.
    """

    own_s: tuple[float, ...]
    parts_bytes: tuple[float, ...] = ()
    sum_bytes: float = 0.0
    cast_bytes: float = 0.0

    @property
    def exchanged(self) -> tuple[tuple[float, ...], float, float]:
        """Key for equal exchanges."""
        return self.parts_bytes, self.sum_bytes, self.cast_bytes

    @property
    def sent_bytes(self) -> float:
        return sum(self.parts_bytes) + self.sum_bytes

    def exchange_s(self, wire: LinkCosts) -> float:
        swap_s = wire.swap_s(self.parts_bytes) if self.parts_bytes else wire.sum_s(self.sum_bytes)
        return swap_s + cast_s(self, wire)


@dataclass(frozen=True)
class TensorTime:
    """own_s: by rank, with the update."""

    step_s: float
    own_s: tuple[float, ...]
    meetings: int
    wire_bytes: float


def cast_s(meeting: Meeting, wire: LinkCosts) -> float:
    return 2 * wire.costs.work_s(gpu_work.cast(meeting.cast_bytes)) if meeting.cast_bytes else 0.0


def is_cut(layer: Layer) -> bool:
    return not layer.is_batch_norm


def time_step(
    layers: tuple[Layer, ...],
    speeds: Sequence[Speed],
    shares: Sequence[int],
    sizes: Sequence[int],
    wire: LinkCosts,
    sent: Sent,
) -> TensorTime:
    """shares: of channels. sizes: samples of each micro-batch."""
    # Every rank has the whole batch. After each convolution and linear map all exchange their channels; backward they
    # add up gradients of its inputs. A step is the sum over these meetings of the slowest rank's compute time and the
    # exchange. Every rank computes BatchNorm for all channels; ReLU and copies are not counted.
    found = meetings_of(layers, speeds, shares, sizes, sent)
    kinds = {meeting.exchanged: meeting for meeting in found}
    exchanges_s = {each: meeting.exchange_s(wire) for each, meeting in kinds.items()}
    return TensorTime(
        step_s=sum(max(meeting.own_s) + exchanges_s[meeting.exchanged] for meeting in found),
        own_s=tuple(map(sum, zip(*(meeting.own_s for meeting in found), strict=True))),
        meetings=len(found),
        wire_bytes=sum(meeting.sent_bytes for meeting in found),
    )


def meetings_of(
    layers: tuple[Layer, ...], speeds: Sequence[Speed], shares: Sequence[int], sizes: Sequence[int], sent: Sent
) -> list[Meeting]:
    """The first meeting comes after the previous step's last gradients and update."""
    found, left_s = list[Meeting](), _sum([0.0] * len(speeds))
    for samples in sizes:
        (first, *others), last_s = _pass(layers, tuple(speeds), tuple(shares), samples, sent)
        found += [replace(first, own_s=_sum(left_s, first.own_s)), *others]
        left_s = last_s
    own_s = _sum(left_s, *(meeting.own_s for meeting in found))
    update_s = [OPTIMISER / (FORWARD + BACKWARD) * rank_s for rank_s in own_s]
    return [replace(found[0], own_s=_sum(found[0].own_s, left_s, update_s)), *found[1:]]


@lru_cache(maxsize=64)
def _pass(
    layers: tuple[Layer, ...], speeds: tuple[Speed, ...], shares: tuple[int, ...], samples: int, sent: Sent
) -> tuple[tuple[Meeting, ...], tuple[float, ...]]:
    """Also returns the compute time after the last meeting. Gradients of images are not added up."""
    found = list[Meeting]()
    nothing_s = own_s = _sum([0.0] * len(speeds))
    times = _times_s(layers, speeds, shares, samples)
    for layer, layer_s in zip(layers, times, strict=True):
        own_s = _sum(own_s, [FORWARD * rank_s for rank_s in layer_s])
        if is_cut(layer):
            found.append(_gathered(layer, own_s, shares, samples, sent))
            own_s = nothing_s
    first = next(layer for layer in layers if is_cut(layer))
    for layer, layer_s in zip(reversed(layers), reversed(times), strict=True):
        own_s = _sum(own_s, [BACKWARD * rank_s for rank_s in layer_s])
        if is_cut(layer) and layer is not first:
            found.append(_added_up(layer, own_s, samples, sent))
            own_s = nothing_s
    return tuple(found), own_s


def _times_s(
    layers: Sequence[Layer], speeds: Sequence[Speed], shares: Sequence[int], samples: int
) -> list[tuple[float, ...]]:
    """By layer and rank: parts of the multiplications, and of the fixed cost."""
    whole = sum(layer.work for layer in layers)
    fixed_s = [speed.fixed_ms / 1000 / len(layers) for speed in speeds]
    sample_s = [samples * speed.sample_ms / 1000 / whole for speed in speeds]
    return [
        _sum(
            fixed_s, [part * layer.work * each_s for part, each_s in zip(_parts(layer, shares), sample_s, strict=True)]
        )
        for layer in layers
    ]


def _parts(layer: Layer, shares: Sequence[int]) -> list[float]:
    """By rank, in whole channels; uncut layers count fully."""
    if not is_cut(layer):
        return [1.0] * len(shares)
    channels = layer.shapes[0][0]
    return [count / channels for count in scale_shares(shares, channels)]


def _gathered(layer: Layer, own_s: tuple[float, ...], shares: Sequence[int], samples: int, sent: Sent) -> Meeting:
    outputs = samples * layer.outputs
    parts_bytes = tuple(sent.outputs * outputs * part for part in _parts(layer, shares))
    return Meeting(own_s, parts_bytes, cast_bytes=FLOAT_BYTES * outputs if sent.casts else 0.0)


def _added_up(layer: Layer, own_s: tuple[float, ...], samples: int, sent: Sent) -> Meeting:
    inputs = samples * layer.inputs
    return Meeting(own_s, (), float(sent.gradients * inputs), FLOAT_BYTES * inputs if sent.casts else 0.0)


def _sum(*times_s: Sequence[float]) -> tuple[float, ...]:
    return tuple(map(sum, zip(*times_s, strict=True)))


# ---- memory ---------------------------------------------------------------------------------------------------------


def weight_bytes(layers: Sequence[Layer], shares: Sequence[int]) -> tuple[int, ...]:
    """By rank: its slices and all uncut layers."""
    apart = gradient_bytes([layer for layer in layers if not is_cut(layer)])
    found = [apart] * len(shares)
    for layer in filter(is_cut, layers):
        for rank, channels in enumerate(scale_shares(shares, layer.shapes[0][0])):
            found[rank] += FLOAT_BYTES * channels * sum(prod(shape[1:]) for shape in layer.shapes)
    return tuple(found)


def memory_bytes(
    layers: Sequence[Layer], shares: Sequence[int], samples: int, kept: float = 1.0, states: int = STATES["sgd"]
) -> tuple[int, ...]:
    """samples: at once. kept: activations' size relative to fp32. states: copies of the weights."""
    activations = round(kept * samples * activation_bytes(layers))
    return tuple(states * weights + activations for weights in weight_bytes(layers, shares))
