"""Lists and cleans orch's work folders on the hosts: survey, reap, mend, down, adopt.

The host touches only what its own records assign to `who` (`remote/belongings.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.record import Owner
from orchestrator.transport.ask import ConnectedHost, ask, understood, words_of
from orchestrator.units import one_line

LOOK_S = 30.0
CLEAR_S = 180.0
"""Ends a job with all escalation steps, and deletes thousands of files."""


@dataclass(frozen=True)
class Who:
    owner: Owner
    cluster: str

    @property
    def request(self) -> dict[str, Any]:
        return {"owner": self.owner.model_dump(), "cluster": self.cluster}


@dataclass(frozen=True)
class There:
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
    """Processes of a job without a supervisor."""

    there: There
    mine: bool
    processes: tuple[str, ...]
    stayed: tuple[str, ...] | None
    """Processes that did not end; None if not asked to."""


@dataclass(frozen=True)
class Reaped:
    found: tuple[Leftover, ...]
    programs: tuple[str, ...]
    """Short programs of orch left by a lost connection."""


@dataclass(frozen=True)
class Mended:
    """Remains of interrupted starts and ends."""

    reaped: Reaped
    folders: tuple[str, ...]
    """Relative to the work folder; removed if asked."""
    why: tuple[str, ...]


@dataclass(frozen=True)
class Cleared:
    removed: tuple[str, ...]
    ended: tuple[str, ...]
    jobs: Mapping[str, Mapping[str, Any]]
    """Last records of removed jobs, unverified."""
    left: tuple[There, ...]
    """Other users' and clusters' jobs."""
    strange: tuple[str, ...]
    why: tuple[str, ...]


def survey_host(host: ConnectedHost, who: Who) -> Survey:
    answer = _ask(host, who, "survey", LOOK_S)
    return understood(
        host.node, lambda: Survey(_all(answer["mine"]), _all(answer["others"]), tuple(words_of(answer["strange"])))
    )


def reap(host: ConnectedHost, who: Who, *, end: bool) -> Reaped:
    answer = _ask(host, who, "reap", CLEAR_S, end=end)
    return understood(host.node, lambda: _reaped(answer))


def mend(host: ConnectedHost, who: Who, *, end: bool) -> Mended:
    answer = _ask(host, who, "mend", CLEAR_S, end=end)
    lists = ("folders", "why")
    return understood(host.node, lambda: Mended(_reaped(answer), *(tuple(words_of(answer[name])) for name in lists)))


def down(host: ConnectedHost, who: Who) -> Cleared:
    answer = _ask(host, who, "down", CLEAR_S)
    return understood(
        host.node,
        lambda: Cleared(
            removed=tuple(words_of(answer["removed"])),
            ended=tuple(words_of(answer["ended"])),
            jobs={one_line(job): dict(record) for job, record in answer["jobs"].items()},
            left=_all(answer["left"]),
            strange=tuple(words_of(answer["strange"])),
            why=tuple(words_of(answer["why"])),
        ),
    )


def adopt(host: ConnectedHost, who: Who, jobs: Sequence[str]) -> tuple[str, ...]:
    answer = _ask(host, who, "adopt", LOOK_S, jobs=list(jobs))
    return understood(host.node, lambda: tuple(words_of(answer["adopted"])))


def _ask(host: ConnectedHost, who: Who, action: str, timeout_s: float, **more: Any) -> dict[str, Any]:
    request = {"action": action, "workdir": host.workdir, **who.request, **more}
    return ask(host, "belongings", request, timeout_s=timeout_s)


def _all(jobs: Any) -> tuple[There, ...]:
    return tuple(_there(one) for one in jobs)


def _there(job: Mapping[str, Any]) -> There:
    owner, state = (one_line(job[key], 200) if job[key] is not None else None for key in ("owner", "state"))
    return There(one_line(job["job"]), one_line(job["cluster"]), owner, state, bool(job["alive"]))


def _reaped(answer: Mapping[str, Any]) -> Reaped:
    return Reaped(tuple(_leftover(one) for one in answer["found"]), tuple(words_of(answer["programs"])))


def _leftover(entry: Mapping[str, Any]) -> Leftover:
    stayed = tuple(words_of(entry["stayed"])) if "stayed" in entry else None
    return Leftover(_there(entry), bool(entry["mine"]), tuple(words_of(entry["processes"])), stayed)
