"""The weights that a network begins with, out of a file: `first_weights(settings, facts, info)`.

A state dict as torch.save writes it, or a dict with one as `model` or `state_dict`, as our own checkpoints have it.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.compute.models import skeleton_of, trainable
from trainer.paced.standin import Learner, LearnerOptimizer, LearningPart, PacedPart, StandIn, StandInOptimizer
from trainer.ranks.agreement import gather_lines, together
from trainer.ranks.rank_info import RankInfo
from trainer.shared.errors import TrainError
from trainer.shared.experiments import DataSet
from trainer.shared.settings import Settings

_ZIP = b"PK\x03\x04"
SHOWN = 3
"""Names in a message, at most."""


def first_weights(settings: Settings, facts: DataSet, info: RankInfo) -> dict[str, Tensor]:
    """By name, those of a last layer of other classes left out; {} where none are asked for. Waits for all ranks.

    Raises TrainError where the file cannot be read, does not fit the network, or differs from host to host.
    """
    if not settings.weights:
        return {}
    with together(info.node):
        content = _read(Path(settings.weights).expanduser())
        network = skeleton_of(settings.model, facts.shape, facts.classes)
        found, fresh = fitting(_state(content, settings.weights), network, facts.classes, settings)
    if len(set(gather_lines(hashlib.sha256(content).hexdigest()))) > 1:
        raise TrainError(f"weights: {settings.weights} is another file on some hosts; copy the same one to all")
    if fresh and info.rank == 0:
        print(f"weights: {', '.join(fresh)} begin fresh, the file has other classes", flush=True)
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TrainError(f"weights: cannot read {path} ({error.strerror}): each host needs the file") from error


def _state(content: bytes, name: str) -> dict[str, Tensor]:
    """Nothing in the file is executed: `weights_only`, and only what begins as a zip, since torch before 2.6 reads
    other forms in the old way whatever is asked (CVE-2025-32434).
    """
    if not content.startswith(_ZIP):
        raise TrainError(f"weights: {name} is not as torch.save has written files since torch 1.6; save it again")
    try:
        raw: Any = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises of many kinds for what is not its own
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise TrainError(f"weights: {name} holds no plain tensors that could be read ({reason})") from error
    for key in ("model", "state_dict"):
        raw = raw[key] if isinstance(raw, dict) and isinstance(raw.get(key), dict) else raw
    if not isinstance(raw, dict) or not all(isinstance(tensor, Tensor) for tensor in raw.values()):
        raise TrainError(f"weights: {name} holds no state dict, which is tensors by name")
    # DDP and torch.compile call them so
    return {str(key).removeprefix("module.").replace("_orig_mod.", ""): tensor for key, tensor in raw.items()}


def fitting(
    state: Mapping[str, Tensor], network: nn.Module, classes: int, settings: Settings
) -> tuple[dict[str, Tensor], list[str]]:
    """What of the state is for this network, and the names of its last layer where that has other classes.

    Raises TrainError with the names that do not fit.
    """
    wanted = network.state_dict()
    fresh = [
        name for name, tensor in wanted.items() if name in state and _is_of_other_classes(state[name], tensor, classes)
    ]
    wrong = [
        f"{words} {_some(names)}"
        for words, names in (
            ("missing:", sorted(wanted.keys() - state.keys())),
            ("unknown:", sorted(state.keys() - wanted.keys())),
            ("of another shape:", sorted(_misshapen(state, wanted) - set(fresh))),
        )
        if names
    ]
    if wrong:
        raise TrainError(f"weights: {settings.weights} does not fit {settings.model}; {'; '.join(wrong)}")
    return {name: tensor for name, tensor in state.items() if name not in fresh}, fresh


def _misshapen(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> set[str]:
    return {name for name in wanted.keys() & state.keys() if wanted[name].shape != state[name].shape}


def _is_of_other_classes(tensor: Tensor, wanted: Tensor, classes: int) -> bool:
    rows = (tensor.shape[:1], wanted.shape[:1])
    return rows[0] != rows[1] == (classes,) and tensor.shape[1:] == wanted.shape[1:]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


# The optimiser: SGD or AdamW, or a stand-in where the rank is paced.


def build_optimizer(settings: Settings, model: nn.Module) -> torch.optim.Optimizer | StandInOptimizer:
    """settings: `fused_sgd` as it turned out."""
    if isinstance(model, Learner | LearningPart):
        return LearnerOptimizer(model, _real(settings, model.network))
    if isinstance(model, StandIn | PacedPart):
        return StandInOptimizer(model)
    return _real(settings, model)


def _real(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    rule: dict[str, Any] = {"lr": settings.lr, "momentum": settings.momentum, "weight_decay": settings.weight_decay}
    if settings.fused_sgd != "on":
        return torch.optim.SGD(model.parameters(), **rule)
    optimizer = torch.optim.SGD(model.parameters(), **rule, fused=True)
    if settings.momentum:
        # By itself it begins with memory as it finds it, which it would keep where fp16 leaves the first update out.
        optimizer.state.update({weight: {"momentum_buffer": torch.zeros_like(weight)} for weight in trainable(model)})
    return optimizer
