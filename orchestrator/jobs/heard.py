"""What the hosts of a job say while it is followed, and whose last word has grown too old to count. Pure.

    heard = Heard()
    if heard.take("a", frame, now_s):           # something changed that the job's state may depend on
        combine(plan, heard.found(now_s), known, now)

A host that loses power says nothing more, and its last record says for ever that its supervisor lives. So a record
that speaks of the present counts only while its host is heard, or was a moment ago; what is said of an end stays said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.errors import ConnectError, HostError
from orchestrator.jobs.frames import Agent, Beat, Frame

SILENT_S = 30.0
"""Longer than LEASE_S of `remote/lease.py`: by then the other hosts have noticed, if it is more than our link."""


class Heard:
    """records: each host's last, whatever its age."""

    def __init__(self) -> None:
        self.records: dict[str, Mapping[str, Any]] = {}
        self._refused: dict[str, HostError] = {}
        self._silent_since_s: dict[str, float] = {}
        self._missed = frozenset[str]()

    def take(self, name: str, item: Frame | HostError, now_s: float) -> bool:
        """name: "" for a beat that no host sent: all that came has been taken, and for a second nothing came. Returns
        whether `found` may give something else than before.
        """
        if not name:
            for silent in self.records:
                self._silent_since_s.setdefault(silent, now_s)
        elif isinstance(item, ConnectError) or item == Beat():  # our own clock's beat: nothing came
            self._silent_since_s.setdefault(name, now_s)
        elif isinstance(item, HostError):  # it is no longer dialled
            self._refused[name] = item
        else:
            self._silent_since_s.pop(name, None)
        if isinstance(item, Agent):
            self.records[name] = item.record
        before, self._missed = self._missed, self.missed(now_s)
        return isinstance(item, Agent) or name in self._refused or self._missed != before

    def missed(self, now_s: float) -> frozenset[str]:
        """The hosts whose last record speaks of a living supervisor and has grown too old to count."""
        silent = {name for name, since_s in self._silent_since_s.items() if now_s - since_s > SILENT_S}
        return frozenset(name for name in silent if self.records.get(name, {}).get("alive"))

    def found(self, now_s: float) -> dict[str, Mapping[str, Any] | HostError]:
        """What counts now, by host."""
        words = f"no word for {SILENT_S:.0f} s"
        alive = {name for name, record in self.records.items() if record.get("alive")}
        refused = {name: error for name, error in self._refused.items() if name in alive or name not in self.records}
        return {**self.records, **refused, **{name: ConnectError(name, words) for name in self.missed(now_s)}}
