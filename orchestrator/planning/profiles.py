"""Profiles: measured speed of each kind of rank, which ranks they apply to, and the split of a batch by them. Pure.

Profiles are stored under $ORCH_HOME by a key of all that affects speed: a new driver, torch or pace needs a new one.
Equal hosts share a profile, unless one was measured separately (`orch profile --each`). `measuring/profiling` measures.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Any

from pydantic import Field, model_validator

from orchestrator.errors import UsageError
from orchestrator.hosts.facts import NodeFacts
from orchestrator.planning.launch_plan import LaunchPlan, NodePlan
from orchestrator.record import SCHEMA, Record
from orchestrator.units import format_percent
from trainer.shared.config import names_of
from trainer.shared.experiments import OWN
from trainer.shared.metrics import LATE
from trainer.shared.settings import Settings
from trainer.shared.shares import (
    BY_SPEED,
    PROFILED,
    Speed,
    at_most,
    equal_shares,
    format_speeds,
    parse_speeds,
    split_batch,
)
from trainer.shared.strategy_table import ONE_PROCESS, why_not_replayed

# Records of a measurement.

Ms = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]
Samples = Annotated[int, Field(ge=1, lt=1 << 40)]
TaskTime = tuple[Ms, Ms]
"""ms per micro-batch, and ms per sample."""
TaskTimes = Annotated[tuple[TaskTime, ...], Field(min_length=1, max_length=1024)]
"""By block."""


class BlockTimes(Record):
    """For networks that are a chain of blocks."""

    samples: Annotated[tuple[Samples, ...], Field(min_length=2, max_length=16)]
    """Measured micro-batch sizes."""
    forward: TaskTimes
    backward: TaskTimes
    weights: TaskTimes
    stretches: Annotated[int, Field(ge=1, le=1024)]
    """Groups of blocks timed separately; a group's time is divided by its blocks' work."""
    of_whole: Annotated[float, Field(gt=0, lt=1e9)] | None = None
    """Sum over blocks at the largest size, relative to the whole network's time."""

    @model_validator(mode="after")
    def _has_all_tasks_of_each_block(self) -> BlockTimes:
        if not len(self.forward) == len(self.backward) == len(self.weights):
            raise ValueError("forward, backward and weights are of unequal numbers of blocks")
        return self

    @property
    def count(self) -> int:
        return len(self.forward)

    @property
    def fixed_ms(self) -> float:
        """Per micro-batch of the whole network, independent of its size."""
        return sum(fixed_ms for task in (self.forward, self.backward, self.weights) for fixed_ms, _ in task)


class SeenLayer(Record):
    """See `orchestrator.forecast.layers.Layer`."""

    shapes: Annotated[tuple[Annotated[tuple[Samples, ...], Field(max_length=8)], ...], Field(max_length=64)]
    work: Annotated[float, Field(ge=0, lt=1e18, allow_inf_nan=False)]
    batch_norm: bool | None = None
    """None in profiles of older versions, and for layers of other shapes."""


class SeenBlock(Record):
    layers: Annotated[tuple[SeenLayer, ...], Field(max_length=1024)]
    outputs: Annotated[int, Field(ge=0, lt=1 << 40)]


class Measurement(Record):
    """The `profile` record of one rank."""

    samples: Annotated[tuple[Samples, ...], Field(min_length=1, max_length=64)]
    step_ms: Annotated[tuple[Ms, ...], Field(min_length=1, max_length=64)]
    """Median of forward, backward and optimiser, without synchronisation."""
    fixed_ms: Ms
    sample_ms: Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)]
    lateness: Annotated[tuple[Ms | None, ...], Field(max_length=64)] = ()
    """Delay of a paced rank at each size, as a fraction of a step."""
    worst_error: Ms | None = None
    largest: Samples
    """The largest batch tried."""
    cap: Samples | None = None
    """Most samples that fit into memory; None: not limited by memory."""
    forward_ms: Ms
    """At the largest size, like optim_ms."""
    optim_ms: Ms
    again_samples: Samples | None = None
    again_ms: Ms | None = None
    blocks: BlockTimes | None = None
    """None for paced ranks and for networks that are not a chain."""
    batch: Samples | None = None
    """Global batch of the settings or script."""
    network: Annotated[tuple[SeenBlock, ...], Field(min_length=1, max_length=1024)] | None = None


