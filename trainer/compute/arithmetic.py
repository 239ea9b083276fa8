"""How a GPU computes: settings that change its speed, and the order or the precision of its sums.

    everyone = devices_of_all_ranks(device)                           on every rank
    settings = choose_arithmetic(settings, device, everyone)          as they turn out: on or off
    use_arithmetic(settings)                                          by this process, from now on
    model = arranged(model, settings)

TF32 and the order of weights in memory are the same on all ranks, unless a person asks otherwise: parts of one gradient
should differ by their samples alone, and DDP compares strides.
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


# Computing in 16 bits where that is safe: `amp=bf16` or `fp16`, by torch's autocast and gradient scaler.
#
#     precision = build_precision(settings.amp, device, group)
#     with precision.autocast():
#         loss_sum = local_loss(model, images, labels)
#     exchange = strategy.backward(precision.scaled(loss_sum), samples, batch)
#     precision.unscale(optimizer)
#     precision.step(optimizer)
#     loss_sum.item()                     the loss as it is
#
# Weights, gradients and sums over ranks stay in 32 bits (Micikevicius et al. 2018).

_SCALE = "scale.own"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Full:
    """32 bits (or 64) throughout: adds nothing to a step."""

    def autocast(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def scaled(self, loss: Tensor) -> Tensor:
        return loss

    def unscale(self, optimizer: Any) -> None:
        pass

    def step(self, optimizer: Any) -> None:
        optimizer.step()

    def own_scale(self) -> dict[str, Tensor]:
        """What this rank's loss scale is, where it is not that of all ranks; to be kept, and given to `take_scale`."""
        return {}

    def take_scale(self, kept: Mapping[str, Tensor]) -> None:
        pass


class Bf16(Full):
    """bfloat16 has float32's range: nothing needs scaling."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16)


class Fp16(Full):
    """The loss is scaled up, so that small gradients do not vanish, as far as no gradient overflows.

    An update with a gradient that is not finite is left out: on all ranks, or where their updates are their own
    (group: None) on those alone that have one.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.device, self.is_alone = device, group is None
        self.scaler = _own_scaler(device) if group is None else _shared_scaler(device, group)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.float16)

    def scaled(self, loss: Tensor) -> Tensor:
        scaled: Tensor = self.scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: Any) -> None:
        """Called when the gradients are summed: ranks wait for each other here, too."""
        with warnings.catch_warnings():  # of torch's, about its own scalars among sharded gradients
            warnings.filterwarnings("ignore", message="Found a non-scalar tensor")
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Any) -> None:
        self.scaler.step(optimizer)
        self.scaler.update()

    def own_scale(self) -> dict[str, Tensor]:
        """The scale, and the updates since it last changed."""
        state = self.scaler.state_dict() if self.is_alone else {}
        return {_SCALE: torch.tensor([state["scale"], state["_growth_tracker"]], dtype=torch.float64)} if state else {}

    def take_scale(self, kept: Mapping[str, Tensor]) -> None:
        """Raises TrainError where it is none."""
        if _SCALE not in kept or not self.is_alone:
            return
        numbers = kept[_SCALE].tolist()
        if len(numbers) != 2 or not all(map(math.isfinite, numbers)) or numbers[0] <= 0 or numbers[1] < 0:
            raise TrainError("resume: the checkpoint's loss scale makes no sense: it is not as it was written")
        self.scaler.load_state_dict(
            {**self.scaler.state_dict(), "scale": numbers[0], "_growth_tracker": int(numbers[1])}
        )


def _own_scaler(device: torch.device) -> Any:
    try:
        return torch.amp.GradScaler(device.type)
    except AttributeError:  # before torch 2.3 it is for GPUs only
        return torch.cuda.amp.GradScaler()


def _shared_scaler(device: torch.device, group: dist.ProcessGroup) -> Any:
    """Where each rank has gradients of its own (averaged weights, sharded gradients) only some may see one that is not
    finite: torch's scaler for shards asks all.
    """
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    try:
        return ShardedGradScaler(device=device.type, process_group=group)
    except TypeError:  # as above
        return ShardedGradScaler(process_group=group)


def build_precision(amp: str, device: torch.device, group: dist.ProcessGroup | None) -> Full:
    """group: of the ranks that leave an update out together (fp16); None where each decides by itself, and waits for
    nobody: what they would exchange in `local` would queue behind the weights that travel.

    Raises TrainError where the device, or this torch on it, cannot compute so.
    """
    if amp == "none":
        return Full()
    if amp == "bf16" and device.type == "cuda" and not is_ampere(device):
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        raise TrainError(
            f"amp bf16: {name} (compute capability {'.'.join(map(str, capability))}) only emulates it, sample by "
            "sample; use amp=fp16"
        )
    if not _computes_in(DTYPES[amp], device):
        raise TrainError(f"amp {amp}: torch {torch.__version__} cannot compute so on {device}; use amp=none or a GPU")
    return Bf16(device) if amp == "bf16" else Fp16(device, group)


def _computes_in(dtype: torch.dtype, device: torch.device) -> bool:
    """Tries it: autocast itself only warns where it cannot, and then computes in 32 bits."""
    images, weight = torch.ones((1, 1, 1, 1), device=device), torch.ones((1, 1, 1, 1), device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.autocast(device.type, dtype):
                return torch.nn.functional.conv2d(images, weight).dtype == dtype
        except RuntimeError:
            return False
