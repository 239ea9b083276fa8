"""Tables by host: clusters (`up`, `status`, `node`), profiles, run summaries, network measurements, doctor findings."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from orchestrator.doctor.observations import Mesh, Pair
from orchestrator.doctor.table import Diagnosis, Finding
from orchestrator.errors import HostError
from orchestrator.hosts.cluster import Cluster
from orchestrator.hosts.exec import host_set
from orchestrator.planning.profiles import BlockTimes, RankProfile, measured_shares
from orchestrator.results.network import Collectives, link_matrix
from orchestrator.results.summary import NodeSummary, Summary
from orchestrator.results.timeline import StageSummary
from orchestrator.units import counted, format_bandwidth, format_bytes, one_line
from orchestrator.views import console
from orchestrator.views import console as tables
from orchestrator.views.console import LEAST_NAME, UNKNOWN, age, figure, percent, table
from orchestrator.views.documents import DROPPED_FIRST, NODE_COLUMNS, cluster_json
from orchestrator.views.job_table import failure_words


def print_cluster(cluster: Cluster) -> None:
    _print_nodes(cluster, cluster_json(cluster)["nodes"], without="probed")


def print_status(cluster: Cluster, silent: Mapping[str, HostError] | None) -> None:
    """silent: nodes without an answer; None: not asked."""
    nodes = cluster_json(cluster, silent)["nodes"]
    _print_nodes(cluster, [{**node, "probed": age(node["probed"])} for node in nodes], without="added")
    known = {name: problem.as_error(name) for name, problem in cluster.problems.items()}
    console.fail_each({**known, **(silent or {})}.values())


def _print_nodes(cluster: Cluster, nodes: Sequence[Mapping[str, Any]], without: str) -> None:
    keys = [key for key in NODE_COLUMNS if key != without and any(node[key] for node in nodes)]
    titles = [{"address": "IP", "gpu": "GPU", "probed": "facts from"}.get(key, key) for key in keys]
    rows = [[str(node[key] or "") for key in keys] for node in nodes]
    console.out.print(table(f"cluster {cluster.name}", titles, rows, drop=DROPPED_FIRST))
    if cluster.master:
        console.out.print(Text.assemble("master: ", console.plain(cluster.master_reason, "bold")))


# The table of `orch profile`: speed of each rank alone, and its part of a batch.


def print_profiles(batch: int, known: Sequence[RankProfile]) -> None:
    shares = measured_shares(batch, known)
    tables.print_table(titles(batch), [cells(batch, each, shares.get(each.rank)) for each in known], right_from=2)
    if words := blocks_words([each.profile.blocks for each in known if each.profile.blocks]):
        console.put(words)


def titles(batch: int) -> tuple[str, ...]:
    return ("host", "GPU", "fixed ms", "ms/sample", "samples/s", "most at once", f"share of {batch}", "measured")


def cells(batch: int, each: RankProfile, share: int | None) -> tuple[str, ...]:
    """share: the rank's part of the batch."""
    (node, local_rank), known = each.rank, each.profile
    return (
        node if known.ranks == 1 else f"{node}:{local_rank}",
        known.gpu or known.device_name,
        figure(known.fixed_ms),
        figure(known.sample_ms),
        figure(known.samples_per_s(batch)),
        str(known.cap) if known.cap else f"> {known.largest}",
        UNKNOWN if share is None else str(share),
        ("now" if each.fresh else known.created[:16].replace("T", " ")) + f" on {known.node}",
    )


def blocks_words(known: Sequence[BlockTimes]) -> str:
    """ "" without measured blocks."""
    if not known:
        return ""
    stretches = min(blocks.stretches for blocks in known)
    in_groups = f" in {counted(stretches, 'group')}" if stretches < known[0].count else ""
    least, most = (figure(of(blocks.fixed_ms for blocks in known)) for of in (min, max))
    fixed = least if least == most else f"{least} to {most}"
    return f"blocks: {known[0].count} measured{in_groups}, fixed {fixed} ms a micro-batch"


