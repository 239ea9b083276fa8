"""Whose the cause of a failed job was: its hosts', its own, or a person's.

    judge(record)       Judged("hosts", "v100: no word for 20 s: host down, frozen or cut off", without="v100")

What the hosts caused may go well on other hosts, or a second time. A script's own failure comes again.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.errors import UsageError
from orchestrator.jobs.job_store import FirstFailure, JobRecord
from orchestrator.jobs.launch import ask_host
from orchestrator.planning.job_spec import JobSpec
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.planning.request import ParsedJob, parse_job
from orchestrator.text import one_line
from orchestrator.transport import ask
from orchestrator.transport.ask import ConnectedHost
from trainer.shared.config import EXPERIMENTS

Whose = Literal["hosts", "script", "person"]

_OF_HOSTS = {"lost", "network", "supervisor", "port"}
"""Kinds of failures that no script brings about."""
_OF_PERSONS = {"folder", "time"}
"""Somebody removed the job's folder, or had set it a limit."""
_LOSES_HOST = {"lost", "network", "supervisor"}
"""Kinds after which that host is not to be counted on."""
_FROM_OUTSIDE = {"SIGKILL", "SIGTERM", "SIGHUP", "SIGINT", "SIGPWR"}
"""What a process does not do to itself: the kernel, out of memory, a host that shuts down, somebody on it."""
_KILLED = 128 + 9
"""What a shell says of a child that SIGKILL ended."""
_GPU_GONE = re.compile(
    r"fallen off the bus|GPU is lost|ECC error|ECC_UNCORRECTABLE|busy or unavailable|no CUDA-capable device|"
    r"CUDA_ERROR_(NO_DEVICE|DEVICE_UNAVAILABLE)|device handle for GPU",
    re.IGNORECASE,
)
_WORKER_KILLED = re.compile(r"worker \(pid \S+\) is killed by signal: Killed")
_MISSED = re.compile(r"watchdog|collective operation|wait timeout|timed out waiting", re.IGNORECASE)
"""A rank waited in vain for another one, which mostly was busy with something else: the script's doing."""
_NOT_STARTED = re.compile(r"(rank \d+|torchrun|the `prepare` command) did not start: ")


@dataclass(frozen=True)
class Judged:
    whose: Whose
    why: str
    """One line."""
    without: str | None = None
    """The host that an attempt does without, unless it may rejoin."""


def judge(record: JobRecord) -> Judged | None:
    """None where it did not fail, or a person ended it."""
    if record.state not in ("failed", "lost"):
        return None
    failure = record.first_failure
    if failure is None:
        return Judged("script", "its first cause is not known")
    why = f"{failure.node}: {one_line(failure.reason, 200)}"
    if record.state == "lost":  # its hosts, all of them, know of no end: they went down, or somebody removed its files
        return Judged("person" if "its files are gone" in failure.reason else "hosts", why)
    if failure.kind in _OF_PERSONS:
        return Judged("person", why)
    if failure.kind in _OF_HOSTS:
        return Judged("hosts", why, failure.node if failure.kind in _LOSES_HOST else None)
    if _GPU_GONE.search(f"{failure.reason} {failure.log_line or ''}"):
        return Judged("hosts", why, failure.node)
    return Judged("hosts" if _is_from_outside(failure) else "script", why)


def _is_from_outside(failure: FirstFailure) -> bool:
    """Of a program that ran on a host, or should have: whether it ended by what was done to it."""
    line = failure.log_line or ""
    if failure.secondary:
        return not _MISSED.search(line)
    if failure.signal:
        return failure.signal in _FROM_OUTSIDE
    killed = failure.exit_code == _KILLED or _WORKER_KILLED.search(line)
    return bool(killed or _NOT_STARTED.match(failure.reason))


# Going on from a job's last checkpoint, in a new job.
#
#     exp, kept = settings_of(plan, spec)                 ("mnist_lenet", {"epochs": 20, "checkpoint_every": 500})
#     found = last_checkpoint(plan, hosts)                where it lies: on the old job's master, or the host with a
#     copy
#     job = job_from(exp, kept, found.path, spec)
#
# The file stays where it is, so that host is the new job's master; the other hosts need none.


