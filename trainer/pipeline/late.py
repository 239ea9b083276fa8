"""Weights of a stage that is one update late (`fidelity=late`).

    late.begin(7)                    before update 7, with the weights that update 6 has left
    late.weights_of(7)               left by update 5, by name; None for an exact update: the parameters themselves
    late.weights_of(8)               left by update 6, for forward passes of update 8 during update 7
    late.hand_over()                 after the last backward: the gradients, to the parameters

Both passes of an update use the same weights. (PipeDream-2BW's delay of one: Narayanan et al. 2021, section 3.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from trainer.compute.buffers import copy_into

LATE = "late"
"""The kind of own state in checkpoints."""


class LateWeights:
    """weights: the stage's parameters, by name; frozen ones are not copied. first: the first late update."""

    # Two sets of copies take turns: the optimiser changes the parameters in place, while the next update's backward
    # still needs the values that its forward has used.

    def __init__(self, weights: Mapping[str, nn.Parameter], first: int) -> None:
        self.weights, self.first, self.update = dict(weights), first, 0
        self.now: dict[str, Tensor] | None = None
        self.next: dict[str, Tensor] | None = None
        self.spare: dict[str, Tensor] | None = None
        """The second set before the first late update: CUDA graphs are recorded for both sets at once."""

    def begin(self, update: int) -> None:
        self.update = update
        free, self.now, self.spare = self.now or self.spare, self.next, None
        if update < self.first:
            self.now = None
        elif self.now is None:  # the first update, or resumed without this rank's copies
            self.now = self._copied({})
        self.next = self._copied(free or {}) if update + 1 >= self.first else None
        if self.next and not self.now:
            self.spare = self._copied({})

    @property
    def sets(self) -> list[dict[str, Tensor]]:
        return [each for each in (self.now, self.next, self.spare) if each]

    def weights_of(self, update: int) -> dict[str, Tensor] | None:
        """update: the current one or the next."""
        return self.now if update == self.update else self.next

    def hand_over(self) -> None:
        for name, copy in (self.now or {}).items():
            weight = self.weights[name]  # frozen perhaps since the copy was made
            weight.grad, copy.grad = copy.grad if weight.requires_grad else None, None

    @torch.no_grad()
    def _copied(self, into: dict[str, Tensor]) -> dict[str, Tensor]:
        copy_into(list(into.values()), [self.weights[name] for name in into])
        for name, weight in self.weights.items():
            if weight.requires_grad and name not in into:
                into[name] = _copy(weight)
        return into

    def own_state(self) -> dict[str, Tensor]:
        """The next update's weights."""
        return {f"{LATE}.{name}": copy.detach() for name, copy in (self.next or {}).items()}

    def expect(self, kept: Mapping[str, Tensor]) -> None:
        """Prepares `own_state` to be overwritten."""
        if any(name.startswith(f"{LATE}.") for name in kept):
            self.next = self._copied({})


def _copy(weight: nn.Parameter) -> Tensor:
    """With the weight's hooks."""
    copy = weight.detach().clone().requires_grad_()
    for hook in (weight._backward_hooks or {}).values():
        copy.register_hook(hook)
    for hook in (getattr(weight, "_post_accumulate_grad_hooks", None) or {}).values():
        copy.register_post_accumulate_grad_hook(hook)
    return copy


class Places:
    """Lets a network compute with other weights. (torch.func.functional_call loses the weights of a module that is
    used in two places, and looks for them in every call.)
    """

    def __init__(self, network: nn.Module) -> None:
        names = {id(weight): name for name, weight in network.named_parameters()}
        self.places = [
            (module, key, names[id(weight)], weight)
            for module in network.modules()
            for key, weight in module._parameters.items()
            if weight is not None
        ]

    @contextlib.contextmanager
    def holding(self, weights: Mapping[str, Tensor] | None) -> Iterator[None]:
        """weights: by name; None for the network's own."""
        if not weights:
            yield
            return
        try:
            self._set(weights)
            yield
        finally:
            self._set({})

    def _set(self, weights: Mapping[str, Tensor]) -> None:
        for module, key, name, own in self.places:
            module._parameters[key] = weights.get(name, own)  # type: ignore[assignment]
            if isinstance(module, nn.RNNBase):
                module._flat_weights = [getattr(module, each) for each in module._flat_weights_names]
