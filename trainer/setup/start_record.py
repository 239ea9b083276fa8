"""The `start` record: who this rank is, what it trains and on what."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.compute.models import gradient_bytes, trainable
from trainer.ranks import process_group
from trainer.ranks.rank_info import RankInfo
from trainer.shared.metrics import SCHEMA
from trainer.shared.settings import AnySettings


def start_fields(
    settings: AnySettings,
    info: RankInfo,
    device: torch.device,
    group: dist.ProcessGroup,
    trained: tuple[str, nn.Module] | None,
) -> dict[str, Any]:
    """trained: the network and its name; None where nothing is trained, and so nothing is paced."""
    name, model = trained or (None, None)
    on_gpu = device.type == "cuda"
    return {
        "schema": SCHEMA,
        "host": info.host,
        "node": info.node,
        "rank": info.rank,
        "local_rank": info.local_rank,
        "world_size": info.world_size,
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "torch": torch.__version__,
        "nccl": process_group.version() if on_gpu else None,
        "backend": dist.get_backend(group),
        "model": name,
        "parameters": sum(parameter.numel() for parameter in trainable(model)) if model else None,
        "gradient_bytes": gradient_bytes(model) if model else None,
        "paced": info.pace is not None and model is not None,
        "settings": dataclasses.asdict(settings),
        "samples_from": None,
    }


def cpu_name() -> str:
    """As the kernel calls it, e.g. `Intel(R) Xeon(R) Gold 6130`; `cpu` where it does not say."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "cpu")
    except OSError:
        return "cpu"
