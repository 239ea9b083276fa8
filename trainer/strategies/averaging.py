"""Averages weights instead of gradients (`parameter_average`, `local`), and compresses gradients (`compressed`).

Averaging: McDonald, Hall and Mann 2010; with several updates in between local SGD (Stich 2019). After single SGD
updates it is exact: w - lr * sum_j (m_j/n) g_j.
"""
# Ranks send their weight change since the last average: rounded to 16 bits, weights themselves would lose digits. The
# mean change is a step of an outer optimiser (DiLoCo, Douillard et al. 2023); learning rate 1 without momentum gives
# the mean weights. With `overlap`, ranks train on during the transfer and add their later change to the mean
# (CoCoD-SGD, Shen et al. 2019; Streaming DiLoCo, Douillard et al. 2025).

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.compute.buffers import bytes_of, flatten, parts_of, unflatten
from trainer.compute.models import trainable
from trainer.compute.timer import InjectedDelay, Timer
from trainer.shared import gpu_work
from trainer.shared.errors import TrainError
from trainer.shared.settings import Settings
from trainer.strategies.after_backward import AfterBackward
from trainer.strategies.base import (
    Base,
    Exchange,
    Strategy,
    WholeNetwork,
    first_rank,
    refuse_unused,
    share_initial_state,
)
from trainer.strategies.gradient_sum import GradientSum


