"""`pull`: what a job wrote beside its logs comes home."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.common import (
    busy,
    chosen_job,
    cluster_option,
    json_option,
    names_of,
    nodes_option,
    open_controller,
    out_option,
)
from orchestrator.cli.complete import job_ids
from orchestrator.errors import HostError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from orchestrator.controller import Controller, Outputs
    from orchestrator.jobs.pull import Output, Pulled
    from orchestrator.paths import RunFolder
    from orchestrator.planning.launch_plan import LaunchPlan

MAX_TIME_S = 253402300799.0
"""The last second that a date has: the year 9999."""


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
    from orchestrator.jobs.pull import Pulled, matching
    from orchestrator.paths import RunFolder
    from orchestrator.views import console

    globs = words
    if not wanted and words and re.fullmatch(r"[A-Za-z0-9_-]+", words[0]):  # what an id consists of
        wanted, globs = words[0], words[1:]
    with open_controller() as controller:
        _, plan = chosen_job(controller, wanted, cluster)
        with busy(f"asking the hosts of {plan.job}"):
            outputs = controller.outputs(plan, names_of(nodes))
        chosen = {node: matching(listing.files, globs) for node, listing in outputs.found.items()}
        if globs and not any(chosen.values()) and not outputs.errors:
            names = list(dict.fromkeys(o.name for listing in outputs.found.values() for o in listing.files))
            remedy = f"it wrote {', '.join(names[:5])}{', ...' if names[5:] else ''}" if names else "it wrote no files"
            raise UsageError(f"no file of {plan.job} fits {' '.join(globs)}", f"{remedy} (`--list` shows all)")
        run, found = RunFolder(out / plan.job), dict[str, Pulled | HostError]()
        if not only_list and any(chosen.values()):
            found = bring(controller, plan, chosen, out)
    if as_json:
        console.print_json(_document(plan.job, run, outputs, chosen, found))
    elif only_list:
        _show_list(run, chosen)
    else:
        for line in lines(run, chosen, found):
            console.put(line)
    for node, listing in outputs.found.items():
        for notice in listing.notices:
            console.warn(f"{node}: {notice}")
    leave(outputs.errors, found)


def bring(
    controller: Controller, plan: LaunchPlan, chosen: Mapping[str, Sequence[Output]], out: Path
) -> dict[str, Pulled | HostError]:
    """Pulls, and shows how it gets on."""
    from orchestrator.cli.boards import pull_board
    from orchestrator.views import console

    try:
        with pull_board({node: sum(file.size for file in files) for node, files in chosen.items()}) as show:
            return controller.pull(plan, chosen, out, show)
    except KeyboardInterrupt:
        console.say("what has arrived stays here; the same command resumes there")
        raise


def lines(
    run: RunFolder, chosen: Mapping[str, Sequence[Output]], found: Mapping[str, Pulled | HostError]
) -> Iterator[str]:
    """What came, a line a host."""
    for node, files in chosen.items():
        if not isinstance(pulled := found.get(node), HostError):
            yield f"{node}: {_words(pulled, files, run.files(node))}"


def leave(errors: Mapping[str, HostError], found: Mapping[str, Pulled | HostError]) -> None:
    """Says what did not come, and ends the command with the exit code for it."""
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
    return f"{len(files) - len(pulled.left)} of {counted(len(files), 'file')} are in {folder}; {came}"


def _show_list(run: RunFolder, chosen: Mapping[str, Sequence[Output]]) -> None:
    from orchestrator.jobs.pull import is_here
    from orchestrator.units import format_bytes
    from orchestrator.views import tables

    rows = [
        (node, file.name, format_bytes(file.size), _when(file)[:16].replace("T", " "), _yes(is_here(run, node, file)))
        for node, files in chosen.items()
        for file in files
    ]
    tables.print_table(("node", "file", "size", "changed", "here"), rows, right_from=2)


def _document(
    job: str,
    run: RunFolder,
    outputs: Outputs,
    chosen: Mapping[str, Sequence[Output]],
    found: Mapping[str, Pulled | HostError],
) -> dict[str, Any]:
    """What `--json` prints."""
    from orchestrator.jobs.pull import is_here

    nodes: dict[str, Any] = {node: {"error": str(error)} for node, error in outputs.errors.items()}
    for node, files in chosen.items():
        rows = [
            {"name": file.name, "size": file.size, "changed": _when(file), "here": is_here(run, node, file)}
            for file in files
        ]
        told: dict[str, Any] = {
            "folder": str(run.files(node)),
            "files": rows,
            "skipped": dict(outputs.found[node].skipped),
        }
        pulled = found.get(node)
        if isinstance(pulled, HostError):
            told |= {"error": str(pulled)}
        elif pulled:
            told |= {"new_files": pulled.files, "new_bytes": pulled.bytes, "left": dict(pulled.left)}
        nodes[node] = told
    return {"schema": 1, "job": job, "nodes": nodes}


def _when(file: Output) -> str:
    """When it was changed, in ISO 8601."""
    from datetime import datetime, timezone

    return datetime.fromtimestamp(min(file.mtime_ns / 1e9, MAX_TIME_S), timezone.utc).isoformat(timespec="seconds")


def _yes(is_so: bool) -> str:
    return "yes" if is_so else ""
