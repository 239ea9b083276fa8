"""What a script asks its checkpoints to keep: schedulers, averages, counters, and the generators beside torch's.

kept = Kept()
kept.add(scheduler=scheduler, ema=ema)      restores them at once if the run was resumed
packed = kept.packed(generators)            each rank's own, as bytes
generators = kept.unpack(packed)
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.checkpoints.file import read_plain, reason
from trainer.shared.errors import TrainError


class Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class Kept:
    """By the names that the script gives them."""

    def __init__(self) -> None:
        self._things: dict[str, Stateful] = {}
        self._resumed: dict[str, Any] | None = None
        """States of the checkpoint that the run was resumed from; None if it began from scratch."""

    def add(self, things: Mapping[str, Stateful]) -> list[str]:
        """Returns the names that the checkpoint does not have. Raises TrainError."""
        missing = []
        for name, thing in things.items():
            if not callable(getattr(thing, "state_dict", None)) or not callable(
                getattr(thing, "load_state_dict", None)
            ):
                raise TrainError(
                    f"run.keep({name}=...): {type(thing).__name__} has no state_dict or no load_state_dict: add them"
                )
            if name in self._things:
                raise TrainError(f"run.keep({name}=...): something else is kept by this name already")
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
        """The generators; `add` takes the rest. packed: None of an older checkpoint. Raises TrainError."""
        if packed is None:
            self._resumed = {}
            return {}
        content = read_plain(packed.numpy().tobytes(), "what the script keeps in the checkpoint")
        self._resumed = content["things"]
        generators: dict[str, Any] = content["generators"]
        return generators


def _packed(content: Any) -> Tensor:
    written = io.BytesIO()
    torch.save(content, written)
    return torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)


def _check(name: str, thing: Stateful) -> None:
    """Before the first update, rather than at the first checkpoint."""
    try:
        read_plain(_packed(_state_of(thing)).numpy().tobytes(), "")
    except Exception as error:  # pickle, torch and the script's own code raise of many kinds
        raise TrainError(
            f"run.keep({name}=...): the state_dict of {type(thing).__name__} cannot be stored ({reason(error)}): only "
            "numbers, text, tensors, and lists and dicts of them can"
        ) from error


def _state_of(thing: Stateful) -> tuple[Any, list[dict[str, Any]]]:
    """Its state, and of a scheduler the values that it has set in its optimiser, which its next step begins with."""
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
