"""The device and threads that a rank computes with."""

from __future__ import annotations

import functools
import os

import torch

from trainer.ranks.rank_info import RankInfo
from trainer.shared.errors import TrainError


def choose_device(wanted: str, backend: str, info: RankInfo) -> torch.device:
    """Raises TrainError if a wanted GPU is missing."""
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
    # Ranks share the host's cores evenly.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // info.local_world_size))


VISIBLE = "CUDA_VISIBLE_DEVICES"


@functools.cache  # a process has only one order
def own_gpu_first(local_rank: int) -> bool:
    """Moves this rank's GPU to the front of CUDA_VISIBLE_DEVICES, before CUDA reads it. False if impossible."""
    # Otherwise each rank takes some hundred MiB of the host's first GPU: Gloo's threads have no device set, so torch
    # switches to the rank's GPU and back when they free an event, and since CUDA 12 switching back creates a context on
    # the first GPU. NCCL has no such threads.
    gpus = os.environ.get(VISIBLE, "").split(",")
    if len(gpus) < 2 or torch.cuda.is_initialized():
        return False
    own = local_rank % len(gpus)
    os.environ[VISIBLE] = ",".join(gpus[own:] + gpus[:own])
    return True