class ParameterAverage(Base):
    """Weighs each rank by its samples since the last average.

    every: updates between averages. overlap: updates during a transfer, fewer than `every`. is_exact: all ranks must
    use all parameters.
    """

    updates_alone = True

    def __init__(
        self,
        model: nn.Module,
        sums: GradientSum,
        timer: Timer,
        delay: InjectedDelay,
        every: int,
        overlap: int = 0,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        is_exact: bool = False,
    ) -> None:
        self.model, self.is_exact = model, is_exact
        self.sums = sums
        self.timer = timer
        self.delay = delay
        self.every, self.overlap = every, overlap
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self.updates = 0  # of this round, like samples
        self.samples: float = 0
        self.samples_of_all = 0
        share_initial_state(model, sums.group)
        self.has_begun = False  # a checkpoint may be read before the first round
        self.start: Tensor  # weights at the start of the round
        self.sent_from: Tensor  # weights at the end of the change in transfer
        self.way: Tensor
        self.under_way = False
        self.pieces: list[Any] = []  # of the change in transfer; empty after arrival
        self.velocity = torch.zeros_like(flatten(trainable(model))) if outer_momentum else torch.empty(0)

    def accumulate(self, loss_sum: Tensor, samples: int, batch: int) -> None:
        (loss_sum / max(1, samples)).backward()

    def backward_alone(self, loss_sum: Tensor, samples: int) -> None:
        self.accumulate(loss_sum, samples, samples)
        self.count(samples, of_all=0)

    def backward(self, loss_sum: Tensor, samples: int, batch: int) -> Exchange:
        self.accumulate(loss_sum, samples, samples)
        if self.is_exact and any(weight.grad is None for weight in trainable(self.model)):
            refuse_unused(self.model, loss_sum)
        self.count(samples, of_all=batch)
        self.delay.pause("sync")
        self.pause_before_call()
        return Exchange(self.timer.mark())

    def count(self, samples: float, of_all: int) -> None:
        """Call before the weights move. of_all: samples of all ranks, or 0 in an update of this rank only."""
        if not self.has_begun:
            self._begin()
        self.samples += samples
        self.samples_of_all += of_all

    def pause_before_call(self) -> None:
        if self.updates + 1 >= self.every:
            self.delay.pause("call")

    def after_update(self) -> None:
        self.updates += 1
        if self.under_way and self.updates >= self.overlap:
            self._take_over()
        if self.updates >= self.every:
            self._send()
            if not self.overlap:
                self._take_over()

    @property
    def keeps_statistics(self) -> bool:
        is_alone = self.sums.group.size() == 1
        return (self.every == 1 or is_alone) and self.outer_lr == 1 and not self.outer_momentum

    def settle(self) -> None:
        for piece in self.pieces:
            piece.wait()
        self.pieces = []

    def _begin(self) -> None:
        self.has_begun, self.start = True, flatten(trainable(self.model))
        self.sent_from, self.way = torch.empty_like(self.start), torch.empty_like(self.start)

    def _send(self) -> None:
        self.sums.executor(gpu_work.leave(bytes_of(self.way)), self._measure_way)
        self.pieces, self.under_way = self.sums.begin_in_pieces(self.way), True
        self.updates = self.samples = self.samples_of_all = 0

    def _measure_way(self) -> None:
        flatten(trainable(self.model), out=self.sent_from)
        torch.sub(self.sent_from, self.start, out=self.way).mul_(self.samples / self.samples_of_all)

    def _take_over(self) -> None:
        self.settle()
        self.under_way = False
        arrive = gpu_work.arrive if self.updates else gpu_work.arrive_at_once
        self.sums.executor(arrive(bytes_of(self.way)), self._go_on)

    def _go_on(self) -> None:
        self._step(self.start, self.velocity, self.way)
        if self.updates:
            ahead = torch.sub(self.start, self.sent_from, out=self.way)
            for weight, part in parts_of(ahead, trainable(self.model)):
                weight.add_(part)
        else:  # bit-identical on every rank
            unflatten(self.start, trainable(self.model))

    def _step(self, start: Tensor, velocity: Tensor, way: Tensor) -> None:
        """The outer optimiser, in place, with Nesterov momentum."""
        if self.outer_momentum:
            velocity.mul_(self.outer_momentum).add_(way)
            way.add_(velocity, alpha=self.outer_momentum)
        start.add_(way, alpha=self.outer_lr)

    # ---- what others see of it ----------------------------------------------------------------------------------

    def whole(self) -> nn.Module:
        """The network if all averaged now. A copy, unless it is this rank's own."""
        if not self.updates and not self.under_way:
            return self.model
        self.settle()
        start, since = self.start, self.start
        if self.under_way:
            start, since = self.start.clone(), self.sent_from
            self._step(start, self.velocity.clone(), self.way.clone())
        if self.updates:
            came = flatten(trainable(self.model)).sub_(since).mul_(self.samples / self.samples_of_all)
            for piece in self.sums.begin_in_pieces(came):
                piece.wait()
            start = came.add_(start)
        network = copy.deepcopy(self.model)
        unflatten(start, trainable(network))
        return network

    def own_state(self) -> dict[str, Tensor]:
        """`weights` are this rank's; `start` and a travelled change are equal on all ranks."""
        kept = {"velocity.0": self.velocity}
        if self.updates or self.under_way:
            counts = torch.tensor([self.updates, self.samples, self.samples_of_all], dtype=torch.float64)
            kept |= {"round.counts": counts, "round.start": self.start}
            kept |= {f"weights.{number}": own.detach() for number, own in enumerate(trainable(self.model))}
        if self.under_way:
            self.settle()
            kept |= {"travelling.from": self.sent_from, "travelling.way": self.way}
        return kept

    def expect(self, kept: Mapping[str, Tensor]) -> None:
        if "round.counts" not in kept:
            return
        self._begin()
        counts = kept["round.counts"].tolist()
        if len(counts) != 3 or not all(math.isfinite(count) and count >= 0 for count in counts):
            raise TrainError("resume: the checkpoint's round of local updates is invalid: the file is damaged")
        self.updates, self.samples, self.samples_of_all = int(counts[0]), counts[1], int(counts[2])
        self.under_way = "travelling.way" in kept

    def regroup(self, part: float) -> None:
        """Continues the round from the mean, which includes the change in transfer."""
        if self.under_way:
            self._step(self.start, self.velocity, self.way)
        self.under_way = False
        self.samples = self.samples_of_all * part


def averaged(
    settings: Settings, model: nn.Module, sums: GradientSum, timer: Timer, delay: InjectedDelay
) -> ParameterAverage:
    outer = (settings.outer_lr, settings.outer_momentum)
    return ParameterAverage(model, sums, timer, delay, settings.local_steps, settings.overlap, *outer)


TOGETHER = 500
"""Updates after which all ranks take rank 0's weights: rarely enough to cost less than another exchange of P."""


class Compressed(AfterBackward):
    # All at once after backward: so little is sent that overlap would hide nothing.

    def __init__(self, model: nn.Module, sums: GradientSum, timer: Timer, delay: InjectedDelay, rank: int) -> None:
        self.power_sgd = PowerSgd(trainable(model), rank)
        super().__init__(model, sums, timer, delay, self.power_sgd)
        self.updates = torch.zeros(1)

    def after_update(self) -> None:
        self.updates += 1
        if self.updates % TOGETHER == 0:
            self._share_rank_0s(self.model)

    def own_state(self) -> dict[str, Tensor]:
        return {"updates.compressed": self.updates, **self.power_sgd.state()}

    def whole(self) -> nn.Module:
        """A copy with rank 0's weights, so that evaluations do not bring the ranks together."""
        network = copy.deepcopy(self.model)
        self._share_rank_0s(network)
        return network

    def _share_rank_0s(self, network: nn.Module) -> None:
        # Different kinds of devices orthogonalise P and round P Q^T differently, so their ranks drift apart.
        for parameter in trainable(network):
            dist.broadcast(parameter.detach(), src=first_rank(self.sums.group), group=self.sums.group)


