"""The places of a cluster where a sweep's jobs run, and how long each job takes there.

slots = slots_of(cluster, names, sweep, speeds)
slots[0].name, slots[0].nodes           "v100/0", ("v100",): one GPU of a host
estimates = estimates_of(controller, cluster, slots, jobs, sweep)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from orchestrator.controller import Controller
from orchestrator.errors import UsageError
from orchestrator.hosts.cluster import Cluster
from orchestrator.hosts.facts import VISIBLE, Gpu, NodeFacts, visible_gpus
from orchestrator.hosts.inventory import Node
from orchestrator.planning.request import ParsedJob
from orchestrator.sweeps.estimates import Estimates
from orchestrator.sweeps.sweep_record import Trial
from orchestrator.sweeps.sweep_spec import SweepSpec
from orchestrator.units import counted, some

_OF_LENGTH = frozenset({"steps", "epochs", "samples", "seed", "lr", "momentum", "weight_decay"})
"""Settings that do not change a host's samples/s."""


@dataclass(frozen=True)
class Slot:
    """A host, some of its GPUs, or several hosts."""

    name: str
    nodes: tuple[str, ...]
    cluster: Cluster
    """Its hosts have only this slot's GPUs."""


@dataclass(frozen=True)
class Slots:
    all: tuple[Slot, ...]
    notes: tuple[str, ...] = ()


def usable(cluster: Cluster, only: Sequence[str]) -> tuple[list[Node], tuple[str, ...]]:
    """Nodes with facts, and a note about the others. Raises UsageError without any."""
    wanted = cluster.chosen(only)
    there = [
        node
        for node in wanted
        if node.name in cluster.facts and node.name not in cluster.problems and node.name not in cluster.released
    ]
    if not there:
        raise UsageError(f"no host of cluster {cluster.name} can be used", "`orch status` names what is wrong")
    away = [node.name for node in wanted if node not in there]
    note = f"left out: {some(away, 6)}, released or unusable at the last `orch up`"
    return there, (note,) if away else ()


def slots_of(cluster: Cluster, nodes: Sequence[Node], sweep: SweepSpec, speeds: Mapping[str, float]) -> Slots:
    """speeds: by node, if known: hosts of a job with several are alike. Raises UsageError if no job fits."""
    if sweep.gpus:
        return _of_gpus(cluster, nodes, sweep.gpus)
    ordered = nodes if sweep.hosts == 1 else sorted(nodes, key=lambda node: -speeds.get(node.name, 0.0))
    names = [node.name for node in ordered]
    teams = [tuple(names[at : at + sweep.hosts]) for at in range(0, len(names), sweep.hosts)]
    whole = [team for team in teams if len(team) == sweep.hosts]
    if not whole:
        raise UsageError(f"a job takes {counted(sweep.hosts, 'host')}, and {len(names)} can be used", "lower --hosts")
    rest = names[len(whole) * sweep.hosts :]
    notes = (f"{some(rest, 6)} not used: a job takes {sweep.hosts} hosts",) if rest else ()
    return Slots(tuple(Slot("+".join(team), team, cluster) for team in whole), notes)


def _of_gpus(cluster: Cluster, nodes: Sequence[Node], gpus: int) -> Slots:
    slots, few = list[Slot](), list[str]()
    for node in nodes:
        parts = _parts(node, cluster.facts[node.name], gpus)
        few += [] if parts else [node.name]
        for number, update in enumerate(parts):
            facts = {**cluster.facts, node.name: cluster.facts[node.name].model_copy(update=update)}
            own = node.model_copy(update={"ranks": gpus, "gpus": gpus if node.gpus else None})
            others = tuple(own if other.name == node.name else other for other in cluster.nodes)
            sliced = cluster.model_copy(update={"nodes": others, "facts": facts})
            slots.append(Slot(node.name if len(parts) == 1 else f"{node.name}/{number}", (node.name,), sliced))
    if not slots:
        raise UsageError(f"no host has {counted(gpus, 'GPU')}", "lower --gpus")
    notes = (f"{some(few, 6)} not used: a job takes {counted(gpus, 'GPU')}",) if few else ()
    return Slots(tuple(slots), notes)


def _parts(node: Node, facts: NodeFacts, gpus: int) -> list[dict[str, tuple[Gpu, ...]]]:
    """Changes to the host's facts, one for each job that fits. A host without GPUs has a slot for each rank."""
    if node.paced or node.device == "cpu" or not facts.gpus:
        return [{}] * ((node.ranks or node.gpus or 1) // gpus)
    if VISIBLE in node.env:
        raise UsageError(
            f"{node.name}: its `env:` sets {VISIBLE}, and the jobs of a sweep share its GPUs among them",
            f"leave --gpus out, or {node.name} by --nodes",
        )
    there = visible_gpus(node.name, facts, node.env)[: node.ranks or node.gpus]
    return [{"gpus": there[at : at + gpus]} for at in range(0, len(there) - gpus + 1, gpus)]


# ---- how long jobs take ----------------------------------------------------------------------------------------------


def speeds_of(controller: Controller, cluster: Cluster, job: ParsedJob, nodes: Sequence[str]) -> dict[str, float]:
    """samples/s of each host by itself, from profiles, paces or the catalogue; {} if one is unknown."""
    found = dict[str, float]()
    for name in nodes:
        worth = controller.planner.speeds(cluster, job.request, job.code, [name])
        if worth is None or not worth.figures.get(name):
            return {}
        found[name] = worth.figures[name]
    return found


def estimates_of(
    controller: Controller,
    slots: Sequence[Slot],
    jobs: Mapping[str, ParsedJob],
    trials: Sequence[Trial],
    key: str | None,
) -> Estimates:
    """jobs: by trial. key: of the grid, that a job's time is proportional to."""
    work = {trial.key: _work(jobs[trial.key], trial, key) for trial in trials}
    same = {slot.name: (slot.nodes, slot.cluster.node(slot.nodes[0]).ranks) for slot in slots}
    by_shape = {_shape(job): trial for trial, job in jobs.items()}

    @cache
    def known(shape: tuple[Any, ...], nodes: tuple[str, ...], ranks: int | None) -> float | None:
        slot = next(slot for slot in slots if same[slot.name] == (nodes, ranks))
        speeds = speeds_of(controller, slot.cluster, jobs[by_shape[shape]], nodes)
        return sum(speeds.values()) or None

    shapes = {trial: _shape(job) for trial, job in jobs.items()}

    def speed(trial: str, slot: str) -> float:
        return known(shapes[trial], *same[slot]) or 1.0

    in_samples = all(_samples(job) for job in jobs.values())
    are_known = in_samples and all(known(shape, *place) for shape in by_shape for place in {*same.values()})
    return Estimates(work, speed if are_known else None)


def _work(job: ParsedJob, trial: Trial, key: str | None) -> float:
    if key:
        return float(trial.values[key])
    return _samples(job) or 1.0


def _samples(job: ParsedJob) -> float | None:
    """Samples in the whole run; None for a script. A folder of images counts as the experiment's own data set."""
    settings = job.request.training if job.request.trains else None
    if settings is None:
        return None
    there = settings.data_set.train_samples
    whole = settings.epochs * min(settings.samples or there, there)
    return float(min(whole, settings.steps * settings.batch) if settings.steps else whole)


def _shape(job: ParsedJob) -> tuple[Any, ...]:
    chosen = job.request.chosen
    return (job.request.name, *sorted((key, value) for key, value in chosen.items() if key not in _OF_LENGTH))
