"""The Python API: `orch`'s commands as methods.

    from orchestrator import Cluster

    with Cluster.up("rack.yaml") as rack:
        job = rack.run(exp="resnet152_cifar", settings={"steps": 100})
        for line in job.lines():
            print(line)
        summary = job.collect("runs")
    summary.samples_per_s, summary.efficiency       1166.0, 0.81

A caller's mistake or a failing host raises an `OrchError` with a message and a remedy. Jobs do not depend on the
program: `Cluster("rack").job()` finds the latest later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

from orchestrator.controller import Controller, opened
from orchestrator.errors import HostsError, UsageError
from orchestrator.hosts.inventory_file import load_inventory
from orchestrator.hosts.occupied import allow, not_allowed
from orchestrator.jobs.job_store import JobRecord
from orchestrator.jobs.queue_place import Rival
from orchestrator.jobs.running import RunningJob
from orchestrator.paths import Home, RunFolder
from orchestrator.planning.job_spec import PYTHON, checked
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.results.summary import Summary
from orchestrator.starting.retries import Asked, Retries
from orchestrator.starting.submission import Submissions


class Cluster:
    """A remembered cluster, by default the current one. Use it in one thread, and close it."""

    def __init__(self, name: str | None = None, *, accept_new_host_keys: bool = False) -> None:
        self._stack = ExitStack()
        context = opened(Home.default(), accept_new_host_keys=accept_new_host_keys)
        self._controller: Controller = self._stack.enter_context(context)
        try:
            self.name = self._controller.store.cluster(name).name
        except BaseException:
            self.close()
            raise

    @classmethod
    def up(
        cls, inventory: str | PathLike[str], *, accept_new_host_keys: bool = False, allow_local: bool = False
    ) -> Cluster:
        """`orch up`: connects to every host of the file, probes it and elects the master. The cluster becomes the
        current one. allow_local: permits commands that the file runs on this machine. Raises HostsError for unusable
        hosts; `Cluster(name)` then still opens the cluster with the others.
        """
        loaded, home = load_inventory(Path(inventory)), Home.default()
        with opened(home, accept_new_host_keys=accept_new_host_keys) as controller:
            if commands := not_allowed(home, controller.clusters.nodes_of(loaded)):
                if not allow_local:
                    listed = "; ".join(map(str, commands))
                    raise UsageError(
                        f"{inventory} would run commands on this machine: {listed}", "allow_local=True, if you trust it"
                    )
                allow(home, commands)
            found = controller.up(loaded)
        if found.problems:
            raise HostsError([*found.problems.values()])
        if found.unlike:
            raise found.unlike
        return cls(loaded.cluster, accept_new_host_keys=accept_new_host_keys)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(node.name for node in self._controller.store.cluster(self.name).nodes)

    @property
    def master(self) -> str | None:
        return self._controller.store.cluster(self.name).master

    # ---- jobs -----------------------------------------------------------------------------------------------------

    def plan(self, *command: str, **options: Any) -> LaunchPlan:
        return self._controller.plan(self._asked(command, options))

    def run(self, *command: str, **options: Any) -> Job:
        """`orch run --detach`: starts a script with its arguments, or an experiment, on all hosts or on none; on Slurm,
        returns when Slurm has started it. options: fields of `JobSpec`. Raises OrchError.
        """
        asked = self._asked(command, options)
        job = self._controller.start(asked)
        retries: Retries | Submissions | None = None
        if asked.cluster.engine:
            retries = self._controller.submissions
        elif asked.request.attempt:
            retries = self._controller.retries(asked, self._controller.start)
        return Job(self._controller, job, retries)

    def _asked(self, command: Sequence[str], options: Mapping[str, Any]) -> Asked:
        if given := {"script", "args", "cluster"} & {*options}:
            raise UsageError(
                f"{min(given)}: not an option here", "run('train.py', '--lr', '0.1'); Cluster(NAME).run(...)"
            )
        program: dict[str, Any] = {}
        if command and options.get("module") is None:
            program = {"script": command[0], "args": [*command[1:]] or None}
        elif command:
            program = {"args": [*command]}
        return self._controller.read(checked({**options, **program, "cluster": self.name}, PYTHON))

    def job(self, wanted: str = "latest") -> Job:
        """wanted: an id, a unique prefix, or `latest`. Raises UsageError."""
        return Job(self._controller, self._controller.jobs.find(wanted, self.name))

    def waiting(self) -> list[Rival]:
        """Queued runs, other people's too, on hosts where this home's jobs run or wait, in order: `job`, `user`,
        `nodes`, `since_s`.
        """
        found = self._controller.queue.waiting(self._controller.jobs.all(self.name).records)
        return [*found.get(self.name, ())]

    def jobs(self) -> list[Job]:
        """All remembered jobs, newest first, without damaged records."""
        known = self._controller.jobs
        return [Job(self._controller, job) for job in known.sound(known.all(self.name).records)]

    # ---- its end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Jobs keep running."""
        self._stack.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Job:
    """With `retries`, the newest attempt."""

    def __init__(self, controller: Controller, job: RunningJob, retries: Retries | Submissions | None = None) -> None:
        self._controller, self._job, self._retries = controller, job, retries

    @property
    def id(self) -> str:
        return self._job.id

    @property
    def state(self) -> str:
        """Asks the hosts: `queued`, `starting`, `running`, `succeeded`, `failed`, `cancelled`, `lost`."""
        return self._job.refresh().state

    def lines(self) -> Iterator[str]:
        """`node rank: units`, until the job and its retries have ended. Raises OrchError if a retry cannot start."""
        for event in self._events():
            if isinstance(event, tuple):
                for line in event:
                    yield f"{line.node} {line.rank}: {line.text}"

    def wait(self) -> JobRecord:
        """The record after the job and its retries have ended: `state`, `exit_code`, `first_failure`. Raises OrchError
        if a retry cannot start.
        """
        for _ in self._events():
            pass
        return self._job.record

    def _events(self) -> Iterator[object]:
        again: RunningJob | None = self._job
        while again:
            self._job = again
            with again.apart() as followed:  # other calls between two lines must not end the stream
                yield from followed.follow()
            again = self._retries.after(again) if self._retries else None

    def cancel(self) -> JobRecord:
        return self._job.cancel()[0]

    def collect(self, out: str | PathLike[str] = "runs") -> Summary:
        """`orch collect`: copies logs and metrics into `out/<job>/` and writes the report. Raises HostsError if a
        host's part is missing.
        """
        report = self._controller.collect(self._job, Path(out))
        if report.errors:
            raise HostsError([*report.errors.values()])
        return report.summary

    def run_folder(self, out: str | PathLike[str] = "runs") -> RunFolder:
        """The folder of `collect`, with `.report`, `.steps` and so on."""
        return RunFolder(Path(out) / self.id)
