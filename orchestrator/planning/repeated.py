"""The job file that repeats a job, from its plan: what every collected run has beside it.

    job = job_of(plan)          for `write_job(run.job_file, job)`

It says what `command_line.run_line` says, and like that it names the cluster, the hosts and whole paths. Of variables
that were given for the job it has the names: their values are kept nowhere.
"""

from __future__ import annotations

from orchestrator.planning.command_line import choice_again, gives_local_rank, program_words, settings_of
from orchestrator.planning.job_file import JobFile
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.planning.request import RunRequest


def job_of(plan: LaunchPlan) -> JobFile:
    return JobFile.model_validate({**_program(plan), **_limits(plan), "settings": settings_of(plan)})


def _program(plan: LaunchPlan) -> dict[str, object]:
    if plan.kind == "experiment":
        return {"exp": plan.exp}
    first, *rest = program_words(plan)
    named = {"module": rest[0], "args": rest[1:]} if first == "-m" and rest else {"script": first, "args": rest}
    return {
        **named,
        "folder": plan.code.source,
        "batch": plan.recorded.batch,
        "pass_local_rank": gives_local_rank(plan),
        "no_metrics": not plan.measures_steps,
        "resume": plan.resumes,
        "keep": list(plan.keep),
    }


def _limits(plan: LaunchPlan) -> dict[str, object]:
    choice, attempt = choice_again(plan), plan.attempt
    return {
        "cluster": plan.cluster,
        "name": plan.name,
        "note": plan.note,
        "nodes": list(choice.candidates) if choice else [node.name for node in plan.nodes],
        "hosts": choice.words if choice else None,
        "env": dict.fromkeys(plan.variables),
        "share": plan.share_gpus,
        "retries": attempt.most - 1 if attempt else None,
        "retry_on": "any" if attempt and attempt.any_cause else "hosts",
        "rejoin": bool(attempt and attempt.rejoin),
        "grace": f"{plan.grace_s:.12g}s" if plan.grace_s != RunRequest.grace_s else None,
        "time_limit": f"{plan.time_limit_s:.12g}s" if plan.time_limit_s else None,
    }
