"""How fast ranks are alone: the record of a profile, whom it holds for, and a plan that makes use of it.

    kinds = kinds_of(plan, facts)                          by (node, local rank): all that its speed depends on
    plan = with_speeds(plan, {rank: profile, ...})         its shares, what its ranks are told, who does what alone

A profile lies under $ORCH_HOME by its kind's key, so that a new driver, torch or pace asks for a new one. Hosts of one
type share theirs, unless one was measured by itself (`orch profile --each`). Pure: `profiling` measures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from orchestrator.errors import UsageError
from orchestrator.hosts.facts import NodeFacts
from orchestrator.planning.launch_plan import LaunchPlan, NodePlan
from orchestrator.record import SCHEMA, Record
from trainer.shared.experiments import DATA_SETS, EXPERIMENTS
from trainer.shared.metrics import LATE
from trainer.shared.replays import why_not_replayed
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

DRIFT = 0.05
"""A profile that drifted by less is steady."""
FEW_NAMES = 8
"""The samples of more hosts than this are not listed in a note."""
GPU_SETTINGS = ("tf32", "channels_last", "cudnn_benchmark", "fused_sgd", "cuda_graph")
"""Settings of the trainer that a GPU's speed depends on."""
AMPERE = 8
"""The major compute capability from which on GPUs have TF32 (trainer.compute.arithmetic)."""
Rank = tuple[str, int]
"""Node and local rank."""
Ms = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]
Samples = Annotated[int, Field(ge=1, lt=1 << 40)]


class Kind(Record):
    """All that the speed of a rank by itself depends on."""

    exp: str
    model: str
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
    """Of its host: they compute at the same time."""
    threads: str | None = None
    """Of a rank that computes on the CPU."""
    gpu_settings: str = ""
    """Of a rank with a GPU: those of GPU_SETTINGS that it does not decide by itself, like "tf32=off"."""
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


class Measurement(Record):
    """The `profile` record of one rank, as its host tells it."""

    samples: Annotated[tuple[Samples, ...], Field(min_length=1, max_length=64)]
    step_ms: Annotated[tuple[Ms, ...], Field(min_length=1, max_length=64)]
    """Forward, backward and optimiser: the median of each size, without any synchronisation."""
    fixed_ms: Ms
    sample_ms: Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)]
    lateness: Annotated[tuple[Ms | None, ...], Field(max_length=64)] = ()
    """Of each size, where a paced rank was measured: how late backward ended, as a part of a step."""
    worst_error: Ms | None = None
    largest: Samples
    """The largest batch that was tried, and could be kept."""
    cap: Samples | None = None
    """The most samples that fit into memory at once; None: memory was not the limit."""
    forward_ms: Ms
    """Of the largest size, like optim_ms."""
    optim_ms: Ms
    again_samples: Samples | None = None
    """A size that was measured once more at the end; None in profiles of an older orch."""
    again_ms: Ms | None = None


class Profile(Kind, Measurement):
    """How fast one kind of rank is alone."""

    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    node: str
    """Where it was measured."""
    created: str
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
        """Of one that is not: at which sizes this machine was late, and by how much at the best of them."""
        told = [(late, size) for size, late in zip(self.samples, self.lateness, strict=False) if late is not None]
        why = f"{self.node}'s CPU was too slow for the pace that it stands in for"
        if not told:
            return why
        late, size = min(told)
        return (
            f"{why} at {len(self.late_sizes)} of {len(told)} batch sizes from {self.samples[0]} to {self.samples[-1]}; "
            f"the best was {size}, {100 * late:,.1f} % of a step late ({100 * LATE:g} % is allowed, at two sizes)"
        )

    @property
    def drift(self) -> float | None:
        """How much longer an update took at the end than when its size had its turn, as a part; None: not known."""
        before = dict(zip(self.samples, self.step_ms, strict=False)).get(self.again_samples or 0)
        return self.again_ms / before - 1 if self.again_ms and before else None

    def drift_words(self) -> str:
        """Of one that got slower while it was measured: by how much; "" of any other."""
        if self.drift is None or self.drift < DRIFT:
            return ""
        slower = f"{self.again_samples} samples took {100 * self.drift:.0f} % longer at the end of the measurement"
        why = "heat, a power cap, or another program"
        return f"{self.node}: {slower} than before ({why}): a long run may be slower than this"

    def is_extrapolated(self, samples: int) -> bool:
        """Whether so many samples at once are more than were tried."""
        return self.cap is None and samples > self.largest

    def samples_per_s(self, batch: int) -> float:
        """Alone, with the whole batch, in parts as large as its memory holds."""
        samples = min(batch, self.cap or batch)
        return 1000 * samples / self.speed.step_ms(samples)


