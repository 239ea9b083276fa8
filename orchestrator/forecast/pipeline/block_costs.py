"""Costs of a network's blocks for a pipeline: time, memory and traffic. Pure. Times are parts of the whole network's,
so that a host's speed gives the time of any blocks.

    chain = chain_from(blocks_of("resnet152", (3, 32, 32), classes=10))
    chain.work(0, 20), chain.cut_bytes(20)          0.36, 16384: blocks 0 to 19, bytes per sample to the next
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

from orchestrator.forecast.gpu_catalogue import activation_bytes
from orchestrator.forecast.layers import FLOAT_BYTES, Block
from orchestrator.planning.profiles import BlockTimes, TaskTime
from trainer.shared.pace import OPTIMISER
from trainer.shared.shares import Speed
from trainer.shared.strategy_table import STATES

# Part of a block's time for FORWARD, BACKWARD (for inputs) and WEIGHTS: a layer has one matrix product forward and two
# of the same size backward (`trainer.shared.pace`: 0.33 and 0.66).
THIRD = 1 / 3


@dataclass(frozen=True)
class ChainBlock:
    """forward, backward, weights: parts of the network's time per sample, in total 1. fixed: part of the cost per
    micro-batch. kept_bytes: held for backward, per sample. cut_bytes: to the next block, per sample, and back.
    """

    forward: float
    backward: float
    weights: float
    fixed: float
    weight_bytes: int
    kept_bytes: int
    cut_bytes: int


@dataclass(frozen=True)
class Chain:
    """Sums over blocks `first` to `last - 1`. states: copies of the weights in memory."""

    blocks: tuple[ChainBlock, ...]
    states: int = STATES["sgd"]

    @cached_property
    def _hash(self) -> int:
        return hash(self.blocks)

    def __hash__(self) -> int:
        # Computed once: caches look up chains thousands of times.
        return self._hash

    @cached_property
    def forwards(self) -> tuple[float, ...]:
        """Before each block, and of all."""
        return _sums([block.forward for block in self.blocks])

    @cached_property
    def backwards(self) -> tuple[float, ...]:
        return _sums([block.backward for block in self.blocks])

    @cached_property
    def of_weights(self) -> tuple[float, ...]:
        return _sums([block.weights for block in self.blocks])

    @cached_property
    def fixed(self) -> tuple[float, ...]:
        return _sums([block.fixed for block in self.blocks])

    @cached_property
    def works(self) -> tuple[float, ...]:
        return _sums([block.forward + block.backward + block.weights for block in self.blocks])

    @cached_property
    def weight_sums(self) -> tuple[float, ...]:
        return _sums([block.weight_bytes for block in self.blocks])

    @cached_property
    def kept_sums(self) -> tuple[float, ...]:
        return _sums([block.kept_bytes for block in self.blocks])

    def work(self, first: int, last: int) -> float:
        return self.works[last] - self.works[first]

    def weight_bytes(self, first: int, last: int) -> int:
        return round(self.weight_sums[last] - self.weight_sums[first])

    def kept_bytes(self, first: int, last: int) -> int:
        return round(self.kept_sums[last] - self.kept_sums[first])

    def cut_bytes(self, first: int) -> int:
        """Before block `first`, per sample and direction."""
        return self.blocks[first - 1].cut_bytes


def _sums(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(accumulate(values, initial=0.0))


def chain_from(blocks: Sequence[Block], sent_bytes: int = FLOAT_BYTES) -> Chain:
    """By arithmetic: time by multiplications, fixed cost by layers. sent_bytes: per number across a cut."""
    total = sum(layer.work for block in blocks for layer in block.layers)
    layers = sum(len(block.layers) for block in blocks)
    found = []
    for block in blocks:
        part = THIRD * sum(layer.work for layer in block.layers) / total
        weight_bytes = sum(layer.bytes for layer in block.layers)
        kept_bytes, cut_bytes = activation_bytes(block.layers), sent_bytes * block.outputs
        found.append(ChainBlock(part, part, part, len(block.layers) / layers, weight_bytes, kept_bytes, cut_bytes))
    return Chain(tuple(found))


# Times of blocks on a host: measured by its profile, else in proportion to multiplications (fixed cost: layers). Pure.
#
#     times = times_of(chain, host)
#     times.forward.line(0, 20).at(16)            seconds of FORWARD of 16 samples through blocks 0 to 19


@dataclass(frozen=True)
class StageHost:
    """A host, or one rank of it (`a16:0`), for a stage. site: the host. fixed_ms, sample_ms: of the whole network on
    one rank. memory_bytes: per rank, None if unknown. blocks: measured times. launch_ms: the least time of a
    micro-batch in the whole network, by the host's launches.
    """

    name: str
    ranks: int
    fixed_ms: float
    sample_ms: float
    memory_bytes: int | None = None
    blocks: BlockTimes | None = None
    site: str = ""
    launch_ms: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "site", self.site or self.name)

    @property
    def apart(self) -> tuple[StageHost, ...]:
        if self.ranks == 1:
            return (self,)
        return tuple(replace(self, name=f"{self.name}:{rank}", ranks=1) for rank in range(self.ranks))

    @staticmethod
    def of(
        name: str,
        speeds: Sequence[Speed],
        memory_bytes: int | None = None,
        blocks: Sequence[BlockTimes | None] = (),
        launch_ms: float = 0.0,
    ) -> StageHost:
        """speeds, blocks: by rank; the slowest decides, since micro-batches take turns."""
        slowest = max(range(len(speeds)), key=lambda rank: (speeds[rank].sample_ms, speeds[rank].fixed_ms))
        speed, own = speeds[slowest], blocks[slowest] if blocks else None
        return StageHost(name, len(speeds), speed.fixed_ms, speed.sample_ms, memory_bytes, own, launch_ms=launch_ms)

    @property
    def samples_per_s(self) -> float:
        """All ranks, with large micro-batches."""
        return 1000 * self.ranks / self.sample_ms


@dataclass(frozen=True)
class Line:
    """Seconds per micro-batch and per sample. least_s: per micro-batch, since the host launches meanwhile."""

    fixed_s: float
    sample_s: float
    least_s: float = 0.0

    def at(self, samples: float) -> float:
        return max(self.least_s, self.fixed_s + self.sample_s * samples)


@dataclass(frozen=True)
class TaskSums:
    """Seconds in the blocks before each, and in all."""

    fixed_s: tuple[float, ...]
    sample_s: tuple[float, ...]
    least_s: tuple[float, ...] = ()
    """Empty: 0."""

    def line(self, first: int, end: int) -> Line:
        least_s = self.least_s[end] - self.least_s[first] if self.least_s else 0.0
        return Line(self.fixed_s[end] - self.fixed_s[first], self.sample_s[end] - self.sample_s[first], least_s)

    def up_to(self, micro_batches: float, samples: float) -> tuple[float, ...]:
        """Total seconds; a lower bound of any blocks' if launches take longer than some tasks."""
        pairs = zip(self.fixed_s, self.sample_s, strict=True)
        computed = tuple(micro_batches * fixed_s + samples * sample_s for fixed_s, sample_s in pairs)
        launched = tuple(micro_batches * least_s for least_s in self.least_s)
        return launched if launched and launched[-1] > computed[-1] else computed


