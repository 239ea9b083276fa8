"""From a collected run folder to its `Summary`: speeds, waits, efficiency, straggler.

Reads plan.json, job.json and the ranks' metrics; writes steps.parquet, summary.json and, for a pipeline,
timeline.json.

    summary = analyse(RunFolder(Path("runs/mnist_lenet-20261121-0912-k3f")))
    summary.straggler           # Straggler(node="a2000", reason="takes 2.4x as long per sample as v100", ...)
"""

from __future__ import annotations

import contextlib
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from orchestrator.errors import OrchError
from orchestrator.files import write_json
from orchestrator.jobs.job_store import FirstFailure, JobRecord
from orchestrator.jobs.metric_lines import count, number, text
from orchestrator.jobs.stall import last_words
from orchestrator.paths import RunFolder
from orchestrator.planning.job_forms import run_line
from orchestrator.planning.launch_plan import LaunchPlan, NodePlan
from orchestrator.record import RECORD_LIMIT, SCHEMA, require_record
from orchestrator.results import caveats
from orchestrator.results.batch_norm_groups import read_batch_norm, read_rebalances
from orchestrator.results.caveats import left_on_hosts, left_out, tried_before
from orchestrator.results.curves import Curves, SpeedCourse, read_curves, read_speed_course, read_target
from orchestrator.results.events import Events, MetricsFile
from orchestrator.results.measure import OF_RUN, Figures, RankFigures, gpu_label, measure, over, write_steps
from orchestrator.results.network import measures_collectives, not_measured, read_collectives, unpaced
from orchestrator.results.single_host import measured as faster_ways
from orchestrator.results.straggler import find_bound, find_straggler, read_gpu_use
from orchestrator.results.summary import GpuSummary, NodeSummary, RankEnd, Summary
from orchestrator.results.tables import read_events
from orchestrator.results.timeline import StageSummary, read_places, read_timeline, write_timeline
from orchestrator.results.timeline import Starts as TimelineStarts
from orchestrator.units import one_line

REMEDY = "a run folder is what `orch collect --job ID` makes"

AnyFailure = TypeVar("AnyFailure", bound=FirstFailure)


