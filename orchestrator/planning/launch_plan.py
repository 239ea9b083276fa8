"""The launch plan: one job, completely, as a frozen value. `orch run --dry-run` prints it, `orch run` executes it.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from orchestrator.hosts.cluster import mask, masked_env
from orchestrator.planning.job_spec import JobSpec, key_of
from orchestrator.planning.requirements import Requirements
from orchestrator.record import SCHEMA, Owner, Record
from orchestrator.units import format_figure, format_percent

if TYPE_CHECKING:
    from trainer.shared.settings import AnySettings, Settings


LOCAL_RANK = "--local_rank={LOCAL_RANK}"
"""For torch.distributed.launch's scripts; filled in by the rank wrapper."""


class System(Record):
    os: str
    kernel: str
    machine: str
    cores: int
    memory_bytes: int
    python: str
    driver: str | None = None
    cuda: str | None = None
    """CUDA version of torch; None for a CPU build."""


class NodePlan(Record):
    name: str
    node_rank: int
    first_rank: int
    """Global rank of local rank 0."""
    ranks: int
    address: str
    interface: str | None
    """Has the training address, else is on a route to another host."""
    device: Literal["cuda", "cpu"]
    gpu: str | None
    gpu_uuids: tuple[str, ...] = ()
    bandwidth_bps: float | None = None
    interface_bps: float | None = None
    """As its interface reports it, for forecasts without a declared bandwidth."""
    paced: dict[str, Any] | None = None
    python: str
    activate: str | None = None
    workdir: str
    env: dict[str, str] = Field(default_factory=dict)
    """For the ranks; sent in a file of mode 0600, never in an argument."""
    shares: tuple[int, ...] = ()
    """Samples per global batch, by rank here; empty if unknown."""
    solo_samples_per_s: float | None = None
    """Profiled speed of all ranks here, each with the whole batch or as much as its memory holds."""
    torchrun: tuple[str, ...]
    """Interpreter arguments; the host fills in `{python}`, `{rendezvous_port}` and `{job_dir}`."""
    command: tuple[str, ...]
    starts_ranks: bool = False
    prepare: str | None = None
    system: System | None = None
    kind: str | None = None
    """With an engine, its type in the inventory."""

    def masked(self) -> NodePlan:
        shell = {name: mask(getattr(self, name)) for name in ("prepare", "activate")}
        return self.model_copy(update={"env": masked_env(self.env), **shell})

    @property
    def rank_numbers(self) -> range:
        return range(self.first_rank, self.first_rank + self.ranks)


class LeftOut(Record):
    """An intended host that could not take part."""

    node: str
    reason: str


class HostChoice(Record):
    min_hosts: int
    max_hosts: int
    candidates: tuple[str, ...] = ()
    """In order: the named hosts, or all of the cluster."""
    left_out: tuple[LeftOut, ...] = ()
    spares: tuple[str, ...] = ()
    """Unused available hosts, best first."""

    @property
    def words(self) -> str:
        return f"{self.min_hosts}:{self.max_hosts}"


class Earlier(Record):
    job: str
    why: str


class Attempt(Record):
    number: int
    """From 1."""
    most: int
    any_cause: bool = False
    """Also retry if the script failed by itself."""
    rejoin: bool = False
    """Take a lost host in again once it answers."""
    wait_s: float = 10.0
    """Before the second attempt; doubles each time."""
    earlier: tuple[Earlier, ...] = ()

    @property
    def words(self) -> str:
        return f"{self.number} of {self.most}"


class Commit(Record):
    id: str
    dirty: bool | None = None
    """Whether the folder has changed or untracked files; None if unknown."""

    @property
    def words(self) -> str:
        changed = {True: ", with changes that are not committed", None: ", changed or not", False: ""}[self.dirty]
        return f"commit {self.id[:12]}{changed}"


