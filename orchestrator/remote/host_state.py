"""One host's part in a job: its phase, failures and ranks, for the hub and for agent.json.

state = HostState(job, node, cut, changed)
state.enter("joined")               # changed() is called
state.fail(failure("port", ...))    # this ends the job
state.status()                      # for the hub
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from .layout import JobFolder, fitted
from .link import MAX_LINE
from .messages import AgentRecord, Failure, Phase, RankRecord, Status, TurnReport, failure
from .stillness import QUIET_S, Stillness

MOST_REPORTED = 8  # most failures that a host reports and keeps
LEFTOVERS = 20
CUT = 8


class HostState:
    """cut: unreachable hosts and why (`membership`). changed: called after every change."""

    def __init__(
        self, job: JobFolder, node: dict[str, Any], cut: Mapping[str, str], changed: Callable[[], None]
    ) -> None:
        self.phase: Phase = "joining"
        self.cancelled = self.is_stopping = self.is_last = self.cannot_write = False
        self.turn: TurnReport | None = None
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
        if self.turn and self.phase == "queued":
            status["turn"] = self.turn
        if self.is_last or self.cannot_write:  # the next attempt's supervisor would read an old record
            status["is_last"] = True
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


# Records of this host's ranks: reports of their wrappers, and ranks that stand still.
#
# ranks = Ranks(job, (2, 3))
# ranks.started({"rank": 2, "event": "started", "pid": 4711, ...})
# ranks.look(time.monotonic())        # True if a rank began or ceased to stand still
# ranks.records                       # {"2": {"pid": 4711, ...}, "3": {}}

ALONE_S = 120.0  # a rank that has joined no other for this long is reported; it may still join
_AT_THE_END = ("exit_code", "signal", "cause", "met")


class Ranks:
    def __init__(self, job: JobFolder, numbers: Iterable[int]) -> None:
        self.records: dict[str, RankRecord] = {str(rank): {} for rank in numbers}
        self.quiet: AgentRecord = {}  # since when no rank prints; {} before the first look
        self._stillness = Stillness(job)

    def started(self, event: dict[str, Any]) -> None:
        record = self.records[str(event["rank"])]
        record.update({"pid": event["pid"], "wrapper": event.get("wrapper"), "started": time.time()})
        record["parent"] = event.get("parent") or record["wrapper"]

    def reported(self, event: dict[str, Any]) -> None:
        record = self.records[str(event["rank"])]
        if event["event"] in ("met", "alone"):
            record["met"] = event["event"] == "met"
        else:
            record["not_finite"] = event["mark"]

    def ended(self, event: dict[str, Any], *, look: bool) -> None:
        record = self.records[str(event["rank"])]
        record.update(cast(RankRecord, {key: event[key] for key in _AT_THE_END if key in event}))
        if event["cause"] is None:
            record.pop("does", None)  # otherwise it stays, as the rank's activity when it was ended
        record["ended"] = time.time()
        if look:
            self.look(time.monotonic())
        if lost := event.get("dropped_bytes"):
            record["dropped_bytes"] = record.get("dropped_bytes", 0) + lost

    def has_files(self) -> bool:
        return self._stillness.has_files(self.records)

    def look(self, now_s: float) -> bool:
        """Updates which ranks stand still, and which have joined no other; only reported. Returns whether records
        changed.
        """
        still = self._stillness.look(self.records, now_s)
        before = json.dumps(self.records)
        for number, record in self.records.items():
            if "ended" not in record:
                record.pop("does", None)
            if number in still:
                record["does"] = still[number]
            if "met" not in record and time.time() - record.get("started", time.time()) > ALONE_S:
                record["met"] = False
        if not still:
            self.quiet["quiet_since"] = None
        elif not self.quiet.get("quiet_since"):
            self.quiet["quiet_since"] = time.time() - QUIET_S
        return json.dumps(self.records) != before

    def wrappers(self) -> set[int]:
        return {pid for record in self.records.values() if (pid := record.get("wrapper"))}

    def dropped(self) -> dict[str, int]:
        return {rank: record["dropped_bytes"] for rank, record in self.records.items() if "dropped_bytes" in record}
