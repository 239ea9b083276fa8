"""What a person sees: tables and lines, by rich. With `cli` the only file that prints.

Results go to standard output, everything else (progress, notices, errors) to standard error; colours only on a
terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from orchestrator.controller import Notice
from orchestrator.lines import Line
from orchestrator.records import FirstFailure, JobRecord, LaunchPlan
from orchestrator.store import Cluster
from orchestrator.summary import Summary
from orchestrator.text import one_line
from orchestrator.units import format_bandwidth, format_bytes


class _Out(Console):
    def on_broken_pipe(self) -> None:
        """rich would exit with 1 here; `cli` knows that a reader who has left is no error."""
        raise BrokenPipeError


# A pipe has no width: a table is not to be folded for it.
out = _Out(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)
err = Console(stderr=True, highlight=False, soft_wrap=True)

_RANK_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "bright_cyan", "bright_magenta", "bright_yellow")
_STATE_COLOURS = {"succeeded": "green", "failed": "red", "lost": "red", "cancelled": "yellow", "running": "cyan"}


def say(text: str) -> None:
    """A line beside the result."""
    err.print(escape(text))


def warn(text: str) -> None:
    err.print(f"[yellow]note:[/] {escape(text)}")


def fail(message: str, remedy: str = "") -> None:
    """An error: what is wrong, then what to try."""
    for line in message.splitlines():
        err.print(f"[red]error:[/] {escape(line)}")
    if remedy:
        err.print(f"  [bold]try:[/] {escape(remedy)}")


def print_json(value: Any) -> None:
    """The one document of `--json`, never coloured or wrapped."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


# ---- the cluster ----------------------------------------------------------------------------------------------


def print_cluster(cluster: Cluster) -> None:
    columns = ("name", "IP", "id", "note", "GPU", "bandwidth", "image", "torch", "status", "added")
    out.print(_table(f"cluster {cluster.name}", columns, cluster_rows(cluster)))
    if cluster.master:
        out.print(f"master: [bold]{escape(cluster.master_reason)}[/]")


def cluster_rows(cluster: Cluster) -> list[tuple[str, ...]]:
    return [tuple(str(value or "") for value in row.values()) for row in cluster_json(cluster)["nodes"]]


def cluster_json(cluster: Cluster) -> dict[str, Any]:
    """The document of `orch up --json` and `orch status --json`."""
    rows = []
    for node in cluster.nodes:
        facts = cluster.facts.get(node.name)
        gpu = node.gpu or (facts.gpus[0].name if facts and facts.gpus else None)
        count = node.gpus or (len(facts.gpus) if facts else 0)
        rows.append(
            {
                "name": node.name,
                "address": node.address or node.host,
                "id": node.id,
                "note": node.note,
                "gpu": f"{count}x {gpu}" if gpu and count > 1 else gpu or ("CPU" if facts else None),
                "bandwidth": format_bandwidth(node.bandwidth_bps) if node.bandwidth_bps else None,
                "image": node.image,
                "torch": facts.torch.version if facts and facts.torch else None,
                "status": node_status(cluster, node.name),
                "added": _short_time(cluster.added.get(node.name)),
            }
        )
    return {
        "schema": 1,
        "cluster": cluster.name,
        "file": cluster.file,
        "master": cluster.master,
        "master_reason": cluster.master_reason,
        "nodes": rows,
        "problems": {name: problem.model_dump() for name, problem in cluster.problems.items()},
    }


def node_status(cluster: Cluster, name: str) -> str:
    if name in cluster.released:
        return "released"
    if name in cluster.problems:
        return "unusable"
    if name == cluster.master:
        return "master"
    return "connected" if name in cluster.facts else "not probed"


# ---- jobs -----------------------------------------------------------------------------------------------------


def print_jobs(jobs: Sequence[JobRecord]) -> None:
    rows = []
    for job in jobs:
        colour = _STATE_COLOURS.get(job.state, "default")
        failure = job.first_failure
        rows.append(
            (
                Text(job.id),
                Text(job.state, style=colour),
                Text(job.exp),
                Text(", ".join(job.nodes)),
                Text(_short_time(job.started) or ""),
                Text(_short_time(job.ended) or ""),
                Text("" if job.exit_code is None else str(job.exit_code)),
                Text(one_line(f"{failure.node}: {failure.reason}", 80) if failure else ""),
            )
        )
    out.print(_table(None, ("job", "state", "exp", "nodes", "started", "ended", "exit", "first failure"), rows))


def jobs_json(jobs: Sequence[JobRecord]) -> dict[str, Any]:
    keys = ("id", "state", "exp", "nodes", "started", "ended", "exit_code", "first_failure")
    return {"schema": 1, "jobs": [{key: job.model_dump(mode="json")[key] for key in keys} for job in jobs]}


def print_end(job: JobRecord) -> None:
    """How a job ended; the failing rank's own code is on the last line."""
    colour = _STATE_COLOURS.get(job.state, "default")
    err.print(f"[{colour}]{job.state}[/] {escape(job.id)}")
    if job.first_failure:
        say(failure_words(job.first_failure))
    if job.exit_code:
        err.print(f"exit code {job.exit_code}")


