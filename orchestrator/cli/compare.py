"""`orch compare`: several collected runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.cli.common import cluster_option, collected, json_option, open_controller, out_option
from orchestrator.cli.complete import job_ids
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.controller import Controller
    from orchestrator.paths import RunFolder


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB JOB...", shell_complete=job_ids)
@click.option(
    "--page", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Where the page goes.  [default: compare.html in the folder of collected runs]",
)  # fmt: skip
@out_option
@cluster_option
@json_option
def compare(jobs: tuple[str, ...], page: Path | None, out: Path, cluster: str | None, as_json: bool) -> None:
    """Show collected runs side by side: speed with its range, time to accuracy, and what differs; asks no host.

    The first run is what the others are compared with. A JOB is an id, a unique prefix of it, `latest`, or the
    folder of a collected run.

    \b
    orch compare resnet152_cifar-20261121 latest
    orch compare runs/ddp runs/pipeline --page pipeline.html
    orch compare A B --json | jq '.runs[1].of_first'
    """
    from orchestrator.files import write_atomic
    from orchestrator.results.compare import compare as compared
    from orchestrator.views import console
    from orchestrator.views.charts import MOST_LINES
    from orchestrator.views.compare import print_comparison
    from orchestrator.views.compare_page import render_comparison

    if not 2 <= len(jobs) <= MOST_LINES:
        raise UsageError(
            f"{len(jobs)} job{'' if len(jobs) == 1 else 's'} named", f"name 2 to {MOST_LINES} collected runs"
        )
    with open_controller() as controller:
        folders = [_folder(controller, job, out, cluster) for job in jobs]
    comparison = compared(folders)
    if as_json:
        return console.print_json(comparison.to_json())
    print_comparison(comparison)
    target = page or out / "compare.html"
    write_atomic(target, render_comparison(comparison))
    return console.put(f"page: {target}")


def _folder(controller: Controller, job: str, out: Path, cluster: str | None) -> RunFolder:
    """Where that run was collected, analysed."""
    from orchestrator.paths import RunFolder

    named = RunFolder(Path(job))
    found = named if named.plan.is_file() else collected(controller, job, out, cluster)
    if not (found.summary.is_file() and found.steps.is_file()):
        controller.report(found)
    if not found.steps.is_file():  # somebody collects into it, and has not come so far
        raise UsageError(
            f"{found.root} is being collected into: its steps are not there yet", "try again when it is done"
        )
    return found
