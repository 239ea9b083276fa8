"""The spec that repeats a plan's job, and its `orch run` line, also for other hosts or settings. Pure.

    run_line(plan)                                  orch run --cluster lab --exp resnet152_cifar --nodes a2000,v100
    run_line(plan, ["v100"], replace(plan.training, batch=512))
    write_job(run.job_file, spec_of(plan))

Both are complete: they name the cluster, the hosts and whole paths. Of variables that were given for the job they have
the names: the values are kept nowhere.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from orchestrator.planning.job_spec import JobSpec, words
from orchestrator.planning.launch_plan import LOCAL_RANK, HostChoice, LaunchPlan
from trainer.shared.config import EXPERIMENTS, fields_of
from trainer.shared.settings import AnySettings


def run_line(plan: LaunchPlan, nodes: Collection[str] = (), settings: AnySettings | None = None) -> str:
    """Quoted for a shell; nodes, settings: as of `spec_of`."""
    spec = spec_of(plan, nodes, settings).model_copy(update={"cluster": None})
    return shlex.join(["orch", "run", "--cluster", plan.cluster, *words(spec)])


def spec_of(plan: LaunchPlan, nodes: Collection[str] = (), settings: AnySettings | None = None) -> JobSpec:
    """nodes: the hosts that take part; () means those of the plan. settings: in place of the plan's; only what differs
    from the experiment's own is spelled out.
    """
    names = [node.name for node in plan.nodes if not nodes or node.name in nodes]
    choice = _choice_again(plan) if len(names) == len(plan.nodes) else None
    attempt = plan.attempt
    values = {
        **(_program(plan) if plan.kind != "experiment" else {"exp": plan.exp}),
        "settings": _settings(plan, settings),
        "env": dict.fromkeys(plan.variables),
        "nodes": list(choice.candidates) if choice else names,
        "hosts": choice.words if choice else None,
        "share": plan.share_gpus,
        "grace_s": plan.grace_s,
        "time_limit_s": plan.time_limit_s,
        "name": plan.name,
        "note": plan.note,
        "cluster": plan.cluster,
    }
    if attempt:
        values |= {"retries": attempt.most - 1, "retry_on": "any" if attempt.any_cause else "hosts"}
        values |= {"rejoin": attempt.rejoin, "retry_wait_s": attempt.wait_s}
    return JobSpec.model_validate(values)


def _choice_again(plan: LaunchPlan) -> HostChoice | None:
    """How many of which hosts to start it on again; None if it has to be those that it had."""
    return None if plan.recorded.stages else plan.hosts  # stages name their hosts


def _settings(plan: LaunchPlan, settings: AnySettings | None) -> dict[str, str]:
    """As a person gives them: only what differs from the experiment's own."""
    if plan.kind != "experiment":
        return dict(_settings_of_script(plan, settings))
    chosen = settings or plan.typed_settings
    usual, names = (EXPERIMENTS[chosen.exp], fields_of(chosen.exp)) if chosen else ({}, {})
    return {name: _text(getattr(chosen, name)) for name in names if getattr(chosen, name) != usual[name]}


def _settings_of_script(plan: LaunchPlan, settings: AnySettings | None) -> Iterator[tuple[str, str]]:
    """The settings that were given, and those that are different in `settings`; the batch has an option of its own."""
    values = dict(plan.settings)
    if settings and plan.typed_settings:
        names = fields_of(settings.exp)
        changed = [name for name in names if getattr(settings, name) != getattr(plan.typed_settings, name)]
        values |= {name: getattr(settings, name) for name in changed}
    for name, value in values.items():
        if name not in ("exp", "batch"):
            yield name, _text(value)


def _text(value: Any) -> str:
    """As `parse_settings` reads it back."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _program(plan: LaunchPlan) -> dict[str, Any]:
    words = [word for word in plan.nodes[0].command if word != LOCAL_RANK]
    flags = list(takewhile(lambda word: word.startswith("-") and word != "-m", words))
    words = words[len(flags) :] or [plan.exp]
    if plan.kind != "module":
        words[0] = str(Path(plan.code.source, words[0]))
    first, *rest = ["python", *flags, *words] if flags else words
    named = {"module": rest[0], "args": rest[1:]} if first == "-m" and rest else {"script": first, "args": rest}
    return {
        **named,
        "resume": plan.resumes,
        "keep": list(plan.keep),
        "folder": plan.code.source,
        "batch": plan.recorded.batch,
        "pass_local_rank": LOCAL_RANK in plan.nodes[0].command,
        "no_metrics": not plan.measures_steps,
    }
