"""`sweep`: a study's rows on this cluster, measured beside published."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.cli.common import cluster_option, json_option, names_of, open_controller, out_option, settings_option
from orchestrator.cli.complete import studies
from orchestrator.errors import UsageError
from orchestrator.studies import study_names

if TYPE_CHECKING:
    from orchestrator.jobs.running import RunningJob
    from orchestrator.measuring.sweep import Follow
    from orchestrator.studies.study import StudyRow

_HELP = f"""Run the rows of a reference study that this cluster can run.

The studies are {", ".join(study_names())}. Rows that are done are not run again, even after a Ctrl-C; rows of other
clusters stay in the same table. The table shows medians, and names rows whose ranges overlap as within noise. Each run
of a row has another seed.

\b
orch sweep bottlenecks --set data_dir=/data
orch sweep mixed_clusters --cluster a16-v100 --repeats 5
orch sweep mnist_methods --set epochs=1 --repeats 3
orch sweep input --set epochs=1 --json | jq '.rows[].measured.figures'
"""


@click.command(help=_HELP)
@click.argument("study", shell_complete=studies)
@settings_option("A setting for all rows, before their own; repeatable.")
@click.option("--rows", metavar="A,B", help="Run only these rows (--json lists their names).")
@click.option(
    "--repeats",
    type=click.IntRange(1, 100),
    metavar="N",
    help="Runs of each row. Default: 3 if the first takes less than a minute, else 1.",
)
@click.option("--again", is_flag=True, help="Run rows again that are done.")
@out_option
@cluster_option
@json_option
def sweep(
    study: str,
    settings: tuple[str, ...],
    rows: str | None,
    repeats: int | None,
    again: bool,
    out: Path,
    cluster: str | None,
    as_json: bool,
) -> None:
    from orchestrator.measuring.sweep import Sweep
    from orchestrator.planning.request import parse_pairs
    from orchestrator.studies.study import load_study
    from orchestrator.views import console, documents, study_table

    if study not in study_names():
        raise UsageError(f"{study!r} is no study", f"choose one of {', '.join(study_names())}")
    published = load_study(study)
    only = names_of(rows)
    known = [row.name for row in published.rows]
    for name in only:
        if name not in known:
            raise UsageError(f"{study} has no row {name!r}", f"its rows: {', '.join(known)}")
    overrides = parse_pairs(settings, "--set KEY=VALUE")
    with open_controller() as controller:
        one = Sweep(study, published, controller, controller.store.cluster(cluster), out, overrides)
        outcomes = one.run(_follower(), only=only, again=again, repeats=repeats)
    if as_json:
        return console.print_json(documents.sweep_json(study, published, outcomes))
    return study_table.print_study(published, outcomes)


def _follower() -> Follow:
    """Shows a row's notes and events, without its output."""
    from orchestrator.views import console, following, launch_plan

    said = set[str]()

    def follow(row: StudyRow, job: RunningJob) -> None:
        console.say(f"{row.name}: {job.id} on {', '.join(node.name for node in job.plan.nodes)}")
        launch_plan.warn_notes(job.plan, said)
        try:
            following.print_events(job.follow(), show=lambda line: False, stream=console.err)
        except KeyboardInterrupt:
            console.say(f"\nstopped watching; {job.id} keeps running, and the same command resumes it")
            console.say(f"cancel: orch cancel --job {job.id}")
            raise

    return follow
