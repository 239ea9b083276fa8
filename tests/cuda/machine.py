"""A machine of stand-in GPUs for tests: `machine.run(Job(...))` plays a run of the trainer on each of its ranks.

Importing torch takes seconds, so one process does it once (`server.py`) and forks the ranks of every job.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.cuda.build import ROOT
from tests.cuda.environment import environment

LIMIT_S = 100
"""For one job, on a machine that others use too. A job that hangs ends after it."""


@dataclass(frozen=True)
class Host:
    """A host of a job: its ranks, and whether these compute on GPUs, of which each rank has one of its own."""

    ranks: int = 1
    device: str = "cuda"


@dataclass(frozen=True)
class Job:
    """arguments: of the trainer. knobs: FAKE_* (README.md). prelude: a function "module:name" that each rank calls
    before, to break something on purpose.
    """

    arguments: Sequence[str]
    hosts: Sequence[Host] = (Host(),)
    knobs: Mapping[str, object] = field(default_factory=dict)
    prelude: str = ""
    limit_s: float = LIMIT_S


@dataclass(frozen=True)
class Rank:
    """How one rank's process went. events: its metrics, with the counters of `counters.h` in every line, as they stood
    then. foreign: GPUs on which it had a context besides its own.
    """

    exit_code: int
    output: str
    events: list[dict[str, Any]]
    foreign: list[int]

    def rows(self, event: str) -> list[dict[str, Any]]:
        return [row for row in self.events if row["event"] == event]

    def counts(self, skip: int) -> list[dict[str, int]]:
        """What each step asked of CUDA, after the first so many."""
        steps = self.rows("step")
        pairs = list(itertools.pairwise(steps))[skip:]
        return [{name: after["counts"][name] - before["counts"][name] for name in before["counts"]}
                for before, after in pairs]  # fmt: skip

    def times(self, name: str, skip: int) -> list[float]:
        """Milliseconds of that name of each step, after the first so many."""
        return [row[name] for row in self.rows("step")][skip:]


END = "\n"
"""In place of a job: the server ends."""


class Machine:
    """Raises CannotBuild."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        own = {"PYTHONPATH": path, "FAKE_CLOCK": "virtual"}
        variables = {**os.environ, **environment(), **own}
        self.server = subprocess.Popen(
            [sys.executable, "-m", "tests.cuda.server"],
            cwd=ROOT, env=variables, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, job: Job) -> list[Rank]:
        """Each rank's end, in their order."""
        with tempfile.TemporaryDirectory(prefix="orch-cuda-") as folder:
            self.server.stdin.write(json.dumps({**asdict(job), "folder": folder}) + "\n")
            self.server.stdin.flush()
            answer = self.server.stdout.readline()
            assert answer, "the server of the stand-in has ended"
            exit_codes = json.loads(answer)
            return [_rank(Path(folder), number, code) for number, code in enumerate(exit_codes)]

    def close(self) -> None:
        # Closing is not enough: a process that was forked from ours holds this end, too, and may outlive us.
        with contextlib.suppress(BrokenPipeError):
            self.server.stdin.write(END)
            self.server.stdin.flush()
        self.server.stdin.close()
        self.server.stdout.close()
        self.server.wait()


def _rank(folder: Path, number: int, exit_code: int) -> Rank:
    output, events = folder / f"{number}.out", folder / f"{number}.events"
    text = output.read_text(errors="replace") if output.exists() else ""
    rows = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    return Rank(exit_code, text, rows, rows[-1]["foreign"] if rows else [])


def problems(ranks: Sequence[Rank]) -> str:
    """What to show where a job did not end well: "" where each rank ended with 0 and kept to its own GPU."""
    return "\n".join(
        f"rank {number}: exit {rank.exit_code}, foreign contexts {rank.foreign}\n{rank.output[-3000:]}"
        for number, rank in enumerate(ranks)
        if rank.exit_code or rank.foreign
    )


LENET = (
    *("--exp", "mnist_lenet", "--data", "synthetic", "--augment", "none", "--eval_every", "0"),
    *("--samples", "48", "--batch", "12", "--steps", "4", "--cuda_graph", "off"),
)
