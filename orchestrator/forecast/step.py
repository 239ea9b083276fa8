"""Predicts a strategy's step time and bottleneck (not pipeline, fsdp or horovod). Pure: no clock, no files.

job = Workload(layers_of("resnet152", (3, 32, 32), 10), batch=256)
forecast = predict(job, hosts, wire, Way("ddp"), shares=(128, 128))
forecast.step_ms, forecast.samples_per_s, forecast.limited_by     948., 270., "wire"
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

import trainer.shared.gpu_work as gpu_work
from orchestrator.forecast.layers import FLOAT_BYTES, Block, Layer, Shape, gradient_bytes
from orchestrator.forecast.links import LinkCosts
from orchestrator.forecast.tensor_step import Sent, time_step
from orchestrator.planning.profiles import BlockTimes
from trainer.shared.gpu_work import Work
from trainer.shared.pace import BACKWARD, FORWARD, OPTIMISER
from trainer.shared.shares import Speed, at_most, equal_shares, fastest_shares
from trainer.shared.strategy_table import STRATEGIES, Fidelity

MIB = 2**20
Limit = Literal["wire", "compute"]


@dataclass(frozen=True)
class HostSpeed:
    name: str
    speeds: tuple[Speed, ...]
    """By rank."""
    kind: str = ""
    """Only for imagined hosts, like 4xA16."""
    blocks: tuple[BlockTimes | None, ...] = ()
    """By rank; empty, or None, if not measured."""
    memory_bytes: int | None = None
    """Per rank; a speed's cap follows from it."""
    launch_ms: float = 0.0
    """The least time of a micro-batch without CUDA graphs, in which the host launches its kernels."""


@dataclass(frozen=True)
class Workload:
    layers: tuple[Layer, ...]
    batch: int
    """Over all ranks."""
    blocks: tuple[Block, ...] = ()
    """Empty: the experiment's own."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(shape for layer in self.layers for shape in layer.shapes)


@dataclass(frozen=True)
class Way:
    strategy: str
    fidelity: Fidelity = "exact"
    bucket_mib: float = 25.0
    every: int = 1
    """Local steps between averages."""
    rank: int = 2
    """PowerSGD's."""
    half_wire: bool = False
    """For local's averages, or outputs gathered by tensor."""
    overlap: int = 0
    """Local steps during an average."""
    local_batch: int = 0
    """Most of one local update; 0: one update a step."""
    exact_part: float = 0.0
    """Part of updates, 0..1; the prediction is the mean over all."""
    sync_bn: bool = False


@dataclass(frozen=True)
class RankTime:
    """compute_ms ends with the last local gradient, exposed_ms with the sum; wait_ms: its part for slower ranks."""

    compute_ms: float
    optim_ms: float
    exposed_ms: float
    wait_ms: float


@dataclass(frozen=True)
class Forecast:
    way: Way
    shares: tuple[int, ...]
    step_ms: float
    samples_per_s: float
    sync_ms: float
    """Besides compute."""
    wire_bytes: float
    """A rank's gradient per update; for tensor, all traffic."""
    own_ms: tuple[float, ...]
    """By rank, with the update."""
    critical: int
    """The rank that waits least."""
    limited_by: Limit
    """The largest part of its step."""
    local_steps: tuple[int, ...] = ()
    """By rank, between averages."""

    @property
    def ranks(self) -> tuple[RankTime, ...]:
        slowest = max(self.own_ms)
        return tuple(
            RankTime((1 - OPTIMISER) * own_ms, OPTIMISER * own_ms, self.step_ms - own_ms, slowest - own_ms)
            for own_ms in self.own_ms
        )


@dataclass(frozen=True)
class Bucket:
    bytes: int
    """In fp32."""
    ready: float
    """Part of backward before it is complete."""
    shapes: tuple[Shape, ...]


@lru_cache(maxsize=64)
def buckets_of(layers: tuple[Layer, ...], bucket_mib: float) -> tuple[Bucket, ...]:
    """Filled like torch's DDP: tensors from the last backwards, until the size is reached."""
    total = sum(layer.work for layer in layers)
    left, found, shapes, size = total, list[Bucket](), list[Shape](), 0
    for layer in reversed(layers):
        left -= layer.work
        for shape in reversed(layer.shapes):
            shapes.append(shape)
            size += FLOAT_BYTES * prod(shape)
            if size >= bucket_mib * MIB:
                found.append(Bucket(size, 1 - left / total, tuple(shapes)))
                shapes, size = [], 0
    return (*found, Bucket(size, 1.0, tuple(shapes))) if shapes else tuple(found)


