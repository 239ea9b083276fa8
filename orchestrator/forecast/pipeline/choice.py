"""The best pipeline for a job on a cluster, or the pipeline in its settings. Pure.

choice = choose(scene, settings)
choice.samples_per_s, choice.limited_by             1163, "slowest stage"
choice.settings                                     {"strategy": "pipeline", "stages": "v100:0-36,a2000:37-51", ...}
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.forecast.advice import Scene
from orchestrator.forecast.inputs import exact_part_of
from orchestrator.forecast.layers import FLOAT_BYTES, gradient_bytes, network_of
from orchestrator.forecast.links import LinkCosts, Transfers
from orchestrator.forecast.pipeline.block_costs import Chain, Line, StageHost, chain_from
from orchestrator.forecast.pipeline.bound import Cut, Family
from orchestrator.forecast.pipeline.clock import Course, copy_s, stages_setting, sums_of, update_seconds
from orchestrator.forecast.pipeline.solve import LEAST_SAMPLES, Space, neighbours, solve
from orchestrator.forecast.step import HostSpeed
from orchestrator.units import format_figure
from trainer.shared import gpu_work
from trainer.shared.pace import OPTIMISER
from trainer.shared.settings import Settings, overlap_of
from trainer.shared.shares import scale_shares, split_batch
from trainer.shared.stages import PER_STAGE, Route, check_stages, parse_stages, ranks_of
from trainer.shared.strategy_table import LOCAL_STEPS

# Parallel pipelines for many hosts: more stages wait longer for each other. Pure. Each gets a part of the batch by its
# hosts' speed; all are cut at the same blocks, and gradients of equal stages are added up, or weights averaged. Hosts
# are dealt so that parallel stages are alike.
#
#     found = solve_replicas(chain, hosts, wire, batch=2048, replicas=2)
#     [course.hosts for course in found.courses], found.seconds

MOST_STAGES = 3
"""Per parallel pipeline; more would have too many orders of stages."""
MOST_APART = 6
"""Ranks up to which each is tried as a stage."""
PLAYED = 8
"""Cuts simulated, of all with bounds."""


@dataclass(frozen=True)
class Beside:
    """courses: parallel pipelines with the same cuts. seconds: per update."""

    courses: tuple[Course, ...]
    seconds: float


def solve_all(
    chain: Chain,
    hosts: Sequence[StageHost],
    wire: LinkCosts,
    batch: int,
    space: Space | None = None,
    averages: Averages | None = None,
) -> Beside | None:
    """The fastest of one or several pipelines; a host's ranks share a stage or hold one each. None if memory is too
    small. averages: only parallel pipelines, which average.
    """
    space = space or Space()
    found = [] if averages else list(_single(chain, hosts, wire, batch, space))
    for replicas in range(2, len(hosts) // 2 + 1):
        if len(hosts) % replicas == 0 and len(hosts) // replicas <= MOST_STAGES:
            found += (
                [beside] if (beside := solve_replicas(chain, hosts, wire, batch, replicas, space, averages)) else []
            )
    return min(found, key=lambda each: each.seconds, default=None)


def _single(chain: Chain, hosts: Sequence[StageHost], wire: LinkCosts, batch: int, space: Space) -> Iterator[Beside]:
    apart = tuple(rank for host in hosts for rank in host.apart)
    for kind in [hosts, apart] if len(hosts) < len(apart) <= MOST_APART else [hosts]:
        if one := solve(chain, kind, wire, batch, space):
            yield Beside((one.course,), one.seconds)


def solve_replicas(
    chain: Chain,
    hosts: Sequence[StageHost],
    wire: LinkCosts,
    batch: int,
    replicas: int,
    space: Space | None = None,
    averages: Averages | None = None,
) -> Beside | None:
    """None if memory is too small. Not proved to be the best."""
    space = space or Space()
    options = []
    for groups in _orders(hosts, replicas):
        parts = scale_shares([round(1000 * sum(host.samples_per_s for host in group)) for group in groups], batch)
        for count in space.counts:
            if min(parts) >= count * space.least_samples * max(group[0].ranks for group in groups):
                options += _cuts(chain, wire, groups, parts, count, space)
    best = sorted(options, key=lambda option: option[0])[:PLAYED]
    played = [Beside(courses, joined_s(chain, courses, wire, averages)) for _, courses in best]
    return min(played, key=lambda each: each.seconds, default=None)


def _orders(hosts: Sequence[StageHost], replicas: int) -> Iterator[tuple[tuple[StageHost, ...], ...]]:
    """Hosts by speed, in rows of one per pipeline; rows are stages, in every order."""
    by_speed = sorted(hosts, key=lambda host: -host.samples_per_s)
    rows = [by_speed[first : first + replicas] for first in range(0, len(by_speed), replicas)]
    rows = [row[::-1] if number % 2 else row for number, row in enumerate(rows)]
    for order in itertools.permutations(rows):
        yield tuple(zip(*order, strict=True))


def _cuts(
    chain: Chain,
    wire: LinkCosts,
    groups: Sequence[tuple[StageHost, ...]],
    parts: Sequence[int],
    count: int,
    space: Space,
) -> list[tuple[float, tuple[Course, ...]]]:
    """With lower bounds."""
    plain = [
        Course(group, (0,) * len(group), part, count, space.in_flight or 0, space.splits, space.late, space.clips)
        for group, part in zip(groups, parts, strict=True)
    ]
    families = [Family(chain, wire, course) for course in plain]
    tried = {found[1] for family in families if (found := family.balanced())}
    tried |= {_between(cuts) for cuts in itertools.combinations(sorted(tried), 2)}
    return [
        (
            max(family.lower_s(cut) for family in families),
            tuple(dataclasses.replace(course, starts=cut) for course in plain),
        )
        for cut in tried
        if all(family.holds(cut) for family in families)
    ]


def _between(cuts: tuple[Cut, Cut]) -> Cut:
    """Every stage keeps a block."""
    return tuple((a + b) // 2 for a, b in zip(*cuts, strict=True))


# Times of an update: tasks and waits by stage, and the bottleneck. Pure.
#
#     timed = time_update(chain, [course], wire)
#     timed.seconds, timed.limited_by                     0.22, "slowest stage"

Limit = Literal["slowest stage", "bubble", "link", "fixed cost"]


@dataclass(frozen=True)
class StageTime:
    """Per update, mean over its ranks. Blocks: `first` to `end - 1`. fixed_s: independent of samples. waiting_s: for
    neighbours or gradient sums. optimiser_s: with the copies of a late stage. out_bytes: of all its ranks.
    memory_bytes: per rank.
    """

    host: str
    first: int
    end: int
    work: float
    forward_s: float
    backward_s: float
    weights_s: float
    optimiser_s: float
    fixed_s: float
    waiting_s: float
    out_bytes: int
    weight_bytes: int
    memory_bytes: int

    @property
    def busy_s(self) -> float:
        return self.forward_s + self.backward_s + self.weights_s + self.optimiser_s


@dataclass(frozen=True)
class Timed:
    """stages: by pipeline. parts_s: causes of the update's time; they add up to `seconds`."""

    seconds: float
    stages: tuple[tuple[StageTime, ...], ...]
    parts_s: Mapping[Limit, float]

    @property
    def limited_by(self) -> Limit:
        return max(self.parts_s, key=lambda part: self.parts_s[part])


