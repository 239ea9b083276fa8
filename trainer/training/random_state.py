"""The generators that a rank draws from: `state = random_state()`, `set_random_state(state)`."""

from __future__ import annotations

import torch
from torch import Tensor


def random_state() -> Tensor:
    """torch's generator of the CPU, and of the GPU where there is one, in one tensor of bytes."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)


def set_random_state(state: Tensor) -> None:
    own = torch.get_rng_state().numel()
    torch.set_rng_state(state[:own].clone())
    if state.numel() > own and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state[own:].clone())
