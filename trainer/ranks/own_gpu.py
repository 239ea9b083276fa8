"""A rank's own GPU becomes the first one that its process sees.

    index = 0 if own_gpu_first(info.local_rank) else info.local_rank

A thread that nobody gave a device stands on the first GPU, and Gloo's threads are such. When one of them frees an event
of the rank's own GPU, torch goes there and back, and since CUDA 12 the way back makes a context: each rank of a host
would take some hundred MiB of its first GPU. NCCL has no such threads; its ranks keep the order that they were given.
"""

from __future__ import annotations

import functools
import os

import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"


@functools.cache  # one process has one order
def own_gpu_first(local_rank: int) -> bool:
    """Whether it is; it cannot be where nobody listed the GPUs. Call it before CUDA is asked for anything: CUDA reads
    the list only then.
    """
    gpus = os.environ.get(VISIBLE, "").split(",")
    if len(gpus) < 2 or torch.cuda.is_initialized():
        return False
    own = local_rank % len(gpus)
    os.environ[VISIBLE] = ",".join(gpus[own:] + gpus[:own])
    return True
