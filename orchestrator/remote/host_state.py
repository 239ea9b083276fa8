"""One host's part in a job: its phase, failures and ranks, for the hub and for agent.json.

state = HostState(job, node, cut, changed)
state.enter("joined")               # changed() is called
state.fail(failure("port", ...))    # this ends the job
state.status()                      # for the hub
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from .layout import JobFolder
from .link import MAX_LINE
from .messages import AgentRecord, Failure, Phase, Status, failure
from .ranks import Ranks
from .truncated_json import fitted

MOST_REPORTED = 8  # most failures that a host reports and keeps
LEFTOVERS = 20
CUT = 8


class HostState:
    """cut: unreachable hosts and why (`membership`). changed: called after every change."""

    def __init__(
        self, job: JobFolder, node: dict[str, Any], cut: Mapping[str, str], changed: Callable[[], None]
    ) -> None:
        self.phase: Phase = "joining"
        self.cancelled = self.is_stopping = False
        self.failures: list[Failure] = []
        self.leftovers: list[str] = []
        self.ranks = Ranks(job, node["rank_numbers"])
        self.changed = changed
        self._job, self._name, self._cut = job, node["name"], cut

    def enter(self, phase: Phase) -> None:
        self.phase = phase
        self.changed()

    def fail(self, cause: Failure) -> None:
        # Without its folder, other failures are only effects.
        self.failures.append(cause if self.has_folder() else self.without_folder())
        self.changed()

    def has_folder(self) -> bool:
        try:
            return self._job.control.exists()
        except OSError:  # a failing disk is no removed folder
            return True

    def without_folder(self) -> Failure:
        return failure("folder", self._name, f"the job's folder was removed ({self._job.root})")

    def status(self) -> Status:
        status: Status = {
            "phase": self.phase,
            "failures": self._worst(),
            "cancelled": self.cancelled,
            "leftovers": self.leftovers[:LEFTOVERS],
            "cut": dict([*self._cut.items()][:CUT]),
        }
        if dropped := self.ranks.dropped():
            status["dropped"] = dropped
        return cast(Status, fitted(status, MAX_LINE // 2))

    def record(self) -> AgentRecord:
        return {
            "phase": self.phase,
            "ranks": self.ranks.records,
            "failures": self._worst(),
            "leftovers": self.leftovers,
            **self.ranks.quiet,
        }

    def _worst(self) -> list[Failure]:
        # As many as fit; causes before effects of another rank's death.
        return sorted(self.failures, key=lambda cause: bool(cause["secondary"]))[:MOST_REPORTED]