@dataclass(frozen=True)
class HostTimes:
    """On one rank. The optimiser adds OPTIMISER of the sum."""

    forward: TaskSums
    backward: TaskSums
    weights: TaskSums

    @property
    def tasks(self) -> tuple[TaskSums, TaskSums, TaskSums]:
        return self.forward, self.backward, self.weights


@lru_cache(maxsize=4096)
def times_of(chain: Chain, host: StageHost) -> HostTimes:
    blocks = host.blocks
    if blocks is not None and blocks.count == len(chain.blocks):
        return HostTimes(_measured(blocks.forward), _measured(blocks.backward), _measured(blocks.weights))
    return HostTimes(*(_part(host, chain.fixed, sums) for sums in (chain.forwards, chain.backwards, chain.of_weights)))


def _measured(times: Sequence[TaskTime]) -> TaskSums:
    return TaskSums(
        _stage_host_sums([fixed_ms for fixed_ms, _ in times]), _stage_host_sums([sample_ms for _, sample_ms in times])
    )


def _stage_host_sums(times_ms: Sequence[float]) -> tuple[float, ...]:
    return tuple(accumulate((ms / 1000 for ms in times_ms), initial=0.0))


def _part(host: StageHost, fixed: Sequence[float], sums: Sequence[float]) -> TaskSums:
    """fixed, sums: parts of the whole network."""
    fixed_s, sample_s = (1 - OPTIMISER) * host.fixed_ms / 3000, (1 - OPTIMISER) * host.sample_ms / 1000
    least_s = (1 - OPTIMISER) * host.launch_ms / 3000
    return TaskSums(
        tuple(fixed_s * part for part in fixed),
        tuple(sample_s * part for part in sums),
        tuple(least_s * part for part in fixed) if least_s else (),
    )
