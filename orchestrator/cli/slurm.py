"""`slurm-batch`: orch's controller for one job, in the batch step of a Slurm job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.cli.common import Orch, open_controller
from orchestrator.errors import OrchError, UsageError

if TYPE_CHECKING:
    from orchestrator.controller import Controller
    from orchestrator.jobs.running import RunningJob
    from orchestrator.planning.job_spec import JobSpec
    from orchestrator.starting.retries import Asked
    from orchestrator.starting.submission import Submitted

KEEPERS_S = 120.0
"""For Slurm to start a step on every host."""


@click.command("slurm-batch")
def slurm_batch() -> None:
    """Run the job of this folder on the hosts of this Slurm job."""
    from orchestrator.cli.run import RunMode, is_webhook, run_asked
    from orchestrator.hosts.inventory_file import load_inventory
    from orchestrator.record import require_record
    from orchestrator.starting.submission import FILE, TORCH, Submitted

    folder = Path.cwd()
    submitted = require_record(folder / FILE, Submitted, "submit it again")
    webhook = submitted.notify if is_webhook(submitted.notify) else None
    command = None if webhook else submitted.notify
    with _notified_of_no_start(command), _keepers(submitted.scratch) as keepers, open_controller() as controller:
        inventory = _write_inventory(folder, submitted, keepers)
        os.chdir(folder / "src")
        memory = Path(__file__).resolve().parents[2] / TORCH
        up = controller.clusters.up(load_inventory(inventory), torch_memory=str(memory))
        for error in up.problems.values():
            click.echo(f"{error}", err=True)
        if submitted.measures:
            return _measure(controller, submitted, folder)
        asked = _asked(controller, submitted, folder, webhook)
        way = RunMode(detach=False, dry_run=False, notify=command, save=None, as_json=False)
        run_asked(controller, asked, way, keepers.note)
    return None


@contextlib.contextmanager
def _notified_of_no_start(command: str | None) -> Iterator[None]:
    """Runs `--notify` if nothing starts."""
    from orchestrator.cli.run import notify
    from orchestrator.jobs.slurm_queue import QUEUED, Queued
    from orchestrator.record import require_record

    path = Path.cwd() / QUEUED
    try:
        yield
    except OrchError:
        if command:
            record = require_record(path, Queued, "submit it again").record
            notify(command, record.model_copy(update={"state": "failed", "exit_code": 1}))
        raise


class Keepers:
    """One step on each host, which owns what has to outlive a command: `remote/keeper_step.py`.

    env: by component, of each host, the variables of its ranks. allocations: of each component. scratch: a folder on
    each host's own disk.
    """

    def __init__(self, job: str, components: int, scratch: str | None) -> None:
        several, self._scratch = components > 1, scratch
        self.allocations = [f"{job}+{number}" if several else job for number in range(components)]
        self.env: list[dict[str, dict[str, str]]] = [{} for _ in self.allocations]
        self._steps = [self._start(number if several else None) for number in range(components)]

    def _start(self, component: int | None) -> subprocess.Popen[str]:
        line = ["srun", "--overlap", "--ntasks-per-node=1", "--mpi=none", "--quiet", "--unbuffered"]
        line += ["--kill-on-bad-exit=0", "--no-kill"]  # the other hosts' steps outlive a host that fails
        line += [] if component is None else [f"--het-group={component}"]
        keeper = [sys.executable, "-m", "orchestrator.remote.keeper_step", *([self._scratch] if self._scratch else [])]
        return subprocess.Popen([*line, *keeper], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def await_all(self) -> None:
        """Raises OrchError if a host's step does not start."""
        late = threading.Timer(KEEPERS_S, self._give_up)
        late.start()
        try:
            for number, process in enumerate(self._steps):
                assert process.stdout  # noqa: S101 - for the type checker: it is a pipe
                for _ in range(_hosts_of(number, len(self._steps))):
                    about = json.loads(process.stdout.readline() or "null")
                    if about is None:
                        words = f"Slurm did not start a step on every host within {KEEPERS_S:.0f} s"
                        raise OrchError(words, "srun's own words are above in this log")
                    if "error" in about:
                        raise OrchError(f"{about['host']}: {about['error']}", "correct `scratch:` in the inventory")
                    self.env[number][str(about["host"])] = dict(about["env"])
        finally:
            late.cancel()

    def _give_up(self) -> None:
        for process in self._steps:
            process.kill()

    def end(self) -> None:
        """Asks each host's step to end what it has started, and itself. A signal for srun would kill them."""
        for process in self._steps:
            if process.stdin and not process.stdin.closed:
                process.stdin.close()

    def close(self) -> None:
        self.end()
        for process in self._steps:
            process.wait()

    def note(self, job: RunningJob) -> None:
        """Reports this job to followers elsewhere."""
        from orchestrator.jobs.slurm_queue import STARTED, started_line

        hosts = {name: each for names, each in zip(self.env, self.allocations, strict=True) for name in names}
        own = {node.name: hosts[node.name] for node in job.plan.nodes}
        with open(Path("..", STARTED), "a") as file:
            file.write(started_line(job.id, job.plan.master, own))


