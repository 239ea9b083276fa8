"""A stage's work on micro-batches, its part of the network, and the transfers between stages.

output = stage.forward(inputs, there_s, weights)         or on the last stage:
inputs = stage.enter(inputs)
stage.judge(inputs, loss_sum, there_s)                   adds it to stage.total
gradient = stage.backward(of_output, batch, there_s)     of the oldest micro-batch
stage.weights()                                          of the oldest one after backward
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.compute.arithmetic import Full, widened
from trainer.compute.graphs import uncast
from trainer.compute.models import stages_of
from trainer.pipeline.deferred import Later, Work, split_backward
from trainer.pipeline.late import Places
from trainer.pipeline.stage_layout import Layout
from trainer.shared.stages import Stage


@dataclass(frozen=True)
class Pass:
    """weights: by name, if other than the part's own."""

    inputs: Tensor
    output: Tensor
    weights: dict[str, Tensor] | None = None


@dataclass(frozen=True)
class Criterion:
    """loss_sum: of outputs in 32 bits and labels; the same in every call."""

    loss_sum: Callable[[Tensor, Tensor], Tensor]
    labels: Tensor

    def __call__(self, output: Tensor) -> Tensor:
        with uncast(output):
            return self.loss_sum(widened(output), self.labels)

    def copied(self) -> Criterion:
        return Criterion(self.loss_sum, self.labels.clone())


class StageWork:
    """part: this stage's blocks. reads: inputs are images, without gradient. splits: weight gradients come later.
    sent_as: the type of outputs.
    """

    learns = True

    def __init__(
        self, part: nn.Module, precision: Full, *, reads: bool, splits: bool, sent_as: torch.dtype | None = None
    ) -> None:
        self.part, self.precision, self.reads, self.splits, self.sent_as = part, precision, reads, splits, sent_as
        self.places, self.later = Places(part), Later()
        self.graphs: Any = None
        """StageGraphs, or None."""
        self.given: Mapping[str, Tensor] | None = None
        """Weights in use instead of the part's own."""
        self.dtype = next(part.parameters()).dtype if type(precision) is Full else None
        self.total = torch.zeros((), dtype=torch.float64)
        """Sum of the update's losses so far, on the last stage."""
        self._of_loss: Tensor | None = None
        """The gradient of each loss of the update."""
        self._passes: deque[Pass] = deque()
        self._put_off: deque[list[Work]] = deque()
        # Only the last stage scales a loss, but all need the scale (fp16), which is created by its first use.
        precision.scaled(torch.zeros((), device=next(part.parameters()).device))
        if splits:
            split_backward(part, self.later)

    def begin(self, sizes: Sequence[int], sets: Sequence[Mapping[str, Tensor]] = ()) -> None:
        """Call before an update. sizes: its micro-batches. sets: weights of late updates, which take turns."""
        if self.graphs:
            self.graphs.begin(sizes, sets, is_idle=not self._passes and not self._put_off)
        self.total.zero_()
        self._of_loss = None

    def enter(self, inputs: Tensor) -> Tensor:
        """Starts a new autograd graph."""
        if self.reads:
            return inputs.detach()
        # may have travelled in 16 bits
        return (inputs.to(self.dtype) if self.dtype else inputs).detach().requires_grad_()

    def forward(self, inputs: Tensor, there_s: float, weights: dict[str, Tensor] | None = None) -> Tensor:
        """Returns the detached output. there_s: arrival of the inputs (time.perf_counter). weights: by name, in place
        of the part's own.
        """
        inputs, self.given = self.enter(inputs), weights
        with self.precision.autocast(), self.places.holding(weights):
            output = self.sent(self.part(inputs))
        self._passes.append(Pass(inputs, output, weights))
        return output.detach()

    def sent(self, output: Tensor) -> Tensor:
        """As it travels, so that graphs include casts and changes of the memory format."""
        return output.to(self.sent_as or output.dtype, memory_format=torch.contiguous_format)

    def judge(self, inputs: Tensor, loss_sum: Tensor, there_s: float) -> None:
        """For `forward` on the last stage."""
        self._passes.append(Pass(inputs, loss_sum))
        if not self.graphs or not self.graphs.has_added(loss_sum):
            self.total = self.total.to(loss_sum.device)
            self.total += loss_sum.detach()

    def backward(self, gradient: Tensor | None, batch: int, there_s: float) -> Tensor | None:
        """Returns the inputs' gradient, or zeros behind frozen blocks.

        gradient: of the output; None for a loss. batch: samples of the whole update.
        """
        done = self._passes.popleft()
        if gradient is None:
            if self._of_loss is None:  # one for all micro-batches
                self._of_loss = self.precision.scaled(done.output.new_full((), 1 / batch))
            done.output.backward(self._of_loss)
        elif done.output.requires_grad:  # False if all its weights are frozen
            with self.places.holding(done.weights):  # checkpointed blocks run again
                torch.autograd.backward(done.output, gradient.to(done.output.dtype))
        if self.splits:
            self._put_off.append(self.later.cut())
        if done.inputs.grad is None and not self.reads:
            return torch.zeros_like(done.inputs)
        return done.inputs.grad

    def weights(self) -> None:
        with torch.no_grad():
            for work in self._put_off.popleft():
                work()