def analyse(run: RunFolder, solo: Mapping[str, float] | None = None) -> Summary:
    """solo: samples/s by node, measured alone; replaces the profile in the plan. Raises OrchError without a readable
    plan; other gaps are in the summary's `missing` and `warnings`.
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
    repeat = run_line(plan)
    missing += [*tried_before(plan), *left_out(plan), *left_on_hosts(plan, run)]
    files = [
        MetricsFile(node.name, rank, run.metrics(node.name, rank)) for node in plan.nodes for rank in node.rank_numbers
    ]
    with read_events(files) as events:
        figures = measure(events, plan)
        write_steps(events, plan, run.steps)
        write_timeline(read_timeline(plan, events), run.timeline)
        nodes = node_summaries(plan, figures, events, run, solo or {})
        summary = _summarise(plan, job, figures, events, nodes, missing).model_copy(update={"repeat": repeat})
    write_json(run.summary, summary.to_json())
    return summary


def _summarise(
    plan: LaunchPlan,
    job: JobRecord | None,
    figures: Figures,
    events: Events,
    nodes: tuple[NodeSummary, ...],
    missing: Iterable[str],
) -> Summary:
    collectives = read_collectives(events, plan) if measures_collectives(plan) else None
    gaps = not_measured(collectives) if collectives else ()
    words = last_words(plan, job) if job else ()
    return Summary(
        schema=SCHEMA,
        **_from_plan(plan),
        **_from_record(job),
        **_from_ranks(plan, events),
        **_from_steps(plan, figures, nodes),
        speed_course=SpeedCourse() if collectives else read_speed_course(events, apart=figures.apart),
        **_training(plan, figures, events),
        nodes=nodes,
        stages=stage_summaries(plan, events.latest("start"), figures),
        collectives=collectives,
        missing=(*missing, *caveats.missing(plan, events, figures), *gaps),
        warnings=(*words, *caveats.not_finite(job), *caveats.warnings(plan, job, events, figures, nodes)),
    )


def _from_plan(plan: LaunchPlan) -> dict[str, Any]:
    """Fields known before the run."""
    return {
        "job": plan.job,
        "note": plan.note,
        "experiment": plan.exp,
        "kind": plan.kind,
        "cluster": plan.cluster,
        "master": plan.master,
        "created": plan.created,
        "command": shlex.join(plan.nodes[0].command) if plan.nodes else None,
        "code": plan.code,
        "world_size": plan.world_size,
        "prediction": plan.prediction,
    }


def _from_record(job: JobRecord | None) -> dict[str, Any]:
    """The run folder may lack the record."""
    if not job:
        return {"state": "unknown"}
    return {
        "state": job.state,
        "started": job.started,
        "ended": job.ended,
        "first_failure": _cleaned(job.first_failure) if job.first_failure else None,
        "not_finite": job.not_finite,
    }


def _from_ranks(plan: LaunchPlan, events: Events) -> dict[str, Any]:
    """Reported once, at the start or the end."""
    starts = events.latest("start")
    first = next(iter(starts.values()), {})
    settings, asked = settings_used(plan, starts, events.since_start("setting", CHANGES))
    return {
        "settings": settings,
        "asked": asked,
        "restarts": max(events.starts().values(), default=1) - 1,
        "metrics": len(events.absent) < plan.world_size,
        "total_s": max(_totals_s(events), default=None),
        "samples_from": text(first, "samples_from"),
        "model": text(first, "model"),
        "parameters": count(first, "parameters"),
        "gradient_bytes": count(first, "gradient_bytes"),
    }


def _from_steps(plan: LaunchPlan, figures: Figures, nodes: tuple[NodeSummary, ...]) -> dict[str, Any]:
    """Hosts are compared only if every rank reported."""
    speed = figures.speed(figures.ranks.values()) or None  # samples are not counted
    fields: dict[str, Any] = {
        "samples_per_s": speed,
        "by_gpu": by_gpu(nodes, plan, figures),
        "apart": figures.apart,
        **{name: getattr(figures, name) for name in OF_RUN},
    }
    if len(figures.reported) < plan.world_size or figures.apart:
        return fields
    part, basis = efficiency(speed, nodes)
    return fields | {
        "efficiency": part,
        "efficiency_basis": basis,
        "faster": faster_ways(plan, nodes, speed),
        "straggler": find_straggler(plan, figures),
        "bound": find_bound(plan, figures),
    }


def _training(plan: LaunchPlan, figures: Figures, events: Events) -> dict[str, Any]:
    """Training results. A rank that stands in for a GPU trains nothing, unless it is `like` a larger GPU."""
    rebalances = read_rebalances(events, plan)
    fields: dict[str, Any] = {
        "batch_norm": read_batch_norm(events.latest("start"), plan, rebalances),
        "rebalances": rebalances,
    }
    if any(node.paced and not node.paced.get("like") for node in plan.nodes):
        return fields
    evaluation = next(iter(events.latest("eval").values()), {})
    return fields | {
        "accuracy": _ratio(evaluation.get("accuracy")),
        "accuracy_per_class": _per_class(evaluation.get("per_class")),
        "loss": figures.loss,
        "test_loss": number(evaluation, "loss"),
        "bits_per_byte": number(evaluation, "bits_per_byte"),
        "target": read_target(events),
        "curves": Curves() if measures_collectives(plan) else read_curves(events),
    }


def _totals_s(events: Events) -> list[float]:
    totals = (number(end, "total_s") for end in events.latest("end").values())
    return [total_s for total_s in totals if total_s is not None and total_s >= 0]


def _ratio(value: Any) -> float | None:
    ratio = number({"value": value}, "value")
    return ratio if ratio is not None and 0 <= ratio <= 1 else None


def _per_class(value: Any) -> dict[str, float]:
    """A list is numbered from 0. At most 1000 classes are kept."""
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


# Per host and per GPU type: speeds, step times, memory, ends of ranks.


def node_summaries(
    plan: LaunchPlan, figures: Figures, events: Events, run: RunFolder, solo: Mapping[str, float]
) -> tuple[NodeSummary, ...]:
    """solo: see `analyse`."""
    measured = (
        _node_summary(node, figures, events, solo.get(node.name, node.solo_samples_per_s or None))
        for node in plan.nodes
    )
    return tuple(_as_seen_by_its_host(node, plan, run) for node in measured)


def _node_summary(node: NodePlan, figures: Figures, events: Events, solo: float | None) -> NodeSummary:
    numbers = node.rank_numbers
    mine = figures.of(node)
    starts, ends = events.latest("start"), events.latest("end")
    start = next((starts[rank] for rank in numbers if rank in starts), {})
    own = [_own_speed(rank, figures.steps) for rank in mine]
    memory = [size for rank in numbers if (size := count(ends.get(rank, {}), "peak_memory_bytes")) is not None]
    return NodeSummary(
        name=node.name,
        gpu=gpu_label(node),
        ranks=node.ranks,
        batch_per_rank=_batch_per_rank(node, start, figures),
        samples_per_s=figures.speed(mine) if len(mine) == node.ranks else None,
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


def _own_speed(rank: RankFigures, steps: int) -> float | None:
    """Samples/s by the rank's own loading, computing and update, as far as reported."""
    if rank.compute_total_ms is None:
        return None
    return over(rank.samples, (rank.compute_total_ms + steps * ((rank.load_ms or 0) + (rank.optim_ms or 0))) / 1000)