Profiles = Mapping[Rank, Profile]


# ---- whom a profile holds for -------------------------------------------------------------------------------------


def kinds_of(plan: LaunchPlan, facts: Mapping[str, NodeFacts]) -> dict[Rank, Kind]:
    """By (node, local rank); empty for what is no training of ours."""
    if "shares" not in plan.settings:
        return {}
    told = {name: str(plan.settings.get(name, "auto")) for name in GPU_SETTINGS} | {"tf32": tf32_of(plan, facts)}
    told["cuda_graph"] = cuda_graph_of(plan.settings)
    asked = " ".join(f"{name}={value}" for name, value in told.items() if value != "auto")
    return {
        (node.name, i): _kind(plan, node, facts[node.name], i, asked) for node in plan.nodes for i in range(node.ranks)
    }


def cuda_graph_of(settings: Mapping[str, Any]) -> str:
    """The setting, off where others rule graphs out. A profile leaves these others out, and would not know."""
    others = (str(settings.get("strategy")), bool(settings.get("sync_bn")), int(settings.get("accumulate", 0)))
    return "off" if why_not_replayed(*others) else str(settings.get("cuda_graph", "auto"))


def tf32_of(plan: LaunchPlan, facts: Mapping[str, NodeFacts]) -> str:
    """on or off, as its ranks will agree: by itself on where all have GPUs that can; auto where a driver does not say.

    A host that is measured alone would not know what the others have.
    """
    asked = str(plan.settings.get("tf32", "auto"))
    if asked != "auto":
        return asked
    if any(node.device != "cuda" for node in plan.nodes):
        return "off"
    gpus = [gpu for node in plan.nodes for gpu in facts[node.name].gpus[: node.ranks]]
    majors = [(gpu.compute_capability or "").partition(".")[0] for gpu in gpus]
    if not majors or not all(map(str.isdecimal, majors)):
        return "auto"
    return "on" if min(map(int, majors)) >= AMPERE else "off"


