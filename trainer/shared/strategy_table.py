"""The table of strategies and fidelities, with everything that other modules ask by name. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Fidelity = Literal["exact", "half", "compressed", "late", "local"]
FIDELITY_NAMES: tuple[Fidelity, ...] = get_args(Fidelity)


@dataclass(frozen=True, kw_only=True)
class StrategyFacts:
    fidelities: tuple[str, ...] = ("exact",)
    collectives: tuple[str, ...] = ()
    """The collectives of an exchange after backward, with all gradients (or weights) in one buffer, as the forecast
    names them.
    """
    sums_gradients: bool = True
    during_backward: bool = False
    """Whether gradients travel while backward computes."""
    is_one_process: bool = False
    cuts_network: bool = False
    """Whether each rank computes a part of the network."""
    on_paced: bool = True
    """Whether ranks that simulate a GPU can use it."""
    why_no_graph: str = ""
    """Why a pass cannot be replayed as a CUDA graph."""

    @property
    def is_after_backward(self) -> bool:
        return self.sums_gradients and bool(self.collectives)

    @property
    def exchanges(self) -> bool:
        """Whether ranks that compute the whole network exchange gradients or weights."""
        return not self.is_one_process and not self.cuts_network


_WEIGHTS_MOVE = "moves weights during a pass"
STRATEGIES = {
    "ddp": StrategyFacts(fidelities=("exact", "half", "compressed", "local"), during_backward=True),
    "allreduce": StrategyFacts(fidelities=("exact", "half"), collectives=("sum of each",)),
    "allreduce_flat": StrategyFacts(fidelities=("exact", "half", "compressed"), collectives=("sum",)),
    "reduce_broadcast": StrategyFacts(collectives=("reduce", "broadcast")),
    "gather_scatter": StrategyFacts(collectives=("gather", "scatter")),
    "allgather": StrategyFacts(collectives=("all_gather",)),
    "reduce_scatter": StrategyFacts(collectives=("reduce_scatter", "all_gather_pieces")),
    "parameter_average": StrategyFacts(fidelities=("exact", "local"), collectives=("sum",), sums_gradients=False),
    "fsdp": StrategyFacts(during_backward=True, on_paced=False, why_no_graph=_WEIGHTS_MOVE),
    "horovod": StrategyFacts(
        during_backward=True,
        on_paced=False,
        why_no_graph="reduces gradients in its own order, which has not been tested with CUDA graphs",
    ),
    "pipeline": StrategyFacts(
        fidelities=("exact", "half", "late", "local"),
        cuts_network=True,
    ),
    "tensor": StrategyFacts(
        fidelities=("exact", "half"), cuts_network=True, why_no_graph="makes ranks wait for each other during a pass"
    ),
    "none": StrategyFacts(is_one_process=True),
    "dp": StrategyFacts(is_one_process=True, why_no_graph=_WEIGHTS_MOVE),
}
ONE_PROCESS = tuple(name for name, facts in STRATEGIES.items() if facts.is_one_process)
AFTER_BACKWARD = tuple(name for name, facts in STRATEGIES.items() if facts.is_after_backward)
FIDELITIES = {
    fidelity: tuple(name for name, facts in STRATEGIES.items() if fidelity in facts.fidelities)
    for fidelity in FIDELITY_NAMES
}
"""The strategies of each fidelity."""
SWITCH = ("auto", "on", "off")
NOT_WITH_FSDP = ("channels_last", "fused_sgd")
"""Settings that must be off if weights are cut into pieces."""
STATES = {"sgd": 3, "adamw": 4}
"""By optimiser, what has the size of the weights in memory: themselves, gradients, momentum, AdamW's second moments."""
OPTIMIZERS = tuple(STATES)
LOCAL_STEPS = 32
"""Local steps if neither chosen nor predicted."""


def why_not_replayed(strategy: str, sync_bn: bool) -> str:
    """Why forward and backward cannot be CUDA graphs; "" if they can.

    >>> why_not_replayed("ddp", sync_bn=True)
    'sync_bn makes ranks wait for each other during a pass'
    """
    if why := STRATEGIES[strategy].why_no_graph:
        return f"strategy {strategy} {why}"
    return "sync_bn makes ranks wait for each other during a pass" if sync_bn else ""
