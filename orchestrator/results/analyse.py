"""From a collected run folder to its figures: who did how much, who waited for whom, how close to the sum of the parts.

Takes plan.json, job.json and the ranks' metrics; writes steps.parquet and summary.json; gives the `Summary`.

    summary = analyse(RunFolder(Path("runs/mnist_lenet-20261121-0912-k3f")))
    summary.straggler           # Straggler(node="a2000", reason="computes 2.4x longer per sample than v100", ...)

How the steps are measured stands in `measure`; here hosts are compared, and what is missing or odd is put into words.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from orchestrator.errors import OrchError
from orchestrator.files import write_json
from orchestrator.jobs.faults import lost_nodes
from orchestrator.jobs.metric_lines import count, number, text
from orchestrator.jobs.record import FirstFailure, JobRecord
from orchestrator.jobs.stall import last_words
from orchestrator.paths import RunFolder
from orchestrator.planning.launch_plan import LaunchPlan, NodePlan
from orchestrator.record import RECORD_LIMIT, SCHEMA, require_record
from orchestrator.results.batch_norm import read_batch_norm
from orchestrator.results.curves import Curves, read_curves
from orchestrator.results.events import Events, MetricsFile
from orchestrator.results.faster import measured as faster_ways
from orchestrator.results.gpu_use import read_gpu_use
from orchestrator.results.measure import Figures, gpu_label, measure, write_steps
from orchestrator.results.network import measures_collectives, not_measured, read_collectives, unpaced
from orchestrator.results.rebalances import read_rebalances
from orchestrator.results.straggler import find_bound, find_straggler
from orchestrator.results.summary import GpuSummary, NodeSummary, RankEnd, Summary
from orchestrator.results.tables import read_events
from orchestrator.results.used import CHANGES, settings_used
from orchestrator.text import one_line
from orchestrator.units import format_bytes
from trainer.shared.metrics import SCHEMA as METRICS_SCHEMA

REMEDY = "a run folder is what `orch collect --job ID` makes"

AnyFailure = TypeVar("AnyFailure", bound=FirstFailure)


def analyse(run: RunFolder, solo: Mapping[str, float] | None = None) -> Summary:
    """Figures of the run in this folder; writes steps.parquet and summary.json there.

    solo: samples/s that a node did alone, by node, in place of what its profile in the plan says.

    Raises OrchError when there is no plan to read; what else is absent or damaged is told in the summary's `missing`
    and `warnings`.
    """
    plan = require_record(run.plan, LaunchPlan, REMEDY)
    if measures_collectives(plan):
        plan = unpaced(plan)
    missing: list[str] = []
    job: JobRecord | None = None
    try:
        job = require_record(run.job, JobRecord, REMEDY)
    except OrchError as error:
        missing.append(f"The job's record is not here ({error.message}), so how it ended is not known.")
    plan = _without_lost(plan, job)
    missing += [words for node in plan.nodes for words in _left_on_host(node.name, run)]
    files = [
        MetricsFile(node.name, rank, run.metrics(node.name, rank)) for node in plan.nodes for rank in node.rank_numbers
    ]
    with read_events(files) as events:
        figures = measure(events, plan)
        write_steps(events, plan, run.steps)
        alone = {node.name: node.solo_samples_per_s for node in plan.nodes if node.solo_samples_per_s}
        summary = _summarise(plan, job, figures, events, {**alone, **(solo or {})}, missing)
    nodes = tuple(_as_seen_by_its_host(node, plan, run) for node in summary.nodes)
    summary = summary.model_copy(update={"nodes": nodes})
    write_json(run.summary, summary.to_json())
    return summary


def _without_lost(plan: LaunchPlan, job: JobRecord | None) -> LaunchPlan:
    """The plan as it was carried out in the end: of an elastic job, without the hosts that it went on without."""
    lost = lost_nodes(job.faults) if job else frozenset[str]()
    left = tuple(node for node in plan.nodes if node.name not in lost)
    return plan.model_copy(update={"nodes": left, "world_size": sum(node.ranks for node in left)}) if lost else plan


# ---- summing up: a few numbers a rank -----------------------------------------------------------------------------


def _summarise(
    plan: LaunchPlan,
    job: JobRecord | None,
    figures: Figures,
    events: Events,
    solo: dict[str, float],
    missing: list[str],
) -> Summary:
    starts = events.latest("start")
    wall_s = max((rank.total_ms for rank in figures.ranks.values()), default=0.0) / 1000
    nodes = tuple(_node_summary(node, figures, events, wall_s, solo.get(node.name)) for node in plan.nodes)
    speed = _over(sum(rank.samples for rank in figures.ranks.values()), wall_s) if figures.ranks else None
    whole = len(figures.reported) == plan.world_size
    efficiency, basis = _efficiency(speed, nodes) if whole else (None, None)
    first_start = next(iter(starts.values()), {})
    paced = any(node.paced for node in nodes)
    restarts = max(events.starts().values(), default=1) - 1
    collectives = read_collectives(events, plan) if measures_collectives(plan) else None
    settings, asked = settings_used(plan, starts, events.since_start("setting", CHANGES))
    rebalances = read_rebalances(events, plan)
    evaluation = {} if paced else next(iter(events.latest("eval").values()), {})
    return Summary(
        schema=SCHEMA,
        job=plan.job,
        experiment=plan.exp,
        kind=plan.kind,
        cluster=plan.cluster,
        master=plan.master,
        created=plan.created,
        started=job.started if job else None,
        ended=job.ended if job else None,
        command=shlex.join(plan.nodes[0].command) if plan.nodes else None,
        code=plan.code,
        settings=settings,
        asked=asked,
        state=job.state if job else "unknown",
        world_size=plan.world_size,
        samples_per_s=speed,
        prediction=plan.prediction,
        efficiency=efficiency,
        efficiency_basis=basis,
        faster=faster_ways(plan, nodes, speed) if whole else (),
        nodes=nodes,
        by_gpu=_by_gpu(nodes, plan, figures),
        straggler=find_straggler(plan, figures) if whole else None,
        bound=find_bound(plan, figures) if whole else None,
        missing=(*missing, *_missing(plan, events, figures), *(not_measured(collectives) if collectives else ())),
        warnings=(*(last_words(plan, job) if job else ()), *_warnings(plan, events, figures, nodes)),
        first_failure=_cleaned(job.first_failure) if job and job.first_failure else None,
        faults=tuple(_cleaned(fault) for fault in job.faults) if job else (),
        restarts=restarts,
        metrics=len(events.absent) < plan.world_size,
        steps=figures.steps,
        warmup_steps_left_out=figures.warmup_steps,
        samples_total=figures.samples_total,
        total_s=max(_totals_s(events), default=None),
        model=text(first_start, "model"),
        parameters=count(first_start, "parameters"),
        gradient_bytes=count(first_start, "gradient_bytes"),
        accuracy=_ratio(evaluation.get("accuracy")),
        accuracy_per_class=_per_class(evaluation.get("per_class")),
        loss=None if paced else figures.loss,
        batch_norm=read_batch_norm(starts, plan, rebalances),
        curves=Curves() if paced or collectives else read_curves(events),
        rebalances=rebalances,
        collectives=collectives,
    )


def _node_summary(node: NodePlan, figures: Figures, events: Events, wall_s: float, solo: float | None) -> NodeSummary:
    numbers = node.rank_numbers
    mine = figures.of(node)
    starts, ends = events.latest("start"), events.latest("end")
    start = next((starts[rank] for rank in numbers if rank in starts), {})
    own = [_over(rank.samples, (rank.compute_total_ms or 0) / 1000) for rank in mine]
    memory = [size for rank in numbers if (size := count(ends.get(rank, {}), "peak_memory_bytes")) is not None]
    return NodeSummary(
        name=node.name,
        gpu=gpu_label(node),
        ranks=node.ranks,
        batch_per_rank=_batch_per_rank(node, start, figures),
        samples_per_s=_over(sum(rank.samples for rank in mine), wall_s) if len(mine) == node.ranks else None,
        own_samples_per_s=_sum(own) if len(mine) == node.ranks else None,
        solo_samples_per_s=solo,
        step_ms=figures.step_ms.get(node.name),
        load_ms=_mean(rank.load_ms for rank in mine),
        compute_ms=_mean(rank.compute_ms for rank in mine),
        sync_ms=_mean(rank.sync_ms for rank in mine),
        wait_ms=_mean(rank.wait_ms for rank in mine),
        optim_ms=_mean(rank.optim_ms for rank in mine),
        peak_memory_bytes=max(memory, default=None),
        paced=node.paced is not None,
        valid=node.paced is None or all(ends.get(rank, {}).get("valid") is True for rank in numbers),
        host=text(start, "host"),
        device_name=text(start, "device_name"),
        torch=text(start, "torch"),
        nccl=text(start, "nccl"),
        backend=text(start, "backend"),
        bandwidth_bps=node.bandwidth_bps,
        system=node.system,
    )


def _batch_per_rank(node: NodePlan, start: Mapping[str, Any], figures: Figures) -> int | None:
    """As its first rank tells, else as `--batch` split it, else what a script's measured steps held on the average."""
    told = count(start, "batch_per_rank")
    if told is not None:
        return told
    if node.shares:
        return node.shares[0]
    samples = [rank.samples for rank in figures.of(node)[:1]]
    return round(samples[0] / figures.steps) if samples and figures.steps else None


