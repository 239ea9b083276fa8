"""This host's ranks as its supervisor knows them: what their wrappers report, and which of them stand still.

ranks = Ranks(job, (2, 3))
ranks.started({"rank": 2, "event": "started", "pid": 4711, ...})
ranks.look(time.monotonic())        # whether there is news of who stands still
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

ALONE_S = 120.0
"""Ranks that have met nobody for so long are said to be alone; they may still meet."""
_AT_THE_END = ("exit_code", "signal", "cause", "met")


class Ranks:
    """numbers: the global ones of this host's ranks."""

    def __init__(self, job: JobFolder, numbers: Iterable[int]) -> None:
        self.records: dict[str, RankRecord] = {str(rank): {} for rank in numbers}
        self.quiet: AgentRecord = {}
        """Since when none prints; {} before the first look."""
        self._stillness = Stillness(job)

    def started(self, event: dict[str, Any]) -> None:
        """Raises KeyError where that is no rank of ours."""
        record = self.records[str(event["rank"])]
        record.update({"pid": event["pid"], "wrapper": event.get("wrapper"), "started": time.time()})

    def reported(self, event: dict[str, Any]) -> None:
        """What a rank's wrapper has seen while the rank runs."""
        record = self.records[str(event["rank"])]
        if event["event"] == "met":
            record["met"] = True
        else:
            record["not_finite"] = event["mark"]

    def ended(self, event: dict[str, Any], *, look: bool) -> None:
        """look: whether what it did, and what the others have printed since the last look, counts."""
        record = self.records[str(event["rank"])]
        record.update(cast(RankRecord, {key: event[key] for key in _AT_THE_END if key in event}))
        if event["cause"] is None:
            record.pop("does", None)  # else it is how the rank was found when it was ended
        record["ended"] = time.time()
        if look:
            self.look(time.monotonic())
        if lost := event.get("dropped_bytes"):
            record["dropped_bytes"] = record.get("dropped_bytes", 0) + lost

    def look(self, now_s: float) -> bool:
        """Notes which of them stand still, and which have met nobody: for people, nothing is ended for it. Whether that
        is news. now_s: on a monotonic clock.
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
        """The pids of those that have started."""
        return {pid for record in self.records.values() if (pid := record.get("wrapper"))}

    def dropped(self) -> dict[str, int]:
        """By rank, the bytes that it printed and the disk did not take."""
        return {rank: record["dropped_bytes"] for rank, record in self.records.items() if "dropped_bytes" in record}