class Part(nn.Module):
    """Calls blocks in order."""

    def __init__(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        super().__init__()
        for name, child in model._modules.items():  # all of them: a module that is used twice has two names
            self.add_module(name, child)
        self.blocks = tuple(blocks)  # a tuple, so that they are not registered twice

    def forward(self, inputs: Tensor, criterion: Criterion | None = None) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return criterion(inputs) if criterion else inputs


def part_of(model: nn.Module, stage: Stage) -> Part:
    """Removes all other weights from the model."""
    own = _modules_of(model, stage)
    blocks = stages_of(model)
    for block in blocks:
        for module in block.modules():
            if id(module) not in own:
                module._parameters = {}
                module._buffers = {}
    return Part(model, blocks[stage.first : stage.last + 1])


def own_names(model: nn.Module, stage: Stage) -> list[str]:
    """Names of the stage's weights and buffers, in the whole network's order."""
    own = _modules_of(model, stage)
    holders = {name for name, module in model.named_modules(remove_duplicate=False) if id(module) in own}
    return [name for name in model.state_dict() if name.rpartition(".")[0] in holders]


class StageParts:
    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def held(self, rank: int, state: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
        return {name: state[name] for name in own_names(network, self.layout.stage(rank)) if name in state}

    def kept(self, rank: int, state: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
        is_first = self.layout.holders(self.layout.stage(rank).first)[0] == rank
        return self.held(rank, state, network) if is_first else {}


def _modules_of(model: nn.Module, stage: Stage) -> set[int]:
    blocks = stages_of(model)[stage.first : stage.last + 1]
    return {id(module) for block in blocks for module in block.modules()}


# Transfers use a thread per end of each link, because Gloo reports an arrival only to a waiting thread, and memory
# prepared in advance, because Gloo holds back data at the source until it is asked for. Gloo also serves NCCL jobs: a
# receive posted early to NCCL occupies the GPU until data arrive. GPU tensors pass through pinned memory.

ACTIVATIONS, GRADIENTS, LABELS, LOSSES = 1, 2, 3, 4
"""Tags."""
AHEAD = 8
"""Receives posted at a time."""


class Sender:
    """Sends in a thread. `send` and `settle` raise the errors of earlier tensors."""

    def __init__(self, group: dist.ProcessGroup, to: int, tag: int) -> None:
        self.group, self.to, self.tag = group, to, tag
        self._left: queue.Queue[tuple[Tensor, Any]] = queue.Queue()
        self._error: BaseException | None = None
        self._spans: deque[tuple[float, float]] = deque()
        threading.Thread(target=self._run, daemon=True, name=f"sends to rank {to}").start()

    def send(self, tensor: Tensor) -> None:
        """Do not change the tensor afterwards."""
        self._raise()
        self._left.put(_staged(tensor) if tensor.is_cuda else (tensor.contiguous(), None))

    def settle(self) -> None:
        """Waits for all."""
        self._left.join()
        self._raise()

    def take_spans(self) -> list[tuple[float, float]]:
        """Since the last call (time.perf_counter)."""
        return [self._spans.popleft() for _ in range(len(self._spans))]

    def _raise(self) -> None:
        if self._error:
            raise self._error

    def _run(self) -> None:
        while True:
            tensor, event = self._left.get()
            try:
                if not self._error:
                    if event:
                        event.synchronize()
                    begin_s = time.perf_counter()
                    dist.send(_bytes(tensor), self.to, group=self.group, tag=self.tag)
                    self._spans.append((begin_s, time.perf_counter()))
            except RuntimeError as error:  # a rank that has ended
                self._error = error
            finally:
                self._left.task_done()


def _bytes(tensor: Tensor) -> Tensor:
    """Gloo supports few types; labels may have any (bool)."""
    return tensor.view(torch.uint8)


def _staged(tensor: Tensor) -> tuple[Tensor, Any]:
    """A copy in host memory, and the event of its completion."""
    # In the computing stream, whose order keeps the tensor alive.
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event(blocking=True)  # waits without using a core
    copied.record()
    return copy, copied


class Receiver:
    """Receives in threads, up to AHEAD tensors in advance. news: notified of arrivals."""

    def __init__(
        self, group: dist.ProcessGroup, source: int, tag: int, news: threading.Condition, device: torch.device
    ) -> None:
        self.group, self.source, self.tag, self.news, self.device = group, source, tag, news, device
        self._expected: queue.Queue[tuple[Sequence[int], torch.dtype]] = queue.Queue()
        self._room = threading.Semaphore(AHEAD)
        self._here: deque[tuple[Tensor, float]] = deque()
        self._error: BaseException | None = None
        self._posted: queue.Queue[tuple[Tensor, Any]] = queue.Queue()
        for work in (self._post, self._wait):
            threading.Thread(target=work, daemon=True, name=f"receives from rank {source}").start()

    def expect(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._expected.put((shape, dtype))

    @property
    def has_arrived(self) -> bool:
        """The next tensor is here. Raises errors."""
        if not self._here and self._error:
            raise self._error
        return bool(self._here)

    @property
    def arrived_s(self) -> float:
        """When the next tensor came (time.perf_counter)."""
        return self._here[0][1]

    def take(self) -> Tensor:
        """The next tensor, on the device."""
        tensor, _ = self._here.popleft()
        self._room.release()
        return tensor.to(self.device, non_blocking=True)

    def wait(self) -> Tensor:
        with self.news:
            self.news.wait_for(lambda: self.has_arrived)
        return self.take()

    def _post(self) -> None:
        pinned = self.device.type == "cuda"
        while True:
            shape, dtype = self._expected.get()
            self._room.acquire()
            tensor = torch.empty(tuple(shape), dtype=dtype, pin_memory=pinned)
            try:
                coming = dist.irecv(_bytes(tensor), self.source, group=self.group, tag=self.tag)
                self._posted.put((tensor, coming))
            except RuntimeError as error:
                self._fail(error)
                return

    def _wait(self) -> None:
        while True:
            tensor, coming = self._posted.get()
            try:
                coming.wait()
            except RuntimeError as error:  # a rank that has ended
                self._fail(error)
                return
            with self.news:
                self._here.append((tensor, time.perf_counter()))
                self.news.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self.news:
            self._error = error
            self.news.notify_all()
