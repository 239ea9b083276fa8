"""How soon a fault is noticed and all has ended, whether a glitch is taken for a loss, and what a stop leaves behind.

    .venv/bin/python tests/bench/detection.py [--torch] [--injections N] [--glitches N] [--stops N] [--seed S]

On the lab, three hosts a job, several jobs at once. "noticed" runs from the fault to the end of the first rank of
another host, "all gone" to the end of the last process that can end (a frozen or cut-off host's own end is checked
when it is back). Without --torch a quick stand-in takes torchrun's place; with it, ranks meet in Gloo collectives.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.chaos.__main__ import play, schedule
from tests.chaos.rounds import Outcome
from tests.chaos.world import World

DEATHS = {
    "rank killed": ["kill_rank"],
    "torchrun killed": ["kill_launcher"],
    "supervisor killed": ["kill_supervisor", "kill_keeper_and_supervisor"],
    "supervisor frozen": ["freeze_supervisor"],
    "host frozen": ["freeze_host"],
    "link cut": ["cut", "cut_inwards", "cut_outwards"],
    "power off": ["power_off"],
}
GLITCHES = ["glitch", "glitch_inwards", "glitch_outwards", "freeze_supervisor_briefly"]
STOPS = ["cancel", "cancel_twice", "workers_that_ignore_all"]


def main() -> int:
    asked = _parser().parse_args()
    kinds = [kind for of_one in DEATHS.values() for kind in of_one]
    parts = [(kinds, asked.injections), (GLITCHES, asked.glitches), (STOPS, asked.stops)]
    with World(asked.cells) as world, open(os.devnull, "w") as nowhere:
        deaths, glitches, stops = (
            play(world, argparse.Namespace(seed=asked.seed, torch=asked.torch, kinds=",".join(some)), rounds, nowhere)
            for some, count in parts
            for rounds in [list(schedule(asked.seed, some, count))]
        )
    print(f"\nseed {asked.seed}, {'real torchrun and Gloo' if asked.torch else 'torch-free'}")
    for name, of_one in DEATHS.items():
        _show(name, [outcome for outcome in deaths if outcome.kind in of_one])
    print(f"{len(glitches)} glitches of 3 to 9 s: {_broken(glitches)} taken for a loss")
    print(f"{len(stops)} stops at random moments: {_broken(stops)} left something behind or said something else")
    print(f"{_broken([*deaths, *glitches, *stops])} broken in all")
    return 1 if _broken([*deaths, *glitches, *stops]) else 0


def _show(name: str, outcomes: list[Outcome]) -> None:
    noticed = [outcome.detected_s for outcome in outcomes if outcome.detected_s is not None]
    gone = [outcome.gone_s for outcome in outcomes if outcome.gone_s is not None]
    if noticed and gone:
        print(
            f"{name:18} {len(outcomes):4} times: noticed median {statistics.median(noticed):5.1f} s, "
            f"worst {max(noticed):5.1f} s; all gone median {statistics.median(gone):5.1f} s, worst {max(gone):5.1f} s; "
            f"{_broken(outcomes)} broken"
        )


def _broken(outcomes: list[Outcome]) -> int:
    return sum(bool(outcome.wrong) for outcome in outcomes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Times of detection, false losses, leftovers.")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--injections", type=int, default=50)
    parser.add_argument("--glitches", type=int, default=12)
    parser.add_argument("--stops", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cells", type=int, default=6)
    return parser


if __name__ == "__main__":
    sys.exit(main())
