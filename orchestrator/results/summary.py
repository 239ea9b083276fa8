"""The summary of a run, `summary.json`: written by `analyse`, read by `report` and `compare`. Unknown figures are None;
`missing` or `warnings` has the reason.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from pydantic import Field

from orchestrator.jobs.job_store import FirstFailure, NotFinite
from orchestrator.jobs.live_stats import POWER_CAP, REASONS, Reading, slowed_by_words
from orchestrator.paths import RunFolder
from orchestrator.planning.launch_plan import CodeFolder, Faster, Prediction, RecordedSettings, System, read_settings
from orchestrator.record import SCHEMA, Record, Words, require_record
from orchestrator.results.batch_norm_groups import BatchNorm, Rebalance
from orchestrator.results.curves import AccuracyTarget, Curves, SpeedCourse
from orchestrator.results.network import Collectives
from orchestrator.results.timeline import StageSummary
from orchestrator.units import format_duration, format_figure, format_percent
from trainer.shared.experiments import TEXT_MODELS
from trainer.shared.strategy_table import STRATEGIES

# Why a host's GPU ran below its possible clock: power, heat, or hardware. Pure. An idle GPU, or one with clocks set by
# its owner, is not slowed.

# Below it, a GPU does not need its clocks.
BUSY_PERCENT = 20
# Shorter slowdowns of a run are not mentioned.
LEAST_SHARE = 0.05
# A headline names waits that are a larger part of a step, also if no host is slower throughout.
MUCH_WAITING = 0.1
# Cards often report a power cap that hardly matters.
LEAST_LOSS = 0.03


class Slowed(Record):
    rank: int
    by: str
    """The cause."""
    share: float
    """0..1 of its readings."""
    mhz: float | None = None
    """Median SM clock."""
    instead_mhz: float | None = None
    """Median SM clock while busy and not slowed."""
    most_mhz: float | None = None
    limit_watts: float | None = None
    """Only for a power cap."""

    @property
    def words(self) -> str:
        cap = f" of {self.limit_watts:.0f} W" if self.limit_watts else ""
        return f"slowed by {self.by}{cap} for {format_percent(self.share)} of the run{self._clocks}"

    @property
    def _clocks(self) -> str:
        if self.mhz is None:
            return ""
        if self.instead_mhz:
            return f": {self.mhz:,.0f} instead of {self.instead_mhz:,.0f} MHz"
        return f": {self.mhz:,.0f} MHz" + (f" of at most {self.most_mhz:,.0f}" if self.most_mhz else "")


def is_slowed(slowed_by: int | None) -> bool:
    return bool(slowed_by and slowed_by_words(slowed_by))


class Slowing:
    """Memory does not grow with the run."""

    def __init__(self) -> None:
        self._gpus: dict[tuple[int, int | None], _Gpu] = {}

    def add(self, reading: Reading) -> None:
        if reading.slowed_by is not None:
            self._gpus.setdefault((reading.rank, reading.index), _Gpu()).add(
                reading, slowed_by_words(reading.slowed_by)
            )

    def found(self) -> Slowed | None:
        """The GPU slowed longest; None if it hardly matters."""
        each = [slowed for (rank, _), gpu in self._gpus.items() if (slowed := gpu.slowed(rank))]
        return max(each, key=lambda slowed: slowed.share, default=None)


class _Gpu:
    def __init__(self) -> None:
        self._readings = 0
        self._reasons = Counter[str]()
        self._slow_mhz, self._free_mhz = Counter[int](), Counter[int]()
        self._most_mhz: float | None = None
        self._limit_watts: float | None = None

    def add(self, reading: Reading, reason: str) -> None:
        self._readings += 1
        self._most_mhz, self._limit_watts = reading.max_sm_mhz, reading.limit_watts
        is_busy = reading.utilisation is None or reading.utilisation >= BUSY_PERCENT
        if reason:
            self._reasons[reason] += 1
        if reading.sm_mhz is not None and (reason or is_busy):
            (self._slow_mhz if reason else self._free_mhz)[round(reading.sm_mhz)] += 1

    def slowed(self, rank: int) -> Slowed | None:
        share = self._reasons.total() / max(1, self._readings)
        mhz, instead_mhz = _median(self._slow_mhz), _median(self._free_mhz)
        could_mhz = instead_mhz or self._most_mhz
        if share < LEAST_SHARE or (mhz and could_mhz and mhz > (1 - LEAST_LOSS) * could_mhz):
            return None
        by = self._reasons.most_common(1)[0][0]
        limit_watts = self._limit_watts if by == REASONS[POWER_CAP] else None
        return Slowed(
            rank=rank, by=by, share=share, mhz=mhz, instead_mhz=instead_mhz, most_mhz=self._most_mhz,
            limit_watts=limit_watts,
        )  # fmt: skip


def _median(counts: Counter[int]) -> float | None:
    """For an even number of values the upper middle one."""
    left = counts.total() // 2
    for value in sorted(counts):
        if left < counts[value]:
            return value
        left -= counts[value]
    return None


class StepTime(Record):
    """A host's slowest rank."""

    p50: float
    p95: float
    mean: float | None = None


