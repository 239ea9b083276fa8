"""The declaration of one setting, its checks, and its value from text. Imports no torch."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.shared.experiments import CHOSEN

INT_BELOW = 2**63
"""The limit of torch and of our records."""


class SettingsError(ValueError):
    """mistakes: one line each; `str(error)` joins them."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = tuple(mistakes)


@dataclass(frozen=True, kw_only=True)
class Setting:
    help: str
    default: Any = None
    """None: each experiment has its own value."""
    choices: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    """Values allowed besides `choices`, but not offered."""
    at_least: float = -math.inf
    below: float = math.inf
    above: float = -math.inf
    parse: Callable[[str], object] | None = None
    """Checks a text with a grammar. Raises ValueError."""
    also: tuple[str, ...] = ()
    """Names in other tools."""
    only: tuple[str, str] | None = None
    """The other setting, and its value, that this setting needs."""
    brought: bool = False
    """Whether a user's own script decides it."""
    of_ranks: bool = False
    """Whether it concerns synchronisation, so that a single rank ignores it."""
    of_gpu: bool = False
    """Whether it changes a GPU's arithmetic, so that a profile holds for one value only."""
    resumes_same: bool = False
    """Whether it must equal the resumed checkpoint's: with other data, the position in the
    stream would mean nothing.
    """
    on_paced: bool = True
    """Whether ranks that simulate a GPU can have it other than at its default."""
    predicted: tuple[object, ...] | None = None
    """Values for which predictions hold; None if it does not affect speed or is predicted."""

    @property
    def is_of_ranks(self) -> bool:
        return self.of_ranks or (self.only is not None and self.only[0] in ("strategy", "fidelity"))


def setting(help: str, *, choices: Iterable[str] = (), hidden: Iterable[str] = (), **more: Any) -> Any:
    """A field of a settings class. more: see `Setting`."""
    made = Setting(help=help, choices=tuple(choices), hidden=tuple(hidden), **more)
    return dataclasses.field(metadata={"setting": made})


def declared(field: dataclasses.Field[Any]) -> Setting:
    made: Setting = field.metadata["setting"]
    return made


def values_of(kind: type, exp: str) -> dict[str, Any]:
    """The complete settings of an experiment. kind: the settings class."""
    defaults = {field.name: declared(field).default for field in dataclasses.fields(kind)}
    return {**defaults, **CHOSEN.get(exp, {}), "exp": exp}


def is_changed(of: Any, field: dataclasses.Field[Any]) -> bool:
    """Whether it differs from the experiment's value."""
    usual = CHOSEN.get(of.exp, {}).get(field.name, declared(field).default)
    return usual is not None and getattr(of, field.name) != usual


def without_effect(of: Any) -> list[str]:
    """Settings that were changed but do nothing without the value of another setting."""
    mistakes = []
    for field in dataclasses.fields(of):
        if (only := declared(field).only) and getattr(of, only[0]) != only[1] and is_changed(of, field):
            mistakes.append(f"{field.name}: does nothing with {only[0]} {getattr(of, only[0])}; use {only[1]}")
    return mistakes


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
    limits = declared(field)
    if kind_of(field) == "str":
        if limits.choices and value not in (*limits.choices, *limits.hidden):
            return [f"{field.name}: {not_among(value, limits.choices)}"]
        return _mistakes_of_text(field.name, limits, value)
    if isinstance(value, bool):
        return []
    if kind_of(field) == "int" and abs(value) >= INT_BELOW:
        return [f"{field.name}: a number of {len(str(abs(value)))} digits; expected less than 2**63"]
    if not math.isfinite(value):
        return [f"{field.name}: {value} is not a finite number"]
    if value < limits.at_least:
        return [f"{field.name}: {value} is too small; at least {limits.at_least}"]
    if value <= limits.above:
        return [f"{field.name}: {value} is too small; more than {limits.above}"]
    if value >= limits.below:
        return [f"{field.name}: {value} is too large; less than {limits.below}"]
    return []


def _mistakes_of_text(name: str, limits: Setting, value: str) -> list[str]:
    try:
        if limits.parse:
            limits.parse(value)
    except ValueError as error:
        return [f"{name}: {error}"]
    return []


MANY = 30
"""Longer lists are replaced by the three nearest names."""


def not_among(value: str, names: Iterable[str]) -> str:
    names = list(names)
    if len(names) > MANY:
        return f"{value!r} is not one of {len(names)} known names{nearest(value, names, most=3)}"
    return f"{value!r} is not one of {', '.join(names)}{nearest(value, names)}"


def close_names(name: str, names: Sequence[str], cutoff: float = 0.6) -> list[str]:
    """The nearest first; `dpp` is nearer to `ddp` than to `dp`."""

    def differs(other: str) -> bool:  # in more than a wrong letter or two swapped ones
        return len(other) != len(name) or sum(map(str.__ne__, name, other)) > 2

    return sorted(difflib.get_close_matches(name, names, n=9, cutoff=cutoff), key=differs)


def nearest(name: str, names: Iterable[str], most: int = 1, also: Mapping[str, Sequence[str]] | None = None) -> str:
    """also: names in other tools."""
    names = list(names)
    same = [key for key, others in (also or {}).items() if name.lower() in others]
    close = same[:1] or close_names(name, names, cutoff=0.5)[:most]
    return f"; did you mean {' or '.join(close)}?" if close else ""
