"""A job's record: its state, its first failure and what it went on after, as `job.json` holds it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from orchestrator.planning.launch_plan import Attempt, HostChoice, LaunchPlan
from orchestrator.record import SCHEMA, Record, Words
from orchestrator.text import message, one_line

JobState = Literal["starting", "running", "succeeded", "failed", "cancelled", "lost"]
_LARGEST = 1 << 53
"""What a host counts stays below: a larger number has no exact float."""

ENDED: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
"""Known to have ended. A lost job may be found again."""

FINAL_STATES: frozenset[str] = ENDED | {"lost"}


class FirstFailure(Record):
    """The first cause of a failed job."""

    kind: Words = ""
    """ "rank", "torchrun", "prepare", "supervisor", ...; "lost" where others only miss the host."""
    node: Words
    rank: int | None = None
    exit_code: int | None = None
    signal: Words | None = None
    reason: Annotated[str, AfterValidator(lambda text: message(text, 500))]
    """In plain words."""
    secondary: bool = False
    """Whether its own log blames the network alone: others' deaths, or a link that broke."""
    log_line: Words | None = None
    """The line of the rank's error log that says why, if one does."""


class NotFinite(Record):
    """The first loss of a job that is NaN or infinite."""

    node: Words
    rank: int = Field(ge=0)
    step: int = Field(ge=0, lt=_LARGEST)
    """The update, from 0."""
    epoch: int = Field(ge=0, lt=_LARGEST)
    loss: Literal["nan", "inf", "-inf"]
    of: Literal["loss", "test loss"] = "loss"

    @property
    def words(self) -> str:
        """`loss nan since update 25 (epoch 3, v100, rank 1)`."""
        place = f"epoch {self.epoch + 1}, {one_line(self.node)}, rank {self.rank}"
        return f"{self.of} {self.loss} since update {self.step + 1:,} ({place})"


class StillRank(Record):
    """What one rank does while none prints."""

    node: str
    rank: int
    does: Literal["waits", "busy", "disk", "stopped", "ended"]
    """See `remote/stillness.py`."""


Kind = Literal[
    "missed-collective",
    "deadlock",
    "loader",
    "dead-mount",
    "stopped",
    "half-dead-link",
    "full-pipe",
    "stands-still",
    "clock-throttle",
    "still-busy",
    "no-stall",
]


@dataclass(frozen=True)
class Verdict:
    """Who holds a job up, as `orch why` says it."""

    kind: Kind
    reason: Words
    """A sentence."""
    remedy: Words = ""
    node: Words | None = None
    rank: int | None = None
    place: Words = ""
    """`train.py:31 in step`; "" where no line is to be named."""
    line: Words = ""
    """The text of that line."""

    @property
    def is_alarm(self) -> bool:
        return self.kind not in ("no-stall", "still-busy")


class Answer(Record):
    """What came of asking why, without a person, while no rank printed."""

    verdict: Verdict
    quiet_s: float
    """How long they had been quiet by then."""


class Stall(Record):
    """No rank of a job prints anything. It may be healthy for all that: the answer says so."""

    quiet_s: float
    """For how long, in whole minutes, when the hosts were asked."""
    ranks: tuple[StillRank, ...]
    since: tuple[float, ...] = ()
    """Since when, host by host, each by its own clock; 0 where it does not say. It tells one stall from the next."""
    answer: Answer | None = None
    """None where nobody has looked yet."""

    @property
    def waits(self) -> bool:
        """Whether some rank does nothing but wait."""
        return bool({rank.does for rank in self.ranks} & {"waits", "disk", "stopped"})


class JobRecord(Record):
    """A job as `orch jobs --json` lists it and as `job.json` stores it."""

    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    id: str
    state: JobState
    exp: str
    cluster: str
    nodes: tuple[str, ...]
    number: int = 0
    """In the order in which this $ORCH_HOME started its jobs, whatever its clock said; 0 for one of an older orch, and
    one that was found on hosts."""
    started: str | None = None
    ended: str | None = None
    exit_code: int | None = None
    first_failure: FirstFailure | None = None
    stall: Stall | None = None
    """How the ranks of an ended job were found last."""
    name: Words | None = None
    """What its person calls it."""
    note: Words | None = None
    hosts: HostChoice | None = None
    """Which hosts it does without, where it was started by `--hosts`."""
    attempt: Attempt | None = None
    """Which one, of a job that is tried again by `--retries`."""
    not_finite: NotFinite | None = None
    """Its figures are of no use from then on; a job may succeed for all that."""
    joined: bool | None = None
    """Whether any rank has met another; False: each of several runs by itself. None: not known, or a single rank."""

    @classmethod
    def of(cls, plan: LaunchPlan, state: JobState) -> JobRecord:
        """What its plan says of a job, before any host has been heard."""
        return cls(
            schema=1,
            id=plan.job,
            state=state,
            exp=plan.exp,
            cluster=plan.cluster,
            nodes=tuple(node.name for node in plan.nodes),
            started=plan.created,
            name=plan.name,
            note=plan.note,
            hosts=plan.hosts,
            attempt=plan.attempt,
        )