class RankEnd(Record):
    rank: int
    exit_code: int | None = None
    signal: Words | None = None


class NodeSummary(Record):
    """Times are means over its ranks and the measured steps."""

    name: str
    gpu: str
    ranks: int
    batch_per_rank: int | None = None
    samples_per_s: float | None = None
    """Inside the cluster."""
    own_samples_per_s: float | None = None
    """Estimated without other hosts: samples over the time to load, compute and update, summed over its ranks."""
    solo_samples_per_s: float | None = None
    """By `orch profile`."""
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
    """0..100."""
    slowed: Slowed | None = None
    ends: tuple[RankEnd, ...] = ()
    host: Words | None = None
    device_name: Words | None = None
    torch: Words | None = None
    nccl: Words | None = None
    backend: Words | None = None
    bandwidth_bps: float | None = None
    system: System | None = None

    @property
    def parts_ms(self) -> dict[str, float] | None:
        """A step's parts in their order; None if a part is unknown."""
        parts = {
            "load": self.load_ms,
            "compute": self.compute_ms,
            "sync": self.sync_ms,
            "wait": self.wait_ms,
            "optimiser": self.optim_ms,
        }
        known = {name: ms for name, ms in parts.items() if ms is not None}
        return known if len(known) == len(parts) and sum(known.values()) > 0 else None

    @property
    def slowed_words(self) -> str:
        """`a2000 was slowed by its power cap of 70 W for 43 % of the run: 1,290 instead of 1,800 MHz`; "" if not."""
        if not self.slowed:
            return ""
        return f"{self.name}{f', rank {self.slowed.rank},' if self.ranks > 1 else ''} was {self.slowed.words}"


class GpuSummary(Record):
    nodes: int
    ranks: int
    samples_per_s: float | None = None
    own_samples_per_s: float | None = None
    share: float | None = None
    """0..1."""


class Straggler(Record):
    """The host for which the others wait."""

    node: str
    rank: int | None = None
    """On a single host."""
    reason: str
    wait_ms: float
    """Additional wait of the others per step."""


Part = Literal["input", "compute", "wire", "optimiser"]


class Bound(Record):
    """The largest part of the step of the rank that waits least."""

    part: Part
    node: str
    share: float
    """0..1 of the step."""
    observed: bool = False
    """A script without `import trainer` took the steps: all that it does between them counts as loading."""

    @property
    def words(self) -> str:
        share = format_percent(self.share)
        if self.part == "input" and self.observed:
            return f"Input-bound: for {share} of each step {self.node} loads data or does other work between steps."
        return {
            "wire": f"Network-bound: {share} of each step is gradient traffic not hidden by compute.",
            "compute": f"Compute-bound: {share} of each step is {self.node}'s own forward and backward.",
            "input": f"Input-bound: for {share} of each step {self.node} waits for its own data.",
            "optimiser": f"Optimiser-bound: the update takes {share} of each step of {self.node}.",
        }[self.part]


