"""The settings of a sweep's jobs, from `--grid lr=0.1,0.01 --grid seed=0:3`, and how they reach a program. Pure.

axes = [axis_of("lr", "0.1,0.01"), axis_of("seed", "0:3")]
for values in drawn(axes):              {"lr": "0.1", "seed": "0"}, {"lr": "0.1", "seed": "1"}, ...
    with_values(spec, values)           the spec of this job: `--lr 0.1 --seed 0` behind the script's arguments
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.errors import UsageError
from orchestrator.planning.job_spec import JobSpec
from orchestrator.planning.naming import MAX_NOTE
from orchestrator.units import one_line

MOST = 2_000
"""Jobs of a sweep."""
FORM = "KEY=VALUE,VALUE,..., KEY=FIRST:END (END excluded) or, with --random, KEY=LOW..HIGH"
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_RANGE = re.compile(r"(-?\d{1,12}):(-?\d{1,12})(?::(-?\d{1,12}))?")
_SPAN = re.compile(r"(?P<low>[-+.\deE]+)\.\.(?P<high>[-+.\deE]+)(?P<log>:log)?")
ENV, SET = "env.", "set."
"""Prefixes of keys: a variable of the environment, a setting for `trainer.join`."""

Values = Mapping[str, str]


@dataclass(frozen=True)
class Span:
    low: float
    high: float
    is_log: bool

    def draw(self, draw: random.Random) -> str:
        if self.is_log:
            return f"{math.exp(draw.uniform(math.log(self.low), math.log(self.high))):.4g}"
        return f"{draw.uniform(self.low, self.high):.4g}"


@dataclass(frozen=True)
class Axis:
    name: str
    values: tuple[str, ...] = ()
    span: Span | None = None


def parse_grid(typed: Sequence[str]) -> dict[str, str]:
    """`["lr=0.1,0.01"]` as a mapping. Raises UsageError."""
    found = dict[str, str]()
    for text in typed:
        name, equals, value = text.partition("=")
        if not equals or name.strip() in found:
            why = f"expected {FORM}" if not equals else "this key is given twice; name all its values in one --grid"
            raise UsageError(f"--grid {text}: {why}", "like --grid lr=0.1,0.01")
        found[name.strip()] = value
    return found


def axis_of(name: str, given: str | Sequence[str]) -> Axis:
    """given: the text behind `KEY=`, or the values of a list. Raises UsageError."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name[:40]!r} is not a key of a grid", "like lr, env.LR or set.strategy")
    if not isinstance(given, str):
        return _of_values(name, [str(value) for value in given])
    if found := _RANGE.fullmatch(given):
        first, end, step = (int(part) if part else 1 for part in found.groups())
        numbers = range(first, end, step) if step else range(0)
        if not 1 <= len(numbers) <= MOST:
            raise UsageError(f"{name}={given}: {len(numbers)} values, expected 1 to {MOST:,}", "0:3 stands for 0, 1, 2")
        return _of_values(name, [str(number) for number in numbers])
    if found := _SPAN.fullmatch(given):
        return Axis(name, span=_span(name, found))
    return _of_values(name, given.split(","))


def _span(name: str, found: re.Match[str]) -> Span:
    try:
        low, high, is_log = float(found["low"]), float(found["high"]), bool(found["log"])
        if low < high < math.inf and (low > 0 or not is_log):
            return Span(low, high, is_log)
    except ValueError:
        pass
    above = ", above 0" if found["log"] else ""
    raise UsageError(f"{name}={found[0]}: expected LOW..HIGH{above}", "like 0.1..0.9, or 1e-4..1e-1:log")


def _of_values(name: str, values: Sequence[str]) -> Axis:
    values = list(dict.fromkeys(value.strip() for value in values))
    if not values or (len(values) == 1 and not values[0]):
        raise UsageError(f"{name}: no value", f"--grid {FORM}")
    return Axis(name, tuple(values))


def drawn(axes: Sequence[Axis], count: int | None = None) -> list[dict[str, str]]:
    """All combinations; with a count, this number of different ones, drawn alike each time: more begin with the same.
    Raises UsageError.
    """
    names = [axis.name for axis in axes]
    spans = [axis.name for axis in axes if axis.span]
    if spans and count is None:
        raise UsageError(f"{spans[0]} is a range to draw from", "add --random 20, or name values")
    every = math.prod(len(axis.values) for axis in axes if not axis.span)
    least = min(every, count) if count is not None and not spans else count or every
    if not axes or least > MOST:
        raise UsageError(f"{least:,} jobs" if axes else "no --grid given", f"1 to {MOST:,} jobs make a sweep")
    if count is None:
        return [dict(zip(names, values, strict=True)) for values in itertools.product(*(axis.values for axis in axes))]
    return list(itertools.islice(_random(axes), least))


def _random(axes: Sequence[Axis]) -> Iterator[dict[str, str]]:
    draw, seen = random.Random("orch sweep"), set[tuple[str, ...]]()  # noqa: S311 - no secret
    for _ in range(100 * MOST):  # a narrow range may hold fewer than were asked for
        values = {axis.name: axis.span.draw(draw) if axis.span else draw.choice(axis.values) for axis in axes}
        if (key := tuple(values.values())) not in seen:
            seen.add(key)
            yield values


def with_values(spec: JobSpec, values: Values) -> JobSpec:
    """A key of an experiment is a setting. A script gets `{key}` in its arguments filled in, else `--key value` behind
    them. `env.KEY` is a variable, `set.KEY` a setting.
    """
    settings, env, args, added = dict(spec.settings), dict(spec.env), list(spec.args), list[str]()
    for key, value in values.items():
        if key.startswith(ENV):
            env[key.removeprefix(ENV)] = value
        elif key.startswith(SET) or spec.exp:
            settings[key.removeprefix(SET)] = value
        elif any(f"{{{key}}}" in word for word in args):
            args = [word.replace(f"{{{key}}}", value) for word in args]
        else:
            added += [f"--{key}", value]
    note = " ".join(filter(None, (spec.note, label(values))))
    changed = {"settings": settings, "env": env, "note": one_line(note, MAX_NOTE)}
    return spec.updated(**changed, **({} if spec.exp else {"args": [*args, *added]}))


def label(values: Values) -> str:
    return " ".join(f"{key}={value}" for key, value in values.items())
