"""The interface of strategies, and gradients of ranks without samples.

With l_j the mean loss of rank j's m_j samples of n, the gradient is sum_j (m_j/n) grad l_j. Strategies add gradients
up, so each rank's loss is multiplied by m_j/n first.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainer.compute.buffers import leaves_of
from trainer.compute.models import trainable
from trainer.shared.errors import TrainError
from trainer.strategies.sync_batch_norm import SynchronisedBatchNorm, is_synchronised


class Exchange(NamedTuple):
    """Device marks of one exchange."""

    computed: Any
    """This rank's last gradient."""
    collectives: tuple[tuple[Any, Any], ...] = ()
    """Hand-over and sum of each overlapped collective, by end."""
    held_up_s: float = 0.0
    """Injected delay after `computed`."""
    waits: tuple[tuple[Any, Any], ...] = ()
    """Begin and end of waits before `computed`."""
    tasks: tuple[Any, ...] = ()
    """Tasks of a pipeline stage during this update."""
    early: tuple[Any, ...] = ()
    """Tasks of this update that were done during the update before."""
    wire_ms: float | None = None
    """A pipeline stage's transfer time, otherwise None."""
    said: tuple[Tensor, int] | None = None
    """Other ranks' summed loss and samples, to print if rank 0 computes no loss."""


