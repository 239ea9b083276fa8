"""`pull`: what a job wrote beside its logs comes home."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.cli.common import (
    busy,
    chosen_job,
    cluster_option,
    json_option,
    nodes_option,
    open_controller,
    out_option,
)
from orchestrator.cli.complete import job_ids
from orchestrator.errors import HostError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from orchestrator.jobs.listing import Output
    from orchestrator.jobs.outputs import Outputs
    from orchestrator.jobs.pull import Pulled
    from orchestrator.jobs.running import RunningJob
    from orchestrator.paths import RunFolder


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
    from orchestrator.hosts.node_names import names_in
    from orchestrator.jobs.listing import matching
    from orchestrator.jobs.pull import Pulled
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
    """The first word is the job's where it can be an id."""
    return (words[0], words[1:]) if words and re.fullmatch(r"[A-Za-z0-9_-]+", words[0]) else (None, words)


def _nothing_fits(job: str, globs: Sequence[str], outputs: Outputs) -> UsageError:
    names = list(dict.fromkeys(file.name for listing in outputs.found.values() for file in listing.files))
    remedy = f"it wrote {', '.join(names[:5])}{', ...' if names[5:] else ''}" if names else "it wrote no files"
    return UsageError(f"no file of {job} matches {' '.join(globs)}", f"{remedy} (`--list` shows all)")


def bring(job: RunningJob, chosen: Mapping[str, Sequence[Output]], out: Path) -> dict[str, Pulled | HostError]:
    """Pulls, and shows how it gets on."""
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
    """What came, a line a host."""
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
    from orchestrator.jobs.listing import is_here
    from orchestrator.units import format_bytes
    from orchestrator.views import tables
    from orchestrator.views.documents import changed

    rows = [
        (node, file.name, format_bytes(file.size), changed(file)[:16].replace("T", " "), _yes(is_here(run, node, file)))
        for node, files in chosen.items()
        for file in files
    ]
    tables.print_table(("node", "file", "size", "changed", "here"), rows, right_from=2)


def _yes(is_so: bool) -> str:
    return "yes" if is_so else ""
