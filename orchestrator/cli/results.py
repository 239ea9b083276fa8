"""Commands about what came of a job: `collect`, `report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.cli.common import (
    Quantity,
    busy,
    chosen_job,
    cluster_option,
    collected,
    job_given,
    json_option,
    open_controller,
    out_option,
)

if TYPE_CHECKING:
    from orchestrator.planning.launch_plan import LaunchPlan


@click.command()
@job_given
@click.option("--checkpoints", is_flag=True, help="Also pull the job's checkpoints; `orch pull` pulls other files.")
@click.option(
    "--max-log", type=Quantity("size"), default="1GiB", show_default=True, help="Pull at most this much of each log."
)
@out_option
@cluster_option
@json_option
def collect(
    wanted: str | None, checkpoints: bool, max_log: float, out: Path, cluster: str | None, as_json: bool
) -> None:
    """Pull a job's logs and metrics, compare its hosts, write the report.

    Only new data is pulled. You can collect while the job runs.

    \b
    orch collect
    orch collect --checkpoints
    orch collect --job mnist_lenet-20261121 --out ~/results
    """
    from orchestrator.units import format_bytes
    from orchestrator.views import comparison, console

    with open_controller() as controller:
        job = chosen_job(controller, wanted, cluster)
        with busy(f"collecting {job.id}"):
            report = controller.collect(job, out, limit_bytes=int(max_log))
    if as_json:
        console.print_json(report.summary.to_json())
    else:
        comparison.print_summary(report.summary)
        console.put(f"report: {report.run.report}")
    console.say(f"{format_bytes(report.new_bytes)} new in {report.run.root}")
    for notice in report.notices:
        console.warn(notice)
    console.fail_each(report.errors.values())
    if checkpoints:
        _pull_checkpoints(job.plan, out)
    if report.errors:
        sys.exit(3)


def _pull_checkpoints(plan: LaunchPlan, out: Path) -> None:
    from orchestrator.cli.pull import bring, leave, lines
    from orchestrator.jobs.listing import checkpoint_globs, matching
    from orchestrator.paths import RunFolder
    from orchestrator.views import console

    with open_controller() as controller:
        job = controller.jobs.of(plan)
        outputs = job.outputs()
        globs = checkpoint_globs(plan)
        chosen = {node: matching(listing.files, globs) for node, listing in outputs.found.items()}
        chosen = {node: files for node, files in chosen.items() if files}
        found = bring(job, chosen, out) if chosen else {}
    for line in lines(RunFolder(out / plan.job), chosen, found):
        console.say(line)
    if not chosen:
        console.say(f"{plan.job} has no checkpoint on its hosts")
    leave(outputs.errors, found)


@click.command()
@job_given
@click.option(
    "--figures",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Also write every table as CSV, JSON Lines and Parquet, and every plot as SVG and PNG, into this folder.",
)
@click.option(
    "--tensorboard",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Also write the run as TensorBoard's events, into DIR/<job>.",
)
@click.option("--mlflow", metavar="URI", help="Also send the run to the MLflow server at this address.")
@out_option
@cluster_option
@json_option
def report(
    wanted: str | None,
    figures: Path | None,
    tensorboard: Path | None,
    mlflow: str | None,
    out: Path,
    cluster: str | None,
    as_json: bool,
) -> None:
    """Show the comparison of a collected run again; asks no host.

    A run that is not in ./runs is found where it was collected last.

    \b
    orch report
    orch report --job latest --json | jq .efficiency
    orch report --job latest --figures paper/figures
    orch report --job latest --tensorboard tb --mlflow http://127.0.0.1:5000
    """
    from orchestrator.views import comparison, console

    with open_controller() as controller:
        run_folder = collected(controller, wanted, out, cluster)
        found = controller.report(run_folder)
    summary = found.summary
    for notice in found.notices:
        console.warn(notice)
    if figures:
        from orchestrator.views.paper import write_figures

        for path in write_figures(run_folder, summary, figures):
            console.say(f"wrote {path}")
    if tensorboard:
        from orchestrator.exports.tensorboard import write_events

        console.say(f"wrote {write_events(summary, tensorboard)}; look: tensorboard --logdir {tensorboard}")
    if mlflow:
        from orchestrator.exports.mlflow import send

        console.say(f"MLflow has it as run {send(summary, mlflow)}")
    if as_json:
        return console.print_json(summary.to_json())
    comparison.print_summary(summary)
    return console.put(f"report: {run_folder.report}")
