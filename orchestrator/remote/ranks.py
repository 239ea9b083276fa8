"""Records of this host's ranks: reports of their wrappers, and ranks that stand still.

ranks = Ranks(job, (2, 3))
ranks.started({"rank": 2, "event": "started", "pid": 4711, ...})
ranks.look(time.monotonic())        # True if a rank began or ceased to stand still
ranks.records                       # {"2": {"pid": 4711, ...}, "3": {}}
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any, cast

from .layout import JobFolder
from .messages import AgentRecord, RankRecord
from .stillness import QUIET_S, Stillness

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

    def reported(self, event: dict[str, Any]) -> None:
        record = self.records[str(event["rank"])]
        if event["event"] == "met":
            record["met"] = True
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
