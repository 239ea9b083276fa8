"""The strategies and fidelities, and which settings one of them alone looks at. Imports no torch."""

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
OF_FIDELITY = {
    "compressed": ("compress_rank", "compress_after"),
    "local": ("local_steps", "local_overlap", "local_after", "local_batch", "outer_lr", "outer_momentum"),
}
"""Settings that one fidelity alone looks at."""
OF_PIPELINE = ("stages", "in_flight", "schedule")
"""Settings that the strategy pipeline alone looks at."""
OPTIMIZERS = ("sgd", "adamw")
OF_LR_STEP = ("lr_steps", "lr_factor")
"""Settings that lr_schedule=step alone looks at."""
LOCAL_STEPS = 32
"""Local steps where nobody has said, and nobody knows, how many hide the wire."""
