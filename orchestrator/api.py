"""A cluster in a Python program: what the commands do, in a few lines.

    from orchestrator import Cluster

    with Cluster.up("inventory/a2000_v100.yaml") as rack:
        job = rack.run(exp="resnet152_cifar", settings={"steps": 100})
        for line in job.lines():
            print(line)
        summary = job.collect("runs")
    summary.samples_per_s, summary.efficiency       1166.0, 0.81

Every mistake of a caller, every host that fails, is an `OrchError` (`orchestrator.errors`) with a message and what to
try. Jobs do not depend on the program: leave it, and `Cluster("rack").job()` finds the latest again, as `orch` does.
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
from orchestrator.jobs.job_queue import Rival
from orchestrator.jobs.job_store import JobRecord
from orchestrator.jobs.running import RunningJob
from orchestrator.paths import Home, RunFolder
from orchestrator.planning.job_spec import PYTHON, checked
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.results.summary import Summary
from orchestrator.starting.retries import Asked, Retries


class Cluster:
    """A remembered cluster; a name that is left out means the current one. To be used by one thread, and closed."""

    def __init__(self, name: str | None = None, *, accept_new_host_keys: bool = False) -> None:
        """Raises UsageError where there is no such cluster."""
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
        """`orch up`: connects to every host of the file, probes it, elects the master. The cluster becomes the current
        one. allow_local: whether commands that the file runs on this machine may run. Raises HostsError for hosts that
        cannot be used, though the others are remembered: `Cluster(name)` takes those.
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
            found = controller.clusters.up(loaded)
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
        """The plan that `run` would start."""
        return self._controller.plan(self._asked(command, options))

    def run(self, *command: str, **options: Any) -> Job:
        """`orch run --detach`: starts a script with its arguments, or the experiment of the options, on all hosts or on
        none. options: the fields of `JobSpec`. Raises OrchError.
        """
        asked = self._asked(command, options)
        job = self._controller.start(asked)
        retries = self._controller.retries(asked, self._controller.start) if asked.request.attempt else None
        return Job(self._controller, job, retries)

    def _asked(self, command: Sequence[str], options: Mapping[str, Any]) -> Asked:
        program: dict[str, Any] = {}
        if command and options.get("module") is None:
            program = {"script": command[0], "args": [*command[1:]] or None}
        elif command:
            program = {"args": [*command]}
        return self._controller.read(checked({"cluster": self.name, **options, **program}, PYTHON))

    def job(self, wanted: str = "latest") -> Job:
        """wanted: an id, the beginning of one, or `latest`. Raises UsageError."""
        return Job(self._controller, self._controller.jobs.find(wanted, self.name))

    def waiting(self) -> list[Rival]:
        """Queued runs on hosts where jobs of this home run or wait, other people's too, in the queue's order: `job`,
        `user`, `nodes` and `since_s`.
        """
        found = self._controller.queue.waiting(self._controller.jobs.all(self.name).records, self.name)
        return [*found.runs.get(self.name, ())]

    def jobs(self) -> list[Job]:
        """All that are remembered, the newest first, but for those whose files here are damaged (`orch jobs` names
        these); those that may run are asked after.
        """
        known = self._controller.jobs
        return [Job(self._controller, job) for job in known.sound(known.all(self.name).records)]

    # ---- its end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the connections. Jobs keep running."""
        self._stack.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Job:
    """One job of a cluster, while that is open. With `retries` it is the newest attempt."""

    def __init__(self, controller: Controller, job: RunningJob, retries: Retries | None = None) -> None:
        self._controller, self._job, self._retries = controller, job, retries

    @property
    def id(self) -> str:
        return self._job.id

    @property
    def state(self) -> str:
        """As its hosts say it now: `starting`, `running`, `succeeded`, `failed`, `cancelled`, `lost`."""
        return self._job.refresh().state

    def lines(self) -> Iterator[str]:
        """What its ranks print, `node rank: text`, from the first line on, until it has ended and is not tried again.
        Raises OrchError where another attempt is due and cannot start.
        """
        for event in self._events():
            if isinstance(event, tuple):
                for line in event:
                    yield f"{line.node} {line.rank}: {line.text}"

    def wait(self) -> JobRecord:
        """Its record once it has ended and is not tried again: `state`, `exit_code`, `first_failure`. Raises OrchError
        where another attempt is due and cannot start.
        """
        for _ in self._events():
            pass
        return self._job.record

    def _events(self) -> Iterator[object]:
        """Those of one attempt after the other."""
        again: RunningJob | None = self._job
        while again:
            self._job = again
            with again.apart() as followed:  # what is asked between two lines must not end their stream
                yield from followed.follow()
            again = self._retries.after(again) if self._retries else None

    def cancel(self) -> JobRecord:
        """Ends it on every host."""
        return self._job.cancel()[0]

    def collect(self, out: str | PathLike[str] = "runs") -> Summary:
        """`orch collect`: brings logs and metrics into `out/<job>/`, compares its hosts, writes the report there.
        Raises HostsError where a host's part is missing.
        """
        report = self._controller.collect(self._job, Path(out))
        if report.errors:
            raise HostsError([*report.errors.values()])
        return report.summary

    def run_folder(self, out: str | PathLike[str] = "runs") -> RunFolder:
        """Where `collect` puts it: `.report`, `.steps` and so on are its files."""
        return RunFolder(Path(out) / self.id)
