"""A GPU's speed settings (TF32, memory format, fused SGD) and 16-bit training (`amp`).

All ranks use the same TF32 and memory format by default: DDP compares strides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.ranks.agreement import agreed
from trainer.shared.errors import TrainError
from trainer.shared.settings import Settings

IN_PIECES = ("fsdp",)
"""Strategies that cut weights in torch's default memory format."""
AMPERE = (8, 0)
"""The first compute capability with TF32 and bf16 hardware (CUDA C Programming Guide, table of arithmetic
instructions).
"""


def is_ampere(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= AMPERE


@dataclass(frozen=True)
class Devices:
    """Whether all ranks have GPUs, and GPUs with TF32."""

    are_gpus: bool
    are_ampere: bool


def devices_of_all_ranks(device: torch.device) -> Devices:
    """A collective call."""
    are_gpus, are_ampere = agreed([float(device.type == "cuda"), float(is_ampere(device))], dist.ReduceOp.MIN)
    return Devices(are_gpus == 1, are_ampere == 1)


def choose_arithmetic(settings: Settings, device: torch.device, everyone: Devices) -> Settings:
    """Replaces auto. Raises TrainError if a wanted feature is missing."""
    on_gpu, in_pieces = device.type == "cuda", settings.strategy in IN_PIECES
    if settings.fused_sgd == "on" and not has_fused_sgd(device):
        raise TrainError(f"fused_sgd: torch {torch.__version__} lacks it for {device.type}; use fused_sgd=auto")
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
    """best: the meaning of auto."""
    return "on" if can and (best if asked == "auto" else asked == "on") else "off"


def has_fused_sgd(device: torch.device) -> bool:
    """GPUs: since torch 2.3; CPUs: since 2.4."""
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
    # Matrix products stay in true float32: PowerSGD needs orthogonal columns.
    torch.backends.cudnn.benchmark = settings.cudnn_benchmark == "on"
    if hasattr(torch.backends.cudnn, "conv"):  # torch 2.9 or newer; warns about the older names
        precision = "tf32" if settings.tf32 == "on" else "ieee"
        cudnn: Any = torch.backends.cudnn  # creates its attributes on access
        cudnn.conv.fp32_precision = precision
        cudnn.rnn.fp32_precision = precision
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    else:
        torch.backends.cudnn.allow_tf32 = settings.tf32 == "on"
        torch.backends.cuda.matmul.allow_tf32 = False


def arranged(model: nn.Module, settings: Settings) -> nn.Module:
    """In the memory format that tensor cores prefer, if `channels_last` is on."""
    return model.to(memory_format=torch.channels_last) if settings.channels_last == "on" else model


# Weights, gradients and sums over ranks stay in 32 bits (Micikevicius et al. 2018).

_SCALE = "scale.own"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.dtype in DTYPES.values() else tensor


class Full:
    def autocast(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def scaled(self, loss: Tensor) -> Tensor:
        return loss

    def unscale(self, optimizer: Any) -> None:
        pass

    def step(self, optimizer: Any) -> None:
        optimizer.step()

    def own_scale(self) -> dict[str, Tensor]:
        """This rank's loss scale, if ranks have different scales."""
        return {}

    def take_scale(self, kept: Mapping[str, Tensor]) -> None:
        pass


class Bf16(Full):
    # bfloat16 has float32's range, so nothing is scaled.

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16)


class Fp16(Full):
    """Scales the loss up. The ranks of `group` skip an update with a non-finite gradient together."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.device, self.is_alone = device, group is None
        self.scaler = _own_scaler(device) if group is None else _shared_scaler(device, group)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.float16)

    def scaled(self, loss: Tensor) -> Tensor:
        scaled: Tensor = self.scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: Any) -> None:
        """A collective call, after the gradients are summed."""
        with warnings.catch_warnings():  # torch's warning about its own scalars among sharded gradients
            warnings.filterwarnings("ignore", message="Found a non-scalar tensor")
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Any) -> None:
        self.scaler.step(optimizer)
        self.scaler.update()

    def own_scale(self) -> dict[str, Tensor]:
        state = self.scaler.state_dict() if self.is_alone else {}
        return {_SCALE: torch.tensor([state["scale"], state["_growth_tracker"]], dtype=torch.float64)} if state else {}

    def take_scale(self, kept: Mapping[str, Tensor]) -> None:
        """Raises TrainError for an invalid scale."""
        if _SCALE not in kept or not self.is_alone:
            return
        numbers = kept[_SCALE].tolist()
        if len(numbers) != 2 or not all(map(math.isfinite, numbers)) or numbers[0] <= 0 or numbers[1] < 0:
            raise TrainError("resume: the checkpoint's loss scale is invalid: the file is damaged")
        self.scaler.load_state_dict(
            {**self.scaler.state_dict(), "scale": numbers[0], "_growth_tracker": int(numbers[1])}
        )


def _own_scaler(device: torch.device) -> Any:
    try:
        return torch.amp.GradScaler(device.type)
    except AttributeError:  # before torch 2.3: GPUs only
        return torch.cuda.amp.GradScaler()


def _shared_scaler(device: torch.device, group: dist.ProcessGroup) -> Any:
    # torch's scaler for shards checks all ranks: with averaged weights or sharded gradients, only some may have the
    # non-finite gradient.
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    try:
        return ShardedGradScaler(device=device.type, process_group=group)
    except TypeError:  # as above
        return ShardedGradScaler(process_group=group)


def build_precision(amp: str, device: torch.device, group: dist.ProcessGroup | None) -> Full:
    """group: ranks that skip an update together (fp16), or None. Raises TrainError if the device lacks `amp`."""
    # None in `local`: an exchange would queue behind the weights in transfer.
    if amp == "none":
        return Full()
    if amp == "bf16" and device.type == "cuda" and not is_ampere(device):
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        raise TrainError(
            f"amp bf16: {name} (compute capability {'.'.join(map(str, capability))}) only emulates it, sample by "
            "sample; use amp=fp16"
        )
    if not _computes_in(DTYPES[amp], device):
        raise TrainError(
            f"amp {amp}: torch {torch.__version__} cannot compute in {amp} on {device}; use amp=none or a GPU"
        )
    return Bf16(device) if amp == "bf16" else Fp16(device, group)


def _computes_in(dtype: torch.dtype, device: torch.device) -> bool:
    # autocast only warns and then computes in 32 bits.
    images, weight = torch.ones((1, 1, 1, 1), device=device), torch.ones((1, 1, 1, 1), device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.autocast(device.type, dtype):
                return torch.nn.functional.conv2d(images, weight).dtype == dtype
        except RuntimeError:
            return False
