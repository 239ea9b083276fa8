"""How much of a GPU's memory a job takes, about. Pure.

    needed_bytes(plan, plan.nodes[0])       # on each of its GPUs

Of the trainer's networks by the catalogue's rule: weights, gradients and momentum, what forward keeps of each sample,
and what CUDA takes for itself. Of a script nothing but the last is known.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.forecast.gpus import RESERVED_BYTES, activation_bytes
from orchestrator.forecast.inputs import computed_shares
from orchestrator.forecast.layers import gradient_bytes, is_known, layers_in, network_of
from orchestrator.forecast.tensor import weight_bytes
from orchestrator.planning.launch_plan import LaunchPlan, NodePlan
from trainer.shared.settings import Settings

HALF = ("bf16", "fp16")


def needed_bytes(plan: LaunchPlan, node: NodePlan) -> int:
    settings = plan.training
    if settings is None or not is_known(settings.model):
        return RESERVED_BYTES
    layers = layers_in(network_of(settings))
    kept = activation_bytes(layers) * (0.5 if settings.amp in HALF else 1.0)
    weights = gradient_bytes(layers)
    if settings.strategy == "tensor" and plan.shares:
        last = node.first_rank + node.ranks
        weights = max(weight_bytes(layers, plan.shares)[node.first_rank : last])
    return round(RESERVED_BYTES + 3 * weights + _samples_at_once(settings, plan.shares, node) * kept)


def _samples_at_once(settings: Settings, shares: Sequence[int], node: NodePlan) -> int:
    """On each GPU; none for a profile, which tries how many fit. shares: of all ranks."""
    if settings.profile_s:
        return 0
    own = computed_shares(settings.strategy, node.shares, sum(shares))
    share = max(own, default=0) * node.ranks / max(1, len(node.gpu_uuids))
    return round(min(share / max(1, settings.accumulate), settings.local_batch or share))