def _as_seen_by_its_host(node: NodeSummary, plan: LaunchPlan, run: RunFolder) -> NodeSummary:
    """With what its supervisor noted: use and memory of the GPUs, and how every rank ended."""
    gpu = read_gpu_use(run.gpu(node.name))
    memory = gpu.memory_bytes if node.peak_memory_bytes is None else node.peak_memory_bytes
    ends = tuple(_rank_ends(run.agent(node.name), plan.node(node.name)))
    update = {"gpu_utilisation": gpu.utilisation, "peak_memory_bytes": memory, "slowed": gpu.slowed, "ends": ends}
    return node.model_copy(update=update)


def _rank_ends(agent: Path, node: NodePlan) -> Iterable[RankEnd]:
    """agent: the supervisor's record, written on the host and not taken on trust."""
    told: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError), open(agent, "rb") as file:
        told = json.loads(file.read(RECORD_LIMIT))
    ranks = told.get("ranks") if isinstance(told, dict) else None
    for rank in node.rank_numbers:
        end = ranks.get(str(rank)) if isinstance(ranks, dict) else None
        known = {key: end.get(key) for key in ("exit_code", "signal")} if isinstance(end, dict) else {}
        try:
            yield RankEnd(rank=rank, **known)
        except ValidationError:
            yield RankEnd(rank=rank)


