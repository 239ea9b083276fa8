"""How long each block of a network takes, for micro-batches of several sizes. Pure: passes come from elsewhere.

    >>> micro_batches({2: 9.0, 4: 11.0, 8: 15.0, 16: 23.0}, batch=64, budget_s=3)     # from the times of whole steps
    (8, 16)

    times = time_blocks(take, blocks, sizes, noise_ms=0.005, budget_s=3)
    times.forward[3]                       (fixed_ms, sample_ms) of block 3

A stage of a pipeline computes forward, backward for what went in, and backward for its weights, each of which has a
line of its own: fixed_ms a micro-batch and sample_ms for each of its samples. Where a block takes no more than the
clock can tell, it is timed in one stretch with its neighbours, whose line is divided by their work.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer.compute.models import numbers, skeleton_of, stages_of, work_of
from trainer.measure.ladder import FEWEST, MOST
from trainer.measure.updates import NoMemory
from trainer.pipeline.chain import Block
from trainer.shared.alpha_beta import fit
from trainer.shared.metrics import LINE_LIMIT

SMALLEST = 8
"""Samples of the smallest micro-batch that is measured, where there are sizes enough: plans make none smaller."""
FEWEST_PARTS = 4
"""The largest micro-batch that is measured is this part of the batch: with fewer parts a pipeline mostly waits."""
MOST_SIZES = 3
CLEAR = 10
"""Times the clock's noise that each task of a stretch takes at least."""

TaskTime = tuple[float, float]
"""fixed_ms a micro-batch, sample_ms for each of its samples."""


@dataclass(frozen=True)
class Lap:
    """Milliseconds of one stretch in one pass, or their medians over several."""

    forward_ms: float
    backward_ms: float
    """For what went in."""
    weights_ms: float
    """Backward for the weights."""

    @property
    def all_ms(self) -> float:
        return self.forward_ms + self.backward_ms + self.weights_ms

    @property
    def least_ms(self) -> float:
        return min(self.forward_ms, self.backward_ms, self.weights_ms)

    def and_then(self, other: Lap) -> Lap:
        return Lap(
            self.forward_ms + other.forward_ms, self.backward_ms + other.backward_ms, self.weights_ms + other.weights_ms
        )


@dataclass(frozen=True)
class BlockTimes:
    """samples: the sizes measured. forward, backward, weights: of each block. stretches: as many as were timed by
    themselves, all blocks where each was.
    """

    samples: tuple[int, ...]
    forward: tuple[TaskTime, ...]
    backward: tuple[TaskTime, ...]
    weights: tuple[TaskTime, ...]
    stretches: int
    largest_ms: float
    """What all blocks took together at the largest size."""

    def record(self, samples: int, whole_ms: float) -> dict[str, Any]:
        """whole_ms: what the whole network takes forward and backward with so many samples."""
        fields = asdict(self)
        for task in ("forward", "backward", "weights"):
            fields[task] = [[round(fixed_ms, 6), round(sample_ms, 8)] for fixed_ms, sample_ms in fields[task]]
        together_ms = fields.pop("largest_ms")
        return {**fields, "of_whole": round(together_ms / whole_ms, 4) if samples == self.samples[-1] else None}


Cut = tuple[int, ...]
"""The first block of each stretch."""
Take = Callable[[int, Cut], Sequence[Lap]]
"""Passes so many samples through the blocks: a lap for each stretch. Raises NoMemory."""


