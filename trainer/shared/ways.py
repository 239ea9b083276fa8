"""The strategies and fidelities. Imports no torch."""

from __future__ import annotations

STRATEGIES = (
    *("ddp", "allreduce", "allreduce_flat", "reduce_broadcast", "gather_scatter", "allgather", "reduce_scatter"),
    *("parameter_average", "fsdp", "horovod", "pipeline", "tensor", "none", "dp"),
)
FIDELITIES = {
    "exact": STRATEGIES,
    "half": ("ddp", "allreduce_flat", "allreduce", "pipeline", "tensor"),
    "compressed": ("ddp", "allreduce_flat"),
    "local": ("ddp", "parameter_average", "pipeline"),
}
"""How faithful the sums are, and the strategies that can be so."""
SWITCH = ("auto", "on", "off")
NOT_WITH_FSDP = ("channels_last", "fused_sgd")
"""What can only be off where weights are cut into pieces."""
OPTIMIZERS = ("sgd", "adamw")
LOCAL_STEPS = 32
"""Local steps where nobody has said, and nobody knows, how many hide the wire."""
