"""How fast ranks are alone: the record of a profile, and whom it holds for. `split` makes use of them.

    kinds = kinds_of(plan, facts)                          by (node, local rank): all that its speed depends on

A profile lies under $ORCH_HOME by its kind's key, so that a new driver, torch or pace asks for a new one. Hosts of one
type share theirs, unless one was measured by itself (`orch profile --each`). Pure: `measuring/profiling` measures.
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

# What a rank reports of its speed alone: whole updates by their size, and each block of its network. Pure.

Ms = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]
Samples = Annotated[int, Field(ge=1, lt=1 << 40)]
TaskTime = tuple[Ms, Ms]
"""What a task of one block takes: ms a micro-batch whatever its size, and ms for each of its samples."""
TaskTimes = Annotated[tuple[TaskTime, ...], Field(min_length=1, max_length=1024)]
"""Of each block, in their order."""


class BlockTimes(Record):
    """How long each block of a network that is a chain of blocks takes, as a stage of a pipeline computes it."""

    samples: Annotated[tuple[Samples, ...], Field(min_length=2, max_length=16)]
    """The sizes of the micro-batches that were measured."""
    forward: TaskTimes
    backward: TaskTimes
    """Backward for what went in."""
    weights: TaskTimes
    """Backward for the weights."""
    stretches: Annotated[int, Field(ge=1, le=1024)]
    """So many stretches of blocks were timed by themselves; the time of each is divided by the work of its blocks."""
    of_whole: Annotated[float, Field(gt=0, lt=1e9)] | None = None
    """What all blocks took together at the largest size, by what the whole network took forward and backward."""

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
        """What a micro-batch of the whole network costs whatever its size."""
        return sum(fixed_ms for task in (self.forward, self.backward, self.weights) for fixed_ms, _ in task)


class SeenLayer(Record):
    """A layer of a network; what each number is: `orchestrator.forecast.layers.Layer`."""

    shapes: Annotated[tuple[Annotated[tuple[Samples, ...], Field(max_length=8)], ...], Field(max_length=64)]
    work: Annotated[float, Field(ge=0, lt=1e18, allow_inf_nan=False)]


class SeenBlock(Record):
    """Layers between two cuts of a network. outputs: numbers that leave it, of one sample."""

    layers: Annotated[tuple[SeenLayer, ...], Field(max_length=1024)]
    outputs: Annotated[int, Field(ge=0, lt=1 << 40)]


class Measurement(Record):
    """The `profile` record of one rank, as its host reports it."""

    samples: Annotated[tuple[Samples, ...], Field(min_length=1, max_length=64)]
    step_ms: Annotated[tuple[Ms, ...], Field(min_length=1, max_length=64)]
    """Forward, backward and optimiser: the median of each size, without any synchronisation."""
    fixed_ms: Ms
    sample_ms: Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)]
    lateness: Annotated[tuple[Ms | None, ...], Field(max_length=64)] = ()
    """How late backward ended at each size, as a part of a step, where a paced rank was measured."""
    worst_error: Ms | None = None
    largest: Samples
    """The largest batch that was tried, and could be kept."""
    cap: Samples | None = None
    """The most samples that fit into memory at once; None: memory was not the limit."""
    forward_ms: Ms
    """The forward time at the largest size, like optim_ms."""
    optim_ms: Ms
    again_samples: Samples | None = None
    """A size that was measured once more at the end; None in profiles of an older orch."""
    again_ms: Ms | None = None
    blocks: BlockTimes | None = None
    """None of a paced rank, which computes none, of a network that is no chain, and in profiles of an older orch."""
    batch: Samples | None = None
    """Of an update over all ranks, as the settings or the script say; None in profiles of an older orch."""
    network: Annotated[tuple[SeenBlock, ...], Field(min_length=1, max_length=1024)] | None = None
    """None in profiles of an older orch, and where the rank could not tell."""


DRIFT = 0.05
"""A profile that drifted by less is steady."""
RETRY = "`{profile}` while nothing else runs there, or with a larger --set batch= or --set profile_s="
"""What to try after a profile that is not valid."""
GPU_SETTINGS = names_of(lambda each: each.of_gpu)
"""Settings of the trainer that a GPU's speed depends on."""
AMPERE = 8
"""The major compute capability from which on GPUs have TF32 (trainer.compute.arithmetic)."""
Rank = tuple[str, int]
"""Node and local rank."""