# The summary of a collected run.

COLUMNS = (
    *("node", "GPU", "ranks", "batch/rank", "samples/s", "alone*"),
    *("step ms", "load", "compute", "sync", "wait", "optimiser"),
)
"""Times are means, so that the parts add up to the step."""
DISPENSABLE = ("ranks", "batch/rank", "optimiser", "load", "GPU", "alone*")
"""Dropped first on a narrow screen."""
SLOWED_SHOWN = 5
CLASSES_SHOWN = 20
STAGE_COLUMNS = ("stage", "held by", "blocks", "work", "compute", "bubble", "wire", "waits for")


def print_summary(summary: Summary) -> None:
    if summary.first_failure:
        console.put(failure_words(summary.first_failure))
    if summary.collectives:
        print_network(summary.collectives)
    else:
        print_hosts(summary)
    for sentence in (*summary.missing, *summary.warnings):
        console.warn(sentence)
    for each in summary.faster:
        console.put(each.words)
        console.put(f"  try: {each.command}")
    if summary.repeat:
        console.put(f"repeat: {summary.repeat}")


def print_hosts(summary: Summary) -> None:
    if summary.slow_words:
        console.put(summary.slow_words)
    title = f"{summary.experiment}: {summary.state}, {counted(summary.steps, 'measured step')}"
    shown = table(title, COLUMNS, list(map(_cells, summary.nodes)), right_from=2, drop=DISPENSABLE)
    console.out.print(shown)
    if summary.samples_per_s is not None:
        are_known = any(node.solo_samples_per_s or node.own_samples_per_s for node in summary.nodes)
        is_shown = are_known and any(column.header == "alone*" for column in shown.columns)
        has_star = summary.efficiency is not None or is_shown
        _print_speed(summary, has_star=has_star)
    if summary.stages:
        print_stages(summary)
    for sentence in _findings(summary):
        console.put(sentence)


def print_stages(summary: Summary) -> None:
    """The cut of the network, and times per stage."""
    rows = [_stage_cells(stage, several=summary.stages[-1].pipeline > 0) for stage in summary.stages]
    shown = table("stages, ms a step", STAGE_COLUMNS, rows, right_from=3, left_from=7, drop=("work", "wire"))
    console.out.print(shown)


def _stage_cells(stage: StageSummary, *, several: bool) -> tuple[str, ...]:
    """several: whether there are several pipelines."""
    number = f"{stage.pipeline + 1}.{stage.stage + 1}" if several else str(stage.stage + 1)
    times = (figure(each) for each in (stage.compute_ms, stage.bubble_ms, stage.wire_ms))
    return (number, stage.name, stage.blocks, percent(stage.work), *times, stage.waits_for or "-")


def _cells(node: NodeSummary) -> tuple[str, ...]:
    step = (node.step_ms.mean or node.step_ms.p50) if node.step_ms else None
    alone = node.solo_samples_per_s or node.own_samples_per_s
    parts = (node.load_ms, node.compute_ms, node.sync_ms, node.wait_ms, node.optim_ms)
    figures = (node.samples_per_s, alone, step, *parts)
    batch = "-" if node.batch_per_rank is None else str(node.batch_per_rank)
    return (node.name, node.gpu, str(node.ranks), batch, *map(figure, figures))