def _hosts_of(component: int, components: int) -> int:
    name = "SLURM_JOB_NUM_NODES" + (f"_HET_GROUP_{component}" if components > 1 else "")
    return int(os.environ[name])


@contextlib.contextmanager
def _keepers(scratch: str | None) -> Iterator[Keepers]:
    if "SLURM_JOB_ID" not in os.environ:
        raise UsageError(
            "slurm-batch is for Slurm's batch step", "`orch run` on a cluster with `engine: slurm` submits it"
        )
    keepers = Keepers(os.environ["SLURM_JOB_ID"], int(os.environ.get("SLURM_HET_SIZE", "1")), scratch)
    signal.signal(signal.SIGTERM, lambda number, frame: keepers.end())
    try:
        keepers.await_all()
        yield keepers
    finally:
        keepers.close()


def _write_inventory(folder: Path, submitted: Submitted, keepers: Keepers) -> Path:
    from orchestrator.files import write_atomic
    from orchestrator.paths import Home

    path, home = folder / "inventory.yaml", Home.default()
    write_atomic(path, json.dumps(submitted.inventory(keepers.env, keepers.allocations)))
    home.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(home.owner, submitted.owner.model_dump_json(by_alias=True))
    return path


def _asked(controller: Controller, submitted: Submitted, folder: Path, webhook: str | None) -> Asked:
    """The job again; after Slurm has queued it again, from its last checkpoint, as a job of its own."""
    from dataclasses import replace

    from orchestrator.starting.submission import CODE, resumed, with_submitted
    from orchestrator.views import console

    spec: JobSpec = submitted.spec
    before = controller.store.jobs()
    if before and (path := resumed(controller.store.plan(before[0].id))):
        console.say(f"Slurm has started this job again: goes on from {path}")
        spec = spec.updated(settings={**spec.settings, "resume": path})
    asked = controller.read(spec)
    asked = with_submitted(asked, submitted, (folder / CODE).read_bytes())
    request = replace(asked.request, notify=webhook, job=None if before else submitted.job)
    return replace(asked, job=replace(asked.job, request=request))


def _measure(controller: Controller, submitted: Submitted, folder: Path) -> None:
    from dataclasses import replace

    from orchestrator.cli.plan import follow_measurement
    from orchestrator.files import write_atomic
    from orchestrator.measuring.profiling import ProfileRequest, Profiling
    from orchestrator.measuring.slurm_profile import FILE, Measured
    from orchestrator.starting.submission import CODE

    wanted = ProfileRequest.of(submitted.spec)
    request = replace(wanted.job.request, env=submitted.env)
    job = replace(wanted.job, request=request, code=submitted.code, blob=(folder / CODE).read_bytes())
    profiling = Profiling(controller, controller.store.cluster(), replace(wanted, job=job))
    found = profiling.run(follow_measurement(), again=submitted.measures == "all")
    write_atomic(folder / FILE, Measured.of(found).model_dump_json(by_alias=True))


if __name__ == "__main__":
    main = Orch()
    main.add_command(slurm_batch)
    main(["slurm-batch"])