def _totals_s(events: Events) -> list[float]:
    totals = (number(end, "total_s") for end in events.latest("end").values())
    return [total_s for total_s in totals if total_s is not None and total_s >= 0]


def _efficiency(speed: float | None, nodes: tuple[NodeSummary, ...]) -> tuple[float | None, Any]:
    """The cluster's speed over the sum of its hosts', and what that sum was made of."""
    solo = _sum(node.solo_samples_per_s for node in nodes)
    own = _sum(node.own_samples_per_s for node in nodes)
    parts, basis = (solo, "solo") if solo else (own, "estimated")
    return (speed / parts, basis) if speed is not None and parts else (None, None)


def _by_gpu(nodes: tuple[NodeSummary, ...], plan: LaunchPlan, figures: Figures) -> dict[str, GpuSummary]:
    total = sum(rank.samples for rank in figures.ranks.values()) if len(figures.ranks) == plan.world_size else 0
    samples = {node.name: sum(rank.samples for rank in figures.of(node)) for node in plan.nodes}
    kinds: dict[str, list[NodeSummary]] = {}
    for node in nodes:
        kinds.setdefault(node.gpu, []).append(node)
    return {
        gpu: GpuSummary(
            nodes=len(group),
            ranks=sum(node.ranks for node in group),
            samples_per_s=_sum(node.samples_per_s for node in group),
            own_samples_per_s=_sum(node.own_samples_per_s for node in group),
            share=_over(sum(samples[node.name] for node in group), total),
        )
        for gpu, group in kinds.items()
    }


# ---- what is missing, what to be careful with ---------------------------------------------------------------------


