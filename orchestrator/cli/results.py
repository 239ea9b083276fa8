"""Commands about what came of a job: `collect`, `report`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from orchestrator.cli.common import (
    busy,
    job_option,
    json_option,
    open_controller,
    out_option,
)
from orchestrator.errors import UsageError


@click.command()
@job_option
@out_option
@json_option
def collect(wanted: str, out: Path, as_json: bool) -> None:
    """Pull a job's logs and metrics, compare its hosts, write the report.

    Only what is new is pulled; works while the job runs, too.

    \b
    orch collect --job latest
    orch collect --job mnist_lenet-20261121 --out ~/results
    """
    from orchestrator import console
    from orchestrator.units import format_bytes

    with open_controller() as controller:
        _, plan = controller.job(wanted)
        with busy(f"collecting {plan.job}"):
            report = controller.collect(plan, out)
    if as_json:
        console.print_json(report.summary.to_json())
    else:
        console.print_summary(report.summary)
        console.put(f"report: {report.run.report}")
    console.say(f"{format_bytes(report.new_bytes)} new in {report.run.root}")
    for notice in report.notices:
        console.warn(notice)
    console.fail_each(report.errors.values())
    if report.errors:
        sys.exit(3)


@click.command()
@job_option
@out_option
@json_option
def report(wanted: str, out: Path, as_json: bool) -> None:
    """The comparison of a collected run once more; asks no host.

    \b
    orch report --job latest
    orch report --job latest --json | jq .efficiency
    """
    from orchestrator import console
    from orchestrator.paths import RunFolder

    with open_controller() as controller:
        # A folder of last month's run needs no memory of it.
        job = wanted if (out / wanted).is_dir() else controller.store.find_job(wanted)
        run_folder = RunFolder(out / job)
        if not run_folder.plan.is_file():
            raise UsageError(f"{run_folder.root} holds no collected run", f"`orch collect --job {job}` first")
        summary = controller.report(run_folder)
    if as_json:
        return console.print_json(summary.to_json())
    console.print_summary(summary)
    return console.put(f"report: {run_folder.report}")
