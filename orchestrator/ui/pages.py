"""What the pages show, from values to HTML. Every value is escaped, and nothing of a host steers a page.

root: how the address of the first page is written on the page that is made, as "./" or "../".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, FileSystemLoader

from orchestrator.errors import OrchError
from orchestrator.hosts.cluster import Cluster
from orchestrator.jobs.known import Jobs
from orchestrator.jobs.record import ENDED, JobRecord
from orchestrator.jobs.stall import standstill
from orchestrator.jobs.waiting import Waiting
from orchestrator.planning.job_spec import OPTIONS, PAGE_FIELDS, key_of
from orchestrator.views.documents import cluster_json, waiting_json
from orchestrator.views.figures import clock, local_minute
from orchestrator.views.job_table import lasted
from orchestrator.views.pages import environment
from trainer.shared.config import EXPERIMENTS

OWN = Path(__file__).parent / "templates"
MOST_JOBS = 50
COLUMNS = ("name", "address", "id", "note", "gpu", "bandwidth", "image", "status", "added")
TITLES = {"name": "Host", "address": "IP", "id": "Id", "note": "Note", "gpu": "Model", "bandwidth": "Bandwidth"}


@cache
def _environment() -> Environment:
    long = {"long": lambda seconds: "" if seconds is None else clock(seconds)}
    made = environment(lasted=lasted, when=lambda iso: local_minute(iso) or "", **long)
    assert made.loader  # noqa: S101 - for the type checker
    made.loader = ChoiceLoader([FileSystemLoader(OWN), made.loader])
    return made


def _page(name: str, **values: Any) -> str:
    return _environment().get_template(name).render(**values)


def style() -> str:
    return _page("ui.css.j2")


def cluster_page(
    cluster: Cluster,
    names: Sequence[str],
    listed: Jobs,
    queue: Waiting,
    failed: Sequence[str],
    root: str,
    said: str = "",
    error: OrchError | None = None,
) -> str:
    """names: all clusters that are remembered. failed: why runs that waited did not start.
    said: what came of what was asked for; error: why nothing came of it.
    """
    document = cluster_json(cluster)
    columns = [key for key in COLUMNS if any(node[key] for node in document["nodes"])]
    titles = [TITLES.get(key, key.capitalize()) for key in columns]
    return _page(
        "cluster.html.j2",
        cluster=document,
        clusters=names,
        columns=list(zip(columns, titles, strict=True)),
        waiting=waiting_json({cluster.name: queue.runs.get(cluster.name, ())}),
        lost=queue.lost,
        own=queue.own,
        failed=failed,
        jobs=listed.records[:MOST_JOBS],
        unheard=listed.unheard,
        problems=listed.problems,
        older=max(0, len(listed.records) - MOST_JOBS),
        ended=ENDED,
        experiments=list(EXPERIMENTS),
        fields=_fields(),
        said=said,
        error=error,
        root=root,
    )


def _fields() -> list[dict[str, Any]]:
    """The form's fields of a job, besides those that stand above them."""
    keys = {name: key_of(name) for name in PAGE_FIELDS}
    return [
        {
            "key": key,
            "label": key.replace("_", " ").capitalize(),
            "help": OPTIONS[name].help,
            "metavar": OPTIONS[name].metavar,
            "is_time": name != key,
        }
        for name, key in keys.items()
    ]


def job_page(record: JobRecord, words: Mapping[str, str], root: str) -> str:
    """words: more of it, by what it is called."""
    stall = standstill(record).words
    return _page("job.html.j2", job=record, words=words, stall=stall, ended=ENDED, root=root)


def error_page(error: OrchError, root: str, kept: str = "") -> str:
    """kept: the address of what can be shown all the same."""
    return _page("error.html.j2", error=error, root=root, kept=kept)


def script() -> str:
    return (OWN / "live.js").read_text()
