"""The `orch run` line that runs a plan's job, or the same job on other hosts or with other settings. Pure.

    run_line(plan)                                  orch run --cluster lab --exp resnet152_cifar --nodes a2000,v100
    run_line(plan, ["v100"], replace(plan.training, batch=512))

It is complete: whoever pastes it into a shell gets that run, whatever cluster is the current one there.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from orchestrator.planning.launch_plan import LOCAL_RANK, HostChoice, LaunchPlan
from orchestrator.planning.request import RunRequest
from trainer.shared.config import fields_of
from trainer.shared.experiments import EXPERIMENTS
from trainer.shared.settings import AnySettings


def run_line(plan: LaunchPlan, nodes: Collection[str] = (), settings: AnySettings | None = None) -> str:
    """Quoted for a shell. nodes: who takes part; none means those of the plan. settings: in place of the plan's; only
    what differs from the experiment's own is spelled out.
    """
    names = [node.name for node in plan.nodes if not nodes or node.name in nodes]
    all_nodes = len(names) == len(plan.nodes)
    options = [*_limits(plan), *_nodes(plan, names, all_nodes=all_nodes)]
    what = ["--exp", plan.exp] if plan.kind == "experiment" else []
    what += [word for name, text in settings_of(plan, settings).items() for word in ("--set", f"{name}={text}")]
    script = _script(plan) if plan.kind != "experiment" else []
    return shlex.join(["orch", "run", "--cluster", plan.cluster, *_called(plan), *what, *options, *script])


def choice_again(plan: LaunchPlan) -> HostChoice | None:
    """How many of which hosts to start it on again; None where it has to be those that it had."""
    return None if plan.recorded.stages else plan.hosts  # stages name their hosts


def _nodes(plan: LaunchPlan, names: Sequence[str], *, all_nodes: bool) -> Iterator[str]:
    choice = choice_again(plan) if all_nodes else None
    yield from ("--nodes", ",".join(choice.candidates if choice else names))
    if choice:
        yield from ("--hosts", choice.words)


def _called(plan: LaunchPlan) -> Iterator[str]:
    for option, words in (("--name", plan.name), ("--note", plan.note)):
        if words:
            yield from (option, words)


def settings_of(plan: LaunchPlan, settings: AnySettings | None = None) -> dict[str, str]:
    """As a person gives them: only what differs from the experiment's own. settings: in place of the plan's."""
    if plan.kind != "experiment":
        return dict(_of_script(plan, settings))
    chosen = settings or plan.typed_settings
    usual, names = (EXPERIMENTS[chosen.exp], fields_of(chosen.exp)) if chosen else ({}, {})
    return {name: _text(getattr(chosen, name)) for name in names if getattr(chosen, name) != usual[name]}


def _of_script(plan: LaunchPlan, settings: AnySettings | None) -> Iterator[tuple[str, str]]:
    """What it was asked for by --set, and what is different in `settings`; its batch has an option of its own."""
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


def _script(plan: LaunchPlan) -> list[str]:
    """The script or module with its arguments, after its own options."""
    options = ["--folder", plan.code.source]
    if plan.recorded.batch is not None:
        options += ["--batch", str(plan.recorded.batch)]
    if gives_local_rank(plan):
        options.append("--pass-local-rank")
    if not plan.measures_steps:
        options.append("--no-metrics")
    options += ["--resume", plan.resumes] if plan.resumes else []
    options += [word for folder in plan.keep for word in ("--keep", f"{folder}/")]
    words = program_words(plan)
    if words[0] == "-m":
        return [*options, *words[:2], "--", *words[2:]]
    return [*options, "--", *words]


def gives_local_rank(plan: LaunchPlan) -> bool:
    return LOCAL_RANK in plan.nodes[0].command


def program_words(plan: LaunchPlan) -> list[str]:
    """What a person types to name the script, by its whole path, or `-m` and the module; and its arguments."""
    words = [word for word in plan.nodes[0].command if word != LOCAL_RANK]
    flags = list(takewhile(lambda word: word.startswith("-") and word != "-m", words))
    words = words[len(flags) :] or [plan.exp]
    if plan.kind != "module":
        words[0] = str(Path(plan.code.source, words[0]))
    return ["python", *flags, *words] if flags else words


def _limits(plan: LaunchPlan) -> Iterator[str]:
    """How the job is started and ended."""
    if attempt := plan.attempt:
        yield from ("--retries", str(attempt.most - 1))
        yield from ("--retry-on", "any") if attempt.any_cause else ()
        yield from ("--rejoin",) if attempt.rejoin else ()
    if plan.time_limit_s:
        yield from ("--time-limit", f"{plan.time_limit_s:.12g}s")
    if plan.grace_s != RunRequest.grace_s:
        yield from ("--grace", f"{plan.grace_s:.12g}s")
    if plan.share_gpus:
        yield "--share"
    yield from (word for name in plan.variables for word in ("--env", name))  # their values are kept nowhere