def time_update(chain: Chain, courses: Sequence[Course], wire: LinkCosts, averages: Averages | None = None) -> Timed:
    """courses: parallel pipelines, each with its part of the batch. wire: with a site per host.

    link: the time saved with free links. The rest: the busiest stage computes (fixed cost: independent of samples), or
    waits (bubble).
    """
    seconds = joined_s(chain, courses, wire, averages)
    without_links_s = min(seconds, joined_s(chain, courses, _free(wire), averages))
    if math.isclose(without_links_s, seconds, rel_tol=1e-9):
        without_links_s = seconds  # sums in another order
    stages = tuple(tuple(_stage_times(chain, course, wire, seconds)) for course in courses)
    busiest = max((stage for each in stages for stage in each), key=lambda stage: stage.busy_s)
    parts: dict[Limit, float] = {
        "slowest stage": busiest.busy_s - busiest.fixed_s,
        "fixed cost": busiest.fixed_s,
        "bubble": max(0.0, without_links_s - busiest.busy_s),
        "link": seconds - without_links_s,
    }
    return Timed(seconds, stages, parts)


def _free(wire: LinkCosts) -> LinkCosts:
    none = Transfers(message_s=0.0, local_message_s=0.0, local_bps=math.inf)
    costs = dataclasses.replace(wire.costs, call_s=0.0, of_cuts=none, **vars(none))
    sites = [dataclasses.replace(site, up_bps=math.inf, down_bps=math.inf) for site in wire.sites]
    return LinkCosts(sites, costs)


