"""The generators that a rank draws from: `state = random_state()`, `set_random_state(state)`."""

from __future__ import annotations

import random
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RandomState(NamedTuple):
    torch: Tensor
    """Bytes of torch's generator of the CPU, then of the GPU if there is one."""
    others: dict[str, Any]
    """Of the modules `random` and, if it is loaded, `numpy.random`: their global states, in plain values."""


def random_state() -> RandomState:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    others: dict[str, Any] = {"random": random.getstate()}
    if numpy := sys.modules.get("numpy"):
        name, keys, *rest = numpy.random.get_state()
        others["numpy"] = (name, keys.tolist(), *rest)
    return RandomState(torch.cat(states), others)


def set_random_state(state: RandomState) -> None:
    own = torch.get_rng_state().numel()
    torch.set_rng_state(state.torch[:own].clone())
    if state.torch.numel() > own and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state.torch[own:].clone())
    if "random" in state.others:
        random.setstate(state.others["random"])
    if "numpy" in state.others and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(state.others["numpy"])