def _batch_per_rank(node: NodePlan, start: Mapping[str, Any], figures: Figures) -> int | None:
    """As reported, else from `--batch`, else a script's mean over the measured steps."""
    reported = count(start, "batch_per_rank")
    if reported is not None:
        return reported
    if node.shares:
        return node.shares[0]
    samples = [rank.samples for rank in figures.of(node)[:1]]
    return round(samples[0] / figures.steps) if samples and figures.steps else None


def _as_seen_by_its_host(node: NodeSummary, plan: LaunchPlan, run: RunFolder) -> NodeSummary:
    """Adds GPU use, memory and ends of ranks, from its supervisor's files."""
    gpu = read_gpu_use(run.gpu(node.name))
    memory = gpu.memory_bytes if node.peak_memory_bytes is None else node.peak_memory_bytes
    ends = tuple(_rank_ends(run.agent(node.name), plan.node(node.name)))
    update = {"gpu_utilisation": gpu.utilisation, "peak_memory_bytes": memory, "slowed": gpu.slowed, "ends": ends}
    return node.model_copy(update=update)


def _rank_ends(agent: Path, node: NodePlan) -> Iterable[RankEnd]:
    """agent: the supervisor's record; untrusted."""
    record: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError), open(agent, "rb") as file:
        record = json.loads(file.read(RECORD_LIMIT))
    ranks = record.get("ranks") if isinstance(record, dict) else None
    for rank in node.rank_numbers:
        end = ranks.get(str(rank)) if isinstance(ranks, dict) else None
        known = {key: end.get(key) for key in ("exit_code", "signal")} if isinstance(end, dict) else {}
        try:
            yield RankEnd(rank=rank, **known)
        except ValidationError:
            yield RankEnd(rank=rank)


def efficiency(
    speed: float | None, nodes: tuple[NodeSummary, ...]
) -> tuple[float | None, Literal["solo", "estimated"] | None]:
    """The cluster's speed over the sum of its hosts' speeds, and the basis of that sum."""
    solo = _sum(node.solo_samples_per_s for node in nodes)
    own = _sum(node.own_samples_per_s for node in nodes)
    parts = solo or own
    return (speed / parts, "solo" if solo else "estimated") if speed is not None and parts else (None, None)


def by_gpu(nodes: tuple[NodeSummary, ...], plan: LaunchPlan, figures: Figures) -> dict[str, GpuSummary]:
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
            share=over(sum(samples[node.name] for node in group), total),
        )
        for gpu, group in kinds.items()
    }


def _sum(values: Iterable[float | None]) -> float | None:
    """None without values, or if any is unknown."""
    known = list(values)
    return sum(value for value in known if value is not None) if known and None not in known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = list(values)
    total = _sum(known)
    return None if total is None else total / len(known)


