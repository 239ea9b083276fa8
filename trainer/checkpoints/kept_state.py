"""The parts of a run's state in a checkpoint: the script's objects, per-rank state, sliced networks, the optimiser."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from trainer.checkpoints.file import BUFFERS, Checkpoint, read_plain, reason
from trainer.shared.errors import TrainError
from trainer.strategies.base import Parts

if TYPE_CHECKING:
    from trainer.training.run import Run


class Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class Kept:
    """A script's objects in its checkpoints.

    kept.add(scheduler=scheduler, ema=ema)      restores them at once if the run was resumed
    """

    def __init__(self) -> None:
        self._things: dict[str, Stateful] = {}
        self._resumed: dict[str, Any] | None = None
        """States from the resumed checkpoint, or None."""

    def add(self, things: Mapping[str, Stateful]) -> list[str]:
        """Returns the names missing in the checkpoint. Raises TrainError."""
        missing = []
        for name, thing in things.items():
            if not callable(getattr(thing, "state_dict", None)) or not callable(
                getattr(thing, "load_state_dict", None)
            ):
                raise TrainError(
                    f"run.keep({name}=...): {type(thing).__name__} has no state_dict or no load_state_dict: add them"
                )
            if name in self._things:
                raise TrainError(
                    f"run.keep({name}=...): another object is kept under this name already; choose another name"
                )
            self._things[name] = thing
            _check(name, thing)
            if self._resumed is not None and name in self._resumed:
                _restore(name, thing, self._resumed[name])
            elif self._resumed is not None:
                missing.append(name)
        return missing

    def packed(self, generators: Mapping[str, Any]) -> Tensor:
        states = {name: _state_of(thing) for name, thing in self._things.items()}
        return _packed({"things": states, "generators": dict(generators)})

    def unpack(self, packed: Tensor | None) -> dict[str, Any]:
        """Returns the generators. packed: None for an older checkpoint. Raises TrainError."""
        if packed is None:
            self._resumed = {}
            return {}
        content = read_plain(packed.numpy().tobytes(), "the script's state in the checkpoint")
        self._resumed = content["things"]
        generators: dict[str, Any] = content["generators"]
        return generators


def _packed(content: Any) -> Tensor:
    written = io.BytesIO()
    torch.save(content, written)
    return torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)


def _check(name: str, thing: Stateful) -> None:
    """Fails before the first update instead of at the first checkpoint."""
    try:
        read_plain(_packed(_state_of(thing)).numpy().tobytes(), "")
    except Exception as error:  # pickle, torch and the script's own code raise many types of errors
        raise TrainError(
            f"run.keep({name}=...): the state_dict of {type(thing).__name__} cannot be stored ({reason(error)}): only "
            "numbers, text, tensors, and lists and dicts of them can"
        ) from error


def _state_of(thing: Stateful) -> tuple[Any, list[dict[str, Any]]]:
    """The state, and a scheduler's values in its optimiser, which its next step uses."""
    groups = getattr(getattr(thing, "optimizer", None), "param_groups", ())
    return thing.state_dict(), [{key: value for key, value in group.items() if key != "params"} for group in groups]


def _restore(name: str, thing: Stateful, state: Any) -> None:
    try:
        own, groups = state
        thing.load_state_dict(own)
        for group, kept in zip(thing.optimizer.param_groups if groups else (), groups, strict=True):  # type: ignore[attr-defined]
            group.update(kept)
    except Exception as error:  # the script's own code
        raise TrainError(f"run.keep({name}=...): the checkpoint's state does not fit it ({reason(error)})") from error


_IN_THE_MEAN = {"statistics", "optimizer", "weights", "round", "travelling", "scale", "buffers"}
"""Kinds of per-rank state with which other ranks can begin: its mean, or rank 0's scale and buffers."""


def by_others(saved: Checkpoint) -> str:
    shares = ",".join(map(str, saved.shares))
    in_round = ", local updates with that of their weights" if "round.counts" in saved.own[0] else ""
    return (
        f"; they were made by {saved.world_size} ranks with shares {shares}: the samples stay the same, "
        f"BatchNorm begins with the mean of the ranks' statistics{in_round}"
    )


