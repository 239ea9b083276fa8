"""Who shares the hosts, and what they type in a round: pure, every choice comes from the seed.

for step in schedule(seed=1, number=7).steps: ...       # each a tuple of commands that run at the same time
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

MIDDLE_STEPS = 3
LATEST_START_S = 0.8


@dataclass(frozen=True)
class Person:
    """home: whose $ORCH_HOME. login: as whom they come to the hosts. code: who has the same ships the same."""

    name: str
    home: str
    cluster: str
    login: str
    code: str


PEOPLE = {
    person.name: person
    for person in (
        Person("ada-x", "ada", "x", "lab", "shared"),
        Person("ada-y", "ada", "y", "lab", "own"),
        Person("bob-x", "bob", "x", "lab", "shared"),
        Person("cem-x", "cem", "x", "other", "shared"),
    )
}
"""Two clusters of one home; another home with the same login and cluster name; another login."""


@dataclass(frozen=True)
class Typed:
    """who types what. after_s: how long after the step's begin. pick: which of their jobs, counted from the newest."""

    who: str
    what: str
    after_s: float
    pick: int = 0

    def __str__(self) -> str:
        return f"{self.who} {self.what}" + f" (job {-1 - self.pick})" * (self.what in ("collect", "pull"))


@dataclass(frozen=True)
class Schedule:
    """strewn: a person's own files lie in the work folders, too; else these come and go with the jobs."""

    strewn: bool
    strays: frozenset[str]
    """Who has left a process behind that belongs to no supervisor."""
    steps: tuple[tuple[Typed, ...], ...]


def schedule(seed: int, number: int) -> Schedule:
    rng = random.Random(f"{seed}/{number}")
    strewn = rng.random() < 0.5
    strays = frozenset(name for name in PEOPLE if rng.random() < 0.3)
    return Schedule(strewn, strays, tuple(_steps(rng)))


def _steps(rng: random.Random) -> Iterator[tuple[Typed, ...]]:
    jobs = dict.fromkeys(PEOPLE, 0)

    def typed(name: str, what: str) -> Typed:
        pick = rng.randrange(jobs[name]) if what in ("collect", "pull") else 0
        jobs[name] = 0 if what == "down" else jobs[name] + (what in ("run", "stay"))
        return Typed(name, what, round(rng.uniform(0.0, LATEST_START_S), 2), pick)

    names = sorted(PEOPLE)
    yield tuple(typed(name, rng.choice(["run", "stay", "stay", "up"])) for name in names)
    for _ in range(MIDDLE_STEPS):
        chosen = rng.sample(names, rng.choice([1, 2, 2, 3, 4]))
        yield tuple(typed(name, rng.choice(_choices(jobs[name]))) for name in chosen)
    rng.shuffle(names)
    while names:
        together = rng.choice([1, 1, 2, 4])
        yield tuple(typed(name, "down") for name in names[:together])
        names = names[together:]


def _choices(jobs: int) -> list[str]:
    """What one may type who has so many jobs on the hosts."""
    always = ["up", "reap", "down"]
    starts = ["run", "stay", "stay"] if jobs < 3 else []
    return always + starts + (["collect", "pull", "pull", "down"] if jobs else [])
