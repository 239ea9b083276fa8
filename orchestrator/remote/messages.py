"""Messages between the supervisors of a job, and agent.json: types and constructors. Pure.

    finish("failed", failure("lost", "beta", "no word for 20 s"))

A job's supervisors have one version. Readers of agent.json may be older or newer: keys may be added, but never change
their meaning.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

Phase = Literal["resting", "queued", "joining", "joined", "running", "done", "stopping", "ended"]
BEFORE_JOINING: tuple[Phase | None, ...] = (None, "resting", "queued", "joining")
STOOD_STILL = "the supervisor stood still"  # a rank's cause
STILL_QUEUED = "; the job was still queued: submit it again"
Whose = Literal["hosts", "script", "person"]
FinalState = Literal["succeeded", "failed", "cancelled"]


class _Failure(TypedDict):
    kind: str
    """"rank", "torchrun", "prepare", "network", "port", "folder", "time", "queue" (`--wait-limit` is over),
    "supervisor"; "lost" for a silent host.
    """
    node: str
    reason: str
    rank: int | None
    exit_code: int | None
    signal: str | None
    log_line: str | None
    secondary: bool  # its log blames the network, so that another rank's death is more likely the cause


class Failure(_Failure, total=False):
    order: int  # order of arrival at the hub
    whose: Whose  # in a final record: see `attempts`
    loses_host: bool


class Earlier(TypedDict):
    """A failed attempt of a job that is retried by its supervisors (`attempts`)."""

    why: str
    ended: float


class RankRecord(TypedDict, total=False):
    """One rank, in its supervisor's record; times are seconds since the epoch."""

    pid: int
    wrapper: int | None  # the pid of `rank`
    parent: int | None  # the script's parent: `rank`, or a process of `preload`
    started: float
    ended: float
    met: bool  # it has joined other ranks; absent until known
    not_finite: dict[str, Any]  # the rank's first NaN or infinite loss, from the trainer: step, epoch, loss, of
    does: str  # its activity while no rank prints (`stillness`)
    exit_code: int | None
    signal: str | None
    cause: str | None  # why we ended it; None if it ended by itself
    dropped_bytes: int  # output that the disk did not take


class Status(TypedDict, total=False):
    """A member's report to the hub: its whole present state; {} before the first."""

    phase: Phase
    failures: list[Failure]
    cancelled: bool
    leftovers: list[str]
    cut: dict[str, str]  # unreachable hosts, and why
    dropped: dict[str, int]  # rank -> bytes of output that the disk did not take, if any
    turn: TurnReport  # in phase "queued"
    is_last: bool  # this host can take part in no further attempt


class TurnReport(TypedDict):
    """A host's place in the queue for its GPUs (`turn`), for the hub."""

    next: int  # the number that a new ticket would get there
    number: int  # of its ticket; 0 without one
    has_come: bool  # its GPUs are free, and no earlier job waits for them
    claimed: int  # the order's `claim` that it has carried out; 0 for none
    refused: int  # the latest failed `claim`


class _Order(TypedDict):
    do: Literal["queue", "wait", "start", "stop", "finish"]


class Order(_Order, total=False):
    number: int  # of the job's tickets; 0 while hosts report `next`
    claim: int  # claim the GPUs now, and keep them until an order without this number
    turn: int  # the queue is over for hosts with this claim
    is_retried: bool  # in a finish: the next attempt follows
    rendezvous_port: int  # the ranks' port: in a start, and in a wait once known
    state: FinalState
    first_failure: Failure | None


class Process(TypedDict):
    pid: int
    start_time: int
    boot_id: str


class AgentRecord(TypedDict, total=False):
    """agent.json, written only by the supervisor; times are seconds since the epoch."""

    schema: int
    job: str
    node: str
    state: Literal["starting", "running", "undone", "succeeded", "failed", "cancelled"]
    pid: int
    start_time: int
    boot_id: str
    keeper: Process
    started: float
    hub_port: int
    peer_port: int
    phase: Phase
    ranks: dict[str, RankRecord]
    failures: list[Failure]
    leftovers: list[str]
    dropped: dict[str, dict[str, int]]  # by host; the master's record has all hosts
    go: float  # when `go` arrived
    rendezvous_port: int
    quiet_since: float | None  # since when no rank has printed
    first_failure: Failure | None
    ended: float
    queue: dict[str, Any]  # in phase "queued": see `turn`
    joins: int  # the hub's port
    earlier: list[Earlier]  # failed attempts
    next_at: float  # in phase "resting": when the next attempt begins
    master_is_silent: bool  # its host gives no sign: else it notifies itself
    notified: str  # what became of `--notify`


def failure(kind: str, node: str, reason: str) -> Failure:
    return {
        "kind": kind,
        "node": node,
        "reason": reason,
        "rank": None,
        "exit_code": None,
        "signal": None,
        "log_line": None,
        "secondary": False,
    }


def finish(state: FinalState, first_failure: Failure | None, *, is_retried: bool = False) -> Order:
    order: Order = {"do": "finish", "state": state, "first_failure": first_failure}
    return {**order, "is_retried": True} if is_retried else order
