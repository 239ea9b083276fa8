"""The fastest strategy for a job on a cluster, its bottleneck, and the effect of changes. Pure.

    scene = Scene(job, hosts, wire)
    advise(scene).best["exact"].forecast.way.strategy   "ddp"
    advise(scene).without                               sets of fewer hosts that are faster

Every candidate is predicted with equal shares and with shares by speed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

from orchestrator.forecast.links import LinkCosts
from orchestrator.forecast.step import (
    Forecast,
    HostSpeed,
    Way,
    Workload,
    alone_samples_per_s,
    predict,
    speeds_of,
)
from orchestrator.forecast.tensor_step import MOST_RANKS
from trainer.shared.settings import overlap_of
from trainer.shared.shares import equal_shares, fastest_shares, without_singles
from trainer.shared.strategy_table import FIDELITY_NAMES, LOCAL_STEPS, Fidelity

BUCKETS_MIB = (10.0, 25.0, 50.0, 100.0)
LOCAL_OVERLAP = overlap_of(LOCAL_STEPS, -1)
AFTER_BACKWARD = ("allreduce_flat", "allreduce")
"""Tried next to ddp; other collectives are for the studies."""
GAIN = 1.01
"""Smaller gains are not reported."""
FEW = 16
"""More hosts are left out kind by kind."""
ENDS = 4
"""With more than FEW kinds: this many of the slowest are left out in turn, and as many of the fastest run by
themselves.
"""
# Tensor has to be predicted this many times as fast: two ranks of one busy host reached 0.57 to 1.12 of the prediction
# (docs/cutting.md).
UNSURE = 2.0
# For a pipeline of a script's network: predictions were 15 and 19 % too high (docs/scripts.md).
UNSURE_OWN = 1.2
Policy = Literal["equal", "measured"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


@dataclass(frozen=True)
class Scene:
    """hosts and wire.sites: the same hosts in order."""

    job: Workload
    hosts: tuple[HostSpeed, ...]
    wire: LinkCosts

    @property
    def holds_whole(self) -> bool:
        """Whether each rank has memory for the whole network and a sample."""
        return all(speed.cap != 0 for host in self.hosts for speed in host.speeds)

    @cached_property
    def equal(self) -> tuple[int, ...]:
        return equal_shares(self.job.batch, self.wire.ranks)

    @cached_property
    def measured(self) -> tuple[int, ...]:
        return self._by_speed(0)

    def _by_speed(self, local_batch: int) -> tuple[int, ...]:
        """Like `trainer.shared.shares.split_batch`."""
        return without_singles(fastest_shares(speeds_of(self.hosts, local_batch), self.job.batch))

    def shares(self, policy: Policy, local_batch: int = 0) -> tuple[int, ...]:
        """local_batch: of the way."""
        if policy == "equal":
            return self.equal
        return self._by_speed(local_batch) if local_batch else self.measured

    @cached_property
    def kinds(self) -> tuple[tuple[str, ...], ...]:
        """Names of hosts with equal ranks and links."""
        alike: dict[object, list[str]] = {}
        for host, site in zip(self.hosts, self.wire.sites, strict=True):
            alike.setdefault((host.speeds, site.up_bps, site.down_bps), []).append(host.name)
        return tuple(map(tuple, alike.values()))

    @cached_property
    def alone(self) -> dict[str, float]:
        """samples/s with the whole batch."""
        kinds = {host.speeds: host for host in self.hosts}
        speeds = {kind: alone_samples_per_s(host, self.job.batch) for kind, host in kinds.items()}
        return {host.name: speeds[host.speeds] for host in self.hosts}

    def only(self, names: Iterable[str]) -> Scene:
        kept = set(names)
        sites = [site for site in self.wire.sites if site.name in kept]
        hosts = tuple(host for host in self.hosts if host.name in kept)
        return Scene(self.job, hosts, LinkCosts(sites, self.wire.costs, self.wire.pairs))

    def with_batch(self, batch: int) -> Scene:
        return Scene(dataclasses.replace(self.job, batch=batch), self.hosts, self.wire)

    def with_links(self, factor: float) -> Scene:
        sites = [
            dataclasses.replace(site, up_bps=factor * site.up_bps, down_bps=factor * site.down_bps)
            for site in self.wire.sites
        ]
        pairs = {pair: factor * bps for pair, bps in self.wire.pairs.items()}
        return Scene(self.job, self.hosts, LinkCosts(sites, self.wire.costs, pairs))

    def with_another(self, name: str) -> Scene:
        index = [host.name for host in self.hosts].index(name)
        twin = f"{name}+"
        host = dataclasses.replace(self.hosts[index], name=twin)
        site = dataclasses.replace(self.wire.sites[index], name=twin)
        return Scene(
            self.job, (*self.hosts, host), LinkCosts([*self.wire.sites, site], self.wire.costs, self.wire.pairs)
        )


@dataclass(frozen=True)
class Choice:
    policy: Policy
    forecast: Forecast

    @property
    def samples_per_s(self) -> float:
        return self.forecast.samples_per_s


@dataclass(frozen=True)
class WhatIf:
    change: str
    hosts: tuple[str, ...]
    choice: Choice
    """The best choice after the change."""


@dataclass(frozen=True)
class Advice:
    fidelity: Fidelity
    """Allowed by the settings."""
    best: Mapping[Fidelity, Choice]
    """Without pipelines, and without fidelities that only pipelines have."""
    choices: tuple[Choice, ...]
    """Every way, only with its best bucket size."""
    alone: Mapping[str, float]
    """samples/s."""
    without: tuple[WhatIf, ...]
    """Faster with fewer hosts, fastest first."""
    what_if: tuple[WhatIf, ...]
    """For the allowed fidelity."""

    @property
    def now(self) -> Choice:
        """The fastest allowed choice; if only pipelines have the fidelity, the fastest exact choice."""
        return self.best.get(self.fidelity, self.best["exact"])

    @property
    def sum_of_parts(self) -> float:
        return sum(self.alone.values())


@dataclass(frozen=True)
class Kept:
    """Fixed parameters of all candidates, see `Way`."""

    buckets_mib: Sequence[float] = BUCKETS_MIB
    every: int = LOCAL_STEPS
    overlap: int = LOCAL_OVERLAP
    local_batch: int = 0
    rank: int = 2
    wire: str = "auto"
    """For local's averages; auto tries fp32 and 16 bits."""
    exact_parts: Mapping[str, float] = field(default_factory=dict)
    """By fidelity that begins exact."""
    sync_bn: bool = False
    slices: bool = True
    """Whether tensor is a candidate; not with sync_bn, or if a host may leave."""
    half_outputs: bool = False
    """Layers' outputs have 16 bits."""