def _print_speed(summary: Summary, *, has_star: bool) -> None:
    """has_star: prints the footnote on standalone speeds."""
    whole = f"cluster: {figure(summary.samples_per_s)} samples/s"
    if summary.tokens_per_s is not None:
        whole += f" ({figure(summary.tokens_per_s)} tokens/s)"
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
    """Bottleneck, slowed GPUs, training results."""
    if summary.prediction and summary.of_prediction:
        yield f"{summary.prediction.words}; measured {percent(summary.of_prediction)} of it"
    if summary.bound and summary.bound.words.partition(": ")[2] not in summary.slow_words:
        yield summary.bound.words
    for node in summary.slowed[:SLOWED_SHOWN]:
        yield node.slowed_words
    if more := summary.slowed[SLOWED_SHOWN:]:
        yield f"so were GPUs of {counted(len(more), 'more host')} (the report and `--json` name them)"
    if summary.batch_norm:
        yield summary.batch_norm.words
    if summary.accuracy is not None:
        loss = f" ({summary.not_finite.words})" if summary.not_finite else ""
        yield f"test accuracy: {percent(summary.accuracy, 2)}{loss}"
        if summary.bits_per_byte is not None:
            yield f"test loss: {summary.bits_per_byte:.3f} bits per byte"
        yield from class_lines(summary.accuracy_per_class)
    if summary.target:
        yield f"target accuracy: {summary.target.words}"
    if summary.curves.epochs:
        yield f"epochs: {summary.curves.epoch_words}"


def class_lines(accuracies: Mapping[str, float]) -> list[str]:
    """At most 80 columns; of many classes the worst."""
    worst = sorted(accuracies, key=lambda name: accuracies[name])[:5]
    shown = list(accuracies) if len(accuracies) <= CLASSES_SHOWN else worst
    head = "  by class, %: " if shown is not worst else f"  worst of {len(accuracies)} classes, %: "
    cells = ", ".join(f"{one_line(name, 24)}\u00a0{100 * accuracies[name]:.1f}" for name in shown)
    wrapped = textwrap.wrap(head + cells, 80, subsequent_indent="    ", break_long_words=False) if cells else []
    return [line.replace("\u00a0", " ") for line in wrapped]


# Results of a run of collectives.


def print_network(found: Collectives) -> None:
    """A line per operation: times of the smallest and largest size, and the line between."""
    columns = ["operation", "size", "µs", "size", "bus Gbps", "of declared", "alpha µs", "beta Gbps", "off by at most"]
    rows = []
    for each in found.operations:
        ends = format_bytes(each.smallest_bytes), figure(each.latency_us), format_bytes(each.largest_bytes)
        line = percent(each.of_declared), figure(each.alpha_us), figure(each.beta_gbps), percent(each.worst_error)
        rows.append((each.operation, *ends, figure(each.busbw_gbps), *line))
    declared = f", declared {figure(found.declared_gbps)} Gbps" if found.declared_gbps else ""
    drop = ("off by at most", "of declared")
    console.out.print(table(f"collectives{declared}", columns, rows, right_from=1, drop=drop))
    if found.links:
        print_links(*link_matrix(found))


def print_links(names: Sequence[str], gbps: Mapping[tuple[str, str], float]) -> None:
    """Rows: sources; columns: targets; in as many tables as the screen needs."""
    title: str | None = "Gbps from one host to another, by itself"
    first = max(len("from / to"), *map(len, names))
    for part in _parts(names, max(LEAST_NAME, console.out.width - first)):
        rows = [(a, *(figure(gbps.get((a, b))) for b in part)) for a in names]
        console.out.print(table(title, ["from / to", *part], rows, right_from=1))
        title = None


def _parts(names: Sequence[str], width: int) -> Iterator[list[str]]:
    """Runs of names that fit into `width` columns, with two spaces before each; at least one name per run."""
    part: list[str] = []
    for name in names:
        if part and sum(len(each) + 2 for each in (*part, name)) > width:
            yield part
            part = []
        part.append(name)
    yield part


# Findings of `orch doctor`: a matrix of connections, findings with remedies, and a summary.

MOST_IN_MATRIX = 12
_STYLES = {"block": "red", "warn": "yellow"}
_WAYS = {"small only": "no large packets", "silent": "no answer"}


def print_diagnosis(found: Diagnosis) -> None:
    mesh = found.seen.mesh
    if mesh and mesh.pairs:
        _print_ways(mesh)
    for same in _together(found.findings):
        _print_finding(same)
    console.put(found.summary)


