"""PowerSGD (Vogels, Karimireddy and Jaggi, NeurIPS 2019): gradients travel as thin matrices, what that leaves out is
remembered and sent later.

    exchange = PowerSgd(trainable(model), rank=2)
    exchange(gradients, sums)            on every rank, in place: each rank's part becomes about the sum of all

A gradient M of n x m numbers becomes P Q^T with `rank` columns. Q is that of the update before (warm start), so that
one multiplication a side follows the largest singular vectors. Each rank's part must already count by its samples:
the sum of the parts is compressed, whatever their sizes. All P travel in one sum and all Q in another, in one order on
every rank, with what is too small to compress as it is beside the P.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.compute.buffers import bytes_of, flatten, unflatten
from trainer.shared import gpu_work
from trainer.strategies.gradient_sum import GradientSum

_SEED = 20_191_208
"""Any number, the same on every rank: the first Q must be."""
_NUDGE = 64
"""Times a number's precision: more than rounding, and less than a gradient has to say."""


class Stack:
    """Matrices of one shape, so that one call multiplies all of them.

    memory: what this rank has not been able to send yet. q: on every rank the same.
    """

    def __init__(self, positions: Sequence[int], like: Tensor, rank: int, generator: torch.Generator) -> None:
        rows, columns = like.shape[0], like[0].numel()
        self.positions = tuple(positions)
        self.memory = like.new_zeros(len(positions), rows, columns)
        rank = min(rank, rows, columns)
        self.q = torch.randn(len(positions), columns, rank, generator=generator).to(like)
        self.p = like.new_zeros(len(positions), rows, rank)
        own = torch.Generator().manual_seed(_SEED)
        self.directions = (torch.randn(rows, rank, generator=own) / math.sqrt(rows)).to(like)

    def project(self, gradients: Sequence[Tensor]) -> None:
        """p becomes this rank's part of the new P."""
        for matrix, position in zip(self.memory, self.positions, strict=True):
            matrix += gradients[position].reshape(matrix.shape)
        torch.bmm(self.memory, self.q, out=self.p)

    def project_back(self) -> None:
        """Takes the sum of all P; q becomes this rank's part of the new Q, and leaves the memory."""
        self.p = orthonormal(self.p, self.directions)
        torch.bmm(self.memory.transpose(1, 2), self.p, out=self.q)
        self.memory.baddbmm_(self.p, self.q.transpose(1, 2), alpha=-1)

    def write(self, gradients: Sequence[Tensor]) -> None:
        """Takes the sum of all Q."""
        for p, q, position in zip(self.p, self.q, self.positions, strict=True):
            gradients[position].copy_((p @ q.T).view(gradients[position].shape))


def orthonormal(matrices: Tensor, directions: Tensor) -> Tensor:
    """The Q of each matrix's QR decomposition with a positive diagonal of R. matrices: (count, rows, columns), with no
    more columns than rows. directions: (rows, columns), what columns become that are zero or depend on others.

    The Gram-Schmidt method on columns of length 1, each twice ("twice is enough": Giraud, Langou and Rozloznik 2005),
    for all matrices at once: a GPU's QR goes from one to the next, and its signs may be other than another device's.
    Cholesky's method takes fewer calls, but squares the condition number, and leaves float32 nothing of such P.
    """
    limits = torch.finfo(matrices.dtype)
    q: Tensor = matrices / matrices.norm(dim=1, keepdim=True).clamp_min(limits.tiny)
    q += _NUDGE * limits.eps * directions  # rounding alone would have each kind of device go on in another direction
    for number in range(q.shape[2]):
        column, before = q[:, :, number : number + 1], q[:, :, :number]
        for _ in range(2 if number else 0):
            column -= before @ (before.mT @ column)
        column /= column.norm(dim=1, keepdim=True).clamp_min(limits.tiny)
    return q


class PowerSgd:
    """parameters: like the gradients in number and shape. Those that would not shrink travel as they are."""

    def __init__(self, parameters: Sequence[Tensor] | Sequence[nn.Parameter], rank: int) -> None:
        generator = torch.Generator().manual_seed(_SEED)
        of_shape: dict[tuple[int, int], list[int]] = {}
        self.small: list[int] = []
        for position, parameter in enumerate(parameters):
            shape = (len(parameter), parameter[0].numel()) if parameter.dim() > 1 else (1, 1)
            shrinks = rank * sum(shape) < math.prod(shape)
            (of_shape.setdefault(shape, []) if shrinks else self.small).append(position)
        self.stacks = [Stack(own, parameters[own[0]].detach(), rank, generator) for own in of_shape.values()]
        self.tensors, self.bytes = len(parameters), bytes_of(*parameters)

    @torch.no_grad()
    def __call__(self, gradients: Sequence[Tensor], sums: GradientSum) -> None:
        gradients = [gradient.detach() for gradient in gradients]
        sums.executor(gpu_work.project(self.bytes, self.tensors), lambda: self._project(gradients))
        _sum_all([*(stack.p for stack in self.stacks), *(gradients[position] for position in self.small)], sums)
        sums.executor(gpu_work.project_back(self.bytes), self._project_back)
        _sum_all([stack.q for stack in self.stacks], sums)
        sums.executor(gpu_work.restore(self.bytes, self.tensors), lambda: self._write(gradients))

    def _project(self, gradients: Sequence[Tensor]) -> None:
        for stack in self.stacks:
            stack.project(gradients)

    def _project_back(self) -> None:
        for stack in self.stacks:
            stack.project_back()

    def _write(self, gradients: Sequence[Tensor]) -> None:
        for stack in self.stacks:
            stack.write(gradients)

    def state(self) -> dict[str, Tensor]:
        """What the next update needs, by kind and shape: there is one stack of a shape. `memory` is this rank's own."""
        kept: dict[str, Tensor] = {}
        for stack in self.stacks:
            of = "x".join(map(str, stack.memory.shape))
            kept |= {f"memory.{of}": stack.memory, f"q.{of}": stack.q}
        return kept


def _sum_all(tensors: Sequence[Tensor], sums: GradientSum) -> None:
    """In one buffer: one latency for all of them."""
    if not tensors:
        return
    flat = flatten(tensors)
    sums.sum(flat)
    unflatten(flat, tensors)