class Kind(Record):
    """All that the speed of a rank by itself depends on."""

    exp: str
    model: str
    """Of a script its folder and its command line, since nothing else is known of its network before it runs."""
    data: str
    """The data set whose image shape counts; images made up, or from a folder, have that of the experiment's own."""
    amp: str
    device: str
    gpu: str | None
    """Its label."""
    device_name: str
    torch: str | None
    driver: str | None
    ranks: int
    """The ranks of its host: they compute at the same time."""
    threads: str | None = None
    """The threads of a rank that computes on the CPU."""
    gpu_settings: str = ""
    """For a rank with a GPU, those of GPU_SETTINGS that it does not decide by itself, like "tf32=off"."""
    paced: dict[str, Any] | None = None
    """The pace that it keeps, without its changes in the course of a run."""
    host: str | None = None
    """CLUSTER/NODE where this host was measured by itself; None: it holds for all hosts of this kind."""

    @property
    def key(self) -> str:
        facts = {name: getattr(self, name) for name in Kind.model_fields}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]

    def of(self, host: str | None) -> Kind:
        return self.model_copy(update={"host": host})


class Profile(Kind, Measurement):
    """How fast one kind of rank is alone."""

    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    node: str
    """Where it was measured."""
    created: str
    code: str | None = None
    """The digest of the script that was measured; None of an experiment."""
    valid: bool = True
    """False where a paced rank kept its pace at fewer than two sizes: it is shown, and counts for nothing else."""

    @property
    def speed(self) -> Speed:
        """For splitting a global batch. Only memory sets a cap: where the time for measuring ended it, the line goes on
        beyond the largest batch that was tried, since smaller parts would change what BatchNorm sees.
        """
        return Speed(self.fixed_ms, self.sample_ms, self.cap)

    @property
    def late_sizes(self) -> tuple[int, ...]:
        """At which a paced rank could not keep its pace; of a valid profile, those that its line leaves out."""
        return tuple(size for size, late in zip(self.samples, self.lateness, strict=False) if (late or 0) > LATE)

    def why_not_valid(self) -> str:
        """At which sizes this machine was late, and by how much at the best of them, if the profile is not valid."""
        judged = [(late, size) for size, late in zip(self.samples, self.lateness, strict=False) if late is not None]
        why = f"{self.node}'s CPU was too slow for the pace that it stands in for"
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
        """How much longer an update took at the end than when its size had its turn, as a part; None: not known."""
        before = dict(zip(self.samples, self.step_ms, strict=False)).get(self.again_samples or 0)
        return self.again_ms / before - 1 if self.again_ms and before else None

    def drift_words(self) -> str:
        """By how much it got slower while it was measured; "" where it did not."""
        if self.drift is None or self.drift < DRIFT:
            return ""
        slower = f"{self.again_samples} samples took {format_percent(self.drift)} longer at the end of the measurement"
        why = "heat, a power cap, or another program"
        return f"{self.node}: {slower} than before ({why}): a long run may be slower than this"

    def is_extrapolated(self, samples: int) -> bool:
        """Whether so many samples at once are more than were tried."""
        return self.cap is None and samples > self.largest

    def samples_per_s(self, batch: int) -> float:
        """Alone, with the whole batch, in parts as large as its memory holds."""
        samples = min(batch, self.cap or batch)
        return 1000 * samples / self.speed.step_ms(samples)


@dataclass(frozen=True)
class RankProfile:
    """The profile that one rank goes by."""

    rank: Rank
    profile: Profile
    fresh: bool
    """Whether it was measured just now."""