DRIFT = 0.05
RETRY = "`{profile}` while nothing else runs there, or with a larger --set batch= or --set profile_s="
GPU_SETTINGS = names_of(lambda each: each.of_gpu)
AMPERE = 8
"""First major compute capability with TF32 (trainer.compute.arithmetic)."""
Rank = tuple[str, int]
"""Node and local rank."""


class Kind(Record):
    """All that a rank's own speed depends on."""

    exp: str
    model: str
    """For a script its folder and command: its network is still unknown."""
    data: str
    """Data set that determines the image shape."""
    amp: str
    device: str
    gpu: str | None
    device_name: str
    torch: str | None
    driver: str | None
    ranks: int
    threads: str | None = None
    gpu_settings: str = ""
    """Values of GPU_SETTINGS other than auto, like "tf32=off"."""
    paced: dict[str, Any] | None = None
    """Without changes during the run."""
    host: str | None = None
    """CLUSTER/NODE if measured separately; None: for all hosts of this kind."""

    @property
    def key(self) -> str:
        facts = {name: getattr(self, name) for name in Kind.model_fields}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]

    def of(self, host: str | None) -> Kind:
        return self.model_copy(update={"host": host})


class Profile(Kind, Measurement):
    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    node: str
    created: str
    code: str | None = None
    """Digest of a script's files."""
    valid: bool = True
    """False if a paced rank kept its pace at fewer than two sizes: it is only shown."""

    @property
    def speed(self) -> Speed:
        """Only memory sets a cap; the line is extrapolated, since smaller parts would change what BatchNorm sees."""
        return Speed(self.fixed_ms, self.sample_ms, self.cap)

    @property
    def late_sizes(self) -> tuple[int, ...]:
        """Sizes at which a paced rank was late."""
        return tuple(size for size, late in zip(self.samples, self.lateness, strict=False) if (late or 0) > LATE)

    def why_not_valid(self) -> str:
        judged = [(late, size) for size, late in zip(self.samples, self.lateness, strict=False) if late is not None]
        why = f"{self.node}'s CPU was too slow for the pace of the simulated GPU"
        if not judged:
            return why
        late, size = min(judged)
        return (
            f"{why} at {len(self.late_sizes)} of {len(judged)} batch sizes from {self.samples[0]} to "
            f"{self.samples[-1]}; the best was {size}, {100 * late:,.1f} % of a step late "
            f"({100 * LATE:g} % is allowed, at two sizes)"
        )

    @property
    def drift(self) -> float | None:
        """Relative increase of an update's time during the measurement."""
        before = dict(zip(self.samples, self.step_ms, strict=False)).get(self.again_samples or 0)
        return self.again_ms / before - 1 if self.again_ms and before else None

    def drift_words(self) -> str:
        """ "" without drift."""
        if self.drift is None or self.drift < DRIFT:
            return ""
        slower = f"{self.again_samples} samples took {format_percent(self.drift)} longer at the end of the measurement"
        why = "heat, a power cap, or another program"
        return f"{self.node}: {slower} than before ({why}): a long run may be slower than this"

    def is_extrapolated(self, samples: int) -> bool:
        """Whether this exceeds the measured sizes."""
        return self.cap is None and samples > self.largest

    def samples_per_s(self, batch: int) -> float:
        """By itself, in parts that fit its memory."""
        samples = min(batch, self.cap or batch)
        return 1000 * samples / self.speed.step_ms(samples)


@dataclass(frozen=True)
class RankProfile:
    rank: Rank
    profile: Profile
    fresh: bool


def measured_shares(batch: int, known: Sequence[RankProfile]) -> dict[Rank, int]:
    """Samples by rank; empty if a profile is invalid."""
    if not all(each.profile.valid for each in known):
        return {}
    speeds = {each.rank: each.profile.speed for each in known}
    return dict(zip(speeds, split_batch("measured", speeds, list(speeds), batch), strict=True))


Profiles = Mapping[Rank, Profile]


# ---- whom a profile holds for -------------------------------------------------------------------------------------