def _print_finding(same: Sequence[Finding]) -> None:
    """same: findings that differ only in their hosts and quantities."""
    first = same[0]
    console.out.print(
        Text.assemble(
            (f"{first.level}:", _STYLES[first.level]),
            " ",
            (f"{first.id} {first.name}", "bold"),
            ", ",
            console.plain(_where(same)),
            ": ",
            console.plain(ranged([finding.seen for finding in same])),
        )
    )
    console.out.print(Text.assemble("  ", ("if ignored:", "bold"), " ", console.plain(first.causes)))
    if first.remedy:
        console.out.print(Text.assemble("  ", ("try:", "bold"), " ", console.plain(first.remedy)))


WAYS_SHOWN = 4
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?) ?([kMGT]?)(bps|ms|s|%)(?!\w)")
_FACTORS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def ranged(texts: Sequence[str]) -> str:
    """Texts that differ only in quantities, as one: `242Mbps to 1.26Gbps measured`."""
    columns = zip(*([found for found in _QUANTITY.finditer(text)] for text in texts), strict=True)
    ends = [(min(each, key=_size), max(each, key=_size)) for each in columns]
    words = iter(low[0] if low[0] == high[0] else f"{low[0]} to {high[0]}" for low, high in ends)
    return _QUANTITY.sub(lambda _: next(words), texts[0])


def _size(quantity: re.Match[str]) -> float:
    return float(quantity[1]) * _FACTORS[quantity[2]] * (0.001 if quantity[3] == "ms" else 1.0)


def _where(same: Sequence[Finding]) -> str:
    if same[0].is_way and len(same) > WAYS_SHOWN:
        hosts = host_set(list(dict.fromkeys(name for finding in same for name in finding.where)))
        return f"{len(same)} directions between {hosts}"
    if same[0].is_way:
        return ", ".join(f"{finding.where[0]} -> {finding.where[1]}" for finding in same)
    return host_set(list(dict.fromkeys(name for finding in same for name in finding.where)))


def _together(findings: Sequence[Finding]) -> list[list[Finding]]:
    """In order of first appearance."""
    found = dict[tuple[str, ...], list[Finding]]()
    for finding in findings:
        key = (finding.id, finding.level, _QUANTITY.sub("", finding.seen), finding.remedy)
        found.setdefault(key, []).append(finding)
    return list(found.values())


def _print_ways(mesh: Mesh) -> None:
    """Rows: starts; columns: ends; as detailed as the screen allows, else only the count: findings name failed
    connections.
    """
    names = list(dict.fromkeys(pair.start for pair in mesh.pairs))
    ways = {(pair.start, pair.end): pair for pair in mesh.pairs}
    for cell in (_trip_and_speed, _speed):
        rows = [[Text(start), *(cell(ways.get((start, end))) for end in names)] for start in names]
        widths = [max(len(name), *(row[at].cell_len for row in rows)) for at, name in enumerate(["", *names])]
        if len(names) <= MOST_IN_MATRIX and sum(widths) + 2 * len(names) <= console.out.width:
            title = "connections between hosts (from the row's to the column's)"
            return console.out.print(table(title, ["", *names], rows))
    is_open = sum(pair.kind == "open" for pair in mesh.pairs)
    return console.put(f"{counted(len(mesh.pairs), 'connection')} between hosts, {is_open} open")


def _trip_and_speed(pair: Pair | None) -> Text:
    if pair is None or pair.kind != "open" or not pair.round_trip_s or not pair.bits_per_s:
        return _speed(pair)
    return Text(f"{1000 * pair.round_trip_s:.2g} ms, {format_bandwidth(pair.bits_per_s)}")


def _speed(pair: Pair | None) -> Text:
    if pair is None:
        return Text("-")
    if pair.kind != "open":
        return Text(_WAYS.get(pair.kind, pair.kind), "yellow" if pair.kind == "not tried" else "red")
    return Text(format_bandwidth(pair.bits_per_s) if pair.bits_per_s else "open")