def failure_words(failure: FirstFailure) -> str:
    log = f"\n  its log says: {one_line(failure.log_line)}" if failure.log_line else ""
    return f"first cause: {one_line(failure.node)}: {one_line(failure.reason)}{log}"


# ---- a plan ---------------------------------------------------------------------------------------------------


def print_plan(plan: LaunchPlan) -> None:
    """The whole plan as text: exactly what would run."""
    rendezvous = f"{plan.master_address}:{plan.rendezvous_port}"
    out.print(f"job {escape(plan.job)} on cluster {escape(plan.cluster)}: {plan.world_size} ranks")
    out.print(f"master {escape(plan.master)}, rendezvous {rendezvous} (static)")
    size = format_bytes(plan.code.size_bytes)
    out.print(
        f"ships {plan.code.files} files, {size}, from {escape(plan.code.source)} (sha256 {plan.code.sha256[:12]})"
    )
    for node in plan.nodes:
        ranks = f"ranks {node.first_rank}..{node.first_rank + node.ranks - 1}"
        out.print(f"\n[bold]{escape(node.name)}[/] node rank {node.node_rank}, {ranks} on {node.device}")
        out.print(f"  address    {node.address} on {node.interface or 'an unknown interface'}")
        if node.shares:
            out.print(f"  batch      {' + '.join(map(str, node.shares))} samples a step")
        out.print(f"  workdir    {escape(node.workdir)}")
        if node.prepare:
            out.print(f"  prepare    {escape(node.prepare)}")
        out.print(f"  env        {escape(' '.join(f'{k}={v}' for k, v in node.env.items()))}")
        out.print(f"  torchrun   {escape(' '.join((node.python, *node.torchrun)))}")
        out.print(f"  rank runs  {escape(' '.join((node.python, *node.command)))}")
    for note in plan.notes:
        warn(note)


# ---- following ------------------------------------------------------------------------------------------------


def print_events(events: Iterable[Line | Notice], show: Any = lambda line: True, stream: Console | None = None) -> None:
    """Every line with its node and rank before it, a colour a rank."""
    for event in events:
        if isinstance(event, Notice):
            warn(event.text)
        elif show(event):
            colour = _RANK_COLOURS[event.rank % len(_RANK_COLOURS)]
            prefix = Text(f"[{event.node} {event.rank}] ", style=colour)
            (stream or out).print(prefix + Text(event.text, style="dim" if event.stream == "stderr" else ""))


# ---- results --------------------------------------------------------------------------------------------------


def print_summary(summary: Summary) -> None:
    """The comparison of the hosts, and what it comes to."""
    columns = (
        "node",
        "GPU",
        "ranks",
        "batch/rank",
        "samples/s",
        "alone*",
        "step ms",
        "load",
        "compute",
        "sync",
        "wait",
    )
    rows = []
    for node in summary.nodes:
        step = node.step_ms.p50 if node.step_ms else None
        alone = node.solo_samples_per_s or node.own_samples_per_s
        figures = (node.samples_per_s, alone, step, node.load_ms, node.compute_ms, node.sync_ms, node.wait_ms)
        batch = "" if node.batch_per_rank is None else str(node.batch_per_rank)
        rows.append((node.name, node.gpu, str(node.ranks), batch, *(_figure(value) for value in figures)))
    title = f"{summary.experiment}: {summary.state}, {summary.steps} measured steps"
    out.print(_table(title, columns, rows, right_from=2))
    if summary.samples_per_s is not None:
        whole = f"cluster: {_figure(summary.samples_per_s)} samples/s"
        if summary.efficiency is not None:
            whole += f", {summary.efficiency:.2f} of the sum of its hosts' speeds alone*"
        out.print(whole)
        measured = summary.efficiency_basis == "solo"
        out.print(
            "* " + ("measured with each host alone" if measured else "estimated: samples over compute time"),
            style="dim",
        )
    if summary.straggler:
        out.print(f"straggler: {escape(summary.straggler.node)} — {escape(summary.straggler.reason)}")
    if summary.accuracy is not None:
        out.print(f"test accuracy: {summary.accuracy:.2%}")
    if summary.first_failure:
        out.print(escape(failure_words(summary.first_failure)))
    for sentence in (*summary.missing, *summary.warnings):
        warn(sentence)


def print_answers(answers: Mapping[str, Any], words: Any) -> None:
    """One line a host: what it answered in words, or its error."""
    for node, answer in answers.items():
        if isinstance(answer, Exception):
            fail(str(answer))
        else:
            out.print(f"{escape(node)}: {escape(words(answer))}")


def _table(title: str | None, columns: Sequence[str], rows: Sequence[Sequence[Any]], right_from: int = 99) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index >= right_from else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(one_line(cell)) for cell in row))
    return table


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}" if value < 10 else f"{value:.1f}"


def _short_time(iso: str | None) -> str | None:
    """Local time, to the minute."""
    try:
        return f"{datetime.fromisoformat(iso).astimezone():%Y-%m-%d %H:%M}" if iso else None
    except ValueError:
        return None
