"""Sentences on missing or doubtful data of a run, for the summary.

missing(plan, events, figures)              "v100: no metrics of rank 1 (it holds no event)."
warnings(plan, events, figures, nodes)      "a2000: metrics of rank 0: the last line is cut off, left out."
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable

from orchestrator.jobs.job_store import JobRecord
from orchestrator.jobs.metric_lines import number
from orchestrator.jobs.stall import alone_words
from orchestrator.paths import RunFolder
from orchestrator.planning.launch_plan import LaunchPlan, NodePlan
from orchestrator.results.events import Events, Rejects
from orchestrator.results.measure import Figures
from orchestrator.results.network import measures_collectives
from orchestrator.results.summary import NodeSummary
from orchestrator.units import counted, format_bytes, format_percent, one_line, some
from trainer.shared.metrics import SCHEMA


def left_on_hosts(plan: LaunchPlan, run: RunFolder) -> Iterable[str]:
    """Parts of long logs that `collect` left on the hosts."""
    for node in plan.nodes:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            for file, size in json.loads(run.left(node.name).read_text()).items():
                yield f"{node.name}: the last {format_bytes(size)} of {file} were not collected (--max-log)."


def left_out(plan: LaunchPlan) -> Iterable[str]:
    if plan.hosts and plan.hosts.left_out:
        each = [f"{host.node} ({one_line(host.reason, 200)})" for host in plan.hosts.left_out]
        yield f"Left out, by --hosts {plan.hosts.words}: {some(each, 12)}."


def tried_before(plan: LaunchPlan) -> Iterable[str]:
    """Failed earlier attempts, whose figures are not included."""
    if plan.attempt and plan.attempt.earlier:
        each = [f"{failed.job} ({one_line(failed.why, 200)})" for failed in plan.attempt.earlier]
        yield f"This is attempt {plan.attempt.words}; its figures exclude the failed attempts before: {some(each, 12)}."


def not_finite(job: JobRecord | None) -> Iterable[str]:
    if job and job.not_finite:
        words = job.not_finite.words
        yield f"{words[0].upper()}{words[1:]}: from then on the run learned nothing, unless that update was skipped."


def missing(plan: LaunchPlan, events: Events, figures: Figures) -> Iterable[str]:
    """Ranks without metrics or steps."""
    if plan.kind in ("script", "program") and len(events.absent) == plan.world_size:
        yield (
            "No rank has metrics: no step of an optimiser of torch was seen, nor records in the file that ORCH_METRICS "
            "names, so neither speed nor batch is known."
        )
        return
    for node in plan.nodes:
        for rank in node.rank_numbers:
            if rank in events.absent:
                yield f"{node.name}: no metrics of rank {rank} ({events.absent[rank]})."
            elif rank not in figures.reported and not measures_collectives(plan) and not plan.recorded.profile_s:
                yield f"{node.name}: rank {rank} reported no step."
    if any(start.get("samples_from") == "unknown" for start in events.latest("start").values()):
        yield (
            "Samples per step, and so the speed, are unknown: the script uses neither a DataLoader nor "
            "DistributedDataParallel. `orch run --batch N` gives them."
        )
    if figures.reported and len(figures.reported) < plan.world_size:
        yield (
            f"{len(figures.reported)} of {plan.world_size} ranks reported steps: the cluster's speed is only theirs, "
            "and waits, efficiency and straggler are unknown."
        )


def warnings(
    plan: LaunchPlan, job: JobRecord | None, events: Events, figures: Figures, nodes: tuple[NodeSummary, ...]
) -> Iterable[str]:
    """Unusable or misleading data."""
    starts = events.starts()
    if times := max(starts.values(), default=1) - 1:
        yield f"The ranks were restarted {_times(times)}; speeds and times are those after the last start."
    node_of = {rank: node.name for node in plan.nodes for rank in node.rank_numbers}
    for rank, rejects in sorted(events.rejects.items()):
        for words in _rejected(rejects, was_restarted=starts.get(rank, 0) >= 2):
            yield f"{node_of[rank]}: metrics of rank {rank}: {words}"
    for rank, start in events.latest("start").items():
        schema = start.get("schema")
        if isinstance(schema, (int, float)) and schema > SCHEMA:
            newer = one_line(str(schema), 20)
            yield f"{node_of[rank]}: rank {rank} writes metrics of schema {newer}; this orch reads up to {SCHEMA}."
    if figures.apart and not (job and alone_words(plan, job)):
        yield (
            "Each rank trained by itself, as far as can be seen: by its first step no rank had created a process group "
            "of torch. A framework that is not set up for several hosts does so without an error: "
            "`orch help frameworks`."
        )
    if figures.reported and not figures.steps:
        yield _why_no_figures(figures)
    for node in nodes:
        if not node.valid:
            yield f"{node.name}: its figures are not valid: {_why_not_valid(plan.node(node.name), events)}."


def _rejected(rejects: Rejects, was_restarted: bool) -> Iterable[str]:
    """A restarted rank repeats steps, which is no fault."""
    if rejects.malformed:
        yield f"{counted(rejects.malformed, 'line')} not JSON events, left out."
    if rejects.too_long:
        yield f"{counted(rejects.too_long, 'line')} too long, left out."
    if rejects.refused:
        yield f"{counted(rejects.refused, 'line')} with an impossible number (negative, infinite, none), left out."
    if rejects.repeated and not was_restarted:
        yield f"{counted(rejects.repeated, 'line')} with a step number seen before; the last line of a step counts."
    if rejects.truncated:
        yield "the last line is cut off, left out."


def _why_not_valid(node: NodePlan, events: Events) -> str:
    ends = events.latest("end")
    last = [ends.get(rank, {}) for rank in node.rank_numbers]
    if not any(end.get("valid") is False for end in last):
        return "not every rank has confirmed, in a last record, that it kept its pace"
    late = max((value for end in last if (value := number(end, "lateness")) is not None), default=None)
    by = "" if late is None else f" (backward ended {format_percent(late, 1)} of a step late)"
    return f"the lab's CPU was the limit{by}"


def _why_no_figures(figures: Figures) -> str:
    if figures.warmup_steps_left_out:
        return (
            f"No step could be measured after the warm-up ({figures.warmup_steps_left_out} left out): steps too few, "
            "without times, or never reported by every rank."
        )
    return "No step could be measured: step lines without times, or no step that every rank reported."


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