def ways(fidelity: Fidelity, kept: Kept = Kept()) -> Iterator[Way]:
    """Without pipelines."""
    if fidelity == "late":
        return  # only pipelines have it
    exact_part = kept.exact_parts.get(fidelity, 0.0)
    if fidelity == "local":
        each = Way("parameter_average", "local", every=kept.every, overlap=kept.overlap, local_batch=kept.local_batch)
        each = dataclasses.replace(each, exact_part=exact_part)
        halves = {"auto": (False, True), "fp32": (False,)}.get(kept.wire, (True,))
        yield from (dataclasses.replace(each, half_wire=half_wire) for half_wire in halves)
        return
    if fidelity == "compressed":
        yield Way("allreduce_flat", "compressed", rank=kept.rank, exact_part=exact_part, sync_bn=kept.sync_bn)
        return
    for bucket_mib in kept.buckets_mib:
        yield Way("ddp", fidelity, bucket_mib, sync_bn=kept.sync_bn)
    yield from (Way(name, fidelity, sync_bn=kept.sync_bn) for name in AFTER_BACKWARD)
    if kept.slices:
        yield Way("tensor", fidelity, half_wire=kept.half_outputs)


def choices(scene: Scene, candidates: Sequence[Way]) -> list[Choice]:
    """Fastest first; ties: the first candidate."""
    candidates = [way for way in candidates if way.strategy != "tensor" or 2 <= scene.wire.ranks <= MOST_RANKS]
    by_batch = {local_batch: splits(scene, local_batch) for local_batch in {way.local_batch for way in candidates}}
    unsorted = [
        Choice(policy, predict(scene.job, scene.hosts, scene.wire, way, by_batch[way.local_batch][policy]))
        for policy in POLICIES
        for way in candidates
        if policy in by_batch[way.local_batch]
    ]
    return sorted(unsorted, key=lambda choice: -preference(choice.forecast.way.strategy, choice.samples_per_s))


