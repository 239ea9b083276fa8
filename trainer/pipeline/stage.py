"""One stage's work on micro-batches: forward, backward for what went in, and later for its own weights.

stage = StageWork(part, precision, reads=False, splits=True)
output = stage.forward(inputs, there_s)                  to be sent on; or, of the last stage,
inputs = stage.enter(inputs)                             what its part is to be called with, and
stage.judge(inputs, loss_sum, there_s)                   the sum of the losses of what it gave
gradient = stage.backward(of_output, batch, there_s)     of the oldest micro-batch, for the stage before
stage.weights()                                          of the oldest one whose backward is over
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.compute.arithmetic import Full
from trainer.compute.models import stages_of
from trainer.pipeline.deferred import Later, Work, split_backward
from trainer.pipeline.stage_layout import Layout
from trainer.shared.stages import Stage
from trainer.strategies.base import weighted


@dataclass(frozen=True)
class Pass:
    """A micro-batch between forward and backward."""

    inputs: Tensor
    output: Tensor


class StageWork:
    """part: the blocks of this stage, in a row. reads: are its inputs images, which have no gradient? splits: do its
    weights' gradients come later?
    """

    learns = True

    def __init__(self, part: nn.Module, precision: Full, *, reads: bool, splits: bool) -> None:
        self.part, self.precision, self.reads, self.splits = part, precision, reads, splits
        self.later = Later()
        self.dtype = next(part.parameters()).dtype if type(precision) is Full else None
        self._passes: deque[Pass] = deque()
        self._put_off: deque[list[Work]] = deque()
        # The last stage alone scales a loss; each needs the scale (of fp16), which begins with the first use of it.
        precision.scaled(torch.zeros((), device=next(part.parameters()).device))
        if splits:
            split_backward(part, self.later)

    def enter(self, inputs: Tensor) -> Tensor:
        """Of the history of these nothing is known here, and so they begin a new one."""
        if self.reads:
            return inputs.detach()
        return (inputs.to(self.dtype) if self.dtype else inputs).detach().requires_grad_()  # some travel in 16 bits

    def forward(self, inputs: Tensor, there_s: float) -> Tensor:
        """there_s: when the inputs came, by time.perf_counter. The result has no history."""
        inputs = self.enter(inputs)
        with self.precision.autocast():
            output = self.part(inputs)
        self._passes.append(Pass(inputs, output))
        result: Tensor = output.detach()
        return result

    def judge(self, inputs: Tensor, loss_sum: Tensor, there_s: float) -> Tensor:
        """In place of `forward`. Gives the loss without its history."""
        self._passes.append(Pass(inputs, loss_sum))
        return loss_sum.detach()

    def backward(self, gradient: Tensor | None, batch: int, there_s: float) -> Tensor | None:
        """gradient: of the output; None where that is a loss. batch: samples of the whole update. Gives that of the
        inputs, which the stage before waits for: zeros if frozen blocks have none.
        """
        done = self._passes.popleft()
        if gradient is None:
            weighted(self.precision.scaled(done.output), batch).backward()
        elif done.output.requires_grad:  # not that of frozen weights alone
            torch.autograd.backward(done.output, gradient.to(done.output.dtype))
        if self.splits:
            self._put_off.append(self.later.cut())
        if done.inputs.grad is None and not self.reads:
            return torch.zeros_like(done.inputs)
        return done.inputs.grad

    def weights(self) -> None:
        """Adds to the weights' `.grad`."""
        with torch.no_grad():
            for work in self._put_off.popleft():
                work()


# The part of a network that a stage holds.
#
# part = part_of(model, stage)               of the model only these blocks keep their weights
# part.state_dict()                          of these alone, under the names that the whole network gives them
# own_names(model, stage)                    those names, of a whole network
# StageParts(layout).held(rank, ...)         what of its state lies on which rank


