"""CUDA graphs of a pipeline's stage: for each size and micro-batch in flight, one per kind of task.

    replay_stage(stage, in_flight, say, gave_up)      in place

Tasks of different micro-batches alternate in changing order, so each recording has its own memory from its forward pass
to its last task. Gradients, and the last stage's losses, are added up in the graphs.
"""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trainer.compute import graphs as plain_graphs
from trainer.compute.graphs import (
    CHANGED,
    WARM,
    Found,
    Memory,
    Piece,
    Replay,
    Reusable,
    Sums,
    Trained,
    Use,
    aliases_of,
    distances,
    hooks_of,
    lacking,
    learns,
    pass_bytes,
    replays,
    some_gradient,
    uncached,
    uncast,
)
from trainer.compute.models import gradient_bytes, trainable
from trainer.pipeline.deferred import Work, autocast_type
from trainer.pipeline.stage import Criterion, Part, StageWork

MOST_SIZES = 6
"""Three of a full batch, and three of an epoch's last."""
MOST_RECORDED = 12
"""In a run, because recording a size takes as long as some ten passes."""
COMPARED_GRADIENTS = 5
"""Copies of the gradients while a recording is compared with plain passes."""


class Size(NamedTuple):
    """autocast: the type that 16-bit operations use, or None. labels: of a pass that ends with the loss."""

    shape: torch.Size
    dtype: torch.dtype
    autocast: torch.dtype | None
    labels: tuple[torch.Size, torch.dtype] | None


Example = tuple[Tensor, Criterion | None]
"""Inputs of a plain pass, and what makes its output a loss."""
Given = Mapping[str, Tensor] | None
"""Weights of late updates instead of the part's own."""


def replay_stage(stage: StageWork, in_flight: int, say: Callable[[str], None], gave_up: Callable[[str], None]) -> None:
    """Changes the class of the stage's part."""
    stage.graphs = StageGraphs(stage, in_flight, say, gave_up)
    replays(stage.part, stage.graphs)


