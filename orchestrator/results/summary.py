"""What one run amounted to: the value that `analyse` produces and `report` and `compare` read.

Takes `summary.json` of a collected run, gives a frozen `Summary`:

    summary = Summary.load(RunFolder(Path("runs/resnet152_cifar-20261121-0912-k3f")))
    summary.efficiency          # 0.21: the cluster's speed over the sum of its hosts' own speeds

A figure that could not be measured is None, and `missing` or `warnings` says why in a sentence.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from orchestrator.jobs.job_store import FirstFailure, NotFinite
from orchestrator.paths import RunFolder
from orchestrator.planning.launch_plan import CodeFolder, Faster, Prediction, RecordedSettings, System, read_settings
from orchestrator.record import SCHEMA, Record, Words, require_record
from orchestrator.results.batch_norm_groups import BatchNorm, Rebalance
from orchestrator.results.curves import AccuracyTarget, Curves, SpeedCourse
from orchestrator.results.network import Collectives
from orchestrator.results.slowed import Slowed
from orchestrator.results.timeline import StageSummary
from orchestrator.units import format_duration, format_figure, format_percent
from trainer.shared.strategy_table import STRATEGIES


class StepTime(Record):
    """The length of a step on one host: its slowest rank's."""

    p50: float
    p95: float


class RankEnd(Record):
    """How a rank's process ended, as its host saw it: neither code nor signal where that is not known."""

    rank: int
    exit_code: int | None = None
    signal: Words | None = None


class NodeSummary(Record):
    """One host's part. Times are means over its ranks and the measured steps."""

    name: str
    gpu: str
    ranks: int
    batch_per_rank: int | None = None
    samples_per_s: float | None = None
    """Samples this host contributed a second, inside the cluster."""
    own_samples_per_s: float | None = None
    """Samples over the time to load, compute and update, summed over its ranks: an estimate of what it does alone."""
    solo_samples_per_s: float | None = None
    """What it did alone, measured by `orch profile`."""
    step_ms: StepTime | None = None
    load_ms: float | None = None
    compute_ms: float | None = None
    sync_ms: float | None = None
    wait_ms: float | None = None
    optim_ms: float | None = None
    peak_memory_bytes: int | None = None
    paced: bool = False
    valid: bool = True
    gpu_utilisation: float | None = None
    """Mean over the samples taken while the job ran, 0..100."""
    slowed: Slowed | None = None
    """What held its GPU down, for a part of the run that matters."""
    ends: tuple[RankEnd, ...] = ()
    host: Words | None = None
    device_name: Words | None = None
    torch: Words | None = None
    nccl: Words | None = None
    backend: Words | None = None
    bandwidth_bps: float | None = None
    system: System | None = None

    @property
    def slowed_words(self) -> str:
        """`a2000 was slowed by its power cap of 70 W for 43 % of the run: 1,290 instead of 1,800 MHz`; "" if not."""
        if not self.slowed:
            return ""
        return f"{self.name}{f', rank {self.slowed.rank},' if self.ranks > 1 else ''} was {self.slowed.words}"


class GpuSummary(Record):
    """All hosts with one type of GPU, together."""

    nodes: int
    ranks: int
    samples_per_s: float | None = None
    own_samples_per_s: float | None = None
    share: float | None = None
    """Its part of all samples of the measured steps, 0..1."""


class Straggler(Record):
    """Who the others wait for."""

    node: str
    rank: int | None = None
    """Named where all ranks stand on one host."""
    reason: str
    wait_ms: float
    """How much longer the others wait a step than this one does."""


Part = Literal["input", "compute", "wire", "optimiser"]


