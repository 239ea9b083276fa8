"""The summary of a collected run: its hosts compared, and what that comes to."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from orchestrator.results.stages import StageSummary
from orchestrator.results.summary import NodeSummary, Summary
from orchestrator.text import one_line
from orchestrator.units import counted
from orchestrator.views import console
from orchestrator.views.figures import figure, percent
from orchestrator.views.job_table import failure_words
from orchestrator.views.network import print_network
from orchestrator.views.tables import table

COLUMNS = (
    *("node", "GPU", "ranks", "batch/rank", "samples/s", "alone*", "step ms"),
    *("load", "compute", "sync", "wait"),
)
DISPENSABLE = ("ranks", "batch/rank", "load", "GPU", "alone*")
"""What a narrow screen does without, the first ones first."""
SLOWED_SHOWN = 5
CLASSES_SHOWN = 20
STAGE_COLUMNS = ("stage", "held by", "blocks", "work", "compute", "bubble", "wire", "waits for")


def print_summary(summary: Summary) -> None:
    """The comparison of the hosts, and what it comes to."""
    if summary.collectives:
        print_network(summary.collectives)
    else:
        print_hosts(summary)
    if summary.first_failure:
        console.put(failure_words(summary.first_failure))
    for sentence in (*summary.missing, *summary.warnings):
        console.warn(sentence)
    for each in summary.faster:
        console.put(each.words)
        console.put(f"  try: {each.command}")
    if summary.repeat:
        console.put(f"repeat: {summary.repeat}")


def print_hosts(summary: Summary) -> None:
    title = f"{summary.experiment}: {summary.state}, {counted(summary.steps, 'measured step')}"
    shown = table(title, COLUMNS, list(map(_cells, summary.nodes)), right_from=2, drop=DISPENSABLE)
    console.out.print(shown)
    if summary.samples_per_s is not None:
        has_star = summary.efficiency is not None or any(column.header == "alone*" for column in shown.columns)
        _print_speed(summary, has_star=has_star)
    if summary.stages:
        print_stages(summary)
    for sentence in _findings(summary):
        console.put(sentence)


def print_stages(summary: Summary) -> None:
    """How the network was cut, and where each part's time goes."""
    rows = [_stage_cells(stage, several=summary.stages[-1].pipeline > 0) for stage in summary.stages]
    shown = table("stages, ms a step", STAGE_COLUMNS, rows, right_from=3, left_from=7, drop=("work", "wire"))
    console.out.print(shown)


def _stage_cells(stage: StageSummary, *, several: bool) -> tuple[str, ...]:
    """several: are there other pipelines beside?"""
    number = f"{stage.pipeline + 1}.{stage.stage + 1}" if several else str(stage.stage + 1)
    times = (figure(each) for each in (stage.compute_ms, stage.bubble_ms, stage.wire_ms))
    return (number, stage.name, stage.blocks, percent(stage.work), *times, stage.waits_for or "-")


def _cells(node: NodeSummary) -> tuple[str, ...]:
    step = node.step_ms.p50 if node.step_ms else None
    alone = node.solo_samples_per_s or node.own_samples_per_s
    figures = (node.samples_per_s, alone, step, node.load_ms, node.compute_ms, node.sync_ms, node.wait_ms)
    batch = "-" if node.batch_per_rank is None else str(node.batch_per_rank)
    return (node.name, node.gpu, str(node.ranks), batch, *map(figure, figures))


def _print_speed(summary: Summary, *, has_star: bool) -> None:
    """How fast the whole was. has_star: a footnote says what the hosts alone are judged by."""
    whole = f"cluster: {figure(summary.samples_per_s)} samples/s"
    if summary.efficiency is not None:
        whole += f", {percent(summary.efficiency)} of its hosts' combined standalone speed*"
    console.put(whole)
    if has_star:
        console.out.print(f"* {summary.basis_words}", style="dim")
    console.put(f"left out: {summary.left_out_words}")
    if summary.samples_words:
        console.put(summary.samples_words)
    if summary.wall_clock_words:
        console.put(summary.wall_clock_words)


def _findings(summary: Summary) -> Iterator[str]:
    """What limited the run, who was waited for, and what it learned."""
    if summary.prediction and summary.of_prediction:
        yield f"{summary.prediction.words}; measured {percent(summary.of_prediction)} of it"
    if summary.bound:
        yield summary.bound.words
    if summary.straggler:
        yield f"straggler: {summary.straggler.node} — {summary.straggler.reason}"
    for node in summary.slowed[:SLOWED_SHOWN]:
        yield node.slowed_words
    if more := summary.slowed[SLOWED_SHOWN:]:
        yield f"so were GPUs of {counted(len(more), 'more host')} (the report and `--json` name them)"
    if summary.batch_norm:
        yield summary.batch_norm.words
    if summary.accuracy is not None:
        loss = f" ({summary.not_finite.words})" if summary.not_finite else ""
        yield f"test accuracy: {percent(summary.accuracy, 2)}{loss}"
        yield from class_lines(summary.accuracy_per_class)
    if summary.target:
        yield f"target accuracy: {summary.target.words}"
    if summary.curves.epochs:
        yield f"epochs: {summary.curves.epoch_words}"


def class_lines(accuracies: Mapping[str, float]) -> list[str]:
    """In at most 80 columns; of many classes those that did worst."""
    worst = sorted(accuracies, key=lambda name: accuracies[name])[:5]
    shown = list(accuracies) if len(accuracies) <= CLASSES_SHOWN else worst
    head = "  by class, %: " if shown is not worst else f"  worst of {len(accuracies)} classes, %: "
    cells = ", ".join(f"{one_line(name, 24)}\u00a0{100 * accuracies[name]:.1f}" for name in shown)
    wrapped = textwrap.wrap(head + cells, 80, subsequent_indent="    ", break_long_words=False) if cells else []
    return [line.replace("\u00a0", " ") for line in wrapped]
