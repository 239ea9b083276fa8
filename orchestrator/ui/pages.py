"""Renders pages, performs the actions of their forms, and exports metrics. All values are escaped.

root: relative address of the first page, like "./" or "../".
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, FileSystemLoader
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from orchestrator.controller import Controller
from orchestrator.errors import OrchError, UsageError
from orchestrator.hosts.cluster import Cluster
from orchestrator.hosts.inventory_file import keys_of_new_node, node_with_defaults
from orchestrator.hosts.occupied import not_allowed
from orchestrator.jobs.job_list import Jobs
from orchestrator.jobs.job_store import ENDED, JobRecord
from orchestrator.jobs.live_stats import HostNow, JobNow
from orchestrator.jobs.queue_place import Rival
from orchestrator.jobs.stall import standstill
from orchestrator.planning.job_forms import run_line
from orchestrator.planning.job_spec import FILE, OPTIONS, PAGE_FIELDS, JobSpec, checked, from_text, key_of
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.planning.request import parse_pairs
from orchestrator.results.summary import Summary
from orchestrator.starting.retries import Asked
from orchestrator.units import format_duration
from orchestrator.views.charts import BarChart, LineChart
from orchestrator.views.console import UNKNOWN, clock, figure, local_minute, percent
from orchestrator.views.documents import NODE_COLUMNS, cluster_json, waiting_json
from orchestrator.views.job_table import lasted
from orchestrator.views.report import environment, headline
from orchestrator.views.run_charts import (
    HostStep,
    curve_charts,
    live_charts,
    speed_chart,
    split_chart,
    split_of_run,
)
from trainer.shared.config import EXPERIMENTS

OWN = Path(__file__).parent / "templates"
MOST_JOBS = 50
TITLES = {"name": "Host", "address": "IP", "gpu": "Model"}
NOT_SHOWN = ("torch", "venv", "probed")


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
    collected: Mapping[str, Summary],
    queue: Sequence[Rival],
    root: str,
    said: str = "",
    error: OrchError | None = None,
) -> str:
    """names: all remembered clusters. collected: by job. `said`: result of the last action. error: why it failed."""
    document = cluster_json(cluster)
    columns = [key for key in NODE_COLUMNS if key not in NOT_SHOWN and any(node[key] for node in document["nodes"])]
    titles = [TITLES.get(key, key.capitalize()) for key in columns]
    return _page(
        "cluster.html.j2",
        cluster=document,
        clusters=names,
        columns=list(zip(columns, titles, strict=True)),
        waiting=waiting_json({cluster.name: queue}),
        own={job.id for job in listed.records if job.state == "queued"},
        jobs=listed.records[:MOST_JOBS],
        collected=collected,
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


FIELD_LABELS = {"name": "Job name", "note": "Job note", "hosts": "Number of hosts"}
"""Labels of fields whose key is that of another field of the page."""


def _fields() -> list[dict[str, Any]]:
    """The job form's fields, except those written out in the template."""
    keys = {name: key_of(name) for name in PAGE_FIELDS}
    return [
        {
            "key": key,
            "label": FIELD_LABELS.get(key, key.replace("_", " ").capitalize()),
            "help": OPTIONS[name].help,
            "metavar": OPTIONS[name].metavar,
            "is_time": name != key,
        }
        for name, key in keys.items()
    ]


@dataclass(frozen=True)
class JobFigures:
    """A job's figures on the page, live or collected. facts: by title. split: each host's step."""

    slow_words: str
    facts: Mapping[str, str]
    split: BarChart | None
    charts: Sequence[LineChart]
    gpus: Sequence[HostNow] = ()
    note: str = ""


