"""The text that sbatch gets: one component for each type of host, then orch's controller in the batch step. Pure.

All paths are relative to the job's folder, from which it is submitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator import __version__
from orchestrator.transport.shell import join, typed

STOP_S = 120
"""Before its time limit Slurm asks the job to end, so that hosts can write their final records."""
LOG = "slurm.log"
_SIGNAL = f"B:TERM@{STOP_S}"


@dataclass(frozen=True)
class Component:
    """The hosts of one type. name: the type's. options: sbatch's, in order."""

    name: str
    hosts: int
    options: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class BatchJob:
    """activate, python: of the inventory. common, more: options of every component, unless it has its own. controller:
    folder with orch's code.
    """

    job: str
    components: Sequence[Component]
    common: tuple[tuple[str, str], ...]
    more: Sequence[str]
    python: str
    activate: str | None
    controller: str


def script_of(batch: BatchJob) -> str:
    ours = [("job-name", batch.job), ("output", LOG), ("open-mode", "append"), ("requeue", ""), ("signal", _SIGNAL)]
    more = [(option.lstrip("-").partition("=")[0], option.partition("=")[2]) for option in batch.more]
    parts = []
    for number, component in enumerate(batch.components):
        shape = [("nodes", str(component.hosts)), ("ntasks-per-node", "1")]
        chosen = dict([*(ours if number == 0 else ()), *shape, *batch.common, *more, *component.options])
        parts.append("\n".join([f"# {component.name}", *(_directive(*option) for option in chosen.items())]))
    lines = [
        "#!/bin/bash",
        f"# Written by orch {__version__}. The last line is orch's controller, which starts and watches the ranks.",
        "\n#SBATCH hetjob\n".join(parts),
        "umask 077",
        *([batch.activate] if batch.activate else ()),
        f'export ORCH_HOME="$PWD/home" PYTHONPATH="$PWD/{batch.controller}" COLUMNS=150',
        f"exec {typed([batch.python])} -u -m orchestrator.cli.slurm",
    ]
    return "\n".join(lines) + "\n"


def _directive(name: str, value: str) -> str:
    return f"#SBATCH --{name}={join([value])}" if value else f"#SBATCH --{name}"