# Settings as the ranks used them, and as requested. Pure.
#
#     used, asked = settings_used(plan, starts, changes)       # {"num_workers": 2, ...}, {"num_workers": -1}
#
# starts: each rank's last `start` event, with its settings as resolved on its host. changes: later `setting` events.
# Both are untrusted. If ranks differ the value is a sentence: `0 on a, 2 on b`.

NAMED = 4
"""Hosts named per value."""
CHANGES = 100
"""`setting` events read per rank."""
Starts = Mapping[int, Mapping[str, Any]]
Changes = Mapping[int, Sequence[Mapping[str, Any]]]


def settings_used(plan: LaunchPlan, starts: Starts, changes: Changes) -> tuple[dict[str, Any], dict[str, Any]]:
    """All used settings, and the plan's values if different."""
    used = {key: _used(key, value, plan, starts, changes) for key, value in plan.settings.items()}
    return used, {key: value for key, value in plan.settings.items() if used[key] != value}


def _used(key: str, asked: Any, plan: LaunchPlan, starts: Starts, changes: Changes) -> Any:
    hosts: dict[Any, list[str]] = {}
    for node in plan.nodes:
        for rank in node.rank_numbers:
            settings = starts.get(rank, {}).get("settings")
            value = settings.get(key) if isinstance(settings, Mapping) else None
            later = [change.get("value") for change in changes.get(rank, ()) if change.get("name") == key]
            value = later[-1] if later else value
            if isinstance(value, (str, int, float)) and not isinstance(asked, (dict, list)):
                value = one_line(value) if isinstance(value, str) else value
                hosts.setdefault(value, []).append(node.name)
    if len(hosts) < 2:
        return next(iter(hosts), asked)
    return ", ".join(f"{value} on {_names(list(dict.fromkeys(names)))}" for value, names in hosts.items())


def _names(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


# Stages of a pipeline: computing, waiting for neighbours, sending. Pure.


def stage_summaries(plan: LaunchPlan, starts: TimelineStarts, figures: Figures) -> tuple[StageSummary, ...]:
    """starts: each rank's last `start`. In the order of the samples, pipeline by pipeline."""
    places = read_places(plan, starts)
    node_of = {rank: node.name for node in plan.nodes for rank in node.rank_numbers}
    stages: dict[tuple[int, int], list[int]] = {}
    for rank, place in sorted(places.items()):
        stages.setdefault((place.pipeline, place.stage), []).append(rank)
    names = {key: _name(places[ranks[0]].name, node_of) for key, ranks in stages.items()}
    return tuple(
        StageSummary(
            pipeline=key[0],
            stage=key[1],
            node=node_of[ranks[0]],
            name=names[key],
            ranks=tuple(ranks),
            first_block=places[ranks[0]].first,
            last_block=places[ranks[0]].last,
            work=_per_stage_sum([number(starts.get(rank, {}), "work") for rank in ranks]),
            **_times([figures.ranks[rank] for rank in ranks if rank in figures.ranks], key, names),
        )
        for key, ranks in sorted(stages.items())
    )


def _name(stage: str, node_of: Mapping[int, str]) -> str:
    """From the setting `stages`; `rank 1` if all ranks are on one host."""
    return f"rank {stage}" if stage.isdecimal() and stage not in node_of.values() else stage


def _times(ranks: Sequence[RankFigures], key: tuple[int, int], names: Mapping[tuple[int, int], str]) -> dict[str, Any]:
    before_ms = _per_stage_mean([rank.bubble_before_ms for rank in ranks])
    behind_ms = _per_stage_mean([rank.bubble_behind_ms for rank in ranks])
    times: dict[str, Any] = {
        "compute_ms": _per_stage_mean([rank.compute_ms for rank in ranks]),
        "wire_ms": _per_stage_mean([rank.wire_ms for rank in ranks]),
    }
    if before_ms is None or behind_ms is None:
        return times
    most_ms, step = max((before_ms, -1), (behind_ms, 1))
    neighbour = names.get((key[0], key[1] + step)) if most_ms > 0 else None
    return {**times, "bubble_ms": before_ms + behind_ms, "waits_for": neighbour, "waits_for_ms": most_ms}


def _per_stage_sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value) and 0 <= value <= 1]
    return sum(known) if known and len(known) == len(values) else None


def _per_stage_mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
