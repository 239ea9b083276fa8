"""Settings with which forward and backward cannot be replayed as CUDA graphs, whatever `cuda_graph` says.

    >>> why_not_replayed("ddp", sync_bn=True, accumulate=0)         # "" where they can
    'with sync_bn ranks meet in the midst of a pass'

A profile has to be measured as the run will compute, so both the trainer and who plans it ask here.
"""

from __future__ import annotations


def why_not_replayed(strategy: str, sync_bn: bool, accumulate: int) -> str:
    if strategy in ("fsdp", "dp"):
        return f"strategy {strategy} moves weights during a pass"
    if strategy == "pipeline":
        return "a pipeline takes its micro-batches forward and backward in changing order"
    if strategy == "horovod":
        return "Horovod takes gradients in an order of its own, which has not been tried with them"
    if strategy == "tensor":
        return "strategy tensor has ranks meet in the midst of a pass"
    if sync_bn:
        return "with sync_bn ranks meet in the midst of a pass"
    return "accumulate adds up the gradients of several passes" if accumulate > 1 else ""