def _stage_times(chain: Chain, course: Course, wire: LinkCosts, update_s: float) -> Iterator[StageTime]:
    routes, ends, memory = course.routes(), course.ends(chain), course.memory_bytes(chain)
    came = 0
    for number, cost in enumerate(course.stages(chain)):
        first, end, ranks = course.starts[number], ends[number], cost.host.ranks
        tasks = (cost.forward, cost.backward, cost.weights)
        times = [sum(line.at(route.size) for route in routes) / ranks for line in tasks]
        optimiser_s = OPTIMISER * sum(times)
        if course.is_late(number):
            optimiser_s += course.late * copy_s(chain, first, end, wire)
        yield StageTime(
            host=cost.host.name,
            first=first,
            end=end,
            work=chain.work(first, end),
            forward_s=times[0],
            backward_s=times[1],
            weights_s=times[2],
            optimiser_s=optimiser_s,
            fixed_s=(1 + OPTIMISER) / ranks * sum(_fixed_s(line, routes) for line in tasks),
            waiting_s=max(0.0, update_s - sum(times) - optimiser_s),
            out_bytes=course.batch * (cost.cut_bytes + came),
            weight_bytes=chain.weight_bytes(first, end),
            memory_bytes=memory[number],
        )
        came = cost.cut_bytes


def _fixed_s(line: Line, routes: Sequence[Route]) -> float:
    """Besides the samples' own time."""
    return sum(line.at(route.size) - line.sample_s * route.size for route in routes)


CHOSEN = ("accumulate", "in_flight", "smaller_first", "schedule")
"""User settings that the choice keeps. With `stages` see `as_set`."""
SMALLER_FIRST = (0.15, 0.3, 0.5)
"""Parts by which the first micro-batch may be smaller. More sizes would take more CUDA graphs."""
LEAST_GAIN = 0.01
"""The least part of the speed that unequal micro-batches must add."""


@dataclass(frozen=True)
class PipelineChoice:
    """courses: by pipeline. settings: for the run. gain: the part of the speed that smaller first micro-batches add."""

    courses: tuple[Course, ...]
    timed: Timed
    settings: Mapping[str, Any]
    gain: float = 0.0

    @property
    def samples_per_s(self) -> float:
        return sum(course.batch for course in self.courses) / self.timed.seconds

    @property
    def limited_by(self) -> Limit:
        return self.timed.limited_by

    @property
    def exact_part(self) -> float:
        """The part of the updates before a pipeline is late, 0..1; 0 if it never is."""
        return 1 - self.courses[0].late if self.courses[0].late else 0.0

    @property
    def micro_batches(self) -> int:
        """Per update, over all pipelines."""
        return sum(len(course.routes()) for course in self.courses)

    @property
    def words(self) -> Iterator[str]:
        """By stage."""
        for stages in self.timed.stages:
            for stage in stages:
                yield _words(stage, self.timed.seconds)


