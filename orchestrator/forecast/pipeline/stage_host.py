"""How long blocks of a network take on a host, by its profile where that has block times. Pure.

    times = times_of(chain, host)
    times.forward.line(0, 20).at(16)            seconds of FORWARD of 16 samples through blocks 0 to 19

Whoever asks how long blocks take on a host asks here. Where no profile says it, each block takes its part of the
multiplications, and of the fixed cost its part of the layers, of what the whole network takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from orchestrator.forecast.pipeline.chain import Chain
from orchestrator.planning.measurement import BlockTimes, TaskTime
from trainer.shared.pace import OPTIMISER
from trainer.shared.shares import Speed


@dataclass(frozen=True)
class StageHost:
    """A host that may hold a stage, or one rank of it (`a16:0`). site: the host's name. fixed_ms, sample_ms: what a
    micro-batch of the whole network takes on one of its ranks, whatever its size, and a sample of it. memory_bytes: of
    each rank, for weights and activations; None where that is not known. blocks: what each block takes on one of its
    ranks; None where that is not measured.
    """

    name: str
    ranks: int
    fixed_ms: float
    sample_ms: float
    memory_bytes: int | None = None
    blocks: BlockTimes | None = None
    site: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "site", self.site or self.name)

    @property
    def apart(self) -> tuple[StageHost, ...]:
        """Its ranks, each by itself."""
        if self.ranks == 1:
            return (self,)
        return tuple(replace(self, name=f"{self.name}:{rank}", ranks=1) for rank in range(self.ranks))

    @staticmethod
    def of(
        name: str,
        speeds: Sequence[Speed],
        memory_bytes: int | None = None,
        blocks: Sequence[BlockTimes | None] = (),
    ) -> StageHost:
        """speeds, blocks: of its ranks, which take micro-batches in turn, so that the slowest sets the pace."""
        slowest = max(range(len(speeds)), key=lambda rank: (speeds[rank].sample_ms, speeds[rank].fixed_ms))
        speed, own = speeds[slowest], blocks[slowest] if blocks else None
        return StageHost(name, len(speeds), speed.fixed_ms, speed.sample_ms, memory_bytes, own)

    @property
    def samples_per_s(self) -> float:
        """Of all its ranks, in micro-batches so large that the fixed cost is nothing."""
        return 1000 * self.ranks / self.sample_ms


@dataclass(frozen=True)
class Line:
    """Seconds of a micro-batch: so many, and so many more for each sample."""

    fixed_s: float
    sample_s: float

    def at(self, samples: float) -> float:
        return self.fixed_s + self.sample_s * samples


@dataclass(frozen=True)
class TaskSums:
    """Seconds of one task in the blocks before each, and in all."""

    fixed_s: tuple[float, ...]
    sample_s: tuple[float, ...]

    def line(self, first: int, end: int) -> Line:
        """Of blocks `first` to `end - 1`."""
        return Line(self.fixed_s[end] - self.fixed_s[first], self.sample_s[end] - self.sample_s[first])

    def up_to(self, micro_batches: float, samples: float) -> tuple[float, ...]:
        """So many micro-batches, of so many samples in all."""
        pairs = zip(self.fixed_s, self.sample_s, strict=True)
        return tuple(micro_batches * fixed_s + samples * sample_s for fixed_s, sample_s in pairs)


@dataclass(frozen=True)
class HostTimes:
    """On one rank of a host; its optimiser then takes OPTIMISER of all that."""

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
    return TaskSums(_sums([fixed_ms for fixed_ms, _ in times]), _sums([sample_ms for _, sample_ms in times]))


def _sums(times_ms: Sequence[float]) -> tuple[float, ...]:
    return tuple(accumulate((ms / 1000 for ms in times_ms), initial=0.0))


def _part(host: StageHost, fixed: Sequence[float], sums: Sequence[float]) -> TaskSums:
    """What `trainer.paced.stage_clock` makes of a host's speed. fixed, sums: parts of the whole network."""
    fixed_s, sample_s = (1 - OPTIMISER) * host.fixed_ms / 3000, (1 - OPTIMISER) * host.sample_ms / 1000
    return TaskSums(tuple(fixed_s * part for part in fixed), tuple(sample_s * part for part in sums))
