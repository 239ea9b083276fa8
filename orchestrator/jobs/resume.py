"""Going on from a job's last checkpoint, in a new job.

    exp, kept = settings_of(plan)                       ("mnist_lenet", {"epochs": 20, "checkpoint_every": 500})
    path = last_checkpoint(plan, host)                  where it lies on the old job's master
    wish = read_experiment(exp, {"resume": path}, kept)

The file stays on the host that wrote it, so that host is the new job's master, too; the other hosts need none.
"""

from __future__ import annotations

import posixpath
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.jobs.control import ask_host
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.transport import ask
from orchestrator.transport.ask import ConnectedHost
from trainer.shared.experiments import EXPERIMENTS


def settings_of(plan: LaunchPlan) -> tuple[str, dict[str, Any]]:
    """The job's experiment, and each setting that is not the experiment's own.

    Raises UsageError where it was no experiment.
    """
    if plan.kind != "experiment" or plan.exp not in EXPERIMENTS:
        left = f"{plan.node(plan.master).workdir}/jobs/{plan.job}/checkpoints on {plan.master}"
        raise UsageError(
            f"{plan.job} ran {plan.exp}: your own scripts resume themselves",
            f"its checkpoints (ORCH_CHECKPOINTS) are in {left}",
        )
    own = EXPERIMENTS[plan.exp]
    changed = {key: value for key, value in plan.settings.items() if key in own and value != own[key]}
    return plan.exp, {key: value for key, value in changed.items() if key != "resume"}


def last_checkpoint(plan: LaunchPlan, host: ConnectedHost) -> str:
    """The newest one's path on the host of the job's master; where the job wrote none, that from which it had gone on.

    Raises UsageError where there is none, HostError.
    """
    settings = plan.recorded
    begun = settings.resume or ""
    path = _newest(plan, host, settings.checkpoint_dir or "")
    path = path or (_newest(plan, host, posixpath.dirname(begun)) if begun else None)
    if path:
        return path
    if not (every := settings.checkpoint_every):
        remedy = f"to write some: `orch run --exp {plan.exp} --set checkpoint_every=500`"
    else:
        remedy = f"it would write one every {every} updates; it ended before, or `orch down` has removed it"
    raise UsageError(f"{plan.job} has no checkpoint on {host.node}", remedy)


def _newest(plan: LaunchPlan, host: ConnectedHost, folder: str) -> str | None:
    """folder: "" for the job's own."""
    answer = ask_host(host, plan, "checkpoint", folder=folder)
    return ask.understood(host.node, lambda: _path(answer["path"]))


def _path(path: object) -> str | None:
    """Raises ValueError for what a host would not say."""
    if path is None or (isinstance(path, str) and path.startswith("/") and path.isprintable() and len(path) < 4096):
        return path
    raise ValueError("a path")