def choose(scene: Scene, settings: Settings, chosen: Collection[str] = CHOSEN) -> PipelineChoice | None:
    """The fastest pipeline or pipelines. None for a single host, or too little memory. chosen: the user's settings;
    those in CHOSEN stay.
    """
    if len(scene.hosts) < 2:
        return None
    # Without BatchNorm a sample does not depend on its micro-batch.
    least_samples = LEAST_SAMPLES if any(layer.is_batch_norm for layer in scene.job.layers) else 1
    splits = "schedule" not in chosen or settings.schedule == "zero_bubble"
    clips = settings.clip_norm > 0
    space = Space(splits=splits, late=late_part_of(settings), clips=clips, least_samples=least_samples)
    if "accumulate" in chosen and settings.accumulate:
        space = dataclasses.replace(space, counts=(settings.accumulate,), least_samples=1)
    if "in_flight" in chosen and settings.in_flight:
        space = dataclasses.replace(space, in_flight=settings.in_flight)
    chain = chain_for(scene, settings)
    if len(chain.blocks) < 2:
        return None
    averages = averages_of(settings)
    found = solve_all(chain, stage_hosts(scene, chain), scene.wire, settings.batch, space, averages)
    if not found:
        return None
    if "shares" in chosen and len(found.courses) > 1:
        try:
            parts = _parts(scene, settings, [course.hosts[0].name for course in found.courses])
        except ValueError:  # imagined hosts, which the shares do not name
            return None
        given = tuple(
            dataclasses.replace(course, batch=part) for course, part in zip(found.courses, parts, strict=True)
        )
        found = Beside(given, joined_s(chain, given, scene.wire, averages))
    courses, gain = found.courses, 0.0
    if "smaller_first" in chosen:
        courses = _smaller(courses, settings.smaller_first, courses[0].starts)
    elif settings.fidelity != "late":  # late updates overlap
        courses, gain = _with_smaller_first(chain, found, scene.wire, space.least_samples, averages)
    return dataclasses.replace(_choice(chain, courses, scene, averages), gain=gain)


def _smaller(courses: Sequence[Course], part: float, starts: Cut) -> tuple[Course, ...]:
    return tuple(dataclasses.replace(course, smaller_first=part, starts=starts) for course in courses)


def _with_smaller_first(
    chain: Chain, found: Beside, wire: LinkCosts, least_samples: int, averages: Averages | None
) -> tuple[tuple[Course, ...], float]:
    """With the same cut or a neighbour, and the gain; as found if that is too small."""
    cut, equal_s = found.courses[0].starts, found.seconds
    best = found
    for part, starts in itertools.product((0.0, *SMALLER_FIRST), (cut, *neighbours(cut, len(chain.blocks)))):
        courses = _smaller(found.courses, part, starts)
        least = min(route.size for course in courses for route in course.routes())
        if least < least_samples or not all(course.fits(chain) for course in courses):
            continue
        seconds = joined_s(chain, courses, wire, averages)
        if not part:
            equal_s = min(equal_s, seconds)
        elif seconds < best.seconds:
            best = Beside(courses, seconds)
    gain = equal_s / best.seconds - 1
    return (best.courses, gain) if gain >= LEAST_GAIN else (found.courses, 0.0)


def as_set(scene: Scene, settings: Settings) -> PipelineChoice:
    """Raises ValueError if the settings do not fit the network and the hosts."""
    chain, pipelines = chain_for(scene, settings), parse_stages(settings.stages)
    check_stages(pipelines, len(chain.blocks))
    named = {stage.node for stages in pipelines for stage in stages}
    held = ((host,) if host.name in named else host.apart for host in stage_hosts(scene, chain))
    hosts = {host.name: host for parts in held for host in parts}
    if named != hosts.keys():
        raise ValueError(f"stages: {', '.join(sorted(named ^ hosts.keys()))}: each host of the job has one stage")
    parts = _parts(scene, settings, [stages[0].node for stages in pipelines])
    courses = tuple(
        Course(
            tuple(hosts[stage.node] for stage in stages),
            tuple(stage.first for stage in stages),
            part,
            settings.accumulate or (1 if settings.fidelity == "late" else PER_STAGE * len(stages)),
            settings.in_flight,
            settings.schedule == "zero_bubble",
            late_part_of(settings),
            settings.clip_norm > 0,
            settings.smaller_first,
        )
        for stages, part in zip(pipelines, parts, strict=True)
    )
    return _choice(chain, courses, scene, averages_of(settings))


