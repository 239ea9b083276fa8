"""python -m tests.chaos [--faults N] [--seed S] [--kinds a,b] [--only NUMBER] [--resume] [--torch] [--cells C]

Plays N rounds, prints one line each, and ends with the count by kind; exit code 1 where an invariant broke. A broken
round prints the line that plays it again. Events and outcomes go to runs/chaos-SEED.jsonl; `--resume` leaves out what
stands there as played.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import invariants
from .faults import FAULTS, TORCH_FREE
from .rounds import Outcome, run_round
from .world import Cell, World


def main() -> int:
    asked = _parser().parse_args()
    kinds = (
        asked.kinds.split(",") if asked.kinds else [kind for kind in FAULTS if not (asked.torch and kind in TORCH_FREE)]
    )
    log = asked.log or Path("runs", f"chaos-{asked.seed}.jsonl")
    log.parent.mkdir(parents=True, exist_ok=True)
    played = _played(log) if asked.resume else {}
    rounds = [(number, kind) for number, kind in schedule(asked.seed, kinds, asked.faults) if number not in played]
    if asked.only is not None:
        rounds = list(schedule(asked.seed, kinds, asked.only + 1))[asked.only :]
    started = time.monotonic()
    with open(log, "a" if asked.resume or asked.only is not None else "w") as events, World(asked.cells) as world:
        outcomes = [*played.values(), *play(world, asked, rounds, events)]
    _conclude(outcomes, time.monotonic() - started, asked)
    all_played = len(outcomes) == len(played) + len(rounds)  # a bug of ours ends a cell's thread with its traceback
    return 0 if all_played and not any(outcome.wrong for outcome in outcomes) else 1


def schedule(seed: int, kinds: list[str], count: int) -> Iterator[tuple[int, str]]:
    """Every kind once in each turn, in an order of the seed's: 60 rounds hold each kind about equally often."""
    for number in range(count):
        turn = sorted(kinds)
        random.Random(f"{seed}/{number // len(kinds)}").shuffle(turn)
        yield number, turn[number % len(kinds)]


def play(world: World, asked: argparse.Namespace, rounds: list[tuple[int, str]], events: Any) -> list[Outcome]:
    """All rounds, a cell playing one at a time."""
    waiting: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    for one in rounds:
        waiting.put(one)
    outcomes: list[Outcome] = []
    writing = threading.Lock()

    def work(cell: Cell) -> None:
        while True:
            try:
                number, kind = waiting.get_nowait()
            except queue.Empty:
                return
            outcome, log = run_round(cell, asked.seed, number, kind, FAULTS[kind], torch=asked.torch)
            with writing:
                outcomes.append(outcome)
                lines = [*log, {"event": "outcome", **asdict(outcome)}]
                events.writelines(json.dumps(line) + "\n" for line in lines)
                events.flush()
                _show(outcome, asked)

    workers = [threading.Thread(target=work, args=(cell,), name=f"cell-{cell.names[0]}") for cell in world.cells]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return outcomes


def _show(outcome: Outcome, asked: argparse.Namespace) -> None:
    times = "" if outcome.detected_s is None else f"noticed {outcome.detected_s:.1f} s, "
    times += "" if outcome.gone_s is None else f"all gone {outcome.gone_s:.1f} s, "
    verdict = "BROKEN" if outcome.wrong else "ok"
    print(f"{outcome.number:4} {verdict:6} {outcome.kind:32} {times}{outcome.took_s:.0f} s", flush=True)
    for one in outcome.wrong:
        print(f"            {one}", flush=True)
    if outcome.wrong:
        more = f" --kinds {asked.kinds}" if asked.kinds else ""
        more += " --torch" if asked.torch else ""
        print(f"      again: python -m tests.chaos --seed {asked.seed} --only {outcome.number}{more}", flush=True)


def _conclude(outcomes: list[Outcome], took_s: float, asked: argparse.Namespace) -> None:
    for kind, found in invariants.summary(outcomes).items():
        print(f"{kind:32} {found['rounds']:4} rounds, {found['broken']} broken")
    broken = sum(bool(outcome.wrong) for outcome in outcomes)
    kinds = len({outcome.kind for outcome in outcomes})
    print(f"seed {asked.seed}: {len(outcomes)} faults of {kinds} kinds, {broken} broken, {took_s:.0f} s")


def _played(log: Path) -> dict[int, Outcome]:
    found = {}
    for line in log.read_text().splitlines() if log.exists() else []:
        with contextlib.suppress(ValueError):  # the last line of a run that was killed
            event = json.loads(line)
            if event.pop("event") == "outcome":
                found[event["number"]] = Outcome(**event)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Faults on purpose, by a seed.")
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default="", help="of: " + ", ".join(FAULTS))
    parser.add_argument("--only", type=int, help="this one round of the seed's")
    parser.add_argument("--cells", type=int, default=6, help="rounds at once, on three hosts each")
    parser.add_argument("--torch", action="store_true", help="real torchrun in place of its quick stand-in")
    parser.add_argument("--resume", action="store_true", help="leave out the rounds that the log lists as played")
    parser.add_argument("--log", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