class StageGraphs:
    """gave_up: called with the reason when this rank stops."""

    def __init__(
        self, stage: StageWork, in_flight: int, say: Callable[[str], None], gave_up: Callable[[str], None]
    ) -> None:
        part: Any = stage.part
        self.stage = stage
        self.blocks = nn.Sequential(*(part.blocks if isinstance(part, Part) else part))
        self.names = {name: id(weight) for name, weight in part.named_parameters()}
        self.in_flight, self.say, self.gave_up = in_flight, say, gave_up
        self.has_given_up = self.is_full = False
        self.examples: dict[Size, Example] = {}
        self.passes: dict[Size, int] = {}
        self.recorded: dict[tuple[Size, int], list[StageRecording]] = {}
        """By size and the given weights' id, 0 for the part's own."""
        self.count = 0
        """Recorded sizes in the whole run."""
        self.sums: Sums | None = None
        self.trained = Trained(self.blocks)

    def __deepcopy__(self, memo: dict[int, Any]) -> StageGraphs:
        # A copied part has other weights: it never replays.
        copied = copy.copy(self)
        copied.has_given_up = True
        return copied

    def replay(self, part: nn.Module, inputs: Tensor, criterion: Criterion | None = None) -> Tensor | None:
        """The output, or with `criterion` the loss; None for a plain pass."""
        if self.has_given_up or not learns(part, inputs):
            return None
        if self.trained.have_changed():  # passes in flight keep their recordings
            if any(self.recorded.values()):
                self.say(CHANGED)
            self.recorded, self.examples, self.passes, self.sums = {}, {}, {}, None
        labels = (criterion.labels.shape, criterion.labels.dtype) if criterion else None
        size = Size(inputs.shape, inputs.dtype, autocast_type(inputs.device.type), labels)
        key = size, _id_of(self.stage.given)
        if known := self.recorded.pop(key, None):
            self.recorded[key] = known  # most recently used last
        if free := next((each for each in known or () if each.is_free), None):
            return free.replay(inputs, criterion)
        if inputs.numel() > max((known.shape.numel() for known in self.passes), default=0):
            self.recorded.clear()  # the largest size so far needs all memory for plain passes
            self.is_full = self.count == MOST_RECORDED
        self.passes[size] = self.passes.get(size, 0) + 1
        if size not in self.examples and not self.is_full:
            self.examples[size] = inputs.detach().clone(), criterion and criterion.copied()
        return None

    @staticmethod
    def has_added(loss_sum: Tensor) -> bool:
        """Whether a replay has added this loss to the stage's total."""
        of = getattr(loss_sum.grad_fn, "of", None)
        return isinstance(of, StageRecording) and of.criterion is not None

    def begin(self, sizes: Sequence[int], sets: Sequence[Mapping[str, Tensor]] = (), *, is_idle: bool) -> None:
        """Call before an update. Records what is known by now, if nothing is in flight. sets: see `StageWork.begin`."""
        self.trained.is_checked = False
        if not is_idle:
            return
        weights: Sequence[Given] = sets or (None,)
        if sets:  # the part's own are not used again
            self.recorded = {key: known for key, known in self.recorded.items() if key[1]}
        ready = [size for size in self.examples if self.passes[size] > WARM and size.shape[0] in sizes]
        for size in sorted(ready, key=lambda size: -size.shape.numel()):
            for given in weights:
                if not self.has_given_up and not self.is_full:
                    self._record_all(size, given, min(self.in_flight, sizes.count(size.shape[0])))
        while len(self.examples) > MOST_SIZES:
            self.examples.pop(next(iter(self.examples)))

    def _record_all(self, size: Size, given: Given, most: int) -> None:
        """A run that fits into memory without recordings always does so with them."""
        known = self.recorded.setdefault((size, _id_of(given)), [])
        if len(known) >= most or self.trained.differs:  # which the update's first pass will notice
            return
        if why := hooks_of(self.stage.part, of_weights=True):
            self._give_up(why)
            return
        while len(self.recorded) > MOST_SIZES:
            self.recorded.pop(next(iter(self.recorded)))
        example = self.examples[size]
        inputs = example[0].requires_grad_(not self.stage.reads)
        torch.cuda.synchronize()
        plain_bytes = pass_bytes(inputs.device)
        taken = float(plain_bytes)
        while len(known) < most:
            gc.collect()  # nothing can be freed during a capture
            torch.cuda.empty_cache()
            needed = taken + plain_bytes * (1 - len(known) / most) + COMPARED_GRADIENTS * gradient_bytes(self.blocks)
            if why := lacking(needed, inputs.device):
                self._leave_plain(why)
                return
            free = torch.cuda.mem_get_info(inputs.device)[0]
            found = self._record(size, example, given)
            if not found:
                return
            known.append(found)
            torch.cuda.empty_cache()
            taken = free - torch.cuda.mem_get_info(inputs.device)[0]
        self.count += 1
        self.is_full = self.count == MOST_RECORDED
        self.say(
            f"cuda_graph: micro-batches of {len(inputs)} samples recorded for {most} in flight, "
            f"{taken / 2**30:.2f} GiB each, {self.far:.1g} off a plain pass"
        )

    def _record(self, size: Size, example: Example, given: Given) -> StageRecording | None:
        instead = {self.names[name]: weight for name, weight in (given or {}).items()}
        try:
            if not self.sums:
                self.sums = Sums(trainable(self.blocks))
            with torch.autocast(example[0].device.type, size.autocast, enabled=size.autocast is not None):
                found = StageRecording(self.blocks, example, self.sums, self.stage, instead)
                self.far, apart = found.distances(example[0])
            why = plain_graphs.why_inexact(self.far, apart)
        except RuntimeError as error:  # torch's error for anything that CUDA refuses
            why = str(error).partition("\n")[0][:200]
        if why:
            self._give_up(why)
            return None
        return found

    def _leave_plain(self, why: str) -> None:
        """Without memory for more recordings."""
        if not any(self.recorded.values()):
            self._give_up(why)
            return
        self.is_full, self.examples = True, {}
        self.say(f"cuda_graph: some micro-batches in flight are not recorded, {why}")

    def _give_up(self, why: str) -> None:
        self.stage.later.cut()  # of a failed recording
        self.has_given_up, self.recorded, self.examples, self.sums = True, {}, {}, None
        gc.collect()
        torch.cuda.empty_cache()
        self.gave_up(why)