def measured_shares(batch: int, known: Sequence[RankProfile]) -> dict[Rank, int]:
    """Each rank's part of a batch that is split by these; empty where one of them is not valid."""
    if not all(each.profile.valid for each in known):
        return {}
    speeds = {each.rank: each.profile.speed for each in known}
    return dict(zip(speeds, split_batch("measured", speeds, list(speeds), batch), strict=True))


Profiles = Mapping[Rank, Profile]


# ---- whom a profile holds for -------------------------------------------------------------------------------------


def kinds_of(plan: LaunchPlan, facts: Mapping[str, NodeFacts]) -> dict[Rank, Kind]:
    """By (node, local rank); empty for what is no training of ours."""
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
    """The setting, off where others rule graphs out. A profile leaves these others out, and would not know."""
    why = why_not_replayed(settings.strategy, settings.sync_bn, settings.accumulate)
    return "off" if why else settings.cuda_graph


def tf32_of(asked: str, nodes: Sequence[NodePlan], facts: Mapping[str, NodeFacts]) -> str:
    """on or off, as the ranks of these nodes will agree: by itself on where all have GPUs that can; auto where a driver
    does not say. asked: the setting `tf32`.

    A host that is measured alone would not know what the others have.
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
    """The command that measures what has these settings."""
    return "orch profile -- SCRIPT [ARGS]" if settings.model == OWN else f"orch profile --exp {settings.exp}"


def _kind(
    settings: Settings, node: NodePlan, facts: NodeFacts, local_rank: int, gpu_settings: str, source: str
) -> Kind:
    """source: the folder of the code."""
    own = node.gpu_uuids
    gpu = next((gpu for gpu in facts.gpus if own and gpu.uuid == own[local_rank % len(own)]), None)
    pace = {key: value for key, value in node.paced.items() if key != "slowdown"} if node.paced else None
    is_own = settings.model == OWN
    model = f"{source}: {shlex.join(node.command)}" if is_own else settings.model
    return Kind(
        exp=settings.exp,
        model=model,
        data=OWN if is_own else settings.data_set_name,
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


# How a global batch is divided over a job's ranks, by the setting `shares` and what is known of their speeds. Pure.
#
#     split = split_batch_of(settings, placement.ranks, profiles)
#     split.shares["v100", 0], split.policy           46, "measured"
#     split.settings                                  what the ranks receive: {"shares": "v100:0=46,...", "speeds": ...}
#
# The controller divides the batch once, here; the ranks do it once more, by the settings that they receive.

FEW_NAMES = 8
"""The samples of more hosts than this are not listed in a note."""


@dataclass(frozen=True)
class Split:
    """A global batch, divided."""

    shares: Mapping[Rank, int] = field(default_factory=dict)
    """Samples of each rank; empty for a script whose batch is not known."""
    policy: str = ""
    """The setting `shares`, settled; "" where it stays as it is."""
    speeds: Mapping[Rank, Speed] = field(default_factory=dict)
    """What is known of ranks, by hand or by profiles."""
    alone: Mapping[Rank, float] = field(default_factory=dict)
    """samples/s of each rank by itself with the whole batch, by its profile."""
    notes: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, str]:
        """The settings from which the ranks compute the same shares."""
        settings = {}
        if self.policy == "measured":
            settings["shares"] = ",".join(f"{node}:{i}={share}" for (node, i), share in self.shares.items())
        if self.speeds:  # a person's own are among them, which may name some ranks alone
            settings["speeds"] = format_speeds(self.speeds)
        return settings


def split_equally(batch: int | None, ranks: Sequence[Rank]) -> Split:
    """batch: None where it is not known."""
    return Split(dict(zip(ranks, equal_shares(batch, len(ranks)), strict=True))) if batch else Split()


def split_batch_of(
    settings: Settings, ranks: Sequence[Rank], profiles: Profiles, not_kept: Profiles | None = None
) -> Split:
    """ranks: in the order of their global ranks. not_kept: profiles that count for nothing, to say so where one is
    missed.

    Raises UsageError where the setting `shares` does not fit the ranks, or asks for a profile that is not there.
    """
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
    """The setting `shares` as it will be where the person leaves it to us."""
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