stacks_of = lru_cache(maxsize=64)(gpu_work.compressed)


@lru_cache(maxsize=64)
def compressed_bytes(shapes: tuple[Shape, ...], rank: int) -> int:
    """PowerSGD (Vogels et al. 2019): two thin matrices if smaller."""
    stacks = stacks_of(shapes, rank).items()
    spared = sum(len(own) * (rows * columns - rank * (rows + columns)) for (rows, columns), own in stacks)
    return FLOAT_BYTES * (sum(map(prod, shapes)) - spared)


def speeds_of(hosts: Sequence[HostSpeed], local_batch: int) -> list[Speed]:
    """local_batch: 0: no limit."""
    return [at_most(speed, local_batch) for host in hosts for speed in host.speeds]


def predict(job: Workload, hosts: Sequence[HostSpeed], wire: LinkCosts, way: Way, shares: Sequence[int]) -> Forecast:
    """shares: samples by rank. Raises KeyError for a strategy that is not predicted."""
    if way.exact_part:
        return _mixed(job, hosts, wire, way, shares)
    speeds = speeds_of(hosts, way.local_batch)
    if way.strategy == "tensor" and len(speeds) > 1:
        return _sliced(job, speeds, wire, way, shares)
    if way.sync_bn and len(speeds) > 1:
        return _in_step(job, speeds, wire, way, shares)
    if way.fidelity == "local":
        return _local(job, speeds, wire, way, shares)
    if way.strategy == "ddp" and way.fidelity != "compressed" and len(speeds) > 1:
        return _overlapped(job, speeds, wire, way, shares)
    sync_ms = 1000 * exchange_s(job, wire, way) if len(speeds) > 1 else 0.0
    ends = [speed.step_ms(samples) for speed, samples in zip(speeds, shares, strict=True)]
    return _forecast(job, way, shares, ends, max(ends) + sync_ms, wire_bytes(job, way))


def _overlapped(job: Workload, speeds: Sequence[Speed], wire: LinkCosts, way: Way, shares: Sequence[int]) -> Forecast:
    # With R_b the time at which the last rank has bucket b, and c_b its cost, the last sum ends at the largest
    # R_b + c_b + c_b+1 + ... over all b, since buckets queue.
    ends = [speed.step_ms(samples) for speed, samples in zip(speeds, shares, strict=True)]
    micro = [speed.micro_batches(samples) for speed, samples in zip(speeds, shares, strict=True)]
    kinds = set(zip(ends, micro, strict=True))
    legs = [0.0] * len(bucket_legs_s(Bucket(0, 0.0, ()), wire, way))
    for bucket in buckets_of(job.layers, way.bucket_mib or fitted_mib(job, wire, way)):
        done_ms = max(release_ms(end, count, bucket.ready) for end, count in kinds)
        for number, leg_s in enumerate(bucket_legs_s(bucket, wire, way)):
            legs[number] = done_ms = max(done_ms, legs[number]) + 1000 * leg_s
    return _forecast(job, way, shares, ends, legs[-1], wire_bytes(job, way))


def _sliced(job: Workload, speeds: Sequence[Speed], wire: LinkCosts, way: Way, shares: Sequence[int]) -> Forecast:
    """shares: of channels."""
    timed = time_step(job.layers, speeds, shares, parts_of(job, speeds), wire, sent_of(way))
    own_ms = [1000 * rank_s for rank_s in timed.own_s]
    return _forecast(job, way, shares, own_ms, 1000 * timed.step_s, timed.wire_bytes)