class Bound(Record):
    """What limits a step: the largest part of the step of the rank that waits least for the others."""

    part: Part
    node: str
    share: float
    """Its part of the step, 0..1."""

    @property
    def words(self) -> str:
        """What to make faster first, in a sentence."""
        share = format_percent(self.share)
        return {
            "wire": f"Network-bound: {share} of each step is gradient traffic not hidden by compute.",
            "compute": f"Compute-bound: {share} of each step is {self.node}'s own forward and backward.",
            "input": f"Input-bound: for {share} of each step {self.node} waits for its own data.",
            "optimiser": f"Optimiser-bound: the update takes {share} of each step of {self.node}.",
        }[self.part]


class Summary(Record):
    """One run in figures; `summary.json` holds exactly this."""

    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    job: str
    note: Words | None = None
    """Its person's own line."""
    experiment: str
    kind: str = "experiment"
    cluster: str = ""
    master: str = ""
    created: str | None = None
    started: str | None = None
    ended: str | None = None
    command: str | None = None
    """What each rank ran, as one would type it into a shell; the interpreter is the host's."""
    repeat: str | None = None
    """The `orch run` line that runs the same again, quoted for a shell."""
    code: CodeFolder | None = None
    """Where the shipped files came from."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """As the ranks used them."""
    asked: dict[str, Any] = Field(default_factory=dict)
    """What was asked for, where a setting turned out otherwise (`auto`, -1, ...)."""
    state: str
    world_size: int
    samples_per_s: float | None = None
    prediction: Prediction | None = None
    """What the plan predicted, to stand beside what was measured."""
    efficiency: float | None = None
    efficiency_basis: Literal["solo", "estimated"] | None = None
    faster: tuple[Faster, ...] = ()
    """Ways to run it that would have taken less time, the fastest first."""
    nodes: tuple[NodeSummary, ...] = ()
    by_gpu: dict[str, GpuSummary] = Field(default_factory=dict)
    stages: tuple[StageSummary, ...] = ()
    """Of a pipeline, in the order in which samples pass them."""
    straggler: Straggler | None = None
    bound: Bound | None = None
    missing: tuple[str, ...] = ()
    """What should be here and is not, a sentence each."""
    warnings: tuple[str, ...] = ()
    """What is here and could not be used, or must be read with care, a sentence each."""
    first_failure: FirstFailure | None = None
    restarts: int = 0
    """How often the ranks were started again."""
    metrics: bool = True
    """Whether any rank wrote metrics; without them there are logs, exit codes and GPU use."""
    steps: int = 0
    """Measured steps: every rank reported them, and they come after the warm-up."""
    warmup_steps_left_out: int = 0
    samples_total: int = 0
    """Over all steps that were reported, warm-up included."""
    samples_from: Words | None = None
    """How samples were counted in a script that was only watched, as its first rank says; None of all others."""
    total_s: float | None = None
    """Start of the slowest rank's process to its end, evaluation included."""
    model: Words | None = None
    parameters: int | None = None
    gradient_bytes: int | None = None
    not_finite: NotFinite | None = None
    """The first loss that was NaN or infinite: no accuracy is shown without it."""
    accuracy: float | None = None
    """0..1, of the last evaluation; None when paced."""
    accuracy_per_class: dict[str, float] = Field(default_factory=dict)
    loss: float | None = None
    """The mean over the samples of the last epoch that ended; else of the last step that has one; None when paced."""
    target: AccuracyTarget | None = None
    """The accuracy at which it was to end; None where none was set, and when paced."""
    batch_norm: BatchNorm | None = None
    """The groups that it saw; None where the network has none, or its ranks do not report it."""
    curves: Curves = Field(default_factory=Curves)
    """How it learned; empty when paced."""
    speed_course: SpeedCourse = Field(default_factory=SpeedCourse)
    """Each host's speed in the course of the run; empty where too few steps were measured, or by an older orch."""
    rebalances: tuple[Rebalance, ...] = ()
    """How the shares followed the ranks' speeds (`shares=auto`), in the order of steps."""
    collectives: Collectives | None = None
    """The results of a run that measured the network and trained nothing."""

    @property
    def recorded(self) -> RecordedSettings:
        return read_settings(self.settings)

    @property
    def basis_words(self) -> str:
        """What the speeds that hosts have alone are based on."""
        if self.efficiency_basis == "solo" or (self.nodes and all(node.solo_samples_per_s for node in self.nodes)):
            return "measured with each host alone"
        return "estimated from each host's own time to load, compute and update; `orch profile` measures it"

    @property
    def paced(self) -> bool:
        return any(node.paced for node in self.nodes)

    @property
    def slowed(self) -> tuple[NodeSummary, ...]:
        """The hosts whose GPU was held down, first those that the findings name."""
        slowed = (node for node in self.nodes if node.slowed)
        return tuple(sorted(slowed, key=lambda node: node.name not in self.named))

    @property
    def named(self) -> frozenset[str]:
        """The hosts that the others wait for, or whose compute limits a step."""
        bound = {self.bound.node} if self.bound and self.bound.part == "compute" else set()
        return frozenset(bound | ({self.straggler.node} if self.straggler else set()))

    @property
    def overlapped(self) -> bool:
        """Do gradients travel while backward still runs? local sends none, compressed sends all of them after it."""
        settings = self.recorded
        facts = STRATEGIES.get(settings.strategy or "")  # a newer orch may have others
        return facts is not None and facts.during_backward and (settings.fidelity or "exact") in ("exact", "half")

    @property
    def of_prediction(self) -> float | None:
        """Measured speed over the predicted one; None where one of them is not known."""
        if self.prediction is None or self.samples_per_s is None or self.prediction.samples_per_s <= 0:
            return None
        return self.samples_per_s / self.prediction.samples_per_s

    @property
    def whole_samples_per_s(self) -> float | None:
        """By the wall clock: all samples of the run over `total_s`. None where the last start is not the only one."""
        if not self.total_s or not self.samples_total or self.restarts:
            return None
        return self.samples_total / self.total_s

    @property
    def samples_words(self) -> str | None:
        """How samples were counted, where neither the trainer nor the script did."""
        counted_by = {
            "batch": "as --batch divides them",
            "loader": "the first dimension of what the DataLoader gave",
            "network": "the first dimension of what DistributedDataParallel was called with",
            "framework": "as the framework's callback counts them",
        }.get(self.samples_from or "")
        return counted_by and f"measured from outside; samples: {counted_by}"

    @property
    def left_out_words(self) -> str:
        """What the speed of the steps, and so the efficiency, says nothing of."""
        parts = [f"the first {self.warmup_steps_left_out} steps"] if self.warmup_steps_left_out else []
        parts += (
            ["evaluation", "checkpoints"] if self.kind == "experiment" else ["what a script does between its steps"]
        )
        if self.recorded.fidelity == "local":
            parts.append("the averages that wait for these two or for the end")
        return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]

    @property
    def wall_clock_words(self) -> str | None:
        """The whole run, with all that is left out elsewhere; None where it is not known."""
        if self.whole_samples_per_s is None or self.total_s is None or not self.samples_per_s:
            return None
        part = self.whole_samples_per_s / self.samples_per_s
        return (
            f"Whole run: {format_duration(self.total_s)} by the wall clock, from the start of the ranks to their end: "
            f"{format_figure(self.whole_samples_per_s)} samples/s, {format_percent(part)} of its measured steps' speed"
        )

    def share(self, node: NodeSummary) -> float | None:
        """The part of all samples that this host did, 0..1; None when some host's is not known."""
        speeds = [other.samples_per_s for other in self.nodes]
        if node.samples_per_s is None or None in speeds or not self.samples_per_s:
            return None
        return node.samples_per_s / self.samples_per_s

    @classmethod
    def load(cls, run: RunFolder) -> Summary:
        """The summary of a run that was analysed. Raises OrchError when there is none or it cannot be read."""
        return require_record(run.summary, cls, "run `orch collect` for this job to make it again")

    def to_json(self) -> dict[str, Any]:
        """The document that `summary.json` holds."""
        return self.model_dump(mode="json", by_alias=True)
