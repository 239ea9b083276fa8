"""A step of `strategy=tensor`: each layer's output channels cut over the ranks, which meet behind each. Pure.

    timed = time_step(layers, speeds, shares=(73, 183), sizes=(256,), wire=wire, sent=Sent())
    timed.step_s, timed.own_s, timed.meetings           1.9, (0.22, 0.22), 311

Every rank has the whole batch. Behind each convolution and linear map all of them swap the channels that they have
computed, and backward add up what each has of the gradient of its inputs. In between nobody computes, so that a step is
the sum over its meetings of the slowest rank's time since the one before, and what the exchange costs. BatchNorm, which
every rank computes for all channels, takes its part of the multiplications; ReLU and the copies that join channels are
not counted. A test plays the same out message by message (tests/support/simulate.py).
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

STATES = 3
"""Weights, their gradients, SGD's momentum."""
MOST_RANKS = 8
"""It is not tried over more: each then has a few channels of a narrow layer (ResNet's have 64), and waits for all."""


@dataclass(frozen=True)
class Sent:
    """Bytes of each number that crosses; in 2 of fp32 it is rounded, which casts says."""

    outputs: int = FLOAT_BYTES
    gradients: int = FLOAT_BYTES
    casts: bool = False


@dataclass(frozen=True)
class Meeting:
    """own_s: what each rank computes before it, since the one before. parts_bytes: of outputs, what each rank sends to
    each other one. sum_bytes: or of gradients, what is added up. cast_bytes: of fp32 that every rank rounds, and back.
    """

    own_s: tuple[float, ...]
    parts_bytes: tuple[float, ...] = ()
    sum_bytes: float = 0.0
    cast_bytes: float = 0.0

    @property
    def exchanged(self) -> tuple[tuple[float, ...], float, float]:
        """What the time of its exchange depends on."""
        return self.parts_bytes, self.sum_bytes, self.cast_bytes

    @property
    def sent_bytes(self) -> float:
        return sum(self.parts_bytes) + self.sum_bytes

    def exchange_s(self, wire: LinkCosts) -> float:
        swap_s = wire.swap_s(self.parts_bytes) if self.parts_bytes else wire.sum_s(self.sum_bytes)
        return swap_s + cast_s(self, wire)


@dataclass(frozen=True)
class TensorTime:
    """own_s: what each rank computes in a step, its update included. wire_bytes: of all that crosses in it."""

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
    """shares: each rank's part of the channels. sizes: of micro-batches, samples."""
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
    """Of a step among many alike. Before the first of them stands what follows the last: the first layer's gradients,
    and the update.
    """
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
    """The meetings of a micro-batch, forward and backward, and what each rank computes after the last of them. Nobody
    adds up gradients of images.
    """
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
    """Of each layer, by rank: its part of the multiplications, and of what a micro-batch costs whatever its size."""
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
    """Of the layer's work, by rank: to whole channels, and of what is not cut all of it."""
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
    """By rank."""
    return tuple(map(sum, zip(*times_s, strict=True)))


# ---- memory ---------------------------------------------------------------------------------------------------------


def weight_bytes(layers: Sequence[Layer], shares: Sequence[int]) -> tuple[int, ...]:
    """By rank: its slices, and all of what is not cut."""
    apart = gradient_bytes([layer for layer in layers if not is_cut(layer)])
    found = [apart] * len(shares)
    for layer in filter(is_cut, layers):
        for rank, channels in enumerate(scale_shares(shares, layer.shapes[0][0])):
            found[rank] += FLOAT_BYTES * channels * sum(prod(shape[1:]) for shape in layer.shapes)
    return tuple(found)


def memory_bytes(layers: Sequence[Layer], shares: Sequence[int], samples: int, kept: float = 1.0) -> tuple[int, ...]:
    """By rank, with so many samples at once, all of whose activations each holds. kept: of their bytes in fp32."""
    activations = round(kept * samples * activation_bytes(layers))
    return tuple(STATES * weights + activations for weights in weight_bytes(layers, shares))
