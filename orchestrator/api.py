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

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar

from typing_extensions import TypedDict, Unpack

from orchestrator.controller import Controller, opened
from orchestrator.errors import HostsError, UsageError
from orchestrator.hosts.cluster import Cluster as Remembered
from orchestrator.hosts.consent import allow, not_allowed
from orchestrator.hosts.inventory_file import load_inventory
from orchestrator.jobs.queued import Rival
from orchestrator.jobs.record import JobRecord
from orchestrator.jobs.running import RunningJob
from orchestrator.paths import Home, RunFolder
from orchestrator.planning.host_choice import parse_hosts
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.planning.naming import job_name, job_note, kept_folder
from orchestrator.planning.request import Wish, Words, read_wish
from orchestrator.planning.variables import read_variables
from orchestrator.results.summary import Summary
from orchestrator.starting.retries import First, Retries, first_attempt

Usual = TypeVar("Usual", float, None)


class Options(TypedDict, total=False):
    """What `run` and `plan` take by name, as `orch run` has it."""

    exp: str
    """An experiment, where no script is named."""
    settings: Mapping[str, object]
    """Of an experiment, or of a script that takes part by `trainer.join`."""
    nodes: str | Sequence[str]
    """Names, ranges and patterns; all hosts without it."""
    hosts: str | int
    """`2:4`, or a number: the best of these that can take part, so many at least and at most."""
    env: Mapping[str, str] | Sequence[str]
    """Variables of this job alone, by name; or names alone, whose values are those of this process."""
    batch: int
    """Samples of an update of a script, to be split among its ranks."""
    folder: str | PathLike[str]
    """What to ship in place of the script's own folder."""
    time_limit_s: float
    wait: bool
    """To queue for GPUs that are in use: `run` returns when they are free and the job runs."""
    wait_limit_s: float
    """To wait no longer than this; means `wait`."""
    retries: int
    """So often it is tried again where its hosts failed it: while the program is in `Job.wait` or `Job.lines`."""
    retry_on: Literal["hosts", "any"]
    """any: also where the script failed by itself."""
    rejoin: bool
    """To take a lost host in again once it answers."""
    retry_wait_s: float
    """Before the second attempt, 10 without it; twice as long before each further one."""
    name: str
    """What the job's id begins with."""
    note: str
    keep: Sequence[str]
    """Folders of a script's working folder that it takes over from its job before."""


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

    def plan(self, *command: str, **options: Unpack[Options]) -> LaunchPlan:
        """What `run` would start; nothing is."""
        cluster, wish, only = self._asked(command, options)
        plan = self._controller.choice.plan(cluster, wish.request, wish.code, only)
        return self._controller.handovers.noted(plan, wish.blob)

    def run(self, *command: str, **options: Unpack[Options]) -> Job:
        """`orch run --detach`: starts a script with its arguments, or the experiment of the options, on all hosts or on
        none. Raises OrchError.
        """
        first = First(*self._asked(command, options))
        retry_wait_s, wait_limit_s = _seconds(options, "retry_wait_s", 10.0), _seconds(options, "wait_limit_s", None)
        if "retry_wait_s" in options and not first.wish.request.attempt:
            raise UsageError("retry_wait_s= belongs to retries=", "retries=N")
        waits = options.get("wait", "wait_limit_s" in options)
        if waits and first.wish.request.hosts:
            raise UsageError("hosts= does without hosts that are in use, wait= waits for them", "leave one of them out")
        start = self._controller.start
        if waits:
            start = partial(self._controller.start_in_turn, limit_s=wait_limit_s)
        job = start(first.cluster, first.wish, first.only)
        again = self._controller.retries(first, start, retry_wait_s) if first.wish.request.attempt else None
        return Job(self._controller, job, again)

    def _asked(self, command: Sequence[str], options: Options) -> tuple[Remembered, Wish, list[str]]:
        """On which cluster, what, and which of its nodes."""
        cluster, wish = self._controller.store.cluster(self.name), read_wish(_words(command, options))
        request = replace(
            wish.request,
            env=read_variables(_pairs(options.get("env", ())), (), os.environ),
            hosts=parse_hosts(str(options["hosts"])) if "hosts" in options else None,
            time_limit_s=_seconds(options, "time_limit_s", None),
            attempt=first_attempt(
                options.get("retries"), options.get("retry_on", "hosts"), rejoin=options.get("rejoin", False)
            ),
            job_name=_called(job_name, options.get("name")),
            note=_called(job_note, options.get("note")),
            keep=_kept(command, options),
        )
        nodes = options.get("nodes", ())
        only = cluster.names(nodes if isinstance(nodes, str) else ",".join(nodes))
        return cluster, replace(wish, request=request), only

    def job(self, wanted: str = "latest") -> Job:
        """wanted: an id, the beginning of one, or `latest`. Raises UsageError."""
        return Job(self._controller, self._controller.jobs.find(wanted, self.name))

    def waiting(self) -> list[Rival]:
        """Who waits for GPUs where jobs of ours run or wait, other people's too, in their order: `job`, `user`,
        `since_s`, and `starts_s`, the seconds within which it starts.
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


def _seconds(options: Options, name: str, usual: Usual) -> float | Usual:
    """Raises UsageError."""
    given = options.get(name)
    if given is None:
        return usual
    if not isinstance(given, (int, float)) or not 0 <= given < math.inf:
        raise UsageError(f"{name}={given!r}: expected seconds, 0 or more", "")
    return float(given)


def _words(command: Sequence[str], options: Options) -> Words:
    settings = tuple(_pairs(options.get("settings", {})))
    folder = Path(options["folder"]) if "folder" in options else None
    return Words(options.get("exp"), settings, command=tuple(command), batch=options.get("batch"), folder=folder)


def _called(read: Callable[[str], str], text: str | None) -> str | None:
    try:
        return None if text is None else read(text)
    except ValueError as error:
        raise UsageError(str(error), "choose another one") from error


def _kept(command: Sequence[str], options: Options) -> tuple[str, ...]:
    folders = options.get("keep", ())
    if folders and not command:
        raise UsageError("keep= belongs to a script of your own", "settings={'checkpoint_every': 500}")
    folders = [folders] if isinstance(folders, str) else folders
    return tuple(dict.fromkeys(filter(None, (_called(kept_folder, folder) for folder in folders))))


def _pairs(values: Mapping[str, object] | Sequence[str]) -> list[str]:
    """NAME=value each; names alone stay. Settings write true and false in small letters."""
    if not isinstance(values, Mapping):
        return [values] if isinstance(values, str) else list(values)
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]