class CodeFolder(Record):
    sha256: str
    source: str
    files: int
    size_bytes: int
    left_out: tuple[str, ...] = ()
    """Likely secrets, at most 100."""
    unsent: tuple[tuple[str, str], ...] = ()
    """Other omitted files, at most 100, with reasons; folders end with `/`."""
    notes: tuple[str, ...] = ()
    commit: Commit | None = None


LIMITS = {
    "wire": "network",
    "compute": "computing",
    "link": "network",
    "slowest stage": "slowest stage",
    "bubble": "pipeline's bubble",
    "fixed cost": "fixed cost of each micro-batch",
}
"""Words for the values of `Prediction.binds`."""


class Prediction(Record):
    step_ms: float
    samples_per_s: float
    binds: str
    """The bottleneck: a key of LIMITS."""
    is_estimate: bool
    """Whether a speed came from the hardware catalogue."""
    basis: tuple[str, ...] = ()
    """Sources of the figures, a sentence each."""

    @property
    def words(self) -> str:
        how = "estimated" if self.is_estimate else "predicted"
        limit = LIMITS.get(self.binds, self.binds)
        speed, step = format_figure(self.samples_per_s), format_figure(self.step_ms)
        return f"{how} {speed} samples/s in steps of {step} ms, limited by the {limit}"


class Faster(Record):
    hosts: tuple[str, ...]
    what: str
    """Like `v100 alone`, `without a16`, `strategy=ddp, shares=measured`."""
    samples_per_s: float
    of_time: float
    """Its time as a fraction of the present, 0..1."""
    basis: Literal["predicted", "estimated", "profiled", "computed"]
    """estimated: with a catalogue speed. profiled: measured. computed: from the host's times in this run."""
    command: str

    @property
    def words(self) -> str:
        how = {"profiled": "profiled alone", "computed": "by its own time in this run"}.get(self.basis, self.basis)
        return f"{self.what} would take {format_percent(self.of_time)} of the time ({how})"


class NcclSetting(Record):
    name: str
    value: str
    reason: str

    @property
    def words(self) -> str:
        return f"{self.name}={self.value}: {self.reason}"


def _asked_of(value: object) -> JobSpec:
    """A recorded spec, without the options of a newer orch."""
    if isinstance(value, JobSpec):
        return value
    known = {key_of(name) for name in JobSpec.model_fields}
    try:
        return JobSpec.model_validate(
            {key: value[key] for key in known & value.keys()} if isinstance(value, dict) else {}
        )
    except ValidationError:
        return JobSpec()


RecordedSpec = Annotated[
    JobSpec,
    BeforeValidator(_asked_of),
    PlainSerializer(lambda spec: spec.model_dump(exclude_unset=True, by_alias=True)),
]


