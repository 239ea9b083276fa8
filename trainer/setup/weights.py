"""Initial weights from a file, and the optimiser.

The file has a state dict written by torch.save, possibly as `model` or `state_dict` in a dict, like our checkpoints.
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
"""Names in a message."""


def first_weights(settings: Settings, facts: DataSet, info: RankInfo) -> dict[str, Tensor]:
    """By name, without a last layer for other classes; {} if not asked for. A collective call.

    Raises TrainError if the file cannot be read, does not fit the network, or differs between hosts.
    """
    if not settings.weights:
        return {}
    with together(info.node):
        content = _read(Path(settings.weights).expanduser())
        network = skeleton_of(settings.model, facts.shape, facts.classes)
        found, fresh = fitting(_state(content, settings.weights), network, facts.classes, settings)
    if len(set(gather_lines(hashlib.sha256(content).hexdigest()))) > 1:
        raise TrainError(f"weights: {settings.weights} differs between hosts; copy the same file to all")
    if fresh and info.rank == 0:
        print(f"weights: {', '.join(fresh)} start with random values, because the file has other classes", flush=True)
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TrainError(f"weights: cannot read {path} ({error.strerror}): each host needs the file") from error


def _state(content: bytes, name: str) -> dict[str, Tensor]:
    """Never executes anything in the file."""
    # `weights_only`, and only files that begin as a zip: torch before 2.6 reads other forms in the old way despite
    # `weights_only` (CVE-2025-32434).
    if not content.startswith(_ZIP):
        raise TrainError(f"weights: {name} is not in the form of torch.save since torch 1.6; save it again")
    try:
        raw: Any = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types of errors for foreign files
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise TrainError(f"weights: {name} holds no plain tensors that can be read ({reason})") from error
    for key in ("model", "state_dict"):
        raw = raw[key] if isinstance(raw, dict) and isinstance(raw.get(key), dict) else raw
    if not isinstance(raw, dict) or not all(isinstance(tensor, Tensor) for tensor in raw.values()):
        raise TrainError(f"weights: {name} holds no state dict (tensors by name)")
    # prefixes of DDP and torch.compile
    return {str(key).removeprefix("module.").replace("_orig_mod.", ""): tensor for key, tensor in raw.items()}


def fitting(
    state: Mapping[str, Tensor], network: nn.Module, classes: int, settings: Settings
) -> tuple[dict[str, Tensor], list[str]]:
    """The state for this network, and names of its last layer if the file has other classes. Raises TrainError."""
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


def build_optimizer(settings: Settings, model: nn.Module) -> torch.optim.Optimizer | StandInOptimizer:
    """settings: with the final `fused_sgd`."""
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
        # Otherwise momentum begins in uninitialised memory, which would stay if fp16 skips the first update.
        optimizer.state.update({weight: {"momentum_buffer": torch.zeros_like(weight)} for weight in trainable(model)})
    return optimizer