def kinds_of(plan: LaunchPlan, facts: Mapping[str, NodeFacts]) -> dict[Rank, Kind]:
    settings = plan.training
    if settings is None:
        return {}
    chosen = {name: str(getattr(settings, name)) for name in GPU_SETTINGS}
    chosen |= {"tf32": tf32_of(settings.tf32, plan.nodes, facts), "cuda_graph": cuda_graph_of(settings)}
    asked = " ".join(f"{name}={value}" for name, value in chosen.items() if value != "auto")
    return {
        (node.name, i): _kind(settings, node, facts[node.name], i, asked, plan.code.source)
        for node in plan.nodes
        for i in range(node.ranks)
    }


def cuda_graph_of(settings: Settings) -> str:
    """Off if other settings, which a profile does not have, rule graphs out."""
    why = why_not_replayed(settings.strategy, settings.sync_bn)
    return "off" if why else settings.cuda_graph


def tf32_of(asked: str, nodes: Sequence[NodePlan], facts: Mapping[str, NodeFacts]) -> str:
    """on if all ranks have GPUs with TF32, else off; auto if a driver reports no capability.

    asked: the setting `tf32`.
    """
    if asked != "auto":
        return asked
    if any(node.device != "cuda" for node in nodes):
        return "off"
    gpus = [gpu for node in nodes for gpu in facts[node.name].gpus[: node.ranks]]
    majors = [(gpu.compute_capability or "").partition(".")[0] for gpu in gpus]
    if not majors or not all(map(str.isdecimal, majors)):
        return "auto"
    return "on" if min(map(int, majors)) >= AMPERE else "off"


def profile_line(settings: Settings) -> str:
    return "orch profile -- SCRIPT [ARGS]" if settings.model == OWN else f"orch profile --exp {settings.exp}"


def _data_of(settings: Settings) -> str:
    name = settings.data_set_name
    if not settings.data_set.is_text:
        return name
    return f"{name} of {settings.tokens} tokens" + (f" (of {settings.vocabulary})" if settings.vocabulary else "")


def _kind(
    settings: Settings, node: NodePlan, facts: NodeFacts, local_rank: int, gpu_settings: str, source: str
) -> Kind:
    own = node.gpu_uuids
    gpu = next((gpu for gpu in facts.gpus if own and gpu.uuid == own[local_rank % len(own)]), None)
    pace = {key: value for key, value in node.paced.items() if key != "slowdown"} if node.paced else None
    is_own = settings.model == OWN
    model = f"{source}: {shlex.join(node.command)}" if is_own else settings.model
    return Kind(
        exp=settings.exp,
        model=model,
        data=OWN if is_own else _data_of(settings),
        amp=settings.amp,
        device=node.device,
        gpu=node.gpu,
        device_name=gpu.name if gpu else "paced" if pace else f"{facts.machine}, {facts.cores} cores",
        torch=facts.torch.version if facts.torch else None,
        driver=gpu.driver if gpu else None,
        ranks=node.ranks,
        threads=None if gpu or pace else node.env.get("OMP_NUM_THREADS"),
        gpu_settings=gpu_settings if node.device == "cuda" else "",
        paced=pace,
    )


# Split of a global batch over ranks, by the setting `shares` and known speeds; ranks repeat it from `Split.settings`.

FEW_NAMES = 8


@dataclass(frozen=True)
class Split:
    shares: Mapping[Rank, int] = field(default_factory=dict)
    """By rank; empty for a script with unknown batch."""
    policy: str = ""
    """Final setting `shares`; "" if unchanged."""
    speeds: Mapping[Rank, Speed] = field(default_factory=dict)
    """Known speeds, typed or profiled."""
    alone: Mapping[Rank, float] = field(default_factory=dict)
    """samples/s by rank, with the whole batch."""
    notes: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, str]:
        """Settings from which ranks compute the same shares."""
        settings = {}
        if self.policy == "measured":
            settings["shares"] = ",".join(f"{node}:{i}={share}" for (node, i), share in self.shares.items())
        if self.speeds:  # including typed speeds, which may be of some ranks only
            settings["speeds"] = format_speeds(self.speeds)
        return settings