def preference(strategy: str, samples_per_s: float, *, is_own: bool = False) -> float:
    """Speed, discounted for unreliable predictions. is_own: a script's network."""
    if strategy == "tensor":
        return samples_per_s / UNSURE
    return samples_per_s / UNSURE_OWN if is_own and strategy == "pipeline" else samples_per_s


def splits(scene: Scene, local_batch: int) -> dict[Policy, tuple[int, ...]]:
    """Without equal shares if they give a rank a single sample, which BatchNorm cannot use."""
    shares = {policy: scene.shares(policy, local_batch) for policy in POLICIES}
    if 1 in shares["equal"] and shares["measured"] != shares["equal"]:
        del shares["equal"]
    return shares


def advise(scene: Scene, fidelity: Fidelity = "exact", kept: Kept = Kept()) -> Advice:
    """fidelity: allowed by the settings, and used for changes."""
    candidates = {each: found for each in FIDELITY_NAMES if (found := list(ways(each, kept)))}
    by_fidelity = {each: choices(scene, found) for each, found in candidates.items()}
    own = fidelity if fidelity in candidates else "exact"

    def at_best(changed: Scene) -> Choice:
        return choices(changed, candidates[own])[0]

    now = by_fidelity[own][0].samples_per_s
    tried = [WhatIf("without", tuple(h.name for h in rest.hosts), at_best(rest)) for rest in fewer(scene)]
    worth = [change for change in tried if change.choice.samples_per_s > GAIN * now]
    return Advice(
        fidelity,
        {each: found[0] for each, found in by_fidelity.items()},
        tuple(_one_a_kind(itertools.chain(*by_fidelity.values()))),
        scene.alone,
        tuple(sorted(worth, key=lambda change: -change.choice.samples_per_s)),
        tuple(WhatIf(words, tuple(h.name for h in then.hosts), at_best(then)) for words, then in changed(scene)),
    )


def _one_a_kind(every: Iterable[Choice]) -> Iterator[Choice]:
    seen = set()
    for choice in every:
        way = choice.forecast.way
        kind = way.strategy, way.fidelity, way.half_wire, choice.policy
        if kind not in seen:
            seen.add(kind)
            yield choice


def fewer(scene: Scene) -> Iterator[Scene]:
    """Without each host, and each host by itself; many hosts kind by kind; of many kinds only the slowest and
    fastest.
    """
    names = [host.name for host in scene.hosts]
    groups = scene.kinds if len(names) > FEW else tuple((name,) for name in names)
    if len(groups) == 1:
        yield from [scene.only(names[:1])] if len(names) > 1 else []
        return
    out = alone = groups
    if len(groups) > FEW:
        by_speed = sorted(groups, key=lambda group: scene.alone[group[0]])
        out, alone = tuple(by_speed[:ENDS]), tuple(by_speed[-ENDS:])
    tried = [tuple(name for name in names if name not in set(group)) for group in out]
    tried += alone if len(groups) > 2 else ()
    tried += [(max(scene.alone, key=lambda name: scene.alone[name]),)] if len(names) > FEW else []
    for kept in tried:
        yield scene.only(kept)


def changed(scene: Scene) -> Iterator[tuple[str, Scene]]:
    """In words, with the changed scene."""
    if len(scene.hosts) > 1:
        yield "links four times as fast", scene.with_links(4)
    fastest = max(scene.alone, key=lambda name: scene.alone[name])
    if scene.wire.sites[0].up_bps < float("inf"):
        kind = next(host.kind for host in scene.hosts if host.name == fastest)
        yield f"adding a {kind} host" if kind else f"adding a host like {fastest}", scene.with_another(fastest)
    batch = scene.job.batch
    for larger in (2 * batch, 8 * batch):
        yield f"batch {larger} instead of {batch}", scene.with_batch(larger)
