"""`orch why`: who holds a job up."""

from __future__ import annotations

import sys

import click

from orchestrator.cli.common import busy, chosen_job, cluster_option, job_given, json_option, open_controller
from orchestrator.errors import HostError


@click.command()
@job_given
@click.option("--stacks", "all_frames", is_flag=True, help="Show the threads of every process, with all frames.")
@cluster_option
@json_option
def why(wanted: str | None, all_frames: bool, cluster: str | None, as_json: bool) -> None:
    """Name the host, rank, Python line and reason where a job stands still.

    Each host looks twice within two seconds at what its ranks do: threads, processes, pipes, connections. It works for
    any script, without root, and neither ends nor changes anything. A job that is only slow counts as no stall. The
    reason is inferred from what the hosts show; it is not proved.

    \b
    orch why
    orch why resnet152 --stacks
    orch why --json | jq .verdict
    """
    from orchestrator.jobs.diagnosis import diagnose
    from orchestrator.jobs.record import ENDED
    from orchestrator.views import console, documents
    from orchestrator.views import why as views

    with open_controller() as controller:
        job = chosen_job(controller, wanted, cluster)
        job.refuse_if_removed()
        if job.record.state in ENDED:
            console.say(f"{job.id} has ended already ({job.record.state}); `orch report --job {job.id}` says how")
        with busy(f"asking the hosts of {job.id}"):
            outcomes = job.looked_at()
    silent = {name: found for name, found in outcomes.items() if isinstance(found, HostError)}
    if len(silent) < len(outcomes):
        verdict = diagnose(job.plan, outcomes)
        job.remember_why(verdict)
        if as_json:
            console.print_json(documents.why_json(job.id, verdict, outcomes))
        else:
            views.print_why(verdict, outcomes, all_frames=all_frames)
    console.fail_each(silent.values())
    if len(silent) == len(outcomes):
        sys.exit(HostError.exit_code)
