"""Scripts that nobody changed, and what was measured of them from outside and by hand.

by_hand("cnn")                               the script's text, with the stopwatch that its comments hold
measured = Measured.read(folder)             folder: rank-<r>, with stdout.log and metrics.jsonl
measured.differences()                       {"load": 0.01, ...}: of each part, against what the script timed
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

SCRIPTS = Path(__file__).with_name("unchanged")
TOLD = Path(__file__).with_name("told")
"""The same frameworks' scripts with the callbacks of `trainer.integrations`; each prints what it counted itself."""
PARTS = ("load", "compute", "exposed", "optim")
WARMUP = 3
WITHIN = 0.10


def unchanged(name: str) -> str:
    return (SCRIPTS / f"{name}.py").read_text()


def by_hand(name: str) -> str:
    """In one file."""
    text = unchanged(name).replace("# by hand: from by_hand import Hand\n", "").replace("# by hand: ", "")
    return (SCRIPTS / "by_hand.py").read_text() + text


@dataclass(frozen=True)
class Measured:
    events: Sequence[Mapping]
    hand: Mapping[str, Sequence[float]]
    """Milliseconds of each part, by step."""

    @classmethod
    def read(cls, folder: Path) -> Measured:
        lines = (folder / "stdout.log").read_text().splitlines()
        hand = next(line for line in lines if line.startswith("BY HAND "))
        return cls(events_in(folder), json.loads(hand.removeprefix("BY HAND ")))

    @property
    def start(self) -> Mapping:
        return self.events[0]

    @property
    def steps(self) -> Sequence[Mapping]:
        return [event for event in self.events if event["event"] == "step"]

    def misses(
        self, parts: Sequence[Sequence[str]] = tuple((part,) for part in PARTS)
    ) -> dict[str, tuple[float, float]]:
        """Of each sum of parts, and of the whole step, the two means in ms, ours first, where they differ by more than
        WITHIN of the script's own, and by more than a hundredth of its step: less than that, nobody measures alike.
        """
        means = {names: self.means_ms(names) for names in (*map(tuple, parts), PARTS)}
        least_ms = 0.01 * means[PARTS][1]
        return {
            "+".join(names): (ours, theirs)
            for names, (ours, theirs) in means.items()
            if abs(ours - theirs) > max(WITHIN * theirs, least_ms)
        }

    def means_ms(self, names: Sequence[str]) -> tuple[float, float]:
        """Of the sum of these parts: ours, the script's own. In a step or two the machine stands still between two
        clocks that should read the same; the quarter of the steps that differ most is therefore left out of both means.
        """
        ours = [sum(step[f"{name}_ms"] for name in names) for step in self.steps]
        theirs = [sum(parts) for parts in zip(*(self.hand[name] for name in names), strict=True)]
        pairs = sorted(zip(ours[WARMUP:], theirs[WARMUP:], strict=True), key=lambda pair: abs(pair[0] - pair[1]))
        alike = pairs[: len(pairs) - len(pairs) // 4]
        return fmean(one for one, _ in alike), fmean(other for _, other in alike)


def events_in(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
