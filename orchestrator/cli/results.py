"""Commands about results: `collect`, `report`, `compare`, `pull`."""

from __future__ import annotations

import re
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
    job_ids,
    json_option,
    nodes_option,
    open_controller,
    out_option,
)
from orchestrator.errors import HostError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from orchestrator.controller import Controller
    from orchestrator.jobs.pull import Output, Outputs, Pulled
    from orchestrator.jobs.running import RunningJob
    from orchestrator.paths import RunFolder
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
    from orchestrator.views import console, host_tables

    with open_controller() as controller:
        job = chosen_job(controller, wanted, cluster)
        with busy(f"collecting {job.id}"):
            report = controller.collect(job, out, limit_bytes=int(max_log))
    if as_json:
        console.print_json(report.summary.to_json())
    else:
        host_tables.print_summary(report.summary)
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
    from orchestrator.jobs.pull import checkpoint_globs, matching
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
    """Show the comparison of a collected run again; works offline.

    A run outside ./runs is found in the folder of its last collection.

    \b
    orch report
    orch report --job latest --json | jq .efficiency
    orch report --job latest --figures paper/figures
    orch report --job latest --tensorboard tb --mlflow http://127.0.0.1:5000
    """
    from orchestrator.views import console, host_tables

    with open_controller() as controller:
        run_folder = collected(controller, wanted, out, cluster)
        found = controller.report(run_folder)
    summary = found.summary
    for notice in found.notices:
        console.warn(notice)
    if figures:
        from orchestrator.views.run_charts import write_figures

        for path in write_figures(run_folder, summary, figures):
            console.say(f"wrote {path}")
    if tensorboard:
        from orchestrator.exports.exporters import write_events

        console.say(f"wrote {write_events(summary, tensorboard)}; look: tensorboard --logdir {tensorboard}")
    if mlflow:
        from orchestrator.exports.exporters import send

        console.say(f"MLflow has it as run {send(summary, mlflow)}")
    if as_json:
        return console.print_json(summary.to_json())
    host_tables.print_summary(summary)
    return console.put(f"report: {run_folder.report}")


