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
from orchestrator.record import SCHEMA, Owner, Record
from orchestrator.units import format_figure, format_percent

if TYPE_CHECKING:
    from trainer.shared.settings import AnySettings, Settings


LOCAL_RANK = "--local_rank={LOCAL_RANK}"
"""Filled in by the rank wrapper: what torch.distributed.launch would give a script."""


class System(Record):
    """What a host was when its job was planned, by its probe."""

    os: str
    kernel: str
    machine: str
    """`x86_64`, ..."""
    cores: int
    """Those that the job may use."""
    memory_bytes: int
    python: str
    driver: str | None = None
    """The driver of its GPUs; None where it has none."""
    cuda: str | None = None
    """That torch was built for; None for a CPU build."""


class NodePlan(Record):
    """What one host is asked to do."""

    name: str
    node_rank: int
    first_rank: int
    """The global rank of this host's local rank 0."""
    ranks: int
    address: str
    """Numeric training address, without prefix length."""
    interface: str | None
    """The interface that carries this host's route to the master (the others' route, on the master)."""
    device: Literal["cuda", "cpu"]
    gpu: str | None
    """The GPU's label, for people and for grouping by type."""
    gpu_uuids: tuple[str, ...] = ()
    bandwidth_bps: float | None = None
    paced: dict[str, Any] | None = None
    python: str
    activate: str | None = None
    workdir: str
    env: dict[str, str] = Field(default_factory=dict)
    """Added to the ranks' environment; it travels in a file of mode 0600, never in an argument."""
    shares: tuple[int, ...] = ()
    """Samples of a global batch for each of this host's ranks; empty for a script whose batch we do not know."""
    solo_samples_per_s: float | None = None
    """What this host does alone, by its profile: all its ranks together, each with the whole batch, or with as large a
    part of it as its memory holds. None where it has none."""
    torchrun: tuple[str, ...]
    """Arguments after the interpreter; `{python}`, `{rendezvous_port}` and `{job_dir}` are filled in on the host."""
    command: tuple[str, ...]
    """What the rank wrapper runs: arguments after the interpreter."""
    starts_ranks: bool = False
    """Whether that command starts all ranks of this host by itself."""
    prepare: str | None = None
    system: System | None = None
    """None in plans of an older orch."""

    def masked(self) -> NodePlan:
        shell = {name: mask(getattr(self, name)) for name in ("prepare", "activate")}
        return self.model_copy(update={"env": masked_env(self.env), **shell})

    @property
    def rank_numbers(self) -> range:
        """The global ranks that live on this host."""
        return range(self.first_rank, self.first_rank + self.ranks)


class LeftOut(Record):
    """A host that a job was to have, and that could not take part."""

    node: str
    reason: str


class HostChoice(Record):
    """How many hosts a job was to have, and which of those that were named it does without."""

    min_hosts: int
    max_hosts: int
    candidates: tuple[str, ...] = ()
    """All that were named, or all of the cluster, in this order."""
    left_out: tuple[LeftOut, ...] = ()
    spares: tuple[str, ...] = ()
    """Hosts that could have taken part, the next best first."""

    @property
    def words(self) -> str:
        """As a person writes it."""
        return f"{self.min_hosts}:{self.max_hosts}"


class Earlier(Record):
    """An attempt at a job that failed."""

    job: str
    why: str


class Attempt(Record):
    """Which of several attempts at a job this is, by `--retries`."""

    number: int
    """From 1 on."""
    most: int
    any_cause: bool = False
    """Whether it is tried again also where the script failed by itself."""
    rejoin: bool = False
    """Whether a host that was lost is taken in again once it answers."""
    wait_s: float = 10.0
    """The pause before the second attempt; it doubles before each further one."""
    earlier: tuple[Earlier, ...] = ()
    """Those that failed before this one, in their order."""

    @property
    def words(self) -> str:
        return f"{self.number} of {self.most}"


class Commit(Record):
    """What of a repository was checked out."""

    id: str
    dirty: bool | None = None
    """Whether the folder held anything else, files that git does not track among it; None where git cannot say."""

    @property
    def words(self) -> str:
        """`commit 3f2a1b9c0d4e, with changes that are not committed`."""
        changed = {True: ", with changes that are not committed", None: ", changed or not", False: ""}[self.dirty]
        return f"commit {self.id[:12]}{changed}"


