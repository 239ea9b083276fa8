"""What an optimiser remembers of each weight: `state = state_of(optimizer, model)`, `restore(optimizer, model, state)`.

A state is by kind, as torch names them: `momentum_buffer` of SGD; `exp_avg`, `exp_avg_sq` and `step` of Adam and AdamW.
Each has a tensor for every weight of the network, in the network's order; None where there is nothing to remember.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

State = Mapping[str, Sequence[Tensor | None]]

STEP = "step"
"""How many updates a weight has seen: a single number, of all kinds the one that is not of its weight's form."""
_ADAM = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", STEP})
_KINDS: dict[type[torch.optim.Optimizer], frozenset[str]] = {
    torch.optim.SGD: frozenset({"momentum_buffer"}),
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
}
"""Of optimisers whose whole state this is."""


def kinds_of(optimizer: object) -> frozenset[str] | None:
    """What it may remember; None where that is not known."""
    return next((kinds for known, kinds in _KINDS.items() if isinstance(optimizer, known)), None)


def state_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, list[Tensor | None]]:
    """Its own tensors, no copies; without kinds that no weight has yet."""
    weights = list(model.parameters())
    of_weights = [optimizer.state.get(weight, {}) for weight in weights]
    found = {
        kind: [of_weight.get(kind) for of_weight in of_weights] for kind in sorted(kinds_of(optimizer) or frozenset())
    }
    return {kind: tensors for kind, tensors in found.items() if any(tensor is not None for tensor in tensors)}


def restore(optimizer: torch.optim.Optimizer, model: nn.Module, state: State) -> None:
    """Not by load_state_dict: that would bring the old learning rate back, and a person may have set another."""
    on_device = {weight for group in optimizer.param_groups for weight in group["params"] if _counts_on_device(group)}
    for kind, tensors in state.items():
        for weight, kept in zip(model.parameters(), tensors, strict=True):
            if kept is None:
                continue
            if kind == STEP:
                own = torch.empty_like(kept, device=weight.device if weight in on_device else "cpu")
            else:
                own = torch.empty_like(weight, requires_grad=False)  # in the weight's order in memory
            optimizer.state[weight][kind] = own.copy_(kept)


def _counts_on_device(group: Mapping[str, object]) -> bool:
    """torch's own rule (Optimizer.load_state_dict)."""
    return bool(group.get("capturable") or group.get("fused"))


def mistake_of(optimizer: torch.optim.Optimizer, state: State, shapes: Sequence[torch.Size]) -> str:
    """Why this optimiser of a network with such weights cannot go on with the state; empty where it can."""
    if foreign := sorted(set(state) - (kinds_of(optimizer) or frozenset())):
        return f"is of another optimiser than {type(optimizer).__name__} (it has {', '.join(foreign)})"
    for kind, tensors in state.items():
        wanted = [torch.Size() if kind == STEP else shape for shape in shapes]
        if len(tensors) != len(wanted) or any(
            tensor is not None and tensor.shape != shape for tensor, shape in zip(tensors, wanted, strict=True)
        ):
            return f"does not fit its network ({kind})"
    return ""
