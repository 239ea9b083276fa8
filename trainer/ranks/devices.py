"""The device and the threads that a rank computes with."""

from __future__ import annotations

import functools
import os

import torch

from trainer.ranks.rank_info import RankInfo
from trainer.shared.errors import TrainError


def choose_device(wanted: str, backend: str, info: RankInfo) -> torch.device:
    """The rank's device. Raises TrainError for a GPU that is not there."""
    is_first = wanted != "cpu" and backend == "gloo" and own_gpu_first(info.local_rank)
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise TrainError(f"{info.node}: no GPU is visible to torch {torch.__version__} ({built}); use device=cpu")
    if info.local_rank >= gpus and backend == "nccl":
        raise TrainError(
            f"{info.node}: local rank {info.local_rank} has no GPU of its own ({gpus} visible) and nccl cannot "
            "share one; start fewer ranks, or use backend=gloo"
        )
    device = torch.device("cuda", 0 if is_first else info.local_rank % gpus)
    torch.cuda.set_device(device)
    return device


def use_threads(info: RankInfo) -> None:
    """torch heeds OMP_NUM_THREADS by itself; without it, the ranks of a host share its cores evenly."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // info.local_world_size))


# A rank's own GPU becomes the first one that its process sees.
#
#     index = 0 if own_gpu_first(info.local_rank) else info.local_rank
#
# A thread that nobody gave a device stands on the first GPU, and Gloo's threads are such. When one of them frees an
# event
# of the rank's own GPU, torch goes there and back, and since CUDA 12 the way back makes a context: each rank of a host
# would take some hundred MiB of its first GPU. NCCL has no such threads; its ranks keep the order that they were given.

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
