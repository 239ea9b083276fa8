"""What a run's settings ask for, as the forecast sees it: `way_of(settings)`, predicted by `forecast_in`; and where
memory is too small for it. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from orchestrator.forecast.advice import BUCKETS_MIB, FIDELITIES, Kept, Scene
from orchestrator.forecast.step import PREDICTED, Fidelity, Forecast, Way, predict
from trainer.shared.experiments import OWN
from trainer.shared.settings import Settings, overlap_of
from trainer.shared.shares import Speed
from trainer.shared.strategy_table import LOCAL_STEPS, ONE_PROCESS

ENDLESS = 10**12
"""Samples."""
UNSENT = ("pace", "catalogue")
"""The sources of speeds that a run's ranks do not receive, nor what their memory holds."""


def way_of(settings: Settings) -> Way | None:
    """The way that these settings ask for. None: one that is not predicted."""
    strategy, fidelity = settings.strategy, allowed(settings)
    half_wire = settings.wire in ("bf16", "fp16")
    if strategy in ONE_PROCESS:
        return Way("ddp")  # one rank, which exchanges nothing
    exact_part = exact_part_of(settings, fidelity)
    if fidelity == "local":
        rounds = {"half_wire": half_wire, **rounds_of(settings)}
        return Way("parameter_average", "local", settings.bucket_mib, exact_part=exact_part, **rounds)
    if strategy == "parameter_average":
        return Way(strategy, "local", half_wire=half_wire)  # after every update
    if strategy == "tensor":
        return Way(strategy, fidelity, half_wire=settings.amp != "none")
    if strategy not in PREDICTED:
        return None
    way = Way(strategy, fidelity, settings.bucket_mib, rank=settings.compress_rank)
    return dataclasses.replace(way, exact_part=exact_part, sync_bn=settings.sync_bn)


def exact_part_of(settings: Settings, fidelity: str) -> float:
    """The part of a run's updates (0..1) before it begins to compress, or to train locally."""
    after = {"compressed": settings.compress_after, "local": settings.local_after}.get(fidelity, 0)
    updates = updates_of(settings)
    return min(1.0, (updates // 10 if after < 0 else after) / updates)


def updates_of(settings: Settings) -> int:
    """The updates of the whole run, as far as the data set is known here; a folder counts as the experiment's set, a
    script's as endless.
    """
    there = settings.data_set.train_samples if settings.model != OWN else ENDLESS
    whole = settings.epochs * -(-min(settings.samples or there, there) // settings.batch)
    return min(whole, settings.steps or whole)


def rounds_of(settings: Settings) -> dict[str, Any]:
    """The settings of local steps, as `Way` names them."""
    every = settings.local_steps or LOCAL_STEPS
    overlap = overlap_of(every, settings.local_overlap)
    return {"every": every, "overlap": overlap, "local_batch": settings.local_batch}


def kept(settings: Settings, chosen: Collection[str]) -> Kept:
    """chosen: settings that the person made."""
    own_mib = settings.bucket_mib if "bucket_mib" in chosen else 0.0
    return Kept(
        **rounds_of(settings),
        rank=settings.compress_rank,
        wire=settings.wire,
        buckets_mib=(own_mib,) if own_mib else BUCKETS_MIB,
        exact_parts={each: exact_part_of(settings, each) for each in ("compressed", "local")},
        sync_bn=settings.sync_bn,
        slices=not settings.sync_bn and settings.model != OWN,
        half_outputs=settings.amp != "none",
    )


def allowed(settings: Settings) -> Fidelity:
    return next(each for each in FIDELITIES if each == settings.fidelity)


def forecast_in(scene: Scene, way: Way, shares: Sequence[int], micro: int) -> Forecast:
    """micro: the setting `accumulate`."""
    hosts, first, computed = [], 0, computed_shares(way.strategy, shares, scene.job.batch)
    for host in scene.hosts:
        own = computed[first : first + len(host.speeds)]
        first += len(own)
        speeds = (_in_parts(speed, share, micro) for speed, share in zip(host.speeds, own, strict=True))
        hosts.append(dataclasses.replace(host, speeds=tuple(speeds)))
    return predict(scene.job, hosts, scene.wire, way, shares)


def computed_shares(strategy: str, shares: Sequence[int], batch: int) -> Sequence[int]:
    """Samples that each rank computes of an update. Under tensor shares are of channels, and all compute the batch."""
    return [batch] * len(shares) if strategy == "tensor" else shares


def _in_parts(speed: Speed, share: int, micro: int) -> Speed:
    if micro < 1 or share < 1:
        return speed
    part = -(-share // micro)
    return dataclasses.replace(speed, cap=part if speed.cap is None else min(part, speed.cap))


def memory_words(
    scene: Scene, shares: Sequence[int], speeds_from: Mapping[str, str], settings: Settings
) -> Iterator[str]:
    """Warnings about hosts that will do more at once than their memory holds: ranks do not learn these estimates."""
    local_batch = settings.local_batch
    found: dict[int, list[tuple[str, int]]] = {}
    for name, cap, share in _too_large(scene, shares, speeds_from, settings):
        found.setdefault(cap, []).append((name, share))
    parts = parts_needed(scene, shares, speeds_from, settings)
    remedy = f"local_batch={min(found, default=0)}" if local_batch else f"accumulate={parts}"
    for cap, ranks in found.items():
        names, most = ", ".join(dict(ranks)), max(share for _, share in ranks)
        what = f"a local batch of {local_batch}" if local_batch else f"a share of {most}"
        yield (
            f"{names}: {what} will not fit into its memory at once ({cap} samples, estimated); `orch profile`, "
            f"or --set {remedy}"
        )


def parts_needed(scene: Scene, shares: Sequence[int], speeds_from: Mapping[str, str], settings: Settings) -> int:
    """The setting `accumulate` with which these shares fit; 0 where they fit as they are."""
    return max((-(-share // cap) for _, cap, share in _too_large(scene, shares, speeds_from, settings)), default=0)


def _too_large(
    scene: Scene, shares: Sequence[int], speeds_from: Mapping[str, str], settings: Settings
) -> Iterator[tuple[str, int, int]]:
    """Name, cap and share, in samples, of each rank that receives no cap and would need one."""
    micro, local_batch = max(1, settings.accumulate), settings.local_batch
    split = iter(computed_shares(settings.strategy, shares, scene.job.batch))
    for host in scene.hosts:
        has_no_cap = speeds_from.get(host.name, "catalogue") in UNSENT
        for speed, share in zip(host.speeds, split, strict=False):
            at_once = min(-(-share // micro), local_batch or share)
            if has_no_cap and speed.cap and at_once > speed.cap:
                yield host.kind or host.name, speed.cap, share
