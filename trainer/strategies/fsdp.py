"""`fsdp`: torch's fully_shard (Zhao et al. 2023, after ZeRO stage 3), in which no rank holds
all weights or gradients.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.compute.models import gradient_bytes, meta_copy, trainable
from trainer.compute.timer import InjectedDelay, Timer
from trainer.ranks.agreement import differing
from trainer.shared.errors import TrainError
from trainer.strategies.base import (
    Base,
    Exchange,
    refuse_sparse,
    refuse_unused,
    share_initial_state,
    sparse_of,
    weighted,
)


class Fsdp(Base):
    """piece_mib: largest part of the network gathered and reduced at once, in MiB.

    Parameters become DTensors, so build the optimiser afterwards.
    """

    # With Gloo, backward waits for slower ranks in all pieces but the last, which looks like computing.

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, timer: Timer, delay: InjectedDelay, piece_mib: float
    ) -> None:
        make_mesh, fully_shard = _newest_fsdp()
        if sparse_of(model):
            refuse_sparse(model)
        self.model = model
        self.group = group
        self.timer = timer
        self.delay = delay
        self.computed: Any = None
        self.collectives: list[tuple[Any, Any]] = []
        share_initial_state(model, group)
        self.hollow = meta_copy(model)
        mesh = make_mesh(group, next(model.parameters()).device.type)
        pieces = list(pieces_of(model, piece_mib * 2**20))
        has_rest = sum(gradient_bytes(part) for piece in pieces for part in piece) < gradient_bytes(model)
        self.reductions = len(pieces) + has_rest
        names = {module: name for name, module in model.named_modules()}
        for number, piece in enumerate((*pieces, [model])):  # the whole is last: it takes the rest
            fully_shard(piece, mesh=mesh)
            sharded: Any = piece[0]  # a piece's modules share their state
            name = names[sharded] or "the rest of the network"
            sharded.set_custom_all_gather(_Gather(2 * number, name))
            sharded.set_custom_reduce_scatter(_Reduce(2 * number + 1, name, self))
        type(sharded).__deepcopy__ = _refuse_copy

    @property
    def meets_in_forward(self) -> bool:
        return self.group.size() > 1

    def accumulate(self, loss_sum: Tensor, samples: int, batch: int) -> None:
        # fully_shard leaves the mean over ranks, not the sum.
        (weighted(loss_sum, batch) * self.group.size()).backward()

    def backward(self, loss_sum: Tensor, samples: int, batch: int) -> Exchange:
        self.collectives.clear()
        self.accumulate(loss_sum, samples, batch)
        if any(weight.grad is None for weight in trainable(self.model)):
            refuse_unused(self.model, loss_sum)
        if not self.collectives:  # a single rank reduces nothing
            self.delay.pause("sync")
            self.computed = self.timer.mark()
        return Exchange(self.computed, tuple(self.collectives))

    @contextlib.contextmanager
    def without_sync(self) -> Iterator[None]:
        """Weights still travel, so all ranks need equally many micro-batches."""
        sharded: Any = self.model
        sharded.set_requires_gradient_sync(False)
        yield
        sharded.set_requires_gradient_sync(True)

    def whole(self) -> nn.Module:
        """A copy; meanwhile every rank holds all weights."""
        network = copy.deepcopy(self.hollow).to_empty(device=next(self.model.parameters()).device)
        own: dict[str, Any] = dict(self.model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, tensor in network.named_parameters(remove_duplicate=False):  # `to_empty` separates tied weights
                tensor.copy_(own[name].full_tensor())
            for copied, module in zip(network.modules(), self.model.modules(), strict=True):
                for name, buffer in module._buffers.items():  # may have been replaced, with another size
                    copied._buffers[name] = None if buffer is None else buffer.clone()
        return network


class _Collective:
    """A collective of one piece, called by fully_shard."""

    # Gloo aborts the process if ranks send different numbers of bytes.

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def check_position(self, sent: Tensor, group: dist.ProcessGroup) -> None:
        """Raises TrainError on all ranks if they are at different pieces or weights."""
        if others := differing(self.number * 2**36 + sent.numel(), self.name, group):
            raise TrainError(
                f"strategy fsdp: ranks use different parts of the network in one update (they differ at {others}), but "
                "all must use the same parts:  use ddp with unused_parameters=zeros"
            )


class _Gather(_Collective):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.check_position(input_tensor, group)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class _Reduce(_Collective):
    # On a GPU it runs in another stream, where a mark would not show the computing time. Gloo has no average.

    def __init__(self, number: int, name: str, strategy: Fsdp) -> None:
        super().__init__(number, name)
        self.strategy = strategy

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        of = self.strategy
        of.delay.pause("call")
        if len(of.collectives) == of.reductions - 1:
            of.delay.pause("sync")
        of.computed = of.timer.mark_computing()
        self.check_position(input_tensor, group)  # waits for slower ranks
        is_mean = op == dist.ReduceOp.AVG
        work = dist.reduce_scatter_tensor(
            output_tensor, input_tensor, op=dist.ReduceOp.SUM if is_mean else op, group=group, async_op=async_op
        )
        if is_mean:
            output_tensor /= group.size()
        of.collectives.append((of.computed, of.timer.mark()))
        return work


def _newest_fsdp() -> tuple[Any, Any]:
    """Raises TrainError if torch is too old."""
    # Imported only here, because it takes a second.
    try:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if hasattr(FSDPModule, "set_custom_all_gather"):
            return DeviceMesh.from_group, fully_shard
    except ImportError:
        pass
    raise TrainError(f"strategy fsdp needs torch 2.9 or newer, this is {torch.__version__}: use ddp")


def pieces_of(model: nn.Module, most_bytes: float) -> Iterator[list[nn.Module]]:
    """Consecutive parts of up to `most_bytes` together."""
    # Every piece costs six latencies, three of them to compare the ranks' positions.
    piece: list[nn.Module] = []
    for part in _parts(model, most_bytes):
        if piece and sum(map(gradient_bytes, [*piece, part])) > most_bytes:
            yield piece
            piece = []
        piece.append(part)
    if piece:
        yield piece


def _parts(module: nn.Module, most_bytes: float) -> Iterator[nn.Module]:
    """The largest modules of up to `most_bytes`, or indivisible ones."""
    for child in module.children():
        if gradient_bytes(child) > most_bytes and any(child.children()):
            yield from _parts(child, most_bytes)
        elif gradient_bytes(child):
            yield child


def _refuse_copy(model: nn.Module, _: object) -> NoReturn:
    # Replaces torch's error, which ends in a traceback.
    raise TrainError(
        f"strategy fsdp: {type(model).__name__.removeprefix('FSDP')} cannot be copied, since each rank has a piece of "
        "its weights; for a moving average set ema=0.999, or use ddp"
    )
