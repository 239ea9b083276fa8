"""Whether to retry a failed job; its last checkpoint and settings, also for `--resume`."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.errors import UsageError
from orchestrator.jobs.job_store import JobRecord
from orchestrator.jobs.launch import ask_host
from orchestrator.planning.job_spec import JobSpec
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.planning.request import ParsedJob, parse_job
from orchestrator.transport import ask
from orchestrator.transport.ask import ConnectedHost
from orchestrator.units import one_line
from trainer.shared.config import EXPERIMENTS

Whose = Literal["hosts", "script", "person"]


@dataclass(frozen=True)
class Judged:
    whose: Whose
    why: str
    without: str | None = None
    """The host that the next attempt leaves out, unless it may rejoin."""


def judge(record: JobRecord) -> Judged | None:
    """None if it did not fail, or a person ended it."""
    if record.state not in ("failed", "lost"):
        return None
    failure = record.first_failure
    if failure is None:
        return Judged("script", "its first cause is not known")
    why = f"{failure.node}: {one_line(failure.reason, 200)}"
    if record.state == "lost":  # no host has a record of its end: they went down, or a person removed its files
        return Judged("person" if "its files are gone" in failure.reason else "hosts", why)
    return Judged(failure.whose or "script", why, failure.node if failure.loses_host else None)


# Resuming from a job's last checkpoint, in a new job.
#
#     exp, kept = settings_of(plan, spec)                 ("mnist_lenet", {"epochs": 20, "checkpoint_every": 500})
#     found = last_checkpoint(plan, hosts)                on the old master, or a host with a copy
#     job = job_from(exp, kept, found.path, spec)
#
# The file stays on its host, which becomes the new job's master.


@dataclass(frozen=True)
class KeptCheckpoint:
    node: str
    path: str

    @property
    def updates(self) -> int:
        found = re.search(r"step-(\d{9})\.pt$", self.path)
        return int(found[1]) if found else 0

    @property
    def folder(self) -> str:
        return posixpath.dirname(self.path)


def settings_of(plan: LaunchPlan, spec: JobSpec) -> tuple[str, dict[str, Any]]:
    """The settings that differ from the experiment's; of a script all. spec: of the new job. Raises UsageError if it
    runs something else.
    """
    own = EXPERIMENTS.get(plan.exp, {}) if plan.kind == "experiment" else {}
    if own and spec.command:
        raise UsageError(f"{plan.job} ran {plan.exp}, not {spec.command[0]}", "give --resume only settings")
    if not own and not spec.command:
        raise UsageError(
            f"{plan.job} ran {plan.exp}, whose files are here and may have changed",
            f"name it again: `orch run --resume {plan.job} -- {plan.exp}`",
        )
    changed = {key: value for key, value in plan.settings.items() if not own or (key in own and value != own[key])}
    return plan.exp, {key: value for key, value in changed.items() if key not in ("exp", "resume")}


def job_from(exp: str, kept: Mapping[str, Any], path: str, spec: JobSpec) -> ParsedJob:
    """kept: the old job's settings; the spec's override them. Raises UsageError."""
    pairs = {**spec.settings, "resume": path}
    if not spec.command:
        return parse_job(spec.updated(exp=exp, settings=pairs), kept)
    left = {key: str(value) for key, value in kept.items() if key != "batch" or spec.batch is None}
    return parse_job(spec.updated(settings={**left, **pairs}))


def keepers_of(plan: LaunchPlan) -> tuple[str, ...]:
    """The master first."""
    return plan.checkpoints or (plan.master,)


def last_checkpoint(plan: LaunchPlan, hosts: Mapping[str, ConnectedHost]) -> KeptCheckpoint:
    """The newest there; if the job wrote no checkpoint, the one it resumed from. Raises UsageError without any,
    HostError.
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
        remedy = f"it writes one every {every} updates: it ended before the first, or `orch down` removed it"
    raise UsageError(f"{plan.job} has no checkpoint on {', '.join(hosts)}", remedy)


def kept_by(plan: LaunchPlan, host: ConnectedHost) -> KeptCheckpoint | None:
    """The newest there. A copy is in the job's own folder, wherever the master writes. Raises HostError."""
    folder = plan.recorded.checkpoint_dir if host.node == plan.master else None
    return _kept(plan, host, folder or "")


def newest(found: Sequence[KeptCheckpoint]) -> KeptCheckpoint | None:
    return max(found, key=lambda kept: kept.updates, default=None)


def _kept(plan: LaunchPlan, host: ConnectedHost, folder: str) -> KeptCheckpoint | None:
    """folder: "" for the job's own."""
    answer = ask_host(host, plan, "checkpoint", folder=folder)
    path = ask.understood(host.node, lambda: _path(answer["path"]))
    return KeptCheckpoint(host.node, path) if path else None


def _path(path: object) -> str | None:
    """Raises ValueError."""
    if path is None or (isinstance(path, str) and path.startswith("/") and path.isprintable() and len(path) < 4096):
        return path
    raise ValueError("a path")