def _kind(plan: LaunchPlan, node: NodePlan, facts: NodeFacts, local_rank: int, gpu_settings: str) -> Kind:
    told, own = plan.settings, node.gpu_uuids
    gpu = next((gpu for gpu in facts.gpus if own and gpu.uuid == own[local_rank % len(own)]), None)
    pace = {key: value for key, value in node.paced.items() if key != "slowdown"} if node.paced else None
    return Kind(
        exp=plan.exp,
        model=str(told["model"]),
        data=str(told["data"] if told["data"] in DATA_SETS else EXPERIMENTS[plan.exp]["data"]),
        amp=str(told["amp"]),
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


# ---- a plan that makes use of them --------------------------------------------------------------------------------


def with_speeds(plan: LaunchPlan, profiles: Profiles, not_kept: Profiles | None = None) -> LaunchPlan:
    """The same plan with every rank's share, and the speeds that are known told to the ranks. not_kept: profiles that
    count for nothing, to say so where one is missed.

    Raises UsageError where the setting `shares` does not fit the ranks, or asks for a profile that is not there.
    """
    told = plan.settings
    if "shares" not in told or told.get("profile_s"):
        return plan
    batch = int(told["batch"])
    ranks = [(node.name, i) for node in plan.nodes for i in range(node.ranks)]
    by_hand = parse_speeds(str(told["speeds"]))
    known = {**{rank: profile.speed for rank, profile in profiles.items()}, **by_hand}
    speeds = {rank: at_most(speed, int(told["local_batch"])) for rank, speed in known.items()}
    plan = _resolved(plan, all(rank in speeds for rank in ranks))
    try:
        shares = split_batch(str(plan.settings["shares"]), speeds, ranks, batch)
    except ValueError as error:
        missed = [not_kept[rank] for rank in ranks if rank in not_kept and rank not in known] if not_kept else []
        if told["shares"] == "measured" and missed:
            raise _not_kept(plan, missed) from error
        raise UsageError(f"shares: {error}", _remedy(plan)) from error
    split = dict(zip(ranks, shares, strict=True))
    by_itself = told["shares"] == PROFILED and shares != equal_shares(batch, len(ranks))
    notes = (_by_profile_words(plan, split),) if by_itself else ()
    nodes = tuple(_told(node, plan, split, speeds, profiles) for node in plan.nodes)
    return plan.model_copy(
        update={"nodes": nodes, "notes": (*plan.notes, *notes, *_notes(plan, split, speeds, profiles))}
    )


def _resolved(plan: LaunchPlan, all_known: bool) -> LaunchPlan:
    """With `shares` as they will be where the person leaves them to us."""
    if plan.settings["shares"] != PROFILED:
        return plan
    by_speed = all_known and plan.settings["strategy"] not in ("none", "dp")
    return plan.model_copy(update={"settings": {**plan.settings, "shares": "measured" if by_speed else "equal"}})


def _by_profile_words(plan: LaunchPlan, split: Mapping[Rank, int]) -> str:
    samples = {node.name: sum(split[node.name, i] for i in range(node.ranks)) for node in plan.nodes}
    few = f" ({', '.join(f'{name} {share}' for name, share in samples.items())})" if len(samples) <= FEW_NAMES else ""
    return f"shares=measured{few}, since every rank's speed is known; --set shares=equal splits the batch evenly"


def _not_kept(plan: LaunchPlan, missed: Sequence[Profile]) -> UsageError:
    words = {
        f"{each.node} was measured on {each.created[:10]}, but not kept: {each.why_not_valid()}" for each in missed
    }
    return UsageError(f"shares: {'; '.join(sorted(words))}", f"{RETRY.format(exp=plan.exp)}; or --set shares=auto")


RETRY = "`orch profile --exp {exp}` while nothing else runs there, or with a larger --set batch= or --set profile_s="
"""What to try after a profile that is not valid."""


def _remedy(plan: LaunchPlan) -> str:
    if plan.settings["shares"] in BY_SPEED:
        return f"measure it: `orch profile --exp {plan.exp}`, with the same --set"
    return "name every node, or rank, that takes part"


def _told(
    node: NodePlan,
    plan: LaunchPlan,
    split: Mapping[Rank, int],
    speeds: Mapping[Rank, Speed],
    profiles: Profiles,
) -> NodePlan:
    own = [(node.name, i) for i in range(node.ranks)]
    command = list(node.command)
    if plan.settings["shares"] == "measured":
        explicit = ",".join(f"{name}:{i}={share}" for (name, i), share in split.items())
        command = [*(word for word in command if not word.startswith("--shares=")), f"--shares={explicit}"]
    if speeds:  # those of a person, who may speak of some ranks alone, among them
        command = [word for word in command if not word.startswith("--speeds=")]
        command.append(f"--speeds={format_speeds(speeds)}")
    alone = [profiles[rank].samples_per_s(int(plan.settings["batch"])) for rank in own if rank in profiles]
    update = {
        "command": tuple(command),
        "shares": tuple(split[rank] for rank in own),
        "solo_samples_per_s": sum(alone) if len(alone) == node.ranks else None,
    }
    return node.model_copy(update=update)


def _notes(
    plan: LaunchPlan, split: Mapping[Rank, int], speeds: Mapping[Rank, Speed], profiles: Profiles
) -> Iterator[str]:
    if plan.settings["shares"] not in BY_SPEED:
        return
    if not speeds.keys() >= split.keys():
        yield "shares=auto: not every rank's speed is known, so they begin equal (`orch profile` measures)"
        return
    longest_ms = max(speeds[rank].step_ms(share) for rank, share in split.items())
    for (node, i), share in split.items():
        if share == 0:
            yield (
                f"{node}:{i} is left out (share 0): two samples would take it {speeds[node, i].step_ms(2):.0f} ms, "
                f"and without it the whole batch is computed in {longest_ms:.0f} ms"
            )
    beyond = sorted(
        f"{node}:{i} (beyond {profiles[node, i].largest})"
        for (node, i), share in split.items()
        if (node, i) in profiles and profiles[node, i].is_extrapolated(share)
    )
    if beyond:
        yield f"extrapolated, since their shares are larger than what the profile tried: {', '.join(beyond)}"