class Part(nn.Module):
    """Calls these blocks one after the other."""

    def __init__(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        super().__init__()
        for name, child in model._modules.items():  # all of them: a module that is used twice has two names
            self.add_module(name, child)
        self._blocks = tuple(blocks)  # modules of these children, and so not listed twice

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self._blocks:
            inputs = block(inputs)
        return inputs


def part_of(model: nn.Module, stage: Stage) -> Part:
    """Takes everything else's weights and buffers away from the model."""
    own = _modules_of(model, stage)
    blocks = stages_of(model)
    for block in blocks:
        for module in block.modules():
            if id(module) not in own:
                module._parameters = {}
                module._buffers = {}
    return Part(model, blocks[stage.first : stage.last + 1])


def own_names(model: nn.Module, stage: Stage) -> list[str]:
    """Of the weights and buffers of a stage, in the order of the whole network's state."""
    own = _modules_of(model, stage)
    holders = {name for name, module in model.named_modules(remove_duplicate=False) if id(module) in own}
    return [name for name in model.state_dict() if name.rpartition(".")[0] in holders]


class StageParts:
    """Which part of a whole network's state lies on which rank."""

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


# Tensors from rank to rank, in the order in which they are sent, while both compute.
#
#     outgoing = Sender(group, to=1, tag=ACTIVATIONS)
#     incoming = Receiver(group, source=0, tag=ACTIVATIONS, news=news, device=device)
#     incoming.expect(shape, dtype)             one call for each tensor that will come, long before it does
#     with news: news.wait_for(lambda: incoming.has_arrived)
#     tensor = incoming.take()
#
# Gloo says of an arrival only to who waits for it, so each link has a thread at either end; and what comes is received
# into memory that lies ready, since Gloo holds back at its source what nobody asks for. This is so where NCCL carries
# gradients, too: a receive that NCCL has been given in advance occupies the GPU until its data come. From and to a GPU
# tensors pass through pinned memory.

ACTIVATIONS, GRADIENTS, LABELS, LOSSES = 1, 2, 3, 4
"""Tags: what two ranks send each other."""
AHEAD = 8
"""Receives that wait for their data at a time: more than a stage's micro-batches in flight beyond its own."""


class Sender:
    """Sends in a thread of its own. Raises in `send` or `settle` what went wrong with an earlier tensor."""

    def __init__(self, group: dist.ProcessGroup, to: int, tag: int) -> None:
        self.group, self.to, self.tag = group, to, tag
        self._left: queue.Queue[tuple[Tensor, Any]] = queue.Queue()
        self._error: BaseException | None = None
        self._spans: deque[tuple[float, float]] = deque()
        threading.Thread(target=self._run, daemon=True, name=f"sends to rank {to}").start()

    def send(self, tensor: Tensor) -> None:
        """Nobody may change it afterwards."""
        self._raise()
        self._left.put(_staged(tensor) if tensor.is_cuda else (tensor.contiguous(), None))

    def settle(self) -> None:
        """Until all has left."""
        self._left.join()
        self._raise()

    def take_spans(self) -> list[tuple[float, float]]:
        """When tensors were being sent since the last call, begin and end of each by time.perf_counter."""
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
            except RuntimeError as error:  # a rank that has gone
                self._error = error
            finally:
                self._left.task_done()


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory: Gloo knows some types only, and labels may be of any (bool)."""
    return tensor.view(torch.uint8)


def _staged(tensor: Tensor) -> tuple[Tensor, Any]:
    """A copy in the host's memory, and the event after which it holds the numbers. The computing stream makes it: by
    its order the tensor lives until then.
    """
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event(blocking=True)  # not at the cost of a core
    copied.record()
    return copy, copied


class Receiver:
    """Receives in a thread of its own, up to AHEAD tensors before they are asked for. news: told of each arrival."""

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
        """Is the next one here? Raises what went wrong instead."""
        if not self._here and self._error:
            raise self._error
        return bool(self._here)

    @property
    def arrived_s(self) -> float:
        """When the next one came, by time.perf_counter."""
        return self._here[0][1]

    def take(self) -> Tensor:
        """The next one, on the device."""
        tensor, _ = self._here.popleft()
        self._room.release()
        return tensor.to(self.device, non_blocking=True)

    def wait(self) -> Tensor:
        """The next one, when it has come."""
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
            except RuntimeError as error:  # a rank that has gone
                self._fail(error)
                return
            with self.news:
                self._here.append((tensor, time.perf_counter()))
                self.news.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self.news:
            self._error = error
            self.news.notify_all()