@dataclass(frozen=True)
class KeptCheckpoint:
    """A checkpoint on a host."""

    node: str
    path: str

    @property
    def updates(self) -> int:
        """After how many of the run it was written."""
        found = re.search(r"step-(\d{9})\.pt$", self.path)
        return int(found[1]) if found else 0

    @property
    def folder(self) -> str:
        return posixpath.dirname(self.path)


def settings_of(plan: LaunchPlan, spec: JobSpec) -> tuple[str, dict[str, Any]]:
    """The job's experiment, and each setting that is not the experiment's own; of a script all that it was given.

    spec: of the job that goes on. Raises UsageError if it runs something else.
    """
    own = EXPERIMENTS.get(plan.exp, {}) if plan.kind == "experiment" else {}
    if own and spec.command:
        raise UsageError(f"{plan.job} ran {plan.exp}, not {spec.command[0]}", "give --resume the settings alone")
    if not own and not spec.command:
        raise UsageError(
            f"{plan.job} ran {plan.exp}, whose files are here and may have changed",
            f"name it again: `orch run --resume {plan.job} -- {plan.exp}`",
        )
    changed = {key: value for key, value in plan.settings.items() if not own or (key in own and value != own[key])}
    return plan.exp, {key: value for key, value in changed.items() if key not in ("exp", "resume")}


def job_from(exp: str, kept: Mapping[str, Any], path: str, spec: JobSpec) -> ParsedJob:
    """kept: settings of the old job, which those of the spec win over. path: of the checkpoint. Raises UsageError."""
    pairs = {**spec.settings, "resume": path}
    if not spec.command:
        return parse_job(spec.updated(exp=exp, settings=pairs), kept)
    left = {key: str(value) for key, value in kept.items() if key != "batch" or spec.batch is None}
    return parse_job(spec.updated(settings={**left, **pairs}))


def keepers_of(plan: LaunchPlan) -> tuple[str, ...]:
    """The hosts that keep its checkpoints, the master first."""
    return plan.checkpoints or (plan.master,)


def last_checkpoint(plan: LaunchPlan, hosts: Mapping[str, ConnectedHost]) -> KeptCheckpoint:
    """The newest one on these hosts; where the job wrote none, that from which it had gone on. Raises UsageError where
    there is none, HostError.
    """
    found = newest([kept for host in hosts.values() if (kept := kept_by(plan, host))])
    if found is None and (begun := plan.recorded.resume) and plan.master in hosts:
        folder = posixpath.dirname(begun) if begun.endswith(".pt") else begun
        found = _kept(plan, hosts[plan.master], folder)
    if found:
        return found
    if not (every := plan.recorded.checkpoint_every):
        what = f"--exp {plan.exp} --set checkpoint_every=500"
        what = what if plan.kind == "experiment" else f"--set checkpoint_every=500 -- {plan.exp}"
        remedy = f"to write some: `orch run {what}`"
    else:
        remedy = f"it would write one every {every} updates; it ended before, or `orch down` has removed it"
    raise UsageError(f"{plan.job} has no checkpoint on {', '.join(hosts)}", remedy)


def kept_by(plan: LaunchPlan, host: ConnectedHost) -> KeptCheckpoint | None:
    """The newest one that lies there. A copy lies in the job's own folder, wherever the master writes. Raises
    HostError.
    """
    folder = plan.recorded.checkpoint_dir if host.node == plan.master else None
    return _kept(plan, host, folder or "")


def newest(found: Sequence[KeptCheckpoint]) -> KeptCheckpoint | None:
    """Of equal ones the first."""
    return max(found, key=lambda kept: kept.updates, default=None)


def _kept(plan: LaunchPlan, host: ConnectedHost, folder: str) -> KeptCheckpoint | None:
    """folder: "" for the job's own."""
    answer = ask_host(host, plan, "checkpoint", folder=folder)
    path = ask.understood(host.node, lambda: _path(answer["path"]))
    return KeptCheckpoint(host.node, path) if path else None


def _path(path: object) -> str | None:
    """Raises ValueError for what a host would not say."""
    if path is None or (isinstance(path, str) and path.startswith("/") and path.isprintable() and len(path) < 4096):
        return path
    raise ValueError("a path")