def _left_on_host(node: str, run: RunFolder) -> Iterable[str]:
    """What `collect` did not take of logs that are too long."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        for file, size in json.loads(run.left(node).read_text()).items():
            yield f"{node}: the last {format_bytes(size)} of {file} were not collected (--max-log)."


def _missing(plan: LaunchPlan, events: Events, figures: Figures) -> Iterable[str]:
    if plan.kind == "script" and len(events.absent) == plan.world_size:
        yield "No rank wrote metrics to the file that ORCH_METRICS names, so neither speed nor batch is known."
        return
    for node in plan.nodes:
        for rank in node.rank_numbers:
            if rank in events.absent:
                yield f"{node.name}: no metrics of rank {rank} ({events.absent[rank]})."
            elif rank not in figures.reported and not measures_collectives(plan) and not plan.settings.get("profile_s"):
                yield f"{node.name}: rank {rank} reported no step."
    if figures.reported and len(figures.reported) < plan.world_size:
        yield (
            f"{len(figures.reported)} of {plan.world_size} ranks reported steps: the cluster's speed is theirs alone, "
            "and waits, efficiency and straggler cannot be told."
        )


def _warnings(plan: LaunchPlan, events: Events, figures: Figures, nodes: tuple[NodeSummary, ...]) -> Iterable[str]:
    node_of = {rank: node.name for node in plan.nodes for rank in node.rank_numbers}
    starts = events.starts()
    if times := max(starts.values(), default=1) - 1:
        yield f"The ranks were started anew {_times(times)}; speeds and times are those after the last start."
    for rank, rejects in sorted(events.rejects.items()):
        where = f"{node_of[rank]}: metrics of rank {rank}"
        if rejects.malformed:
            yield f"{where}: {_lines(rejects.malformed)} not JSON events, left out."
        if rejects.too_long:
            yield f"{where}: {_lines(rejects.too_long)} too long, left out."
        if rejects.refused:
            yield f"{where}: {_lines(rejects.refused)} with an impossible number (negative, infinite, none), left out."
        if rejects.repeated and starts.get(rank, 0) < 2:
            yield f"{where}: {_lines(rejects.repeated)} with a step number seen before; the last line of a step counts."
        if rejects.truncated:
            yield f"{where}: the last line is cut off, left out."
    for rank, start in events.latest("start").items():
        schema = start.get("schema")
        if isinstance(schema, (int, float)) and schema > METRICS_SCHEMA:
            told = one_line(str(schema), 20)
            yield f"{node_of[rank]}: rank {rank} writes metrics of schema {told}; this orch knows {METRICS_SCHEMA}."
    if figures.reported and not figures.steps:
        yield _why_no_figures(figures)
    for node in nodes:
        if not node.valid:
            yield f"{node.name}: its figures are not valid: {_why_not_valid(plan.node(node.name), events)}."


def _why_not_valid(node: NodePlan, events: Events) -> str:
    """In words, by how much its ranks missed their pace."""
    ends = events.latest("end")
    told = [ends.get(rank, {}) for rank in node.rank_numbers]
    if not any(end.get("valid") is False for end in told):
        return "not every rank has confirmed, in a last record, that it kept its pace"
    late = max((value for end in told if (value := number(end, "lateness")) is not None), default=None)
    by = "" if late is None else f" (backward ended {100 * late:.1f} % of a step late)"
    return f"the lab's CPU was the limit{by}"


def _why_no_figures(figures: Figures) -> str:
    if figures.warmup_steps:
        return (
            f"No step could be measured after the warm-up ({figures.warmup_steps} left out): steps too few, without "
            "times, or never reported by every rank."
        )
    return "No step could be measured: step lines without times, or none that every rank reported."


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _lines(count: int) -> str:
    return f"{count} line" if count == 1 else f"{count} lines"


# ---- small tools ---------------------------------------------------------------------------------------------------


def _ratio(value: Any) -> float | None:
    ratio = number({"value": value}, "value")
    return ratio if ratio is not None and 0 <= ratio <= 1 else None


def _per_class(value: Any) -> dict[str, float]:
    """Accuracy by class; a list is numbered from 0. At most 1000 classes are kept."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ratios = ((one_line(str(name), 80), _ratio(item)) for name, item in list(pairs)[:1000])
    return {name: ratio for name, ratio in ratios if ratio is not None}


def _cleaned(failure: AnyFailure) -> AnyFailure:
    line = failure.log_line
    return failure.model_copy(
        update={
            "reason": one_line(failure.reason),
            "log_line": None if line is None else one_line(line),
            "signal": None if failure.signal is None else one_line(failure.signal, 40),
        }
    )


def _over(count: float, amount: float) -> float | None:
    return count / amount if amount > 0 else None


def _sum(values: Iterable[float | None]) -> float | None:
    """The sum; None as soon as one is unknown, or when there are none."""
    known = list(values)
    return sum(value for value in known if value is not None) if known and None not in known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = list(values)
    total = _sum(known)
    return None if total is None else total / len(known)
