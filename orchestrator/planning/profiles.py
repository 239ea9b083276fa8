"""How fast ranks are alone: the record of a profile, and whom it holds for. `split` makes use of them.

    kinds = kinds_of(plan, facts)                          by (node, local rank): all that its speed depends on

A profile lies under $ORCH_HOME by its kind's key, so that a new driver, torch or pace asks for a new one. Hosts of one
type share theirs, unless one was measured by itself (`orch profile --each`). Pure: `measuring/profiling` measures.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from orchestrator.hosts.facts import NodeFacts
from orchestrator.planning.launch_plan import LaunchPlan, NodePlan
from orchestrator.planning.measurement import Measurement
from orchestrator.record import SCHEMA, Record
from orchestrator.units import format_percent
from trainer.shared.config import names_of
from trainer.shared.experiments import OWN
from trainer.shared.metrics import LATE
from trainer.shared.settings import Settings
from trainer.shared.shares import Speed, split_batch
from trainer.shared.strategy_table import why_not_replayed

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
