"""What lies in the hosts' work folders and whose it is: one host asked, its answer as a value.

    look(host, who)                     # Survey: our jobs, others', and what is no job of anybody
    reap(host, who, end=True)           # Reaped: processes of jobs without a supervisor; ours are ended
    down(host, who)                     # Cleared: what was ended and removed, and what was left alone
    adopt(host, who, ["mnist-..."])     # the jobs that are ours from now on

Only what belongs to `who`, an owner and one of its clusters, is ever touched; the host decides that by its own records
(`remote/belongings.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.record import Owner
from orchestrator.text import one_line
from orchestrator.transport.ask import ConnectedHost, ask, understood, words_of

LOOK_S = 30.0
CLEAR_S = 180.0
"""For a job's end by the whole ladder, and the removal of some thousand files."""


@dataclass(frozen=True)
class Who:
    owner: Owner
    cluster: str

    @property
    def request(self) -> dict[str, Any]:
        return {"owner": self.owner.model_dump(), "cluster": self.cluster}


@dataclass(frozen=True)
class There:
    """A job that lies on a host. owner: a name for people; None where an older orch started it."""

    job: str
    cluster: str
    owner: str | None
    state: str | None
    alive: bool

    def __str__(self) -> str:
        state = "running" if self.alive else "ended"
        return f"{self.job} ({state}; cluster {self.cluster} of {self.owner or 'an older orch'})"


@dataclass(frozen=True)
class Survey:
    mine: tuple[There, ...]
    others: tuple[There, ...]
    strange: tuple[str, ...]


@dataclass(frozen=True)
class Leftover:
    """Processes of a job whose supervisor is gone. stayed: those that did not end; None where none was told to."""

    there: There
    mine: bool
    processes: tuple[str, ...]
    stayed: tuple[str, ...] | None


@dataclass(frozen=True)
class Reaped:
    """programs: short ones of orch that a silent link left, of this host's user."""

    found: tuple[Leftover, ...]
    programs: tuple[str, ...]


@dataclass(frozen=True)
class Cleared:
    """jobs: those removed, with their last records, which are a host's word. left, strange: what was left alone: jobs,
    and names that orch did not make. why: what else stays, and why.
    """

    removed: tuple[str, ...]
    ended: tuple[str, ...]
    jobs: Mapping[str, Mapping[str, Any]]
    left: tuple[There, ...]
    strange: tuple[str, ...]
    why: tuple[str, ...]


def survey_host(host: ConnectedHost, who: Who) -> Survey:
    told = _ask(host, who, "survey", LOOK_S)
    return understood(
        host.node, lambda: Survey(_all(told["mine"]), _all(told["others"]), tuple(words_of(told["strange"])))
    )


def reap(host: ConnectedHost, who: Who, *, end: bool) -> Reaped:
    told = _ask(host, who, "reap", CLEAR_S, end=end)
    return understood(
        host.node,
        lambda: Reaped(tuple(_leftover(one) for one in told["found"]), tuple(words_of(told["programs"]))),
    )


def down(host: ConnectedHost, who: Who) -> Cleared:
    told = _ask(host, who, "down", CLEAR_S)
    return understood(
        host.node,
        lambda: Cleared(
            removed=tuple(words_of(told["removed"])),
            ended=tuple(words_of(told["ended"])),
            jobs={one_line(job): dict(record) for job, record in told["jobs"].items()},
            left=_all(told["left"]),
            strange=tuple(words_of(told["strange"])),
            why=tuple(words_of(told["why"])),
        ),
    )


def adopt(host: ConnectedHost, who: Who, jobs: Sequence[str]) -> tuple[str, ...]:
    told = _ask(host, who, "adopt", LOOK_S, jobs=list(jobs))
    return understood(host.node, lambda: tuple(words_of(told["adopted"])))


def _ask(host: ConnectedHost, who: Who, action: str, timeout_s: float, **more: Any) -> dict[str, Any]:
    request = {"action": action, "workdir": host.workdir, **who.request, **more}
    return ask(host, "belongings", request, timeout_s=timeout_s)


def _all(told: Any) -> tuple[There, ...]:
    return tuple(_there(one) for one in told)


def _there(told: Mapping[str, Any]) -> There:
    owner, state = (one_line(told[key], 200) if told[key] is not None else None for key in ("owner", "state"))
    return There(one_line(told["job"]), one_line(told["cluster"]), owner, state, bool(told["alive"]))


def _leftover(told: Mapping[str, Any]) -> Leftover:
    stayed = tuple(words_of(told["stayed"])) if "stayed" in told else None
    return Leftover(_there(told), bool(told["mine"]), tuple(words_of(told["processes"])), stayed)