def micro_batches(step_ms: dict[int, float], batch: int, budget_s: float) -> tuple[int, ...]:
    """Two or three sizes, as far apart as time allows; the two smallest where it allows no others. step_ms: of the
    sizes whose updates were timed, ascending.
    """
    useful = [size for size in step_ms if SMALLEST <= size <= batch // FEWEST_PARTS]
    smallest = list(step_ms)[:MOST_SIZES]
    for sizes in (useful, smallest):
        for count in range(len(sizes), 1, -1):
            spread = tuple(sorted({sizes[0], sizes[count // 2], sizes[count - 1]}))
            if _cost_s(spread, step_ms) <= budget_s:
                return spread
    return tuple(smallest[:2])


def _cost_s(sizes: Sequence[int], step_ms: dict[int, float]) -> float:
    """With the whole network's updates of the largest size."""
    return (1 + FEWEST) * sum(step_ms[size] for size in (*sizes, sizes[-1])) / 1000


def time_blocks(
    take: Take,
    blocks: Sequence[Block],
    sizes: Sequence[int],
    noise_ms: float,
    budget_s: float,
    now: Callable[[], float] = time.monotonic,
) -> BlockTimes | None:
    """None where memory holds fewer than two of the sizes. noise_ms: between two marks with nothing between them."""
    cut = tuple(range(len(blocks)))
    laps: dict[int, list[Lap]] = {}
    for size in sizes:
        try:
            take(size, cut)  # not timed: libraries choose their algorithms
            laps[size] = _medians(take, size, cut, budget_s / len(sizes), now)
            if len(laps) == 1 and (longer := stretches(laps[size], CLEAR * noise_ms)) != cut:
                cut = longer
                laps[size] = _medians(take, size, cut, budget_s / len(sizes), now)
        except NoMemory:
            break
    return _through(laps, cut, blocks) if len(laps) > 1 else None


def stretches(laps: Sequence[Lap], least_ms: float) -> Cut:
    """As many as there can be of which each task takes so long. laps: of single blocks."""
    cut, reached = [0], laps[0]
    for number, lap in enumerate(laps[1:], 1):
        if reached.least_ms >= least_ms:
            cut.append(number)
            reached = lap
        else:
            reached = reached.and_then(lap)
    if len(cut) > 1 and reached.least_ms < least_ms:
        cut.pop()  # what is left belongs to the stretch before
    return tuple(cut)


def _medians(take: Take, size: int, cut: Cut, budget_s: float, now: Callable[[], float]) -> list[Lap]:
    began_s, passes = now(), list[Sequence[Lap]]()
    while len(passes) < FEWEST or (len(passes) < MOST and now() - began_s < budget_s):
        passes.append(take(size, cut))
    return [
        Lap(
            statistics.median(lap.forward_ms for lap in same),
            statistics.median(lap.backward_ms for lap in same),
            statistics.median(lap.weights_ms for lap in same),
        )
        for same in zip(*passes, strict=True)
    ]


def _through(laps: dict[int, list[Lap]], cut: Cut, blocks: Sequence[Block]) -> BlockTimes:
    def lines(of: Callable[[Lap], float]) -> tuple[TaskTime, ...]:
        found: list[TaskTime] = []
        for number, (first, end) in enumerate(itertools.pairwise((*cut, len(blocks)))):
            line = line_of({size: of(each[number]) for size, each in laps.items()})
            found += divided(line, blocks[first:end])
        return tuple(found)

    return BlockTimes(
        samples=tuple(laps),
        forward=lines(lambda lap: lap.forward_ms),
        backward=lines(lambda lap: lap.backward_ms),
        weights=lines(lambda lap: lap.weights_ms),
        stretches=len(cut),
        largest_ms=sum(lap.all_ms for lap in laps[max(laps)]),
    )


def line_of(times_ms: dict[int, float]) -> TaskTime:
    """By size, two at least."""
    line = fit([(size, max(ms, 1e-6)) for size, ms in times_ms.items()])  # the relative errors' least squares
    if line is None:  # sizes too close to each other
        size, ms = max(times_ms.items())
        return 0.0, ms / size
    return line.alpha_s, line.slope_s


def divided(line: TaskTime, blocks: Sequence[Block]) -> list[TaskTime]:
    """The fixed part by layers, as each has to be started; the rest by multiplications."""
    work, kernels = sum(block.work for block in blocks), sum(block.kernels for block in blocks)
    return [(line[0] * block.kernels / kernels, line[1] * block.work / work) for block in blocks]


# What any network is made of, as a forecast of its speed needs it, seen in its first forward pass.
#
# >>> network = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
# >>> seen = Visited(network)
# >>> _ = network(torch.zeros(3, 8))
# >>> seen.blocks(samples=3)[0]           # work: multiplications of one sample; outputs: numbers that leave the block
# {'layers': [{'shapes': [[4, 8], [4]], 'work': 32.0}], 'outputs': 4}

LARGEST = LINE_LIMIT // 3
"""Characters of all blocks in JSON: the rest of a line is for the blocks' times, and what else a profile says."""


def blocks_on_paper(name: str, shape: tuple[int, int, int], classes: int) -> list[dict[str, Any]] | None:
    """The blocks of one of our networks, without a computation. None where it cannot do without numbers, and as
    `Visited.blocks`.
    """
    network = skeleton_of(name, shape, classes).eval()  # a part that only training has computes nothing that counts
    visited, samples = Visited(network), 2
    try:
        network(torch.zeros(samples, *shape, device="meta"))
    except (RuntimeError, NotImplementedError):
        return None
    return visited.blocks(samples)


class Visited:
    """From now until the end of the network's first forward pass. Blocks are those between which it may be cut: a
    network that cannot be cut (may_cut: False if something else forbids it) is a single one.
    """

    def __init__(self, network: nn.Module, *, may_cut: bool = True) -> None:
        self._network, self._chain = network, (stages_of(network) if may_cut else []) or [network]
        self._layers: list[tuple[nn.Module, float]] = []
        """Those with weights of their own in the order of forward, and each one's work for all samples."""
        self._outputs: dict[int, int] = {}
        self._is_over = False
        self._hooks = [*self._watch()]

    def _watch(self) -> Iterator[RemovableHandle]:
        for layer in self._network.modules():
            if any(True for _ in layer.parameters(recurse=False)):
                yield layer.register_forward_hook(self._visit)
        called = {id(module) for module in self._network.modules()}
        for number, block in enumerate(self._chain):
            last = block if id(block) in called else list(cast(nn.Sequential, block))[-1]
            yield last.register_forward_hook(self._leave(number))
        yield self._network.register_forward_hook(self._end)

    def _visit(self, layer: nn.Module, inputs: Any, outputs: Any) -> None:
        self._layers.append((layer, work_of(layer, numbers(inputs), numbers(outputs))))

    def _leave(self, number: int) -> Callable[[nn.Module, Any, Any], None]:
        def left(block: nn.Module, inputs: Any, outputs: Any) -> None:
            self._outputs[number] = numbers(outputs)

        return left

    def _end(self, network: nn.Module, inputs: Any, outputs: Any) -> None:
        self._is_over = True
        for hook in self._hooks:
            hook.remove()

    def blocks(self, samples: int) -> list[dict[str, Any]] | None:
        """samples: of that pass. None before it, where gradients are not of 32 bits, as a forecast has them, and where
        there are more layers than fit into a record.
        """
        trained = [weight for weight in self._network.parameters() if weight.requires_grad]
        if not self._is_over or any(weight.dtype != torch.float32 for weight in trained):
            return None
        seen = set[int]()
        blocks = [self._block(number, samples, seen) for number in range(len(self._chain))]
        return blocks if len(json.dumps(blocks)) <= LARGEST else None

    def _block(self, number: int, samples: int, seen: set[int]) -> dict[str, Any]:
        """seen: weights that have been counted, which a layer may share with another."""
        inside, layers = {id(module) for module in self._chain[number].modules()}, list[dict[str, Any]]()
        for layer, work in [each for each in self._layers if id(each[0]) in inside]:
            shapes = _fresh(layer.parameters(recurse=False), seen)
            if shapes or not layers:
                layers.append({"shapes": shapes, "work": 0.0})
            layers[-1]["work"] += work / samples
        if beside := _fresh(self._chain[number].parameters(), seen):  # whoever computes with them was not called
            layers.append({"shapes": beside, "work": 0.0})
        whole = [layer for layer in layers if layer["shapes"]]
        return {"layers": whole, "outputs": self._outputs.get(number, 0) // samples}


def _fresh(weights: Iterator[nn.Parameter], seen: set[int]) -> list[list[int]]:
    """The shapes of those that are trained and that nobody has counted."""
    found = [weight for weight in weights if weight.requires_grad and id(weight) not in seen]
    seen.update(map(id, found))
    return [list(weight.shape) for weight in found]
