"""What a strategy is, and how the samples of unequal ranks come to count alike.

With l_j the mean loss over rank j's m_j samples of n, the gradient to find is sum_j (m_j/n) grad l_j. Every strategy
that exchanges gradients adds them up, so each rank's loss is first multiplied by m_j/n: this makes it 1/n times the sum
of its samples' losses. It stays exact for unequal shares, and for a share of 0; no pass over the gradients is spent on
it, and what is rounded or compressed on its way has its weight already.
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
    """What one exchange of gradients left on the device's time line."""

    computed: Any
    """The mark of this rank's own last gradient."""
    collectives: tuple[tuple[Any, Any], ...] = ()
    """For each one that ran beside backward, the marks of when this rank handed it over and when the sum was there, in
    the order of their ends.
    """
    held_up_s: float = 0.0
    """How long this rank stood still on purpose between the calls that came after `computed`."""
    waits: tuple[tuple[Any, Any], ...] = ()
    """Marks of begin and end of each time before `computed` in which this rank stood still for another's data."""
    tasks: tuple[Any, ...] = ()
    """What a stage of a pipeline did when."""
    wire_ms: float | None = None
    """How long a stage of a pipeline had a message on its way out; None elsewhere."""
    said: tuple[Tensor, int] | None = None
    """What rank 0 says to people where it computes no loss itself: the sum of others', and of how many samples."""


class Parts(Protocol):
    """Which part of a network's state lies on which rank, where no rank has all of it."""

    def held(self, rank: int, state: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
        """What the rank holds, as views. state: of the whole network, by name, or numbers that belong to its weights.
        network: the whole one, of which names alone are looked at.
        """

    def kept(self, rank: int, state: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
        """The same less what a lower rank holds as well."""


class Strategy(Protocol):
    @property
    def model(self) -> nn.Module:
        """What the forward pass calls."""

    @property
    def parts(self) -> Parts | None:
        """None where each rank holds the whole network."""

    @property
    def counts(self) -> bool:
        """Do the samples that this rank reads count as its own? Not where another reads the same ones."""

    def outputs(self, network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits and labels of what this rank is to judge. network: `whole`. batches: the test data that it reads, on
        its device.
        """

    def average_statistics(self, network: nn.Module, batches: Iterable[Tensor], *, again: bool = False) -> None:
        """BatchNorm's, over all that hold the same part, where ranks hold parts. network: `whole`. batches: of training
        images that this rank reads, from which they are estimated again where they belong to other weights (again: by
        the caller's word).
        """

    @property
    def keeps_statistics(self) -> bool:
        """Do the weights of `whole` come so close to those that each rank trains with, that BatchNorm's running
        statistics of these belong to them?
        """

    @property
    def updates_alone(self) -> bool:
        """May a rank take updates of its own between two that all make?"""

    @property
    def meets_in_forward(self) -> bool:
        """Do the ranks wait for each other in the forward pass, so that a rank without samples has to make one?"""

    def no_loss(self) -> Tensor:
        """Of a rank without samples, in place of a forward pass: `backward` and `accumulate` make zeros of it."""

    def backward(self, loss_sum: Tensor, samples: int, batch: int) -> Exchange:
        """Leaves in .grad what the optimiser shall use: the gradient of the mean loss over the whole batch, each
        part of it as its own rank's network sees it, or of a rank's own part where weights are averaged.

        loss_sum: of this rank's `samples`, which are part of `batch` over all ranks; of its last micro-batch, where
        others went before it through `accumulate`. samples: of all of them.
        """

    def without_sync(self) -> AbstractContextManager[object]:
        """Around forward and `accumulate` of a micro-batch that another one follows: nothing travels."""

    def backward_alone(self, loss_sum: Tensor, samples: int) -> None:
        """For an update of this rank's own, from so many samples, where there may be any."""

    def accumulate(self, loss_sum: Tensor, samples: int, batch: int) -> None:
        """Adds a micro-batch's gradient to .grad; `backward` sends the sum. samples: of this rank's whole update."""

    def after_update(self) -> None:
        """Called when the optimiser has moved the weights: what a strategy sends then counts as synchronisation."""

    def settle(self) -> None:
        """Waits for what travels beside training, which changes nothing but when it has arrived."""

    def own_state(self) -> dict[str, Tensor]:
        """What this rank needs to go on beside momentum and the weights of `whole`, by name (KIND or KIND.WHICH), to be
        kept and written into again.
        """

    def expect(self, kept: Mapping[str, Tensor]) -> None:
        """Makes `own_state` one into which this, of a checkpoint, can be written, the weights being those of `whole`
        already. Raises TrainError.
        """

    def regroup(self, part: float) -> None:
        """After that, where other ranks, or shares, wrote the checkpoint. part: of each batch, that is this rank's."""

    def whole(self) -> nn.Module:
        """The network with the weights that all ranks share, for evaluations and checkpoints: the run's own or a copy,
        so that nobody may change them. Called by all ranks; the run goes on as if nobody had.
        """


class WholeNetwork:
    """What strategies have alike that give each rank the whole network, and samples of its own."""

    parts: Parts | None = None
    counts = True

    def outputs(self, network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        return ((network(images), labels) for images, labels in batches)

    def average_statistics(self, network: nn.Module, batches: Iterable[Tensor], *, again: bool = False) -> None:
        raise NotImplementedError  # parts is None


class Base(WholeNetwork):
    """What most strategies have alike: ranks weigh their gradients as `weighted` does, nothing travels during backward
    or after the update, and nothing has to be kept.
    """

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
    """The sum of the losses of this rank's samples."""
    return cross_entropy(model(images), labels, reduction="sum")


def weighted(loss_sum: Tensor, batch: int) -> Tensor:
    """The loss to differentiate, for a rank whose samples are part of `batch` over all ranks."""
    return loss_sum / batch


def backward_weighted(loss_sum: Tensor, batch: int) -> None:
    """`weighted(loss_sum, batch).backward()`, to the same bits, without an operation that divides."""
    loss_sum.backward(loss_sum.new_full(loss_sum.shape, 1 / batch))


def share_initial_state(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Leaves rank 0's weights and buffers on every rank."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=first_rank(group), group=group)


def first_rank(group: dist.ProcessGroup) -> int:
    """The number, among all ranks, of the group's first one: collectives name their root so."""
    return dist.get_global_rank(group, 0)


# What a rank without samples gives to the others: gradients that are exactly 0, whatever the network. The same for
# parameters that a loss does not depend on (`unused_parameters`).
#
# loss_sum = no_loss(network)              without a forward pass: nothing that the network does can be seen in it
# with without_effect(network):            if ranks meet in the forward pass: with samples that count for nothing
#     loss_sum = ...
#     strategy.backward(loss_sum, 0, batch)
#
# A made-up sample, or a loss times 0, would not do: 0 times a number that is not finite is NaN, for every rank.

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
