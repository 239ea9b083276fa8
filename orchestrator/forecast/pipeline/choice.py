"""The pipeline that suits a job on a cluster, and the one that its settings ask for. Pure.

choice = choose(scene, settings)
choice.samples_per_s, choice.limited_by             1163, "slowest stage"
choice.settings                                     {"strategy": "pipeline", "stages": "v100:0-36,a2000:37-51", ...}
as_set(scene, settings)                             the same of stages, accumulate and in_flight as they stand
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.forecast.advice import Scene
from orchestrator.forecast.gpus import activation_bytes
from orchestrator.forecast.layers import FLOAT_BYTES, gradient_bytes, network_of
from orchestrator.forecast.pipeline.averages import Averages
from orchestrator.forecast.pipeline.chain import Chain, chain_from
from orchestrator.forecast.pipeline.course import STATES, Course, stages_setting
from orchestrator.forecast.pipeline.replicas import solve_all
from orchestrator.forecast.pipeline.solve import Space
from orchestrator.forecast.pipeline.stage_host import StageHost
from orchestrator.forecast.pipeline.timing import Limit, StageTime, Timed, time_update
from orchestrator.forecast.step import HostSpeed
from orchestrator.units import format_figure
from trainer.shared.settings import Settings, overlap_of
from trainer.shared.shares import scale_shares
from trainer.shared.stages import check_stages, parse_stages
from trainer.shared.strategy_table import LOCAL_STEPS
from trainer.shared.turns import PER_STAGE

CHOSEN = ("accumulate", "in_flight", "schedule")
"""Settings of a person that the choice keeps to. `stages` of a person leave nothing to choose: see `as_set`."""


@dataclass(frozen=True)
class PipelineChoice:
    """courses: one of each pipeline. settings: with which a run does this."""

    courses: tuple[Course, ...]
    timed: Timed
    settings: Mapping[str, Any]

    @property
    def samples_per_s(self) -> float:
        return sum(course.batch for course in self.courses) / self.timed.seconds

    @property
    def limited_by(self) -> Limit:
        return self.timed.limited_by

    @property
    def micro_batches(self) -> int:
        """Of an update, over all pipelines."""
        return sum(len(course.routes()) for course in self.courses)

    @property
    def words(self) -> Iterator[str]:
        """Of each stage."""
        for stages in self.timed.stages:
            for stage in stages:
                yield _words(stage, self.timed.seconds)


def choose(scene: Scene, settings: Settings, chosen: Collection[str] = CHOSEN) -> PipelineChoice | None:
    """The one that takes least, one pipeline or several. None for a single host, or where memory holds none.

    chosen: the settings that the person made; those of CHOSEN among them stay.
    """
    if len(scene.hosts) < 2:
        return None
    space = Space(splits="schedule" not in chosen or settings.schedule == "zero_bubble")
    if "accumulate" in chosen and settings.accumulate:
        space = dataclasses.replace(space, counts=(settings.accumulate,), least_samples=1)
    if "in_flight" in chosen and settings.in_flight:
        space = dataclasses.replace(space, in_flight=settings.in_flight)
    chain = chain_for(scene, settings)
    if len(chain.blocks) < 2:
        return None
    averages = averages_of(settings)
    found = solve_all(chain, stage_hosts(scene), scene.wire, settings.batch, space, averages)
    return _choice(chain, found.courses, scene, averages) if found else None


def as_set(scene: Scene, settings: Settings) -> PipelineChoice:
    """What `stages`, `accumulate` and the others ask for.

    Raises ValueError where they do not fit the network and the hosts.
    """
    chain, pipelines = chain_for(scene, settings), parse_stages(settings.stages)
    check_stages(pipelines, len(chain.blocks))
    named = {stage.node for stages in pipelines for stage in stages}
    held = ((host,) if host.name in named else host.apart for host in stage_hosts(scene))
    hosts = {host.name: host for parts in held for host in parts}
    if named != hosts.keys():
        raise ValueError(f"stages: {', '.join(sorted(named ^ hosts.keys()))}: each host of the job has one stage")
    first = [hosts[stages[0].node] for stages in pipelines]
    parts = scale_shares([host.ranks for host in first], settings.batch)
    courses = tuple(
        Course(
            tuple(hosts[stage.node] for stage in stages),
            tuple(stage.first for stage in stages),
            part,
            settings.accumulate or PER_STAGE * len(stages),
            settings.in_flight,
            settings.schedule == "zero_bubble",
        )
        for stages, part in zip(pipelines, parts, strict=True)
    )
    return _choice(chain, courses, scene, averages_of(settings))


def chain_for(scene: Scene, settings: Settings) -> Chain:
    """Of the scene's network, else the experiment's. Cuts are crossed in 16 bits under `fidelity=half` and with amp."""
    sent_bytes = FLOAT_BYTES if settings.sent_as == "fp32" and settings.amp == "none" else FLOAT_BYTES // 2
    chain = chain_from(scene.job.blocks or network_of(settings), sent_bytes)
    if settings.amp == "none":
        return chain
    return Chain(tuple(dataclasses.replace(block, kept_bytes=block.kept_bytes // 2) for block in chain.blocks))


def stage_hosts(scene: Scene) -> tuple[StageHost, ...]:
    return tuple(StageHost.of(host.name, host.speeds, _memory_bytes(scene, host), host.blocks) for host in scene.hosts)


def _memory_bytes(scene: Scene, host: HostSpeed) -> int | None:
    """What is known of it; else what holds the whole network with as many samples at once as a profile found, None
    where no limit is known.
    """
    if host.memory_bytes is not None:
        return host.memory_bytes
    caps = [speed.cap for speed in host.speeds if speed.cap is not None]
    if not caps:
        return None
    layers = scene.job.layers
    return STATES * gradient_bytes(layers) + min(caps) * activation_bytes(layers)


def averages_of(settings: Settings) -> Averages | None:
    """None where pipelines beside each other add up gradients."""
    if settings.fidelity != "local":
        return None
    every = settings.local_steps or max(LOCAL_STEPS, settings.local_overlap + 1)
    return Averages(every, overlap_of(every, settings.local_overlap), settings.sent_as != "fp32")


def _choice(chain: Chain, courses: Sequence[Course], scene: Scene, averages: Averages | None) -> PipelineChoice:
    first = courses[0]
    found: dict[str, Any] = {
        "strategy": "pipeline",
        "stages": stages_setting(courses, chain),
        "accumulate": first.count,
        "in_flight": first.in_flight,
        "schedule": "zero_bubble" if first.splits else "1f1b",
    }
    if len(courses) > 1:  # only those that read samples have a share of them
        parts = {course.hosts[0].name: course.batch for course in courses}
        found["shares"] = ",".join(f"{host.name}={parts.get(host.name, 0)}" for host in scene.hosts)
    return PipelineChoice(tuple(courses), time_update(chain, courses, scene.wire, averages), found)


def _words(stage: StageTime, seconds: float) -> str:
    """`v100: blocks 0-36, 71 % of the work, computes 99 % of an update; ...`."""
    weights, sent = format_figure(stage.weight_bytes / 1e6), format_figure(stage.out_bytes / 1e6)
    return (
        f"{stage.host}: blocks {stage.first}-{stage.end - 1}, {100 * stage.work:.0f} % of the work, computes "
        f"{100 * stage.busy_s / seconds:.0f} % of an update; {weights} MB of weights, "
        f"{format_figure(stage.memory_bytes / 2**30)} GiB of memory at most, sends {sent} MB an update"
    )