class Parts(Protocol):
    """Each rank's part of a network's state."""

    def held(self, rank: int, state: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
        """Views of the rank's part. network: the whole network, for its names."""

    def kept(self, rank: int, state: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
        """Without parts of lower ranks."""


class Strategy(Protocol):
    @property
    def model(self) -> nn.Module:
        """For the forward pass."""

    @property
    def parts(self) -> Parts | None:
        """None if each rank holds the whole network."""

    @property
    def counts(self) -> bool:
        """False if another rank reads the same samples."""

    def outputs(self, network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits and labels that this rank evaluates. network: from `whole`."""

    def average_statistics(self, network: nn.Module, batches: Iterable[Tensor], *, again: bool = False) -> None:
        """Averages BatchNorm statistics over the ranks with the same part. batches: training images for a new estimate,
        if needed or asked for by `again`.
        """

    @property
    def keeps_statistics(self) -> bool:
        """Whether BatchNorm's statistics fit `whole`."""

    @property
    def updates_alone(self) -> bool:
        """Whether a rank may update by itself."""

    @property
    def meets_in_forward(self) -> bool:
        """Whether ranks wait for each other in forward."""

    def no_loss(self) -> Tensor:
        """Has zero gradients; for a rank without samples."""

    def backward(self, loss_sum: Tensor, samples: int, batch: int) -> Exchange:
        """Leaves the gradient for the optimiser in .grad.

        loss_sum: of this rank's last micro-batch. samples: of all its micro-batches. batch: of all ranks.
        """

    def without_sync(self) -> AbstractContextManager[object]:
        """For all micro-batches but the last."""

    def backward_alone(self, loss_sum: Tensor, samples: int) -> None:
        """In an update of this rank only."""

    def accumulate(self, loss_sum: Tensor, samples: int, batch: int) -> None:
        """Adds to .grad. samples: of this rank's whole update."""

    def after_update(self) -> None:
        """Transfers here count as synchronisation."""

    def settle(self) -> None:
        """Waits for transfers."""

    def own_state(self) -> dict[str, Tensor]:
        """This rank's other state by name (KIND or KIND.WHICH), to be stored and overwritten."""

    def expect(self, kept: Mapping[str, Tensor]) -> None:
        """Prepares `own_state` to be overwritten by `kept`. Raises TrainError."""

    def regroup(self, part: float) -> None:
        """Called after `expect` if ranks or shares have changed. part: this rank's share."""

    def whole(self) -> nn.Module:
        """A collective call. The common network, for evaluations and checkpoints; do not modify it."""


class WholeNetwork:
    """Each rank holds the whole network."""

    parts: Parts | None = None
    counts = True

    def outputs(self, network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        return ((network(images), labels) for images, labels in batches)

    def average_statistics(self, network: nn.Module, batches: Iterable[Tensor], *, again: bool = False) -> None:
        raise NotImplementedError  # parts is None


class Base(WholeNetwork):
    """Weighted gradients, no other transfers, no state."""

    updates_alone = False

    @property
    def keeps_statistics(self) -> bool:
        return True

    @property
    def meets_in_forward(self: Strategy) -> bool:
        return is_synchronised(self.model)

    def no_loss(self: Strategy) -> Tensor:
        return no_loss(self.model)

    def without_sync(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def accumulate(self, loss_sum: Tensor, samples: int, batch: int) -> None:
        backward_weighted(loss_sum, batch)

    def backward_alone(self, loss_sum: Tensor, samples: int) -> None:
        raise NotImplementedError  # updates_alone is False

    def after_update(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def own_state(self) -> dict[str, Tensor]:
        return {}

    def expect(self, kept: Mapping[str, Tensor]) -> None:
        pass

    def regroup(self, part: float) -> None:
        pass


def local_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy_sum(model(images), labels)


def cross_entropy_sum(outputs: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """outputs: classes in the second dimension."""
    if outputs.dim() == labels.dim() == 2:  # a paced rank has no output per token
        labels = labels[:, 0]
    elif outputs.dim() > 2:  # `GptHead` has a token's classes next to each other: as rows they need no copy
        outputs, labels = outputs.movedim(1, -1).flatten(0, -2), labels.flatten()
    return cross_entropy(outputs, labels, reduction="sum", label_smoothing=label_smoothing)


def weighted(loss_sum: Tensor, batch: int) -> Tensor:
    """batch: of all ranks."""
    return loss_sum / batch


def backward_weighted(loss_sum: Tensor, batch: int) -> None:
    """Bit-identical, without a batch_split."""
    loss_sum.backward(loss_sum.new_full(loss_sum.shape, 1 / batch))


def share_initial_state(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Copies rank 0's."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=first_rank(group), group=group)


def first_rank(group: dist.ProcessGroup) -> int:
    """Numbered among all ranks."""
    return dist.get_global_rank(group, 0)


# Gradients of exactly 0, for ranks without samples and unused parameters. A loss times 0 would not do: 0 times NaN is
# NaN, for every rank.

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of every module; buffers are handled separately."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def no_loss(network: nn.Module, weights: Sequence[Tensor] | None = None) -> Tensor:
    """0, with gradients of exactly 0; weights: default all trained."""
    loss: Tensor = _Nothing.apply(sparse_of(network), *(trainable(network) if weights is None else weights))
    return loss


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, sparse: Mapping[int, str], *weights: Tensor) -> Tensor:
        context.sparse, context.weights = sparse, weights
        return weights[0].new_zeros(())

    @staticmethod
    def backward(context: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(_zeros_of(weight, is_sparse=id(weight) in context.sparse) for weight in context.weights)


def _zeros_of(weight: Tensor, *, is_sparse: bool) -> Tensor:
    """In the layer's layout, as DDP requires."""
    if not is_sparse:
        return torch.zeros_like(weight)
    rows = torch.empty((1, 0), dtype=torch.long, device=weight.device)
    return torch.sparse_coo_tensor(rows, weight.new_empty((0, *weight.shape[1:])), weight.shape, check_invariants=False)


def sparse_of(network: nn.Module) -> dict[int, str]:
    """`nn.Embedding(..., sparse=True)`"""
    modules = [(name, module) for name, module in network.named_modules() if getattr(module, "sparse", False) is True]
    return {id(module.weight): f"{name}.weight".removeprefix(".") for name, module in modules}


SHOWN = 4
"""Names in a message."""


def refuse_unused(network: nn.Module, loss: Tensor | None = None) -> NoReturn:
    """Raises TrainError. For missing gradients after backward."""
    weights = [(name, weight) for name, weight in network.named_parameters() if weight.requires_grad]
    unused = [name for name, weight in weights if weight.grad is None]
    if not unused and loss is not None:  # an earlier micro-batch has used them
        used = leaves_of(loss)
        unused = [name for name, weight in weights if weight not in used]
    names = ", ".join(unused[:SHOWN]) + (f" and {len(unused) - SHOWN} more" if len(unused) > SHOWN else "")
    raise TrainError(
        f"the loss does not depend on {len(unused)} of {len(weights)} parameters ({names}): freeze them "
        "(requires_grad=False) or leave them out of the network; if updates are to do without some of them, "
        "unused_parameters=zeros"
    )


def refuse_sparse(network: nn.Module) -> NoReturn:
    """Raises TrainError."""
    found = [name for name, weight in network.named_parameters() if weight.grad is not None and weight.grad.is_sparse]
    names = ", ".join(found or sparse_of(network).values())
    raise TrainError(f"sparse gradients ({names}) travel with strategy ddp only: use it, or sparse=False in the layer")


class Unused:
    """Sets unused parameters' gradients to 0, or None if no rank uses them."""

    def __init__(self, network: nn.Module, group: dist.ProcessGroup) -> None:
        self.network, self.weights, self.group = network, trainable(network), group
        device = self.weights[0].device if dist.get_backend(group) == "nccl" else "cpu"
        self.used = torch.zeros(len(self.weights), dtype=torch.int32, device=device)

    def note(self, found: set[Tensor]) -> None:
        """found: used by a micro-batch's loss."""
        self.used |= torch.tensor([weight in found for weight in self.weights], dtype=torch.int32).to(self.used.device)

    def covered(self, loss: Tensor, *, is_counted: bool) -> Tensor:
        """Makes the last loss depend on all parameters. is_counted: whether the samples are this rank's."""
        found = leaves_of(loss)
        if is_counted:
            self.note(found)
        unused = [weight for weight in self.weights if weight not in found]
        return loss + no_loss(self.network, unused) if unused else loss

    def forget(self) -> None:
        """Call after the exchange."""
        dist.all_reduce(self.used, op=dist.ReduceOp.MAX, group=self.group)
        for weight, is_used in zip(self.weights, self.used.tolist(), strict=True):
            if not is_used:
                weight.grad = None
        self.used.zero_()


@contextlib.contextmanager
def without_effect(network: nn.Module) -> Iterator[None]:
    """Makes forward and backward change nothing, for ranks that only take part in collectives. Statistics of BatchNorm
    over all ranks move.
    """
    hooks: list[Any] = []
    hooked: set[int] = set()

    def hook_weights(module: nn.Module, *_: object) -> None:
        # Only weights that exist now: fsdp gathers its weights during forward.
        for weight in module.parameters():
            if weight.requires_grad and id(weight) not in hooked:
                hooked.add(id(weight))
                hooks.append(weight.register_hook(torch.zeros_like))

    modules = list(network.modules())
    synchronised = [module for module in modules if isinstance(module, SynchronisedBatchNorm)]
    notes = [_Note(module) for module in modules]
    hook_weights(network)
    hooks += [module.register_forward_pre_hook(hook_weights) for module in modules]
    for module in synchronised:
        module.counts = False
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in synchronised:
            module.counts = True
        for note in notes:
            note.put_back()


class _Note:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = {
            name: (value, _copied(value))
            for name, value in vars(module).items()
            if name not in _OF_TORCH and isinstance(value, (*_PLAIN, Tensor, list, dict, set, deque))
        }
        moves_on = isinstance(module, SynchronisedBatchNorm)
        self.buffers = {} if moves_on else {name: (one, _copied(one)) for name, one in module._buffers.items()}

    @torch.no_grad()
    def put_back(self) -> None:
        of_module: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (vars(self.module), self.attributes),
            (self.module._buffers, self.buffers),
        ]
        for places, kept in of_module:
            for name, (value, before) in kept.items():
                places[name] = value
                _refill(value, before)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value if isinstance(value, _PLAIN) else copy.copy(value)


def _refill(value: Any, before: Any) -> None:
    if isinstance(value, Tensor):
        value.copy_(before)
    elif not isinstance(value, _PLAIN):
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(before)