def split_equally(batch: int | None, ranks: Sequence[Rank]) -> Split:
    return Split(dict(zip(ranks, equal_shares(batch, len(ranks)), strict=True))) if batch else Split()


def split_batch_of(
    settings: Settings, ranks: Sequence[Rank], profiles: Profiles, not_kept: Profiles | None = None
) -> Split:
    """not_kept: invalid profiles, for the error message. Raises UsageError if `shares` does not fit."""
    if settings.profile_s:
        return split_equally(settings.batch, ranks)
    known = {**{rank: profile.speed for rank, profile in profiles.items()}, **parse_speeds(settings.speeds)}
    speeds = {rank: at_most(speed, settings.local_batch) for rank, speed in known.items()}
    policy = _policy(settings, all_known=all(rank in speeds for rank in ranks))
    try:
        shares = split_batch(policy, speeds, ranks, settings.batch)
    except ValueError as error:
        missed = [not_kept[rank] for rank in ranks if rank in not_kept and rank not in known] if not_kept else []
        if policy == "measured" and missed:
            raise _not_kept(profile_line(settings), missed) from error
        raise UsageError(f"shares: {error}", _remedy(profile_line(settings), policy)) from error
    split = dict(zip(ranks, shares, strict=True))
    by_itself = settings.shares == PROFILED and shares != equal_shares(settings.batch, len(ranks))
    return Split(
        shares=split,
        policy=policy,
        speeds=speeds,
        alone={rank: profiles[rank].samples_per_s(settings.batch) for rank in ranks if rank in profiles},
        notes=(*([_by_profile_words(split)] if by_itself else ()), *_notes(policy, split, speeds, profiles)),
    )


def _policy(settings: Settings, *, all_known: bool) -> str:
    if settings.shares != PROFILED:
        return settings.shares
    return "measured" if all_known and settings.strategy not in ONE_PROCESS else "equal"


# ---- in words -------------------------------------------------------------------------------------------------------


def _by_profile_words(split: Mapping[Rank, int]) -> str:
    samples: dict[str, int] = {}
    for (name, _), share in split.items():
        samples[name] = samples.get(name, 0) + share
    few = f" ({', '.join(f'{name} {share}' for name, share in samples.items())})" if len(samples) <= FEW_NAMES else ""
    return f"shares=measured{few}, since every rank's speed is known; --set shares=equal splits the batch evenly"


def _not_kept(profile: str, missed: Sequence[Profile]) -> UsageError:
    words = {
        f"{each.node} was measured on {each.created[:10]}, but not kept: {each.why_not_valid()}" for each in missed
    }
    return UsageError(f"shares: {'; '.join(sorted(words))}", f"{RETRY.format(profile=profile)}; or --set shares=auto")


def _remedy(profile: str, policy: str) -> str:
    if policy in BY_SPEED:
        return f"measure it: `{profile}`, with the same --set"
    return "name every node, or rank, that takes part"


def _notes(policy: str, split: Mapping[Rank, int], speeds: Mapping[Rank, Speed], profiles: Profiles) -> Iterator[str]:
    if policy not in BY_SPEED:
        return iter(())
    if not speeds.keys() >= split.keys():
        words = "shares=auto: not every rank's speed is known, so they begin equal (`orch profile` measures)"
        return iter((words,))
    return chain(_idle_words(split, speeds), _extrapolated_words(split, profiles))


def _idle_words(split: Mapping[Rank, int], speeds: Mapping[Rank, Speed]) -> Iterator[str]:
    longest_ms = max(speeds[rank].step_ms(share) for rank, share in split.items())
    for (node, i), share in split.items():
        if share == 0:
            yield (
                f"{node}:{i} is left out (share 0): two samples would take it {speeds[node, i].step_ms(2):.0f} ms, "
                f"and without it the whole batch is computed in {longest_ms:.0f} ms"
            )


def _extrapolated_words(split: Mapping[Rank, int], profiles: Profiles) -> Iterator[str]:
    beyond = sorted(
        f"{node}:{i} (beyond {profiles[node, i].largest})"
        for (node, i), share in split.items()
        if (node, i) in profiles and profiles[node, i].is_extrapolated(share)
    )
    if beyond:
        yield f"extrapolated, since their shares are larger than what the profile tried: {', '.join(beyond)}"