class CodeFolder(Record):
    """Files to ship, addressed by content."""

    sha256: str
    """Digest of the packed files."""
    source: str
    files: int
    size_bytes: int
    left_out: tuple[str, ...] = ()
    """Files that look like secrets, the first hundred of them."""
    unsent: tuple[tuple[str, str], ...] = ()
    """Further files that stay here, the first hundred, each with the reason; a folder's name ends with `/`."""
    notes: tuple[str, ...] = ()
    """What a person should know of the choice of files."""
    commit: Commit | None = None
    """None outside of a repository."""


LIMITS = {
    "wire": "network",
    "compute": "computing",
    "link": "network",
    "slowest stage": "slowest stage",
    "bubble": "pipeline's bubble",
    "fixed cost": "fixed cost of each micro-batch",
}
"""The values of `Prediction.binds`, in words for people."""


class Prediction(Record):
    """What was predicted of a job before it ran."""

    step_ms: float
    samples_per_s: float
    binds: str
    """What limits the speed: a key of LIMITS."""
    is_estimate: bool
    """Whether some speed came from the hardware catalogue."""
    basis: tuple[str, ...] = ()
    """What the figures rest on, a sentence each."""

    @property
    def words(self) -> str:
        how = "estimated" if self.is_estimate else "predicted"
        limit = LIMITS.get(self.binds, self.binds)
        speed, step = format_figure(self.samples_per_s), format_figure(self.step_ms)
        return f"{how} {speed} samples/s in steps of {step} ms, limited by the {limit}"


class Faster(Record):
    """A way to run the same job that takes less time than the one at hand, and the line that takes it."""

    hosts: tuple[str, ...]
    """Those that take part."""
    what: str
    """In words: `v100 alone`, `without a16`, `strategy=ddp, shares=measured`."""
    samples_per_s: float
    of_time: float
    """The part of the time that it would take, 0..1."""
    basis: Literal["predicted", "estimated", "profiled", "computed"]
    """predicted or, with a speed from the hardware catalogue, estimated before the run. After it: from the host's
    profile, or from its own time to load, compute and update in that run."""
    command: str
    """The whole `orch run` line, quoted for a shell."""

    @property
    def words(self) -> str:
        how = {"profiled": "profiled alone", "computed": "by its own time in this run"}.get(self.basis, self.basis)
        return f"{self.what} would take {format_percent(self.of_time)} of the time ({how})"


class NcclSetting(Record):
    """A variable that NCCL, or torch's use of it, needs on every host of a job."""

    name: str
    value: str
    reason: str
    """Why, in a few words."""

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


