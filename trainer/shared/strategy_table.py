"""The strategies, each declared once, and the fidelities. Imports no torch.

STRATEGIES["gather_scatter"].collectives        ("gather", "scatter"): `orch plan` predicts its cost by them
FIDELITIES["half"]                              the strategies whose gradients may travel in 16 bits
"""

from __future__ import annotations

from dataclasses import dataclass

FIDELITY_NAMES = ("exact", "half", "compressed", "local")


@dataclass(frozen=True, kw_only=True)
class StrategyFacts:
    """Everything that other parts ask of a strategy by its name."""

    fidelities: tuple[str, ...] = ("exact",)
    collectives: tuple[str, ...] = ()
    """With all gradients (or weights) in one buffer, the collectives of an exchange after backward, in their order, as
    the forecast names them.
    """
    sums_gradients: bool = True
    during_backward: bool = False
    """Whether gradients travel while backward still computes."""
    is_one_process: bool = False
    cuts_network: bool = False
    """Whether a rank computes only a part of the network."""
    on_paced: bool = True
    """Whether ranks that keep a GPU's time without one can use it."""
    why_no_graph: str = ""
    """Why a pass cannot be replayed as a CUDA graph."""

    @property
    def is_after_backward(self) -> bool:
        return self.sums_gradients and bool(self.collectives)

    @property
    def exchanges(self) -> bool:
        """Whether ranks that each compute the whole network exchange gradients or weights."""
        return not self.is_one_process and not self.cuts_network


_WEIGHTS_MOVE = "moves weights during a pass"
STRATEGIES = {
    "ddp": StrategyFacts(fidelities=FIDELITY_NAMES, during_backward=True),
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
        why_no_graph="takes gradients in an order of its own, which has not been tried with them",
    ),
    "pipeline": StrategyFacts(
        fidelities=("exact", "half", "local"),
        cuts_network=True,
        why_no_graph="takes its micro-batches forward and backward in changing order",
    ),
    "tensor": StrategyFacts(
        fidelities=("exact", "half"), cuts_network=True, why_no_graph="has ranks meet in the midst of a pass"
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
"""How faithful the sums are, and the strategies that can be so."""
SWITCH = ("auto", "on", "off")
NOT_WITH_FSDP = ("channels_last", "fused_sgd")
"""Settings that can only be off if weights are cut into pieces."""
OPTIMIZERS = ("sgd", "adamw")
LOCAL_STEPS = 32
"""Local steps without a choice of the person or a prediction of how many hide the wire."""


def why_not_replayed(strategy: str, sync_bn: bool, accumulate: int) -> str:
    """Why forward and backward cannot be replayed as CUDA graphs, whatever `cuda_graph` is; "" if they can. A profile
    has to be measured as the run will compute, so the planner asks, too.

    >>> why_not_replayed("ddp", sync_bn=True, accumulate=0)
    'with sync_bn ranks meet in the midst of a pass'
    """
    if why := STRATEGIES[strategy].why_no_graph:
        return f"strategy {strategy} {why}"
    if sync_bn:
        return "with sync_bn ranks meet in the midst of a pass"
    return "accumulate adds up the gradients of several passes" if accumulate > 1 else ""
