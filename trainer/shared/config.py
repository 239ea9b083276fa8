"""Parses settings from command lines, texts and records. Imports no torch.

>>> parse_settings("mnist_lenet", {"batch": "128", "strategy": "allreduce"}).batch
128
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from trainer.shared.experiments import CHOSEN, NAMED, SCRIPT
from trainer.shared.setting_fields import (
    Setting,
    SettingsError,
    convert,
    declared,
    kind_of,
    nearest,
    not_among,
    values_of,
)
from trainer.shared.settings import AnySettings, CollectiveSettings, Settings

TRAINING = {exp: values_of(Settings, exp) for exp in NAMED}
"""The complete settings of each training experiment."""
EXPERIMENTS = {**TRAINING, "collectives": values_of(CollectiveSettings, "collectives")}


def begun_with(exp: str) -> dict[str, Any]:
    """The experiment's initial values; {} if it is unknown."""
    return values_of(Settings, exp) if exp in CHOSEN else {}


def names_of(is_so: Callable[[Setting], object]) -> tuple[str, ...]:
    """The training settings whose declaration matches."""
    return tuple(field.name for field in dataclasses.fields(Settings) if is_so(declared(field)))


OF_PIPELINE = names_of(lambda each: each.only == ("strategy", "pipeline"))


def _class_of(exp: str) -> type[AnySettings]:
    return CollectiveSettings if exp == "collectives" else Settings


def fields_of(exp: str) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(_class_of(exp))}


def settings_from(exp: str, document: Mapping[str, Any]) -> AnySettings:
    """The settings in a record: ignores unknown names and uses the experiment's values for missing ones.

    Raises SettingsError for an unknown experiment or value.
    """
    return parse_settings(exp, {}, {name: document[name] for name in fields_of(exp).keys() & document.keys()})


def parse_settings(exp: str, pairs: Mapping[str, str], kept: Mapping[str, Any] = MappingProxyType({})) -> AnySettings:
    """The experiment's settings, changed by `kept` (values) and then `pairs` (key to text).

    Raises SettingsError with every mistake, and the nearest name if a name is unknown.
    """
    mistakes = []
    if exp not in (*EXPERIMENTS, SCRIPT):
        mistakes.append(f"exp: {not_among(exp, EXPERIMENTS)}")
    mistakes += [mistake for name, value in kept.items() for mistake in _mistakes_of_kept(fields_of(exp), name, value)]
    if mistakes and kept:
        raise SettingsError(mistakes)
    values = {**(begun_with(exp) or EXPERIMENTS.get(exp, next(iter(EXPERIMENTS.values())))), **kept}
    fields = fields_of(exp)
    for key, text in pairs.items():
        if key == "exp":
            mistakes.append("exp: is chosen with --exp, not as a setting")
        elif key not in fields:
            mistakes.append(f"{key}: no such setting{_nearest(key, fields)}")
        else:
            try:
                values[key] = convert(fields[key], text)
            except ValueError as error:
                mistakes.append(f"{key}: {error}")
    try:
        settings = _class_of(exp)(**values)
    except SettingsError as error:
        mistakes.extend(error.mistakes)
    if mistakes:
        raise SettingsError(mistakes)
    return settings


def _nearest(name: str, fields: Mapping[str, dataclasses.Field[Any]]) -> str:
    return nearest(name, fields, also={key: declared(field).also for key, field in fields.items()})


def _mistakes_of_kept(fields: Mapping[str, dataclasses.Field[Any]], name: str, value: object) -> list[str]:
    if name not in fields:
        return [f"{name}: no such setting{_nearest(name, fields)}"]
    kind = kind_of(fields[name])
    return [] if isinstance(value, _TYPES[kind]) else [f"{name}: {value!r} is not {_CALLED[kind]}"]


def parse_arguments(arguments: Sequence[str]) -> AnySettings:
    """Settings from `--exp NAME --key value` or `--key=value`. Raises SettingsError with every mistake."""
    pairs: dict[str, str] = {}
    mistakes = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        key = key.replace("-", "_")
        if not word.startswith("--") or not key:
            mistakes.append(f"{word!r}: expected --key value")
            continue
        if not equals and (not rest or rest[0].startswith("--")):
            mistakes.append(f"{key}: a value is missing after --{key}")
            continue
        if key in pairs:
            mistakes.append(f"{key}: is given twice")
        pairs[key] = value if equals else rest.pop(0)
    exp = pairs.pop("exp", None)
    if exp is None and not any(text.startswith("exp:") for text in mistakes):
        mistakes.append(f"exp: name an experiment with --exp NAME, one of {', '.join(EXPERIMENTS)}")
    try:
        if exp == SCRIPT:
            raise SettingsError([f"exp: {exp} is for your own script that calls `import trainer`; start that script"])
        settings = parse_settings(next(iter(EXPERIMENTS)) if exp is None else exp, pairs)
    except SettingsError as error:
        mistakes.extend(error.mistakes)
    if mistakes:
        raise SettingsError(mistakes)
    return settings


_TYPES: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}
_CALLED = {"bool": "True or False", "int": "a whole number", "float": "a number", "str": "a text"}
_EXPECTED = {"bool": "true|false"}


def help_text() -> str:
    lines = [
        "usage: torchrun [...] -m trainer --exp NAME [--key value]...",
        "",
        "example: torchrun --standalone --nproc-per-node 2 -m trainer --exp mnist_lenet --epochs 1",
        "",
    ]
    for title, exp in (("training", next(iter(TRAINING))), ("--exp collectives, which trains nothing", "collectives")):
        lines += [f"settings of {title}:", ""]
        for name, field in fields_of(exp).items():
            choices = declared(field).choices
            lines.append(
                f"  --{name} {'|'.join(choices) if choices else _EXPECTED.get(kind_of(field), kind_of(field))}"
            )
            lines.append(f"      {declared(field).help}")
        lines.append("")
    return "\n".join(lines)