def _parts(scene: Scene, settings: Settings, first: Sequence[str]) -> tuple[int, ...]:
    """Each pipeline's samples, as its run splits them. first: names of the first stages."""
    speeds = {(host.name, rank): speed for host in scene.hosts for rank, speed in enumerate(host.speeds)}
    shares = split_batch(settings.shares, speeds, list(speeds), settings.batch)
    readers = [ranks_of(name, [node for node, _ in speeds]) for name in first]
    wanted = [shares[rank] for lanes in readers for rank in lanes]
    scaled = iter(scale_shares(wanted if any(wanted) else [1] * len(wanted), settings.batch))
    return tuple(sum(itertools.islice(scaled, len(lanes))) for lanes in readers)


def chain_for(scene: Scene, settings: Settings) -> Chain:
    """The scene's network, else the experiment's. Cuts use 16 bits with `fidelity=half` and amp."""
    sent_bytes = FLOAT_BYTES if settings.sent_as == "fp32" and settings.amp == "none" else FLOAT_BYTES // 2
    blocks = chain_from(scene.job.blocks or network_of(settings), sent_bytes).blocks
    if settings.amp != "none":
        blocks = tuple(dataclasses.replace(block, kept_bytes=block.kept_bytes // 2) for block in blocks)
    return Chain(blocks, settings.states)


def stage_hosts(scene: Scene, chain: Chain) -> tuple[StageHost, ...]:
    return tuple(
        StageHost.of(host.name, host.speeds, _memory_bytes(scene, chain, host), host.blocks, host.launch_ms)
        for host in scene.hosts
    )


def _memory_bytes(scene: Scene, chain: Chain, host: HostSpeed) -> int | None:
    """If unknown: for the whole network with the samples that a profile found; None without a limit."""
    if host.memory_bytes is not None:
        return host.memory_bytes
    caps = [speed.cap for speed in host.speeds if speed.cap is not None]
    if not caps:
        return None
    return chain.states * gradient_bytes(scene.job.layers) + min(caps) * chain.kept_bytes(0, len(chain.blocks))


def late_part_of(settings: Settings) -> float:
    """The part of the updates that are late, 0..1."""
    return 1 - exact_part_of(settings, "late") if settings.fidelity == "late" else 0.0


def averages_of(settings: Settings) -> Averages | None:
    """None if parallel pipelines add up gradients."""
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
    if first.smaller_first:
        found["smaller_first"] = first.smaller_first
    if len(courses) > 1:  # only ranks that read samples have a share
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


# Parallel pipelines that average weights (`fidelity=local`). Pure. They update independently and wait only at
# averages.
#
#     joined_s(chain, courses, wire, Averages(every=32, overlap=8))       seconds of an update


@dataclass(frozen=True)
class Averages:
    """every: updates per average. overlap: updates during its transfer. half: in 16 bits."""

    every: int
    overlap: int = 0
    half: bool = False


def joined_s(chain: Chain, courses: Sequence[Course], wire: LinkCosts, averages: Averages | None) -> float:
    """Mean seconds per update. averages: None adds up gradients."""
    if averages is None:
        return update_seconds(chain, courses, wire)
    own_s = max(update_seconds(chain, [course], wire) for course in courses)
    travels_s, copies_s = _average_s(chain, courses, wire, averages)
    return own_s + (copies_s + max(0.0, travels_s - averages.overlap * own_s)) / averages.every


def _average_s(chain: Chain, courses: Sequence[Course], wire: LinkCosts, averages: Averages) -> tuple[float, float]:
    """(transfer, copies) of the largest part: all stages average at once."""
    part = 0.5 if averages.half else 1.0
    halved = dataclasses.replace(
        chain,
        blocks=tuple(dataclasses.replace(one, weight_bytes=round(part * one.weight_bytes)) for one in chain.blocks),
    )
    travels_s = max((each.seconds for each in sums_of(halved, courses, wire)), default=0.0)
    largest = max(
        chain.weight_bytes(first, end)
        for course in courses
        for first, end in zip(course.starts, course.ends(chain), strict=True)
    )
    arrives = gpu_work.arrive if averages.overlap else gpu_work.arrive_at_once
    casts_s = 2 * wire.costs.work_s(gpu_work.cast(largest)) if averages.half else 0.0
    return travels_s, casts_s + wire.costs.work_s(gpu_work.leave(largest)) + wire.costs.work_s(arrives(largest))