# `compare`.


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB JOB...", shell_complete=job_ids)
@click.option(
    "--page", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Write the page to this file.  [default: compare.html in the folder of collected runs]",
)  # fmt: skip
@out_option
@cluster_option
@json_option
def compare(jobs: tuple[str, ...], page: Path | None, out: Path, cluster: str | None, as_json: bool) -> None:
    """Show collected runs side by side: speed with its range, time to accuracy, and what differs; works offline.

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
    from orchestrator.views.run_comparison import print_comparison, render_comparison

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
    from orchestrator.paths import RunFolder

    named = RunFolder(Path(job))
    found = named if named.plan.is_file() else collected(controller, job, out, cluster)
    if not (found.summary.is_file() and found.steps.is_file()):
        controller.report(found)
    if not found.steps.is_file():  # another process is still collecting into it
        raise UsageError(
            f"{found.root} is being collected into: its steps are not there yet", "try again when it is done"
        )
    return found


# `pull`.


@click.command()
@click.argument("words", nargs=-1, metavar="[JOB] [GLOB]...", shell_complete=job_ids)
@click.option("--job", "wanted", metavar="ID", help="The job; replaces JOB.", shell_complete=job_ids)
@click.option(
    "--list", "only_list", is_flag=True, help="List the files and which of them are here already; pull nothing."
)
@nodes_option
@out_option
@cluster_option
@json_option
def pull(
    words: tuple[str, ...],
    wanted: str | None,
    only_list: bool,
    nodes: str | None,
    out: Path,
    cluster: str | None,
    as_json: bool,
) -> None:
    """Bring home what a job wrote: its checkpoints, and every new or changed file of its script's folder.

    JOB is an id, a unique prefix of one, or `latest` (the default). A GLOB chooses files by the names that `--list`
    shows; `src/` may be left out. The files of each host land in OUT/JOB/nodes/NODE/files and are checked by SHA-256.
    Interrupted pulls resume: run the same command again. You can pull while the job runs.

    \b
    orch pull
    orch pull --list
    orch pull '*.pt'
    orch pull latest snapshot.pt 'checkpoints/*'
    orch pull mnist_lenet-20261121 --nodes v100 --out ~/results
    """
    from orchestrator.hosts.grammar import names_in
    from orchestrator.jobs.pull import Pulled, matching
    from orchestrator.paths import RunFolder
    from orchestrator.views import console, documents

    wanted, globs = (wanted, words) if wanted else _job_and_globs(words)
    with open_controller() as controller:
        job = chosen_job(controller, wanted, cluster)
        with busy(f"asking the hosts of {job.id}"):
            outputs = job.outputs(names_in(nodes, [node.name for node in job.plan.nodes], job.id))
        chosen = {node: matching(listing.files, globs) for node, listing in outputs.found.items()}
        if globs and not any(chosen.values()) and not outputs.errors:
            raise _nothing_fits(job.id, globs, outputs)
        run, found = RunFolder(out / job.id), dict[str, Pulled | HostError]()
        if not only_list and any(chosen.values()):
            found = bring(job, chosen, out)
    if as_json:
        console.print_json(documents.pulled_json(job.id, run, outputs.found, outputs.errors, chosen, found))
    else:
        _show_list(run, chosen) if only_list else _show_pulled(run, chosen, found)
    for node, listing in outputs.found.items():
        for notice in listing.notices:
            console.warn(f"{node}: {notice}")
    leave(outputs.errors, found)


def _job_and_globs(words: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    return (words[0], words[1:]) if words and re.fullmatch(r"[A-Za-z0-9_-]+", words[0]) else (None, words)


def _nothing_fits(job: str, globs: Sequence[str], outputs: Outputs) -> UsageError:
    names = list(dict.fromkeys(file.name for listing in outputs.found.values() for file in listing.files))
    remedy = f"it wrote {', '.join(names[:5])}{', ...' if names[5:] else ''}" if names else "it wrote no files"
    return UsageError(f"no file of {job} matches {' '.join(globs)}", f"{remedy} (`--list` shows all)")


def bring(job: RunningJob, chosen: Mapping[str, Sequence[Output]], out: Path) -> dict[str, Pulled | HostError]:
    from orchestrator.cli.boards import pull_board
    from orchestrator.views import console

    try:
        with pull_board({node: sum(file.size for file in files) for node, files in chosen.items()}) as show:
            return job.pull(chosen, out, show)
    except KeyboardInterrupt:
        console.say("what has arrived stays here; the same command resumes there")
        raise


def lines(
    run: RunFolder, chosen: Mapping[str, Sequence[Output]], found: Mapping[str, Pulled | HostError]
) -> Iterator[str]:
    for node, files in chosen.items():
        if not isinstance(pulled := found.get(node), HostError):
            yield f"{node}: {_words(pulled, files, run.files(node))}"


def _show_pulled(
    run: RunFolder, chosen: Mapping[str, Sequence[Output]], found: Mapping[str, Pulled | HostError]
) -> None:
    from orchestrator.views import console

    for line in lines(run, chosen, found):
        console.put(line)


def leave(errors: Mapping[str, HostError], found: Mapping[str, Pulled | HostError]) -> None:
    """Prints what is missing, and ends the command if so."""
    from orchestrator.views import console

    left = [
        f"{node}: {name} {why}"
        for node, pulled in found.items()
        if not isinstance(pulled, HostError)
        for name, why in pulled.left.items()
    ]
    for line in left:
        console.warn(line)
    problems = [*errors.values(), *(error for error in found.values() if isinstance(error, HostError))]
    console.fail_each(problems)
    if problems:
        sys.exit(HostError.exit_code)
    if left:
        sys.exit(1)


def _words(pulled: Pulled | None, files: Sequence[Output], folder: Path) -> str:
    from orchestrator.units import counted, format_bytes

    if not files or not pulled:
        return "nothing to pull"
    came = f"{counted(pulled.files, 'file')}, {format_bytes(pulled.bytes)} came" if pulled.files else "nothing new"
    return f"{folder} has {len(files) - len(pulled.left)} of {counted(len(files), 'file')}; {came}"


def _show_list(run: RunFolder, chosen: Mapping[str, Sequence[Output]]) -> None:
    from orchestrator.jobs.pull import is_here
    from orchestrator.units import format_bytes
    from orchestrator.views import console as tables
    from orchestrator.views.documents import changed

    rows = [
        (node, file.name, format_bytes(file.size), changed(file)[:16].replace("T", " "), _yes(is_here(run, node, file)))
        for node, files in chosen.items()
        for file in files
    ]
    tables.print_table(("node", "file", "size", "changed", "here"), rows, right_from=2)


def _yes(is_so: bool) -> str:
    return "yes" if is_so else ""
