"""One field of the settings: its sentence, its bounds, its value from text. Imports no torch."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Sequence
from typing import Any

INT_BELOW = 2**63
"""What torch and every record of ours can hold."""


class SettingsError(ValueError):
    """mistakes: every mistake, one line each; `str(error)` joins them."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = tuple(mistakes)


def setting(
    help: str,
    *,
    choices: Iterable[str] = (),
    unsaid: Iterable[str] = (),
    at_least: float = -math.inf,
    below: float = math.inf,
    above: float = -math.inf,
) -> Any:
    """A field with its sentence and its bounds: at_least <= value, above < value < below.

    unsaid: right beside `choices`, and nothing that a person writes.
    """
    bounds = {"at_least": at_least, "below": below, "above": above}
    return dataclasses.field(metadata={"help": help, "choices": tuple(choices), "unsaid": tuple(unsaid), **bounds})


def kind_of(field: dataclasses.Field[Any]) -> str:
    """`int`, `float`, `bool` or `str`: annotations are text here."""
    return str(field.type)


def convert(field: dataclasses.Field[Any], text: str) -> Any:
    kind = kind_of(field)
    if kind == "str":
        return text
    if kind == "bool":
        if text.lower() not in _TRUTH:
            raise ValueError(f"{text!r} is not true or false")
        return _TRUTH[text.lower()]
    try:
        return int(text) if kind == "int" else float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a {'whole ' if kind == 'int' else ''}number") from None


_TRUTH = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}


def mistakes_of_value(field: dataclasses.Field[Any], value: Any) -> list[str]:
    """The mistakes of one value: none or one."""
    limits = field.metadata
    if kind_of(field) == "str":
        right = not limits["choices"] or value in (*limits["choices"], *limits["unsaid"])
        return [] if right else [f"{field.name}: {not_among(value, limits['choices'])}"]
    if isinstance(value, bool):
        return []
    if kind_of(field) == "int" and abs(value) >= INT_BELOW:
        return [f"{field.name}: a number of {len(str(abs(value)))} digits; expected less than 2**63"]
    if not math.isfinite(value):
        return [f"{field.name}: {value} is not a finite number"]
    if value < limits["at_least"]:
        return [f"{field.name}: {value} is too small; at least {limits['at_least']}"]
    if value <= limits["above"]:
        return [f"{field.name}: {value} is too small; more than {limits['above']}"]
    if value >= limits["below"]:
        return [f"{field.name}: {value} is too large; less than {limits['below']}"]
    return []


MANY = 30
"""Names that a message does not list any more: then it has the three nearest."""


def not_among(value: str, names: Iterable[str]) -> str:
    names = list(names)
    if len(names) > MANY:
        return f"{value!r} is not one of {len(names)} known names{nearest(value, names, most=3)}"
    return f"{value!r} is not one of {', '.join(names)}{nearest(value, names)}"


_ALSO_CALLED = {
    "lr": ("learning_rate",),
    "lr_schedule": ("scheduler", "lr_scheduler", "lr_scheduler_type"),
    "lr_warmup": ("warmup", "warmup_epochs", "lr_warmup_epochs"),
    "lr_steps": ("milestones", "lr_milestones"),
    "lr_factor": ("gamma", "lr_gamma"),
    "batch": ("batch_size", "bs", "bsz", "global_batch", "global_batch_size", "train_batch_size"),
    "steps": ("iterations", "iters", "max_steps", "updates"),
    "weight_decay": ("wd", "l2"),
    "data_dir": ("data_path", "data_root", "dataset_path"),
    "accumulate": ("gradient_accumulation_steps", "accumulation_steps", "accum", "grad_accum"),
    "amp": ("precision", "mixed_precision", "fp16", "bf16"),
    "model": ("arch", "network"),
    "checkpoint_every": ("save_every", "save_steps", "checkpoint_interval"),
    "num_workers": ("workers", "dataloader_workers"),
}
"""What other tools call our settings."""


def nearest(name: str, names: Iterable[str], most: int = 1) -> str:
    names = list(names)
    also = [key for key, others in _ALSO_CALLED.items() if key in names and name.lower() in others]
    close = also[:1] or difflib.get_close_matches(name, names, n=most, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""