class Summary(Record):
    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    job: str
    note: Words | None = None
    experiment: str
    kind: str = "experiment"
    cluster: str = ""
    master: str = ""
    created: str | None = None
    started: str | None = None
    ended: str | None = None
    command: str | None = None
    """For a shell; the interpreter is the host's."""
    repeat: str | None = None
    """The `orch run` line."""
    code: CodeFolder | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    """As the ranks used them."""
    asked: dict[str, Any] = Field(default_factory=dict)
    """If different from `settings`."""
    state: str
    world_size: int
    samples_per_s: float | None = None
    prediction: Prediction | None = None
    efficiency: float | None = None
    efficiency_basis: Literal["solo", "estimated"] | None = None
    faster: tuple[Faster, ...] = ()
    """Fastest first."""
    nodes: tuple[NodeSummary, ...] = ()
    by_gpu: dict[str, GpuSummary] = Field(default_factory=dict)
    stages: tuple[StageSummary, ...] = ()
    """A pipeline's, in the order of the samples."""
    apart: bool = False
    """Each rank trained by itself."""
    straggler: Straggler | None = None
    bound: Bound | None = None
    missing: tuple[str, ...] = ()
    """Sentences."""
    warnings: tuple[str, ...] = ()
    """Sentences on unusable or doubtful data."""
    first_failure: FirstFailure | None = None
    restarts: int = 0
    metrics: bool = True
    """Whether any rank wrote metrics."""
    steps: int = 0
    """Reported by every rank, after the warm-up."""
    warmup_steps_left_out: int = 0
    samples_total: int = 0
    """With warm-up."""
    samples_from: Words | None = None
    """Only in an observed script."""
    total_s: float | None = None
    """The slowest rank's process, with evaluation."""
    model: Words | None = None
    parameters: int | None = None
    gradient_bytes: int | None = None
    not_finite: NotFinite | None = None
    """Shown with any accuracy."""
    accuracy: float | None = None
    """0..1; None when paced."""
    accuracy_per_class: dict[str, float] = Field(default_factory=dict)
    loss: float | None = None
    """The last complete epoch's, else the mean of the last 20 steps with a loss, as while it ran; None when paced."""
    test_loss: float | None = None
    bits_per_byte: float | None = None
    """In the last test, if the samples are text."""
    target: AccuracyTarget | None = None
    batch_norm: BatchNorm | None = None
    curves: Curves = Field(default_factory=Curves)
    """Empty when paced."""
    speed_course: SpeedCourse = Field(default_factory=SpeedCourse)
    """Empty with too few steps, or from an older orch."""
    rebalances: tuple[Rebalance, ...] = ()
    collectives: Collectives | None = None
    """If the run measured the network."""

    @property
    def slow_words(self) -> str:
        """The slow host or network and the reason, the worst first; "" if unknown."""
        if self.apart:
            return f"{self.world_size} ranks trained {self.world_size} networks, each by itself."
        if self.bound is None or self.world_size == 1:
            return self.bound.words if self.bound else ""
        network = f"The network was slow: {self.bound.words.partition(': ')[2]}" if self.bound.part == "wire" else ""
        if self.straggler is None:
            nobody = f"No {'host' if len(self.nodes) > 1 else 'rank'} held the others up."
            return network or f"{self._waits_without_straggler or nobody} {self.bound.words}"
        waited = self._straggler_words(self.straggler)
        if network and self.bound.share > self._step_share(self.straggler.wait_ms):
            return f"{network} Besides, {waited}"
        return waited.replace("the", "The", 1) if waited.startswith("the ") else waited

    @property
    def _waits_without_straggler(self) -> str:
        """ "" if no wait is worth mentioning."""
        most = max(self.nodes, key=lambda node: node.wait_ms or 0.0)
        wait_ms = most.wait_ms or 0.0
        if (share := self._step_share(wait_ms)) < MUCH_WAITING:
            return ""
        is_pipeline = self.recorded.strategy == "pipeline"
        why = (
            "while the pipeline fills and drains"
            if is_pipeline
            else "but the steps vary too much to name a slower host"
        )
        return f"{most.name} waited {format_figure(wait_ms)} ms ({format_percent(share)}) of each step, {why}."

    def _step_share(self, ms: float) -> float:
        steps_ms = [sum(node.parts_ms.values()) for node in self.nodes if node.parts_ms]
        return min(1.0, ms / max(steps_ms)) if steps_ms else 0.0

    def _straggler_words(self, found: Straggler) -> str:
        """`v100 waited for a2000, 215 ms (34 %) of each step: a2000 takes 2.3x as long per sample as v100.`"""
        others = [node for node in self.nodes if node.name != found.node]
        waited = others[0].name if len(others) == 1 else "the other hosts" if others else "the other ranks"
        slow = found.node if found.rank is None else f"rank {found.rank} of {found.node}"
        part = self._step_share(found.wait_ms)
        share = f" ({format_percent(part)})" if part else ""
        of_step = f"{format_figure(found.wait_ms)} ms{share} of each step"
        return f"{waited} waited for {slow}, {of_step}: {slow} {found.reason}."

    @property
    def recorded(self) -> RecordedSettings:
        return read_settings(self.settings)

    @property
    def _is_text(self) -> bool:
        return self.settings.get("model") in TEXT_MODELS

    @property
    def tokens_per_s(self) -> float | None:
        """None unless the samples are text."""
        tokens = self.settings.get("tokens")
        if not self._is_text or self.samples_per_s is None or not isinstance(tokens, int):
            return None
        return self.samples_per_s * tokens

    @property
    def basis_words(self) -> str:
        if self.efficiency_basis == "solo" or (self.nodes and all(node.solo_samples_per_s for node in self.nodes)):
            return "measured with each host alone"
        return "estimated from each host's own time to load, compute and update; `orch profile` measures it"

    @property
    def paced(self) -> bool:
        return any(node.paced for node in self.nodes)

    @property
    def slowed(self) -> tuple[NodeSummary, ...]:
        """Named hosts first."""
        slowed = (node for node in self.nodes if node.slowed)
        return tuple(sorted(slowed, key=lambda node: node.name not in self.named))

    @property
    def named(self) -> frozenset[str]:
        """The straggler, and the host whose compute limits a step."""
        bound = {self.bound.node} if self.bound and self.bound.part == "compute" else set()
        return frozenset(bound | ({self.straggler.node} if self.straggler else set()))

    @property
    def overlapped(self) -> bool:
        """local sends nothing during backward, compressed sends afterwards."""
        settings = self.recorded
        facts = STRATEGIES.get(settings.strategy or "")  # a newer orch may have others
        return facts is not None and facts.during_backward and (settings.fidelity or "exact") in ("exact", "half")

    @property
    def of_prediction(self) -> float | None:
        if self.prediction is None or self.samples_per_s is None or self.prediction.samples_per_s <= 0:
            return None
        return self.samples_per_s / self.prediction.samples_per_s

    @property
    def whole_samples_per_s(self) -> float | None:
        """By the wall clock; None after restarts."""
        if not self.total_s or not self.samples_total or self.restarts:
            return None
        return self.samples_total / self.total_s

    @property
    def samples_words(self) -> str | None:
        """None if the trainer or the script counted them."""
        counted_by = {
            "batch": "as --batch divides them",
            "loader": "the first dimension of what the DataLoader gave",
            "network": "the first dimension of what DistributedDataParallel was called with",
            "framework": "as the framework's callback counts them",
        }.get(self.samples_from or "")
        return counted_by and f"measured from outside; samples: {counted_by}"

    @property
    def left_out_words(self) -> str:
        """For the steps' speed and the efficiency."""
        parts = [f"the first {self.warmup_steps_left_out} steps"] if self.warmup_steps_left_out else []
        parts += (
            ["evaluation", "checkpoints"] if self.kind == "experiment" else ["what a script does between its steps"]
        )
        if self.recorded.fidelity == "local":
            parts.append("the averages that wait for these two or for the end")
        return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]

    @property
    def wall_clock_words(self) -> str | None:
        if self.whole_samples_per_s is None or self.total_s is None or not self.samples_per_s:
            return None
        part = self.whole_samples_per_s / self.samples_per_s
        return (
            f"Whole run: {format_duration(self.total_s)} by the wall clock, from the start of the ranks to their end: "
            f"{format_figure(self.whole_samples_per_s)} samples/s, {format_percent(part)} of its measured steps' speed"
        )

    def share(self, node: NodeSummary) -> float | None:
        """0..1; None if any host's speed is unknown."""
        speeds = [other.samples_per_s for other in self.nodes]
        if node.samples_per_s is None or None in speeds or not self.samples_per_s:
            return None
        return node.samples_per_s / self.samples_per_s

    @classmethod
    def load(cls, run: RunFolder) -> Summary:
        """Raises OrchError without a readable summary."""
        return require_record(run.summary, cls, "run `orch collect` for this job to make it again")

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)
