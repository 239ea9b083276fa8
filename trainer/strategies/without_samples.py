"""What a rank without samples gives to the others: gradients that are exactly 0, whatever the network. The same for
parameters that a loss does not depend on (`unused_parameters`).

loss_sum = no_loss(network)              without a forward pass: nothing that the network does can be seen in it
with without_effect(network):            if ranks meet in the forward pass: with samples that count for nothing
    loss_sum = ...
    strategy.backward(loss_sum, 0, batch)

A made-up sample, or a loss times 0, would not do: 0 times a number that is not finite is NaN, for every rank.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.compute.buffers import leaves_of
from trainer.compute.models import trainable
from trainer.shared.errors import TrainError
from trainer.strategies.sync_batch_norm import SynchronisedBatchNorm

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""What each module has that is no note of its own; buffers are looked at by themselves."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def no_loss(network: nn.Module, weights: Sequence[Tensor] | None = None) -> Tensor:
    """0, whose gradient is exactly 0 for each of these weights of the network; without any for all that it trains."""
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
    """As the weight's layer would give them: DDP asks for that."""
    if not is_sparse:
        return torch.zeros_like(weight)
    rows = torch.empty((1, 0), dtype=torch.long, device=weight.device)
    return torch.sparse_coo_tensor(rows, weight.new_empty((0, *weight.shape[1:])), weight.shape, check_invariants=False)


def sparse_of(network: nn.Module) -> dict[int, str]:
    """Names of the weights whose gradients are sparse (`nn.Embedding(..., sparse=True)`)."""
    modules = [(name, module) for name, module in network.named_modules() if getattr(module, "sparse", False) is True]
    return {id(module.weight): f"{name}.weight".removeprefix(".") for name, module in modules}


SHOWN = 4
"""Names in a message, at most."""


def refuse_unused(network: nn.Module, loss: Tensor) -> NoReturn:
    """Called when backward of the loss did not leave a gradient for each parameter. Raises TrainError."""
    weights = [(name, weight) for name, weight in network.named_parameters() if weight.requires_grad]
    unused = [name for name, weight in weights if weight.grad is None]
    if not unused:  # an earlier micro-batch has used them
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
    """Parameters that a rank's loss does not depend on count as 0. Those that no rank's loss depends on have no
    gradient after the exchange: the optimiser leaves them alone, as in one process.

    group: of the ranks that exchange gradients.
    """

    def __init__(self, network: nn.Module, group: dist.ProcessGroup) -> None:
        self.network, self.weights, self.group = network, trainable(network), group
        device = self.weights[0].device if dist.get_backend(group) == "nccl" else "cpu"
        self.used = torch.zeros(len(self.weights), dtype=torch.int32, device=device)

    def note(self, found: set[Tensor]) -> None:
        """Those that the loss of a micro-batch depends on."""
        self.used |= torch.tensor([weight in found for weight in self.weights], dtype=torch.int32).to(self.used.device)

    def covered(self, loss: Tensor, *, is_counted: bool) -> Tensor:
        """The last micro-batch's, as one that depends on all. is_counted: whether its samples are this rank's own."""
        found = leaves_of(loss)
        if is_counted:
            self.note(found)
        unused = [weight for weight in self.weights if weight not in found]
        return loss + no_loss(self.network, unused) if unused else loss

    def forget(self) -> None:
        """After the exchange."""
        dist.all_reduce(self.used, op=dist.ReduceOp.MAX, group=self.group)
        for weight, is_used in zip(self.weights, self.used.tolist(), strict=True):
            if not is_used:
                weight.grad = None
        self.used.zero_()


@contextlib.contextmanager
def without_effect(network: nn.Module) -> Iterator[None]:
    """Forward and backward in it take part in what all ranks do together, and change nothing else: gradients of all
    weights are 0, a BatchNorm over all ranks does not count the samples, and buffers, modes and what modules note in
    attributes are put back. (Statistics of a BatchNorm over all ranks move on, as on the other ranks.)
    """
    hooks: list[Any] = []
    hooked: set[int] = set()

    def hook_weights(module: nn.Module, *_: object) -> None:
        """Those that are there now: fsdp's are gathered as forward comes to them."""
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
    """What a module keeps from one forward pass to the next, beside its weights."""

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
    """If it was changed in place."""
    if isinstance(value, Tensor):
        value.copy_(before)
    elif not isinstance(value, _PLAIN):
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(before)
