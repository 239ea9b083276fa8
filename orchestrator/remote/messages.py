"""What the supervisors of a job say, to each other and in agent.json: every form of it, and who builds one. Pure.

    finish("failed", failure("lost", "beta", "no word for 20 s"))

All supervisors of a job come from one controller, so they are of one version. What reads agent.json may be older or
newer: a key may join the others, and none changes its meaning.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

Phase = Literal["joining", "joined", "running", "done", "stopping", "ended"]
FinalState = Literal["succeeded", "failed", "cancelled"]


class _Failure(TypedDict):
    kind: str
    """ "rank", "torchrun", "prepare", "network", "port", "folder", "time", "supervisor"; "lost" of a silent host."""
    node: str
    reason: str
    rank: int | None
    exit_code: int | None
    signal: str | None
    log_line: str | None
    secondary: bool
    """Whether its own log blames the network: then another's death is rather the cause."""


class Failure(_Failure, total=False):
    """What ends a job."""

    order: int
    """As the hub heard of it."""


class RankRecord(TypedDict, total=False):
    """What a supervisor knows of one of its ranks; times are seconds since the epoch."""

    pid: int
    wrapper: int | None
    """The pid of `rank`, whose child the script is."""
    started: float
    ended: float
    met: bool
    """Whether it has met other ranks; not there while nobody knows."""
    not_finite: dict[str, Any]
    """The first loss of a rank that was NaN or infinite, as the trainer marks it: step, epoch, loss, of."""
    does: str
    """Where no rank prints (`stillness`)."""
    exit_code: int | None
    signal: str | None
    cause: str | None
    """Why we ended it; None where it ended by itself."""
    dropped_bytes: int
    """What it printed and the disk did not take."""


class Status(TypedDict, total=False):
    """What a member reports to the hub: its whole present state. {} of one that was not heard of yet."""

    phase: Phase
    failures: list[Failure]
    cancelled: bool
    leftovers: list[str]
    cut: dict[str, str]
    """Whom it does not reach, and how."""
    dropped: dict[str, int]
    """By rank, where there are any, the bytes that it printed and the disk did not take."""


class _Order(TypedDict):
    do: Literal["wait", "start", "stop", "finish"]


class Order(_Order, total=False):
    """The hub's order to all members."""

    rendezvous_port: int
    """Where the ranks meet: of a start, and of a wait as soon as it is known."""
    state: FinalState
    first_failure: Failure | None


class Process(TypedDict):
    """The fields of a `processes.Identity`."""

    pid: int
    start_time: int
    boot_id: str


class AgentRecord(TypedDict, total=False):
    """agent.json, which the supervisor alone writes; times are seconds since the epoch."""

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
    dropped: dict[str, dict[str, int]]
    """By host; the master's record has those of all."""
    go: float
    """When the word to go came."""
    rendezvous_port: int
    quiet_since: float | None
    """Since when no rank has printed."""
    first_failure: Failure | None
    ended: float


def failure(kind: str, node: str, reason: str) -> Failure:
    """What went wrong there, in plain words; the caller adds what is known of rank, exit and log."""
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


def finish(state: FinalState, first_failure: Failure | None) -> Order:
    return {"do": "finish", "state": state, "first_failure": first_failure}
