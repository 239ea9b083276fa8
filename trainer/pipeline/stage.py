"""One stage's work on micro-batches: forward, backward for what went in, and later for its own weights.

stage = StageWork(part, precision, reads=False, splits=True)
output = stage.forward(inputs, there_s)                  to be sent on; or, of the last stage,
inputs = stage.enter(inputs)                             what its part is to be called with, and
stage.judge(inputs, loss_sum, there_s)                   the sum of the losses of what it gave
gradient = stage.backward(of_output, batch, there_s)     of the oldest micro-batch, for the stage before
stage.weights()                                          of the oldest one whose backward is over
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.compute.arithmetic import Full
from trainer.pipeline.deferred import Later, Work, split_backward
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