def figures_live(now: JobNow) -> JobFigures:
    progress = now.progress
    facts = {
        "step": f"{now.step or 0:,}" + (f" of {now.steps:,}" if now.steps else ""),
        "samples/s": figure(now.samples_per_s),
        **({"loss": figure(now.loss)} if now.loss is not None else {}),
        "running": clock(progress.elapsed_s) if progress.elapsed_s is not None else UNKNOWN,
        "left, about": clock(progress.left_s) if progress.left_s is not None else UNKNOWN,
    }
    rows = [host.row for host in now.hosts if host.row]
    steps = [HostStep(row.node, row.parts_ms) for row in rows if row.parts_ms]
    silent = "; ".join(f"{host.node}: {host.silent}" for host in now.hosts if host.silent)
    waiting = "" if rows else "waiting for the first step"
    return JobFigures(now.slow_words, facts, split_chart(steps), live_charts(now.course), now.hosts, silent or waiting)


def figures_collected(summary: Summary) -> JobFigures:
    facts = {
        "steps measured": f"{summary.steps:,}",
        "samples/s": figure(summary.samples_per_s),
        "efficiency": percent(summary.efficiency),
        **({"accuracy": percent(summary.accuracy, 2)} if summary.accuracy is not None else {}),
        **({"loss": figure(summary.loss)} if summary.loss is not None else {}),
        "in all": UNKNOWN if summary.total_s is None else format_duration(summary.total_s),
    }
    charts = [chart for chart in (speed_chart(summary), *curve_charts(summary.curves)) if chart]
    return JobFigures(headline(summary), facts, split_of_run(summary), charts)


def figures_part(figures: JobFigures) -> str:
    """A part of the job's page, which replaces the one before."""
    return _page("figures.html.j2", figures=figures)


def job_page(record: JobRecord, plan: LaunchPlan, figures: JobFigures | None, root: str) -> str:
    """figures: None while the job runs, and if it has ended and was not collected."""
    return _page(
        "job.html.j2",
        job=record,
        plan=plan,
        figures=figures,
        stall=standstill(record).words,
        repeat=run_line(plan),
        ended=ENDED,
        root=root,
    )


def error_page(error: OrchError, root: str, kept: str = "") -> str:
    """kept: address of an older copy."""
    return _page("error.html.j2", error=error, root=root, kept=kept)


def script() -> str:
    return (OWN / "live.js").read_text()


# Actions by the names of their forms; each does what a command does, and returns a sentence about the result.

Form = Mapping[str, str]


def add(controller: Controller, cluster: Cluster, form: Form) -> str:
    """Adds a host, by the form's fields and further KEY=VALUE words."""
    given = {key: form[key].strip() for key in ("host", "gpu", "bandwidth", "note") if form.get(key, "").strip()}
    pairs = {**given, **parse_pairs(_words(form, "more"), "KEY=VALUE")}
    keys = keys_of_new_node(form.get("name", "").strip(), pairs)
    new, _ = node_with_defaults(cluster, keys)
    if not_allowed(controller.store.home, [new]):
        raise UsageError(f"{new.name} would run commands on this machine", "add it by `orch node add`, which asks")
    found = controller.clusters.add_node(cluster, keys, new)
    return "; ".join([f"{new.name} was added", *found.warnings])


def release(controller: Controller, cluster: Cluster, form: Form) -> str:
    controller.clusters.release_node(cluster, form["node"], restore=False)
    return f"{form['node']} is released: it gets no job until it is restored"


def restore(controller: Controller, cluster: Cluster, form: Form) -> str:
    controller.clusters.release_node(cluster, form["node"], restore=True)
    return f"{form['node']} takes part again"


def remove(controller: Controller, cluster: Cluster, form: Form) -> str:
    controller.clusters.remove_node(cluster, form["node"])
    return f"{form['node']} was taken out of the cluster; the inventory file stays as it is"


def master(controller: Controller, cluster: Cluster, form: Form) -> str:
    found = controller.clusters.pin_master(cluster, form["node"] or None)
    return f"master: {found.master_reason}"


def run(controller: Controller, cluster: Cluster, form: Form) -> str:
    plan = controller.start(_asked(controller, cluster, form)).plan
    begins = f"{plan.job} starts when its GPUs are free" if plan.asked.waits else f"started {plan.job}"
    return "; ".join([begins, *plan.notes, *(f"{one.words}: {one.command}" for one in plan.faster)])


