"""Going on from a job's last checkpoint, in a new job.

    exp, kept = settings_of(plan, words)                ("mnist_lenet", {"epochs": 20, "checkpoint_every": 500})
    path = last_checkpoint(plan, host)                  where it lies on the old job's master
    wish = wish_for(exp, kept, path, words)

The file stays on the host that wrote it, so that host is the new job's master, too; the other hosts need none.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.jobs.control import ask_host
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.planning.request import Wish, Words, parse_pairs, read_experiment, read_wish
from orchestrator.transport import ask
from orchestrator.transport.ask import ConnectedHost
from trainer.shared.experiments import EXPERIMENTS

NO_WORDS = Words()


def settings_of(plan: LaunchPlan, words: Words = NO_WORDS) -> tuple[str, dict[str, Any]]:
    """The job's experiment, and each setting that is not the experiment's own; of a script all that it was given.

    words: what the person wants to go on with. Raises UsageError where that is not what the job ran, and for a script
    that the trainer had no part in.
    """
    own = EXPERIMENTS.get(plan.exp, {}) if plan.kind == "experiment" else {}
    if not own and not plan.training:
        left = f"{plan.node(plan.master).workdir}/jobs/{plan.job}/checkpoints on {plan.master}"
        raise UsageError(
            f"{plan.job} ran {plan.exp}, which resumes by itself: it does not take part by `trainer.join`",
            f"its checkpoints (ORCH_CHECKPOINTS) are in {left}",
        )
    if own and words.command:
        raise UsageError(f"{plan.job} ran {plan.exp}, not {words.command[0]}", "give --resume the settings alone")
    if not own and not words.command:
        raise UsageError(
            f"{plan.job} ran {plan.exp}, whose files are here and may have changed",
            f"name it again: `orch run --resume {plan.job} -- {plan.exp}`",
        )
    changed = {key: value for key, value in plan.settings.items() if not own or (key in own and value != own[key])}
    return plan.exp, {key: value for key, value in changed.items() if key not in ("exp", "resume")}


def wish_for(exp: str, kept: Mapping[str, Any], path: str, words: Words) -> Wish:
    """kept: settings of the old job, which those of `words` go before. path: of the checkpoint. Raises UsageError."""
    pairs = {**parse_pairs(words.settings, "--set KEY=VALUE"), "resume": path}
    if not words.command:
        return read_experiment(exp, pairs, kept)
    left = {key: value for key, value in kept.items() if key != "batch" or words.batch is None}
    return read_wish(replace(words, settings=tuple(f"{key}={value}" for key, value in {**left, **pairs}.items())))


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
        what = f"--exp {plan.exp} --set checkpoint_every=500"
        what = what if plan.kind == "experiment" else f"--set checkpoint_every=500 -- {plan.exp}"
        remedy = f"to write some: `orch run {what}`"
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
