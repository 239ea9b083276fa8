"""How much of a step a rank waited for slower ranks, and how much the network alone held it up. Pure.

In each step, over its ranks j:

    wait_j = min(exposed_j, comm_j - min_k comm_k)      sync_j = exposed_j - wait_j

comm is the time with a gradient under way: the rank that arrives last at an exchange waits for nobody there, so what it
still spends is the network's. Where nothing overlaps, comm is exposed, wait is exposed_j - min_k exposed_k and sync is
min_k exposed_k. Where backward runs on beside the exchange, a late rank costs the others only what the network, busy
with earlier gradients, does not hide; exposed alone would blame it for all. Only durations enter: hosts share no clock.

The stages of a pipeline meet nowhere: what each waits for its neighbours, its bubble, it measures itself, and that is
its wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Quantity = TypeVar("Quantity", bound=Any)
"""Milliseconds, or an expression over columns that hold them."""


def wait_and_sync(
    exposed: Quantity, comm: Quantity, least_comm: Quantity, least: Callable[[Quantity, Quantity], Quantity] = min
) -> tuple[Quantity, Quantity]:
    """The wait and the sync time of one rank in one step. least_comm: the shortest comm of all ranks in this step.

    least: returns the smaller of two quantities.
    """
    wait = least(exposed, comm - least_comm)
    return wait, exposed - wait


def bubble_and_sync(
    exposed: Quantity, bubble: Quantity, least: Callable[[Quantity, Quantity], Quantity] = min
) -> tuple[Quantity, Quantity]:
    """The same of a stage of a pipeline."""
    wait = least(exposed, bubble)
    return wait, exposed - wait