def _asked(controller: Controller, cluster: Cluster, form: Form) -> Asked:
    asked = controller.read(job_of(cluster, form))
    return replace(asked, job=replace(asked.job, request=replace(asked.request, detached=True)))


def job_of(cluster: Cluster, form: Form) -> JobSpec:
    """An experiment, or a script of this machine with its arguments; its hosts wait for their GPUs."""
    command = _words(form, "script")
    values = {name: _value(name, form.get(key_of(name), "")) for name in ("exp", "settings", "nodes", *PAGE_FIELDS)}
    program = {"script": command[0], "args": command[1:] or None} if command else {}
    waits = {"wait": True} if form.get("wait") else {}
    return checked({"cluster": cluster.name, **values, **program, **waits}, FILE)


def _value(name: str, text: str) -> Any:
    with _closed_quotes(key_of(name), text):
        return from_text(name, text)


def cancel(controller: Controller, cluster: Cluster, form: Form) -> str:
    job = controller.jobs.find(form["job"])
    _, stayed = job.cancel()
    if stayed:
        raise OrchError(f"{job.id} may still be running: {'; '.join(stayed)}", "`orch reap` lists what is left")
    return f"{job.id} was ended on every host"


def _words(form: Form, field: str) -> tuple[str, ...]:
    """Split as by a shell. Raises UsageError."""
    with _closed_quotes(field, text := form.get(field, "")):
        return tuple(shlex.split(text))


@contextmanager
def _closed_quotes(field: str, text: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise UsageError(f"{field}: {text}: {error}", "close each quote that is opened") from error


ACTS: dict[str, Callable[[Controller, Cluster, Form], str]] = {
    act.__name__: act for act in (add, release, restore, remove, master, run, cancel)
}
NEEDED: dict[str, str] = {**dict.fromkeys(("release", "restore", "remove", "master"), "node"), "cancel": "job"}
"""The required field of each form."""


# OpenMetrics for Prometheus.

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
OF_HOST = {
    "samples_per_second": ("samples_per_s", "Samples that the host takes a second"),
    "loss": ("loss", "Mean training loss over the newest steps of the host"),
    "wait_ratio": ("wait_share", "Part of its time in which the host waits for slower ones"),
    "sync_ratio": ("sync_share", "Part of its time in which only the network holds the host up"),
    "step": ("step", "Steps that the host has done"),
}
OF_GPU = {
    "utilisation_ratio": ("utilisation", 0.01, "How busy the GPU is"),
    "memory_bytes": ("memory_bytes", 1.0, "Memory in use on the GPU"),
    "temperature_celsius": ("celsius", 1.0, "Temperature of the GPU"),
    "power_watts": ("watts", 1.0, "Power that the GPU draws"),
}


LABELS = ("job", "cluster", "node")


class JobsCollector(Collector):
    def __init__(self, jobs: Sequence[JobNow]) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        heard = GaugeMetricFamily("orch_host_heard", "Whether the host of the job answers", labels=LABELS)
        for labels, host in self._hosts():
            heard.add_metric(labels, 0.0 if host.silent else 1.0)
        yield heard
        for name, (field, words) in OF_HOST.items():
            family = GaugeMetricFamily(f"orch_host_{name}", words, labels=LABELS)
            for labels, host in self._hosts():
                _add(family, labels, getattr(host.row, field) if host.row else None)
            yield family
        for name, (field, factor, words) in OF_GPU.items():
            family = GaugeMetricFamily(f"orch_gpu_{name}", words, labels=[*LABELS, "gpu"])
            for labels, host in self._hosts():
                for gpu in host.gpus:
                    _add(family, [*labels, str(gpu.index)], getattr(gpu, field), factor)
            yield family

    def _hosts(self) -> Iterator[tuple[list[str], HostNow]]:
        for job in self._jobs:
            for host in job.hosts:
                yield [job.record.id, job.record.cluster, host.node], host


def _add(family: GaugeMetricFamily, labels: Sequence[str], value: float | None, factor: float = 1.0) -> None:
    if value is not None:
        family.add_metric(labels, factor * value)


def metrics_of(jobs: Sequence[JobNow]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(JobsCollector(jobs))
    text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return text
