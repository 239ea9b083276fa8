"""How a GPU computes: settings that change its speed, and the order or the precision of its sums.

    everyone = devices_of_all_ranks(device)                           on every rank
    settings = choose_arithmetic(settings, device, everyone)          as they turn out: on or off
    use_arithmetic(settings)                                          by this process, from now on
    model = arranged(model, settings)

TF32 and the order of weights in memory are the same on all ranks, unless a person asks otherwise: parts of one gradient
should differ by their samples alone, and DDP compares strides.
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.ranks.agreement import agreed
from trainer.shared.errors import TrainError
from trainer.shared.settings import Settings

IN_PIECES = ("fsdp",)
"""Strategies that cut weights up, in the order in which torch makes them."""
AMPERE = (8, 0)
"""The compute capability from which on GPUs have TF32, and bf16 in hardware (CUDA C Programming Guide, table of
arithmetic instructions)."""


def is_ampere(device: torch.device) -> bool:
    """Or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= AMPERE


@dataclass(frozen=True)
class Devices:
    """Whether all ranks compute on GPUs, and on such as have TF32."""

    are_gpus: bool
    are_ampere: bool


def devices_of_all_ranks(device: torch.device) -> Devices:
    """Waits for all ranks."""
    are_gpus, are_ampere = agreed([float(device.type == "cuda"), float(is_ampere(device))], dist.ReduceOp.MIN)
    return Devices(are_gpus == 1, are_ampere == 1)


def choose_arithmetic(settings: Settings, device: torch.device, everyone: Devices) -> Settings:
    """Raises TrainError where this torch lacks what a person asks for."""
    on_gpu, in_pieces = device.type == "cuda", settings.strategy in IN_PIECES
    if settings.fused_sgd == "on" and not has_fused_sgd(device):
        raise TrainError(f"fused_sgd: torch {torch.__version__} has none for {device.type}; use fused_sgd=auto")
    return dataclasses.replace(
        settings,
        tf32=_chosen(settings.tf32, everyone.are_ampere, can=is_ampere(device)),
        channels_last=_chosen(settings.channels_last, everyone.are_gpus and settings.amp != "none" and not in_pieces),
        cudnn_benchmark=_chosen(settings.cudnn_benchmark, best=False, can=on_gpu),
        fused_sgd=_chosen(
            settings.fused_sgd,
            on_gpu and not in_pieces and settings.optimizer == "sgd" and has_fused_sgd(device),
            can=settings.optimizer == "sgd",
        ),
    )


def _chosen(asked: str, best: bool, can: bool = True) -> str:
    """on or off. best: what auto is."""
    return "on" if can and (best if asked == "auto" else asked == "on") else "off"


def has_fused_sgd(device: torch.device) -> bool:
    """From torch 2.3 on for GPUs, from 2.4 on for CPUs."""
    if "fused" not in inspect.signature(torch.optim.SGD).parameters:
        return False
    weight = torch.zeros(1, device=device)
    try:
        _step_fused(weight)
    except RuntimeError:
        return False
    return True


def _step_fused(weight: torch.Tensor) -> None:
    weight.grad = torch.zeros_like(weight)
    torch.optim.SGD([weight], lr=0.1, fused=True).step()


def use_arithmetic(settings: Settings) -> None:
    """Matrix products stay in float32 proper: PowerSGD's columns have to be orthogonal."""
    torch.backends.cudnn.benchmark = settings.cudnn_benchmark == "on"
    if hasattr(torch.backends.cudnn, "conv"):  # torch 2.9 or newer, which warns of the names before
        precision = "tf32" if settings.tf32 == "on" else "ieee"
        cudnn: Any = torch.backends.cudnn  # makes its attributes as it is asked for them
        cudnn.conv.fp32_precision = precision
        cudnn.rnn.fp32_precision = precision
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    else:
        torch.backends.cudnn.allow_tf32 = settings.tf32 == "on"
        torch.backends.cuda.matmul.allow_tf32 = False


def arranged(model: nn.Module, settings: Settings) -> nn.Module:
    """Its weights as convolutions on tensor cores like them in memory, where that is asked for."""
    return model.to(memory_format=torch.channels_last) if settings.channels_last == "on" else model
