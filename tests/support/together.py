"""Which tests one worker of pytest-xdist takes whole: those of a file, and those of several files that share something
that takes seconds to start.

Otherwise each worker would start it for the files that it happens to get.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

GANGS = ("accumulate", "arithmetic", "fidelity", "fused_batch_norm", "nccl", "shared_network", "strategies")
TOGETHER = {
    "the stand-in": ("tests/cuda/",),  # the machine of stand-in GPUs, whose server imports torch's CUDA build
    # Both fork ranks, each from a process of its own that has imported torch, and take about as long as each other.
    "gangs of ranks": tuple(f"tests/trainer/test_{name}.py" for name in GANGS),
    "the trainer": ("tests/trainer/",),
}
"""How each begins; the first that fits counts."""


class TogetherScheduling(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        fits = (name for name, begins in TOGETHER.items() if nodeid.startswith(begins))
        return next(fits, super()._split_scope(nodeid))