class LaunchPlan(Record):
    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    job: str
    name: str | None = None
    """The user's, prefix of the id."""
    note: str | None = None
    exp: str
    kind: Literal["experiment", "script", "module", "program"]
    cluster: str
    owner: Owner | None = None
    asked: RecordedSpec = Field(default_factory=JobSpec)
    """As requested by the user, without values of variables."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """All of an experiment's; a script's given and decided ones. Read them by `typed_settings`."""
    master: str
    master_address: str
    rendezvous_port: int
    """Preferred; the master announces another if it is in use."""
    world_size: int
    created: str
    code: CodeFolder
    nodes: tuple[NodePlan, ...]
    share_gpus: bool = False
    grace_s: float = 3.0
    """Time for ranks to end after INT, and again after TERM."""
    time_limit_s: float | None = None
    hosts: HostChoice | None = None
    """None: exactly the named hosts."""
    attempt: Attempt | None = None
    """None: no retries."""
    detached: bool = False
    """Its hosts queue, retry and notify by themselves; no controller follows."""
    notify: str | None = Field(None, repr=False)
    """A command on the master, or the address of a webhook; it may contain a secret."""
    resumes: str | None = None
    """A script that resumes by itself starts with this job's files."""
    requirements: Requirements | None = None
    """Packages that hosts install for this job."""
    keep: tuple[str, ...] = ()
    """Folders taken over from the script's previous job."""
    measures_steps: bool = True
    """Measure a script's steps from outside if it writes no records."""
    backend: Literal["nccl", "gloo"] | None = None
    """For gradients, unless a script chooses otherwise."""
    checkpoints: tuple[str, ...] = ()
    """The master, and the host with the copy; empty without checkpoints."""
    nccl: tuple[NcclSetting, ...] = ()
    """Without variables that the user set."""
    variables: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """For the user before the run, one line each."""
    prediction: Prediction | None = None
    """None if the speeds, links or strategy are unknown."""
    faster: tuple[Faster, ...] = ()

    @property
    def recorded(self) -> RecordedSettings:
        return read_settings(self.settings)

    @property
    def typed_settings(self) -> AnySettings | None:
        """None for a script without `trainer.join`, and for unknown settings."""
        from trainer.shared.config import settings_from
        from trainer.shared.setting_fields import SettingsError

        exp = self.exp if self.kind == "experiment" else self.settings.get("exp")
        try:
            return settings_from(str(exp), self.settings) if exp else None
        except SettingsError:
            return None

    @property
    def training(self) -> Settings | None:
        """With a script's defaults; None if the trainer trains nothing or settings are unknown."""
        from trainer.shared.settings import Settings

        settings = self.typed_settings
        return settings if isinstance(settings, Settings) else None

    @property
    def shares(self) -> tuple[int, ...]:
        """By global rank; empty if unknown."""
        return tuple(share for node in self.nodes for share in node.shares)

    def node(self, name: str) -> NodePlan:
        return next(node for node in self.nodes if node.name == name)

    def typed(self, node: NodePlan) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The commands of torchrun and of the host's first rank, with placeholders filled in."""
        known = {
            "python": node.python,
            "job_dir": f"{node.workdir}/jobs/{self.job}",
            "rendezvous_port": self.rendezvous_port,
            "nodes": len(self.nodes),
            "node_rank": node.node_rank,
        }
        filled = [_filled(word, known) for word in node.torchrun]
        command = [word.format(LOCAL_RANK=0) if word == LOCAL_RANK else word for word in node.command]
        return (node.python, *filled), (tuple(command) if self.kind == "program" else (node.python, *command))

    def masked(self) -> LaunchPlan:
        """Without possible secrets: the only form that is printed or stored."""
        nodes = tuple(node.masked() for node in self.nodes)
        return self.model_copy(update={"nodes": nodes, "notify": mask(self.notify)})


def _filled(word: str, known: Mapping[str, object]) -> str:
    for name, value in known.items():
        word = word.replace(f"{{{name}}}", str(value))
    return word


# Lenient reading of recorded settings: a record may come from another version of orch, or from a script. Code that
# needs complete and valid settings uses `LaunchPlan.training`. Pure.


class RecordedSettings(Record):
    """Named as in `trainer.shared.settings.Settings`; invalid values become None."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    data: str | None = None
    batch: int | None = None
    epochs: int | None = None
    steps: int | None = None
    strategy: str | None = None
    fidelity: str | None = None
    stages: str | None = None
    sync_bn: bool | None = None
    slow: str | None = None
    profile_s: float | None = None
    warmup_steps: int | None = None
    num_workers: int | str | None = None
    """A sentence in a summary if hosts differ: `0 on a, 2 on b`."""
    target_accuracy: float | None = None
    resume: str | None = None
    checkpoint_dir: str | None = None
    checkpoint_every: int | None = None

    @field_validator("*", mode="wrap")
    @classmethod
    def _or_none(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            return None


def read_settings(document: object) -> RecordedSettings:
    return RecordedSettings.model_validate(document if isinstance(document, dict) else {})