def numbered(kind: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"{kind}.{number}": tensor for number, tensor in enumerate(tensors)}


def fill(tensors: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> str:
    """Copies tensors of the same name and shape. Returns a message about the others."""
    fits = {name for name, tensor in tensors.items() if name in kept and kept[name].shape == tensor.shape}
    for name in fits:
        tensors[name].copy_(kept[name])
    fresh, dropped = ({name.partition(".")[0] for name in {*of} - fits} - _IN_THE_MEAN for of in (tensors, kept))
    words = f"; {', '.join(sorted(fresh))}: not in the checkpoint, started fresh" if fresh else ""
    return words + (f"; {', '.join(sorted(dropped - fresh))}: left out" if dropped - fresh else "")


def for_other_ranks(saved: Checkpoint, world_size: int) -> dict[str, Tensor]:
    """The state with which each of `world_size` other ranks begins. The mean of the weights is in `model`."""
    if saved.settings.get("stages"):
        return {}  # each rank's state belongs to a part of the network
    samples = torch.tensor([of_rank[2] for of_rank in saved.sums], dtype=torch.float64)
    parts = samples / samples.sum() if samples.sum() > 0 else torch.eye(saved.world_size)[0]
    found = {}
    for name in [
        name for name in saved.own[0] if not name.startswith(BUFFERS)
    ]:  # those ranks begin with the buffers in `model`
        of_ranks = torch.stack([own[name] for own in saved.own])
        kind = name.partition(".")[0]
        if kind in ("round", "travelling"):  # equal on all ranks, or useless to others
            found[name] = of_ranks[0]
        elif kind == "scale":  # the scale at which no rank overflowed
            found[name] = of_ranks.amin(0)
        elif kind == "statistics":
            counted = parts > 0  # skips 0 * x, since x may be infinite
            found[name] = torch.tensordot(parts[counted].to(of_ranks.dtype), of_ranks[counted], dims=1)
        elif kind != "weights":
            found[name] = of_ranks.sum(0) / (world_size if kind == "memory" else saved.world_size)
    return found


def skeleton(run: Run) -> nn.Module:
    skeleton: nn.Module = run.training_task.skeleton()
    return skeleton


def to_be_kept(run: Run, network: nn.Module, parts: Parts, whole: nn.Module, state: State) -> dict[str, Tensor]:
    """This rank's part, without what a lower rank also has. network: the state shared by all ranks with this part."""
    wanted = parts.kept(run.info.rank, whole.state_dict(), whole)
    names, own = [name for name, _ in run.model.named_parameters()], network.state_dict()
    found = {name: own[name] for name in wanted}
    for kind, tensors in state.items():
        of_names = dict(zip(names, tensors, strict=True))
        found |= {remembered(kind, name): one for name in wanted if (one := of_names.get(name)) is not None}
    return found


def joined(
    of_ranks: Sequence[Mapping[str, Tensor]], parts: Parts, whole: nn.Module
) -> tuple[dict[str, Tensor], dict[str, list[Tensor | None]]]:
    """The whole network's state and optimiser state. of_ranks: from `to_be_kept`."""
    like = whole.state_dict()
    weights = [name for name, _ in whole.named_parameters()]
    kinds = dict.fromkeys(name.partition(" ")[0] for kept in of_ranks for name in kept if " " in name)
    state = _assembled(of_ranks, parts, whole, {name: name for name in like})
    of_optimizer: dict[str, list[Tensor | None]] = {}
    for kind in kinds:
        found = _assembled(of_ranks, parts, whole, {name: remembered(kind, name) for name in weights})
        of_optimizer[kind] = [found.get(name) for name in weights]
    return state, of_optimizer


def _assembled(
    of_ranks: Sequence[Mapping[str, Tensor]], parts: Parts, whole: nn.Module, called: Mapping[str, str]
) -> dict[str, Tensor]:
    """called: weight or buffer -> key in `of_ranks`."""
    of_whole, found = whole.state_dict(), dict[str, Tensor]()
    for name, key in called.items():
        one = next((kept[key] for kept in of_ranks if key in kept), None)
        if one is not None:
            found[name] = torch.empty(of_whole[name].shape if one.dim() else (), dtype=one.dtype)
    for rank, kept in enumerate(of_ranks):
        for name, tensor in parts.kept(rank, found, whole).items():
            tensor.copy_(kept[called[name]])
    return found


def remembered(kind: str, name: str) -> str:
    """The key of optimiser state."""
    return f"{kind} {name}"


def take(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    for (
        name,
        tensor,
    ) in model.state_dict().items():  # load_state_dict would miss entries that a pipeline stage has removed
        tensor.copy_(state[name])


def own_state(run: Run, parts: Parts, state: State) -> dict[str, list[Tensor | None]]:
    """This rank's part of the optimiser state."""
    whole = skeleton(run)
    names, own = [name for name, _ in whole.named_parameters()], [name for name, _ in run.model.named_parameters()]
    found: dict[str, list[Tensor | None]] = {}
    for kind, tensors in state.items():
        known = {name: one for name, one in zip(names, tensors, strict=True) if one is not None}
        held = parts.held(run.info.rank, known, whole)
        found[kind] = [held.get(name) for name in own]
    return found


# Optimiser state by torch's names (SGD: `momentum_buffer`; Adam and AdamW: `exp_avg`, `exp_avg_sq`, `step`). Each kind
# has a tensor for every weight in the network's order, or None.

State = Mapping[str, Sequence[Tensor | None]]

STEP = "step"
"""A weight's number of updates: the only kind without the weight's shape."""
_ADAM = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", STEP})
_KINDS: dict[type[torch.optim.Optimizer], frozenset[str]] = {
    torch.optim.SGD: frozenset({"momentum_buffer"}),
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
}


def kinds_of(optimizer: object) -> frozenset[str] | None:
    """None for an unknown optimiser."""
    return next((kinds for known, kinds in _KINDS.items() if isinstance(optimizer, known)), None)


def state_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, list[Tensor | None]]:
    """References. Kinds that no weight has are missing."""
    weights = list(model.parameters())
    of_weights = [optimizer.state.get(weight, {}) for weight in weights]
    found = {
        kind: [of_weight.get(kind) for of_weight in of_weights] for kind in sorted(kinds_of(optimizer) or frozenset())
    }
    return {kind: tensors for kind, tensors in found.items() if any(tensor is not None for tensor in tensors)}


def restore(optimizer: torch.optim.Optimizer, model: nn.Module, state: State) -> None:
    """Keeps the learning rate, unlike load_state_dict: a user may have set a new one."""
    on_device = {weight for group in optimizer.param_groups for weight in group["params"] if _counts_on_device(group)}
    for kind, tensors in state.items():
        for weight, kept in zip(model.parameters(), tensors, strict=True):
            if kept is None:
                continue
            if kind == STEP:
                own = torch.empty_like(kept, device=weight.device if weight in on_device else "cpu")
            else:
                own = torch.empty_like(weight, requires_grad=False)  # the memory format of the weight
            optimizer.state[weight][kind] = own.copy_(kept)


def _counts_on_device(group: Mapping[str, object]) -> bool:
    """The rule of torch's Optimizer.load_state_dict."""
    return bool(group.get("capturable") or group.get("fused"))


def mistake_of(optimizer: torch.optim.Optimizer, state: State, shapes: Sequence[torch.Size]) -> str:
    """Why this optimiser cannot use the state, or "". shapes: of the weights."""
    if foreign := sorted(set(state) - (kinds_of(optimizer) or frozenset())):
        return f"is of another optimiser than {type(optimizer).__name__} (it has {', '.join(foreign)})"
    for kind, tensors in state.items():
        wanted = [torch.Size() if kind == STEP else shape for shape in shapes]
        if len(tensors) != len(wanted) or any(
            tensor is not None and tensor.shape != shape for tensor, shape in zip(tensors, wanted, strict=True)
        ):
            return f"does not fit its network ({kind})"
    return ""