class LaunchPlan(Record):
    """One job, completely: `orch run --dry-run` prints exactly this, `orch run` executes exactly this."""

    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    job: str
    name: str | None = None
    """What the person calls it; the id begins with it."""
    note: str | None = None
    """A line of the person's own."""
    exp: str
    kind: Literal["experiment", "script", "module"]
    cluster: str
    owner: Owner | None = None
    """Who starts it. None in plans of an older orch."""
    asked: Annotated[
        JobSpec,
        BeforeValidator(_asked_of),
        PlainSerializer(lambda spec: spec.model_dump(exclude_unset=True, by_alias=True)),
    ] = Field(default_factory=JobSpec)
    """The job as the person asked for it, without the values of its variables. Empty in plans of an older orch."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """An experiment's, all of them; of a script those that were given or decided here, `exp` among them where it is
    joined by `trainer.join`, and of another script the global batch. `typed_settings` reads them.
    """
    master: str
    master_address: str
    rendezvous_port: int
    """The port asked for; the master takes another when it is in use, and announces it to every host."""
    world_size: int
    created: str
    code: CodeFolder
    nodes: tuple[NodePlan, ...]
    """In node-rank order: the master first."""
    share_gpus: bool = False
    grace_s: float = 3.0
    """How long ranks have after INT, and again after TERM, before the next step of the stop ladder."""
    time_limit_s: float | None = None
    hosts: HostChoice | None = None
    """None: it has exactly those that were named."""
    attempt: Attempt | None = None
    """None: it is not tried again."""
    resumes: str | None = None
    """The job whose files a script that resumes by itself begins with."""
    keep: tuple[str, ...] = ()
    """Folders of the script's working folder that it takes over from its job before."""
    measures_steps: bool = True
    """Whether a script's steps are measured from outside where it writes no records."""
    backend: Literal["nccl", "gloo"] | None = None
    """What carries the gradients, unless a script chooses otherwise; None in plans of an older orch."""
    checkpoints: tuple[str, ...] = ()
    """Who keeps its checkpoints: the master, which writes them, and the host that gets a copy of each. Empty where it
    writes none.
    """
    nccl: tuple[NcclSetting, ...] = ()
    """What the hosts' environments hold because of NCCL, and why; without what a person has set."""
    variables: tuple[str, ...] = ()
    """Names of the environment variables that were given for this job alone."""
    notes: tuple[str, ...] = ()
    """What a person should know before this runs, one line each."""
    prediction: Prediction | None = None
    """None where speeds or links are not known, or the strategy is not predicted."""
    faster: tuple[Faster, ...] = ()
    """Ways that are predicted to take less time, the fastest first."""

    @property
    def recorded(self) -> RecordedSettings:
        """Some of its settings, whatever it is and whoever wrote it."""
        return read_settings(self.settings)

    @property
    def typed_settings(self) -> AnySettings | None:
        """None for a script that the trainer has no part in, and for what this version does not know."""
        from trainer.shared.config import settings_from
        from trainer.shared.setting_fields import SettingsError

        exp = self.exp if self.kind == "experiment" else self.settings.get("exp")
        try:
            return settings_from(str(exp), self.settings) if exp else None
        except SettingsError:
            return None

    @property
    def training(self) -> Settings | None:
        """Its settings, of a script with what it would have by itself; None where the trainer trains nothing, or by
        settings that this version does not know.
        """
        from trainer.shared.settings import Settings

        settings = self.typed_settings
        return settings if isinstance(settings, Settings) else None

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of a global batch for each rank, the ranks in their order; empty for a script of unknown batch."""
        return tuple(share for node in self.nodes for share in node.shares)

    def node(self, name: str) -> NodePlan:
        return next(node for node in self.nodes if node.name == name)

    def typed(self, node: NodePlan) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The command lines of torchrun and of the host's first rank, with what a host fills in: the port is the one
        asked for.
        """
        known = {
            "python": node.python,
            "job_dir": f"{node.workdir}/jobs/{self.job}",
            "rendezvous_port": self.rendezvous_port,
            "nodes": len(self.nodes),
            "node_rank": node.node_rank,
        }
        filled = [_filled(word, known) for word in node.torchrun]
        command = [word.format(LOCAL_RANK=0) if word == LOCAL_RANK else word for word in node.command]
        return (node.python, *filled), (node.python, *command)

    def masked(self) -> LaunchPlan:
        """The same without the values of what may be a secret: the only form that is printed or kept."""
        return self.model_copy(update={"nodes": tuple(node.masked() for node in self.nodes)})


def _filled(word: str, known: Mapping[str, object]) -> str:
    """What stands in braces and has no such name stays as it is: a plan from elsewhere may hold any word."""
    for name, value in known.items():
        word = word.replace(f"{{{name}}}", str(value))
    return word


# Settings as a record on disk keeps them, read by type and leniently. Pure.
#
#     plan.recorded.batch                 64; None where the record has none, or something else in its place
#
# A record may be an older or a newer orch's, of an experiment that is unknown here, or a script's, of which only the
# batch is known. Where all settings have to be there and right, take `LaunchPlan.training`.


class RecordedSettings(Record):
    """Those that results, listings and reports ask for, under the names that `trainer.shared.settings.Settings` has."""

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
    """In a summary a sentence where hosts differ: `0 on a, 2 on b`."""
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
    """document: what stands in the place of settings, by name; nothing of it is taken on trust."""
    return RecordedSettings.model_validate(document if isinstance(document, dict) else {})
