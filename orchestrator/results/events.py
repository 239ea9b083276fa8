"""The events of a run's ranks, in the tables of `tables.read_events`. Imports no duckdb.

events.latest("end")[0]["total_s"]           each rank's last event of a name
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from orchestrator.jobs.metric_lines import parse_event


@dataclass(frozen=True)
class MetricsFile:
    node: str
    rank: int
    path: Path


@dataclass
class Rejects:
    """Lines of one rank that were left out, by cause."""

    malformed: int = 0
    too_long: int = 0
    refused: int = 0
    repeated: int = 0
    truncated: bool = False


@dataclass(frozen=True)
class Events:
    connection: Any
    """duckdb.DuckDBPyConnection; closed with its context."""
    rejects: dict[int, Rejects] = field(default_factory=dict)
    absent: dict[int, str] = field(default_factory=dict)
    """By rank, why its file could not be read."""

    def latest(self, event: str) -> dict[int, dict[str, Any]]:
        texts = self._latest.get(event, {})
        return {rank: content for rank, text in texts.items() if (content := parse_event(text)) is not None}

    @cached_property
    def _latest(self) -> dict[str, dict[int, str]]:
        """Every event in one query: each query takes DuckDB a millisecond, however small the answer."""
        rows = self.connection.execute(
            "SELECT event, rank, arg_max(content, line) FROM others GROUP BY event, rank ORDER BY rank"
        ).fetchall()
        found: dict[str, dict[int, str]] = {}
        for event, rank, text in rows:
            found.setdefault(event, {})[rank] = text
        return found

    def since_start(self, event: str, limit: int) -> dict[int, list[dict[str, Any]]]:
        """Each rank's first events of this name after its last start."""
        rows = self.connection.execute(
            "SELECT rank, content FROM others AS o WHERE event = ? AND line >"
            " (SELECT max(line) FROM others AS s WHERE s.rank = o.rank AND s.event = 'start')"
            " QUALIFY row_number() OVER (PARTITION BY rank ORDER BY line) <= ? ORDER BY rank, line",
            [event, limit],
        ).fetchall()
        found: dict[int, list[dict[str, Any]]] = {}
        for rank, text in rows:
            if (content := parse_event(text)) is not None:
                found.setdefault(rank, []).append(content)
        return found

    def starts(self) -> dict[int, int]:
        """Starts of each rank that led to a step (torchrun's --max-restarts)."""
        return dict(self.connection.execute("SELECT rank, times FROM starts").fetchall())

    def of_rank(self, rank: int, event: str, limit: int) -> list[dict[str, Any]]:
        rows = self.connection.execute(
            "SELECT content FROM others WHERE rank = ? AND event = ? ORDER BY line LIMIT ?", [rank, event, limit]
        ).fetchall()
        return [content for (text,) in rows if (content := parse_event(text)) is not None]
