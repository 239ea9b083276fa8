"""From a collected run folder to its figures: who did how much, who waited for whom, how close to the sum of the parts.

Takes plan.json, job.json and the ranks' metrics; writes steps.parquet, summary.json and, of a pipeline, timeline.json;
gives the `Summary`.

    summary = analyse(RunFolder(Path("runs/mnist_lenet-20261121-0912-k3f")))
    summary.straggler           # Straggler(node="a2000", reason="takes 2.4x as long per sample as v100", ...)

How steps are measured is in `measure`, what each host did in `per_host`, what is missing or odd in `caveats`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from orchestrator.errors import OrchError
from orchestrator.files import write_json
from orchestrator.jobs.metric_lines import count, number, text
from orchestrator.jobs.record import FirstFailure, JobRecord
from orchestrator.jobs.stall import last_words
from orchestrator.paths import RunFolder
from orchestrator.planning.command_line import run_line
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.record import SCHEMA, require_record
from orchestrator.results import caveats
from orchestrator.results.batch_norm import read_batch_norm
from orchestrator.results.caveats import left_on_hosts, left_out, tried_before
from orchestrator.results.curves import Curves, read_curves
from orchestrator.results.events import Events, MetricsFile
from orchestrator.results.faster import measured as faster_ways
from orchestrator.results.measure import Figures, measure, write_steps
from orchestrator.results.network import measures_collectives, not_measured, read_collectives, unpaced
from orchestrator.results.per_host import by_gpu, cluster_speed, efficiency, node_summaries
from orchestrator.results.per_stage import stage_summaries
from orchestrator.results.rebalances import read_rebalances
from orchestrator.results.speed_course import SpeedCourse, read_speed_course
from orchestrator.results.straggler import find_bound, find_straggler
from orchestrator.results.summary import NodeSummary, Summary
from orchestrator.results.tables import read_events
from orchestrator.results.target import read_target
from orchestrator.results.timeline import read_timeline, write_timeline
from orchestrator.results.used import CHANGES, settings_used
from orchestrator.text import one_line

REMEDY = "a run folder is what `orch collect --job ID` makes"

AnyFailure = TypeVar("AnyFailure", bound=FirstFailure)


def analyse(run: RunFolder, solo: Mapping[str, float] | None = None) -> Summary:
    """Figures of the run in this folder; writes steps.parquet, summary.json and timeline.json there.

    solo: samples/s that a node did alone, by node, in place of what its profile in the plan says.

    Raises OrchError when there is no plan to read; what else is absent or damaged stands in the summary's `missing`
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
        speed_course=SpeedCourse() if collectives else read_speed_course(events),
        **_training(plan, figures, events),
        nodes=nodes,
        stages=stage_summaries(plan, events.latest("start"), figures),
        collectives=collectives,
        missing=(*missing, *caveats.missing(plan, events, figures), *gaps),
        warnings=(*words, *caveats.not_finite(job), *caveats.warnings(plan, events, figures, nodes)),
    )


def _from_plan(plan: LaunchPlan) -> dict[str, Any]:
    """Fields of the summary that were known before the run."""
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
    """How it ended; a run folder may lack the record."""
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
    """What ranks reported once, at their start or their end."""
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
    """Hosts are compared only where every rank reported."""
    speed = cluster_speed(figures)
    fields: dict[str, Any] = {
        "samples_per_s": speed,
        "by_gpu": by_gpu(nodes, plan, figures),
        "steps": figures.steps,
        "warmup_steps_left_out": figures.warmup_steps,
        "samples_total": figures.samples_total,
    }
    if len(figures.reported) < plan.world_size:
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
    """What the network learned; a rank that stands in for a GPU learns nothing, unless it is `like` a larger one."""
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