class ExactFirst(WholeNetwork):
    """Uses `exact` for the first `after` updates, then `later`: `compress_after`, or
    post-local SGD (Lin et al. 2020).
    """

    def __init__(self, exact: Strategy, later: Strategy, after: int) -> None:
        self.exact: Strategy | None = exact
        self.later = later
        self.after = after
        self.updates = torch.zeros(1)

    @property
    def _current(self) -> Strategy:
        if self.updates >= self.after:
            self.exact = None  # frees its buckets, which take as much memory as all weights
        return self.exact or self.later

    @property
    def model(self) -> nn.Module:
        return self._current.model

    @property
    def keeps_statistics(self) -> bool:
        return self._current.keeps_statistics

    @property
    def updates_alone(self) -> bool:
        return self._current.updates_alone

    @property
    def meets_in_forward(self) -> bool:
        return self._current.meets_in_forward

    def no_loss(self) -> Tensor:
        return self._current.no_loss()

    def without_sync(self) -> AbstractContextManager[object]:
        return self._current.without_sync()

    def accumulate(self, loss_sum: Tensor, samples: int, batch: int) -> None:
        self._current.accumulate(loss_sum, samples, batch)

    def backward_alone(self, loss_sum: Tensor, samples: int) -> None:
        self._current.backward_alone(loss_sum, samples)

    def backward(self, loss_sum: Tensor, samples: int, batch: int) -> Exchange:
        return self._current.backward(loss_sum, samples, batch)

    def after_update(self) -> None:
        self._current.after_update()
        self.updates += 1

    def settle(self) -> None:
        self._current.settle()

    def own_state(self) -> dict[str, Tensor]:
        return {"updates.first": self.updates, **self.later.own_state()}

    def expect(self, kept: Mapping[str, Tensor]) -> None:
        if "updates.first" in kept:
            self.updates.fill_(kept["updates.first"].sum())
        if self.updates >= self.after:  # exact updates begin with the mean
            self.later.expect(kept)

    def regroup(self, part: float) -> None:
        self.later.regroup(part)

    def whole(self) -> nn.Module:
        return self._current.whole()


# PowerSGD (Vogels, Karimireddy and Jaggi, NeurIPS 2019): a gradient matrix M becomes P Q^T with `rank` columns, and the
# error is sent later. Q is reused from the last update (warm start), so one multiplication per side follows the largest
# singular vectors. All P travel in one sum, with small tensors, and all Q in another.

_SEED = 20_191_208
"""Arbitrary, but equal on all ranks, for the first Q."""
_NUDGE = 64
"""Times the precision: more than rounding errors, less than the information in a gradient."""


class Stack:
    """Matrices of one shape, multiplied together. memory: this rank's unsent error. q: equal on all ranks."""

    def __init__(self, positions: Sequence[int], p: Tensor, q: Tensor) -> None:
        self.positions, self.p, self.q = tuple(positions), p, q
        self.memory = q.new_zeros(len(q), p.shape[1], q.shape[1])

    def project(self, gradients: Sequence[Tensor]) -> None:
        """Sets p to this rank's part of P."""
        own = [gradients[position] for position in self.positions]
        torch._foreach_add_([error.view_as(new) for error, new in zip(self.memory, own, strict=True)], own)
        torch.bmm(self.memory, self.q, out=self.p)

    def project_back(self) -> None:
        """p: orthonormal. Sets q to this rank's part of Q."""
        torch.bmm(self.memory.mT, self.p, out=self.q)
        self.memory.baddbmm_(self.p, self.q.mT, alpha=-1)

    def write(self, gradients: Sequence[Tensor]) -> None:
        """q: the sum of all Q."""
        for p, q, position in zip(self.p, self.q, self.positions, strict=True):
            gradient = gradients[position]
            if gradient.is_contiguous() and gradient.dtype == p.dtype:
                torch.mm(p, q.T, out=gradient.view(len(p), len(q)))
            else:
                gradient.copy_((p @ q.T).view_as(gradient))


