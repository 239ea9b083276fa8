"""What a rank reports of its speed alone: whole updates by their size, and each block of its network. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from orchestrator.record import Record

Ms = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]
Samples = Annotated[int, Field(ge=1, lt=1 << 40)]
TaskTime = tuple[Ms, Ms]
"""What a task of one block takes: ms a micro-batch whatever its size, and ms for each of its samples."""
TaskTimes = Annotated[tuple[TaskTime, ...], Field(min_length=1, max_length=1024)]
"""Of each block, in their order."""


class BlockTimes(Record):
    """How long each block of a network that is a chain of blocks takes, as a stage of a pipeline computes it."""

    samples: Annotated[tuple[Samples, ...], Field(min_length=2, max_length=16)]
    """The sizes of the micro-batches that were measured."""
    forward: TaskTimes
    backward: TaskTimes
    """Backward for what went in."""
    weights: TaskTimes
    """Backward for the weights."""
    stretches: Annotated[int, Field(ge=1, le=1024)]
    """So many stretches of blocks were timed by themselves; the time of each is divided by the work of its blocks."""
    of_whole: Annotated[float, Field(gt=0, lt=1e9)] | None = None
    """What all blocks took together at the largest size, by what the whole network took forward and backward."""

    @model_validator(mode="after")
    def _has_all_tasks_of_each_block(self) -> BlockTimes:
        if not len(self.forward) == len(self.backward) == len(self.weights):
            raise ValueError("forward, backward and weights are of unequal numbers of blocks")
        return self

    @property
    def count(self) -> int:
        return len(self.forward)

    @property
    def fixed_ms(self) -> float:
        """What a micro-batch of the whole network costs whatever its size."""
        return sum(fixed_ms for task in (self.forward, self.backward, self.weights) for fixed_ms, _ in task)


class SeenLayer(Record):
    """A layer of a network; what each number is: `orchestrator.forecast.layers.Layer`."""

    shapes: Annotated[tuple[Annotated[tuple[Samples, ...], Field(max_length=8)], ...], Field(max_length=64)]
    work: Annotated[float, Field(ge=0, lt=1e18, allow_inf_nan=False)]


class SeenBlock(Record):
    """Layers between two cuts of a network. outputs: numbers that leave it, of one sample."""

    layers: Annotated[tuple[SeenLayer, ...], Field(max_length=1024)]
    outputs: Annotated[int, Field(ge=0, lt=1 << 40)]


class Measurement(Record):
    """The `profile` record of one rank, as its host reports it."""

    samples: Annotated[tuple[Samples, ...], Field(min_length=1, max_length=64)]
    step_ms: Annotated[tuple[Ms, ...], Field(min_length=1, max_length=64)]
    """Forward, backward and optimiser: the median of each size, without any synchronisation."""
    fixed_ms: Ms
    sample_ms: Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)]
    lateness: Annotated[tuple[Ms | None, ...], Field(max_length=64)] = ()
    """How late backward ended at each size, as a part of a step, where a paced rank was measured."""
    worst_error: Ms | None = None
    largest: Samples
    """The largest batch that was tried, and could be kept."""
    cap: Samples | None = None
    """The most samples that fit into memory at once; None: memory was not the limit."""
    forward_ms: Ms
    """The forward time at the largest size, like optim_ms."""
    optim_ms: Ms
    again_samples: Samples | None = None
    """A size that was measured once more at the end; None in profiles of an older orch."""
    again_ms: Ms | None = None
    blocks: BlockTimes | None = None
    """None of a paced rank, which computes none, of a network that is no chain, and in profiles of an older orch."""
    batch: Samples | None = None
    """Of an update over all ranks, as the settings or the script say; None in profiles of an older orch."""
    network: Annotated[tuple[SeenBlock, ...], Field(min_length=1, max_length=1024)] | None = None
    """None in profiles of an older orch, and where the rank could not tell."""
