"""Times each block of a network for several micro-batch sizes, and counts its work. Pure: passes come from elsewhere.

    >>> micro_batches({2: 9.0, 4: 11.0, 8: 15.0, 16: 23.0}, batch=64, budget_s=3)     # from times of whole steps
    (8, 16)

Blocks too short for the clock are timed together (a stretch), whose line is divided by their work.
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
"""Plans use no smaller micro-batches."""
FEWEST_PARTS = 4
"""Largest micro-batch as a part of the batch."""
MOST_SIZES = 3
CLEAR = 10
"""Least time of a stretch's tasks by the clock's noise."""

TaskTime = tuple[float, float]
"""fixed_ms, sample_ms."""


@dataclass(frozen=True)
class Lap:
    """A stretch in one pass, or medians."""

    forward_ms: float
    backward_ms: float
    """For inputs."""
    weights_ms: float
    """For weights."""

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
    """forward, backward, weights: per block. stretches: number."""

    samples: tuple[int, ...]
    forward: tuple[TaskTime, ...]
    backward: tuple[TaskTime, ...]
    weights: tuple[TaskTime, ...]
    stretches: int
    largest_ms: float
    """All blocks at the largest size."""

    def record(self, samples: int, whole_ms: float) -> dict[str, Any]:
        """whole_ms: without the optimiser."""
        fields = asdict(self)
        for task in ("forward", "backward", "weights"):
            fields[task] = [[round(fixed_ms, 6), round(sample_ms, 8)] for fixed_ms, sample_ms in fields[task]]
        together_ms = fields.pop("largest_ms")
        return {**fields, "of_whole": round(together_ms / whole_ms, 4) if samples == self.samples[-1] else None}


Cut = tuple[int, ...]
"""The first block of each stretch."""
Take = Callable[[int, Cut], Sequence[Lap]]
"""Passes samples through the blocks. Raises NoMemory."""


def micro_batches(step_ms: dict[int, float], batch: int, budget_s: float) -> tuple[int, ...]:
    """Two or three sizes, far apart. step_ms: by size, ascending."""
    useful = [size for size in step_ms if SMALLEST <= size <= batch // FEWEST_PARTS]
    smallest = list(step_ms)[:MOST_SIZES]
    for sizes in (useful, smallest):
        for count in range(len(sizes), 1, -1):
            spread = tuple(sorted({sizes[0], sizes[count // 2], sizes[count - 1]}))
            if _cost_s(spread, step_ms) <= budget_s:
                return spread
    return tuple(smallest[:2])


def _cost_s(sizes: Sequence[int], step_ms: dict[int, float]) -> float:
    """With the whole network's updates."""
    return (1 + FEWEST) * sum(step_ms[size] for size in (*sizes, sizes[-1])) / 1000


def time_blocks(
    take: Take,
    blocks: Sequence[Block],
    sizes: Sequence[int],
    noise_ms: float,
    budget_s: float,
    now: Callable[[], float] = time.monotonic,
) -> BlockTimes | None:
    """None if fewer than two sizes fit. noise_ms: between adjacent marks."""
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
    """As many as possible with tasks of `least_ms`. laps: of single blocks."""
    cut, reached = [0], laps[0]
    for number, lap in enumerate(laps[1:], 1):
        if reached.least_ms >= least_ms:
            cut.append(number)
            reached = lap
        else:
            reached = reached.and_then(lap)
    if len(cut) > 1 and reached.least_ms < least_ms:
        cut.pop()  # the rest belongs to the last stretch
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
    """times_ms: at least two sizes."""
    line = fit([(size, max(ms, 1e-6)) for size, ms in times_ms.items()])  # least squares of relative errors
    if line is None:  # sizes too close to each other
        size, ms = max(times_ms.items())
        return 0.0, ms / size
    return line.alpha_s, line.slope_s


def divided(line: TaskTime, blocks: Sequence[Block]) -> list[TaskTime]:
    """Divides the fixed part by layers, the rest by multiplications."""
    work, kernels = sum(block.work for block in blocks), sum(block.kernels for block in blocks)
    return [(line[0] * block.kernels / kernels, line[1] * block.work / work) for block in blocks]


LARGEST = LINE_LIMIT // 3
"""Characters in JSON; a line has other fields, too."""


def blocks_on_paper(name: str, shape: tuple[int, int, int], classes: int) -> list[dict[str, Any]] | None:
    """`Visited.blocks` of one of our networks, without computing. None if the meta device fails."""
    network = skeleton_of(name, shape, classes).eval()  # in eval mode, parts only for training are ignored
    visited, samples = Visited(network), 2
    try:
        network(torch.zeros(samples, *shape, device="meta"))
    except (RuntimeError, NotImplementedError):
        return None
    return visited.blocks(samples)


class Visited:
    """Records layers in the network's first forward pass. Blocks are separated by possible cuts."""

    def __init__(self, network: nn.Module, *, may_cut: bool = True) -> None:
        self._network, self._chain = network, (stages_of(network) if may_cut else []) or [network]
        self._layers: list[tuple[nn.Module, float]] = []
        """Layers with weights in forward's order; work of all samples."""
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
        """None without a pass or 32-bit gradients, or with too many layers for a record."""
        trained = [weight for weight in self._network.parameters() if weight.requires_grad]
        if not self._is_over or any(weight.dtype != torch.float32 for weight in trained):
            return None
        counted = set[int]()
        blocks = [self._block(number, samples, counted) for number in range(len(self._chain))]
        return blocks if len(json.dumps(blocks)) <= LARGEST else None

    def _block(self, number: int, samples: int, seen: set[int]) -> dict[str, Any]:
        """seen: weights that are counted already."""
        inside, layers = {id(module) for module in self._chain[number].modules()}, list[dict[str, Any]]()
        for layer, work in [each for each in self._layers if id(each[0]) in inside]:
            shapes = _fresh(layer.parameters(recurse=False), seen)
            if shapes or not layers:
                layers.append({"shapes": shapes, "work": 0.0, **_norm_of(layer, shapes)})
            layers[-1]["work"] += work / samples
        if beside := _fresh(self._chain[number].parameters(), seen):  # used by a module that was not called
            layers.append({"shapes": beside, "work": 0.0})
        whole = [layer for layer in layers if layer["shapes"]]
        return {"layers": whole, "outputs": self._outputs.get(number, 0) // samples}


def _norm_of(layer: nn.Module, shapes: list[list[int]]) -> dict[str, bool]:
    """`batch_norm`, for layers that have its shapes: other normalisations do not mix samples."""
    is_like = len(shapes) == 2 and all(len(shape) == 1 for shape in shapes)
    return {"batch_norm": isinstance(layer, nn.modules.batchnorm._BatchNorm)} if is_like else {}


def _fresh(weights: Iterator[nn.Parameter], seen: set[int]) -> list[list[int]]:
    """Shapes of uncounted trained weights."""
    found = [weight for weight in weights if weight.requires_grad and id(weight) not in seen]
    seen.update(map(id, found))
    return [list(weight.shape) for weight in found]