def orthonormal(matrices: Tensor, directions: Tensor, out: Tensor | None = None) -> Tensor:
    """The Q of each QR decomposition with positive diagonal of R.

    matrices: (count, rows, columns), columns <= rows. directions: (rows, columns), replace dependent columns. out: may
    be the matrices.
    """
    # Gram-Schmidt twice per column ("twice is enough": Giraud, Langou and Rozloznik 2005), for all matrices at once: a
    # GPU's QR takes one after the other, with signs that depend on the device. Cholesky squares the condition number,
    # which is too much for float32.
    limits = torch.finfo(matrices.dtype)
    lengths = matrices.norm(dim=1, keepdim=True).clamp_min(limits.tiny)
    # Without the directions, rounding errors would decide on each device. The sum's scale does not matter.
    q: Tensor = torch.addcdiv(directions, matrices, lengths, value=1 / (_NUDGE * limits.eps), out=out)
    for number in range(q.shape[2]):
        column, before = q[:, :, number : number + 1], q[:, :, :number]
        for _ in range(2 if number else 0):
            column.baddbmm_(before, before.mT @ column, alpha=-1)
        column /= column.norm(dim=1, keepdim=True).clamp_min(limits.tiny)
    return q


class PowerSgd:
    """Replaces gradients by their approximate sum over all ranks. Tensors that would not shrink travel unchanged.

    parameters: shaped like the gradients, which must be weighted by samples.
    """

    # In few kernels: matrices of one shape are multiplied together, those with equally many rows orthonormalised
    # together. A CUDA graph would replace the others, but needs the gradients at the same addresses in each update:
    # copying ResNet-152's there and back takes an A2000 as long as these launches take its host.

    def __init__(self, parameters: Sequence[Tensor] | Sequence[nn.Parameter], rank: int) -> None:
        generator = torch.Generator().manual_seed(_SEED)
        like = flatten([parameter.flatten()[:0] for parameter in parameters])  # of a type that holds all
        of_shape = gpu_work.compressed([parameter.shape for parameter in parameters], rank)
        stacked = {position for positions in of_shape.values() for position in positions}
        self.small = [position for position in range(len(parameters)) if position not in stacked]
        self.sides: list[tuple[Tensor, Tensor]] = []
        """All P with the same number of rows, and their directions."""
        parts: dict[int, Iterator[Tensor]] = {}
        for rows in dict.fromkeys(rows for rows, _ in of_shape):
            counts = [len(positions) for shape, positions in of_shape.items() if shape[0] == rows]
            p, own = like.new_zeros(sum(counts), rows, rank), torch.Generator().manual_seed(_SEED)
            self.sides.append((p, (torch.randn(rows, rank, generator=own) / math.sqrt(rows)).to(like)))
            parts[rows] = iter(p.split(counts))
        self.stacks = [
            Stack(own, next(parts[rows]), torch.randn(len(own), columns, rank, generator=generator).to(like))
            for (rows, columns), own in of_shape.items()
        ]
        self.works = gpu_work.compressing(bytes_of(*parameters), of_shape, rank)

    @torch.no_grad()
    def __call__(self, gradients: Sequence[Tensor], sums: GradientSum) -> None:
        gradients = [gradient.detach() for gradient in gradients]
        sums.executor(self.works[0], lambda: self._project(gradients))
        _sum_all([*(p for p, _ in self.sides), *(gradients[position] for position in self.small)], sums)
        sums.executor(self.works[1], self._project_back)
        _sum_all([stack.q for stack in self.stacks], sums)
        sums.executor(self.works[2], lambda: self._write(gradients))

    def _project(self, gradients: Sequence[Tensor]) -> None:
        for stack in self.stacks:
            stack.project(gradients)

    def _project_back(self) -> None:
        for p, directions in self.sides:
            orthonormal(p, directions, out=p)
        for stack in self.stacks:
            stack.project_back()

    def _write(self, gradients: Sequence[Tensor]) -> None:
        for stack in self.stacks:
            stack.write(gradients)

    def state(self) -> dict[str, Tensor]:
        """By kind and shape. `memory` differs between ranks."""
        kept: dict[str, Tensor] = {}
        for stack in self.stacks:
            of = "x".join(map(str, stack.memory.shape))
            kept |= {f"memory.{of}": stack.memory, f"q.{of}": stack.q}
        return kept


def _sum_all(tensors: Sequence[Tensor], sums: GradientSum) -> None:
    """In one buffer, for a single latency."""
    if not tensors:
        return
    flat = flatten(tensors)
    sums.sum(flat)
    unflatten(flat, tensors)