def parts_of(job: Workload, speeds: Sequence[Speed]) -> tuple[int, ...]:
    """All ranks compute together, so the smallest memory decides."""
    count = -(-job.batch // min((speed.cap for speed in speeds if speed.cap), default=job.batch))
    return equal_shares(job.batch, count)


def sent_of(way: Way) -> Sent:
    """Only `half` rounds tensor's sums."""
    half, all_half = FLOAT_BYTES // 2, way.fidelity == "half"
    return Sent(half if all_half or way.half_wire else FLOAT_BYTES, half if all_half else FLOAT_BYTES, all_half)


def _mixed(job: Workload, hosts: Sequence[HostSpeed], wire: LinkCosts, way: Way, shares: Sequence[int]) -> Forecast:
    lossy = dataclasses.replace(way, exact_part=0.0)
    strategy = "ddp" if way.fidelity == "local" else way.strategy
    exact = Way(strategy, "exact", way.bucket_mib, local_batch=way.local_batch, sync_bn=way.sync_bn)
    first = predict(job, hosts, wire, exact, shares)
    then = predict(job, hosts, wire, lossy, shares)

    def mean(early: float, late: float) -> float:
        return way.exact_part * early + (1 - way.exact_part) * late

    step_ms, sent_bytes = mean(first.step_ms, then.step_ms), mean(first.wire_bytes, then.wire_bytes)
    return _forecast(job, way, shares, then.own_ms, step_ms, sent_bytes, then.local_steps)


def _in_step(job: Workload, speeds: Sequence[Speed], wire: LinkCosts, way: Way, shares: Sequence[int]) -> Forecast:
    """`sync_bn`: ranks meet in every BatchNorm, so all are as slow as the slowest. Buckets share the process group, so
    nothing is hidden.
    """
    slowest_ms = max(speed.step_ms(samples) for speed, samples in zip(speeds, shares, strict=True))
    own_ms = slowest_ms + 1000 * batch_norms_s(job, wire)
    if way.strategy == "ddp" and way.fidelity != "compressed":
        buckets = buckets_of(job.layers, way.bucket_mib or fitted_mib(job, wire, way))
        sync_s = sum(sum(bucket_legs_s(bucket, wire, way)) for bucket in buckets)
    else:
        sync_s = exchange_s(job, wire, way)
    return _forecast(job, way, shares, [own_ms] * len(shares), own_ms + 1000 * sync_s, wire_bytes(job, way))


def batch_norms_s(job: Workload, wire: LinkCosts) -> float:
    """Counts, means and variances forward; two sums backward."""
    channels = [layer.shapes[0][0] for layer in job.layers if layer.is_batch_norm]
    return sum(
        wire.all_gather_s(FLOAT_BYTES * (1 + 2 * count)) + wire.all_reduce_s(FLOAT_BYTES * 2 * count)
        for count in channels
    )


def fitted_mib(job: Workload, wire: LinkCosts, way: Way) -> float:
    """See `fitted_bucket_bytes` of trainer.strategies.gradient_sum."""
    small_s, large_s = (sum(bucket_legs_s(Bucket(size, 0.0, ()), wire, way)) for size in (1 << 10, 1 << 22))
    beta = max(large_s - small_s, 1e-9) / ((1 << 22) - (1 << 10))
    fitted = max(1.0, math.sqrt(gradient_bytes(job.layers) * small_s / beta))
    return 2 ** (min(max(round(2 * math.log2(fitted)), 40), 56) / 2) / MIB


def release_ms(step_ms: float, micro_batches: int, ready: float) -> float:
    """From the rank's update to the bucket's last gradient."""
    last = 1 / max(1, micro_batches)
    before = OPTIMISER + (FORWARD + BACKWARD) * (1 - last)
    return step_ms * (before + last * (FORWARD + BACKWARD * ready))


def bucket_legs_s(bucket: Bucket, wire: LinkCosts, way: Way) -> tuple[float, ...]:
    """Consecutive buckets overlap leg by leg."""
    if way.fidelity == "half":
        cast_s = wire.costs.work_s(gpu_work.cast(bucket.bytes))
        return (cast_s, *wire.sum_legs_s(bucket.bytes / 2), cast_s)
    return wire.sum_legs_s(bucket.bytes)


def wire_bytes(job: Workload, way: Way) -> float:
    whole = gradient_bytes(job.layers)
    if way.fidelity == "compressed":
        return compressed_bytes(job.shapes, way.rank)
    return (whole / 2 if way.fidelity == "half" or way.half_wire else whole) / way.every


Exchange = Callable[[LinkCosts, float], float]
COLLECTIVES: dict[str, Exchange] = {
    "sum": lambda wire, size: wire.sum_s(size),
    "reduce_scatter": lambda wire, size: wire.reduce_scatter_s(size),
    "all_gather_pieces": lambda wire, size: wire.all_gather_s(size / wire.ranks),
    "reduce": lambda wire, size: wire.reduce_s(size),
    "broadcast": lambda wire, size: wire.broadcast_s(size),
    "gather": lambda wire, size: wire.gather_s(size),
    "scatter": lambda wire, size: wire.scatter_s(size),
    "all_gather": lambda wire, size: wire.all_gather_s(size),
}
"""Seconds, with one buffer of this size per rank."""
PREDICTED = tuple(name for name, facts in STRATEGIES.items() if name == "ddp" or facts.collectives)


def exchange_s(job: Workload, wire: LinkCosts, way: Way) -> float:
    """For a strategy that sends after backward."""
    if way.fidelity == "compressed":  # sums of both thin factors; unchanged tensors are included
        return 2 * wire.sum_s(wire_bytes(job, way) / 2) + compress_s(job, wire, way.rank)
    whole = gradient_bytes(job.layers)
    half = way.fidelity == "half" or way.half_wire
    sent, casts_s = (whole / 2, 2 * wire.costs.work_s(gpu_work.cast(whole))) if half else (whole, 0.0)
    collectives = STRATEGIES[way.strategy].collectives
    if collectives == ("sum of each",):
        return casts_s + (len(job.shapes) - 1) * wire.sum_s(0) + wire.sum_s(sent)
    return casts_s + sum(COLLECTIVES[name](wire, sent) for name in collectives) + sum(copies_s(job, wire, way))


def compress_s(job: Workload, wire: LinkCosts, rank: int) -> float:
    works = gpu_work.compressing(gradient_bytes(job.layers), stacks_of(job.shapes, rank), rank)
    return sum(map(wire.costs.work_s, works))


def copies_s(job: Workload, wire: LinkCosts, way: Way) -> tuple[float, float]:
    before, after = _copies(gradient_bytes(job.layers), wire.ranks, way)
    return wire.costs.work_s(before), wire.costs.work_s(after)


def _copies(whole: int, ranks: int, way: Way) -> tuple[Work, Work]:
    if way.strategy == "parameter_average":
        return gpu_work.leave(whole), (gpu_work.arrive if way.overlap else gpu_work.arrive_at_once)(whole)
    if {"gather", "all_gather"} & {*STRATEGIES[way.strategy].collectives}:  # a rank adds up all ranks' gradients
        return gpu_work.copy(whole), gpu_work.copy((1 + ranks) * whole)
    return gpu_work.copy(whole), gpu_work.copy(whole)


def averaging(way: Way) -> Way:
    return Way("parameter_average", half_wire=way.half_wire, overlap=way.overlap)


def _local(job: Workload, speeds: Sequence[Speed], wire: LinkCosts, way: Way, shares: Sequence[int]) -> Forecast:
    """`overlap` steps hide an average's transfer, not its copies."""
    own_ms = [speed.step_ms(samples) for speed, samples in zip(speeds, shares, strict=True)]
    sync_ms = 0.0
    if len(speeds) > 1:
        copies_ms = 1000 * sum(copies_s(job, wire, averaging(way)))
        travel_ms = 1000 * exchange_s(job, wire, averaging(way)) - copies_ms
        sync_ms = copies_ms + max(0.0, travel_ms - way.overlap * max(own_ms))
    step_ms = max(own_ms) + sync_ms / way.every
    a_step = [speed.micro_batches(share) if way.local_batch else 1 for speed, share in zip(speeds, shares, strict=True)]
    return _forecast(job, way, shares, own_ms, step_ms, wire_bytes(job, way), tuple(way.every * own for own in a_step))


def _forecast(
    job: Workload,
    way: Way,
    shares: Sequence[int],
    compute_ms: Sequence[float],
    step_ms: float,
    sent_bytes: float,
    local_steps: tuple[int, ...] = (),
) -> Forecast:
    """compute_ms: with the update."""
    slowest = max(compute_ms)
    sync_ms = step_ms - slowest
    parts: dict[Limit, float] = {"wire": sync_ms, "compute": (1 - OPTIMISER) * slowest}
    return Forecast(
        way=way,
        shares=tuple(shares),
        step_ms=step_ms,
        samples_per_s=1000 * job.batch / step_ms,
        sync_ms=sync_ms,
        wire_bytes=sent_bytes,
        own_ms=tuple(compute_ms),
        critical=compute_ms.index(slowest),
        limited_by=max(parts, key=lambda part: parts[part]),
        local_steps=local_steps,
    )


def alone_samples_per_s(host: HostSpeed, batch: int) -> float:
    """Without exchange."""
    shares = fastest_shares(host.speeds, batch)
    return 1000 * batch / max(speed.step_ms(samples) for speed, samples in zip(host.speeds, shares, strict=True))
