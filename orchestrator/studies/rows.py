"""What a study is: rows that can be run again, each beside what was published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.planning.starters import Starter


@dataclass(frozen=True)
class StudyRow:
    """One configuration that a study measured."""

    name: str
    cells: tuple[str, ...]
    """Under the study's own columns."""
    exp: str
    settings: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[tuple[str, int], ...] = ()
    """GPU and ranks of each host that it needs."""
    ranks: int = 0
    """How many there must be in all, where it does not matter on which hosts; of a row with a starter, 0 is all that
    one host has.
    """
    gpus: int = 0
    """How many each rank must have for itself."""
    starter: Starter | None = None
    """Who starts its ranks, all on one host; None is orch, on as many hosts as there are."""
    needs_horovod: bool = False
    """Whether its hosts must have that package."""
    against: str = ""
    """The row by whose time this one's speed-up is counted."""
    never: str = ""
    """Why it cannot run on any cluster."""
    published: tuple[str, ...] = ()
    """What the study gives, in its words."""


@dataclass(frozen=True)
class Study:
    """A published study that can be run again."""

    title: str
    source: str
    columns: tuple[str, ...]
    figures: tuple[str, ...]
    """What of a run's summary stands in the table (names in `figures.FIGURES`); the first of them compares the rows."""
    published: tuple[str, ...]
    """The columns of the rows' published cells."""
    rows: tuple[StudyRow, ...]
    note: str = ""
    shows_learning: bool = False
    """Whether each row's loss by epoch and accuracy by class stand beneath the table."""

    @property
    def has_speed_ups(self) -> bool:
        return any(row.against for row in self.rows)