def _id_of(given: Given) -> int:
    return id(given) if given else 0


def _do(works: Sequence[Work]) -> None:
    for work in works:
        work()


class StageRecording(Reusable):
    """instead: of the blocks' parameters, by their id."""

    def __init__(
        self, blocks: nn.Sequential, example: Example, sums: Sums, stage: StageWork, instead: Mapping[int, Tensor]
    ) -> None:
        self.blocks, self.sums, self.stage, self.instead = blocks, sums, stage, instead
        inputs, criterion = example
        self.criterion = criterion and criterion.copied()
        self.learned = [instead.get(id(weight), weight) for weight in trainable(blocks)]
        memory = Memory()
        with uncached():
            own = inputs.detach().clone().requires_grad_(inputs.requires_grad)
            self.piece = Piece(blocks, own, memory, sums.all, instead, self._end)
            versions = [found._version for found in sums.all]
            self.piece.record_backward(torch.zeros_like(self.piece.output, requires_grad=False))
            works = stage.later.cut()
            self.weights_graph = torch.cuda.CUDAGraph() if works else None
            if works:
                with memory.recorded(self.weights_graph), torch.no_grad(), uncast(own):
                    _do(works)
        if any(found._version == before for found, before in zip(sums.all, versions, strict=True)):
            raise RuntimeError("a weight has no gradient")
        self.starts_from_weights = torch.zeros((), device=own.device, requires_grad=bool(self.piece.aliases))

    def _end(self, output: Tensor) -> Tensor:
        if not self.criterion:
            return self.stage.sent(output)
        loss_sum = self.criterion(output)
        self.stage.total.add_(loss_sum.detach())
        return loss_sum

    def replay(self, inputs: Tensor, criterion: Criterion | None = None) -> Tensor:
        if self.criterion and criterion:
            self.criterion.labels.copy_(criterion.labels)
        output: Tensor = Replay.apply(self, self.begin(), inputs, self.starts_from_weights)
        return output

    def forward(self, inputs: Tensor) -> Tensor:
        return self.piece.forward(inputs)

    def backward(self, gradient: Tensor, use: Use) -> tuple[Tensor | None, None]:
        self.sums.bind(self.learned)
        of_inputs, *_ = self.piece.backward(gradient)
        if self.weights_graph:
            self.stage.later.add(functools.partial(self.weights, use))
        return of_inputs, None

    def weights(self, use: Use | None = None) -> None:
        if self.weights_graph:
            self.weights_graph.replay()

    def distances(self, inputs: Tensor) -> tuple[float, float]:
        totals = [self.stage.total] if self.criterion else []

        def plain() -> Found:
            own = aliases_of(self.blocks, self.instead)
            leaf = inputs.detach().requires_grad_(inputs.requires_grad)
            output = self._end(functional_call(self.blocks, own, (leaf,), tie_weights=False))
            with uncast(output):
                torch.autograd.backward(output, some_gradient(output))
                with torch.no_grad():
                    _do(self.stage.later.cut())
            gradients = [one.grad for one in dict.fromkeys(own.values()) if one.grad is not None]
            return [output, *totals], [] if leaf.grad is None else [leaf.grad], gradients

        @torch.no_grad()
        def replayed() -> Found:
            output = self.piece.forward(inputs)
            of_inputs, *_ = self.piece.backward(some_gradient(output))
            self.weights()
            return [output, *totals], [] if of_inputs is None else [of_inputs], self.sums.all

        return distances(plain, replayed, self.blocks, [*self.sums.all, *totals])
