"""The request of a sweep, and its file: a job file with a `grid:`.

    script: train.py
    args: [--epochs, "3"]
    grid: {lr: [0.1, 0.01], seed: "0:3"}
    gpus: 1                                     # several jobs a host, of one GPU each
    stop: median

`read_sweep` returns the job and the SweepSpec.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationError

from orchestrator.errors import InventoryError, Mistake, UsageError
from orchestrator.hosts.inventory import Written, mistake_of, problem
from orchestrator.hosts.yamlfile import Document, read_yaml
from orchestrator.planning.job_forms import VERBATIM, job_in
from orchestrator.planning.job_spec import JobSpec, key_of
from orchestrator.sweeps import JOB_FIELDS
from orchestrator.sweeps.grid import Axis, axis_of

_PROGRAM: Final = ("script", "module", "args")


class SweepSpec(Written):
    grid: Annotated[dict[str, str | list[str]], Field(min_length=1)]
    """By key: its values, or a text like `0:3`."""
    random: Annotated[int | None, Field(ge=1)] = None
    """Number of combinations to draw; None: all."""
    gpus: Annotated[int | None, Field(ge=1)] = None
    """For each job, on one host; None: whole hosts."""
    hosts: Annotated[int, Field(ge=1)] = 1
    """For each job."""
    stop: Literal["median"] | None = None
    length: str | None = None
    """A key of the grid that a job's time is proportional to."""

    @property
    def axes(self) -> list[Axis]:
        """Raises UsageError."""
        return [axis_of(name, given) for name, given in self.grid.items()]


def sweep_of(**values: Any) -> SweepSpec:
    """For a command line. Raises UsageError with all mistakes."""
    try:
        spec = SweepSpec.model_validate(values)
    except ValidationError as error:
        lines = [f"--{details['loc'][0]}: {problem(details)}" for details in error.errors()]
        raise UsageError("\n".join(dict.fromkeys(lines))) from None
    for key, words in wrong_together(spec):
        raise UsageError(f"--{key}: {words}")
    return spec


def wrong_together(spec: SweepSpec) -> Iterator[tuple[str, str]]:
    """Keys, and what is wrong with them."""
    if spec.gpus and spec.hosts > 1:
        yield "gpus", "are of one host, and hosts is above 1: leave one of them out"
    if spec.length is not None and spec.length not in spec.grid:
        yield "length", f"{spec.length} is no key of the grid ({', '.join(spec.grid)})"
    try:
        axes = spec.axes
    except UsageError as error:
        yield "grid", str(error)
        return
    lengths = [axis for axis in axes if axis.name == spec.length]
    if any(axis.span or not all(map(_is_number, axis.values)) for axis in lengths):
        yield "length", f"the values of {spec.length} must be numbers above 0"


def _is_number(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def read_sweep(path: Path) -> tuple[JobSpec, SweepSpec]:
    """Raises InventoryError with all mistakes, by line."""
    document = read_yaml(path, verbatim=(*VERBATIM, "grid"))
    own = {key: value for key, value in document.values.items() if key in SweepSpec.model_fields}
    rest = {key: value for key, value in document.values.items() if key not in own}
    mistakes = [*_not_for_sweeps(document, rest)]
    spec = None
    try:
        spec = SweepSpec.model_validate(own)
        wrong = ((key, f"`{key}`: {words}") for key, words in wrong_together(spec))
        mistakes += [Mistake(document.file, document.line((key,)), words) for key, words in wrong]
    except ValidationError as error:
        mistakes += [mistake_of(details, document) for details in error.errors()]
    job = None
    try:
        job = job_in(replace(document, values=rest), path)
    except InventoryError as error:
        mistakes = [*error.mistakes, *mistakes]
    if mistakes or spec is None or job is None:
        raise InventoryError(sorted(dict.fromkeys(mistakes), key=lambda mistake: mistake.line))
    return job, spec


def _not_for_sweeps(document: Document, rest: dict[str, Any]) -> Iterator[Mistake]:
    for name in JobSpec.model_fields:
        if (key := key_of(name)) in rest and name not in (*JOB_FIELDS, *_PROGRAM):
            yield Mistake(document.file, document.line((key,)), f"`{key}` is not for the jobs of a sweep; leave it out")
