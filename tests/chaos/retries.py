"""python -m tests.chaos.retries [--rounds N] [--seed S] [--racks R]

`orch run --retries 1` on three hosts, whose master is lost at a random moment: by its power, or by its link alone, so
that it lives on where nobody hears it. After each round: did the job come to its end, did it lose more than the steps
since its last checkpoint, and were ever ranks of two attempts alive at once, on any host, the one that was cut off too?
Needs root: it stands on the lab. Exit code 1 where a round broke.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.lab import Lab, lab
from tests.support.terminal import Person

INVENTORY = """
cluster: again
defaults: {device: cpu, bandwidth: 2.5Gbps, env: {OMP_NUM_THREADS: "1"}}
nodes:
  - {name: alpha, host: 10.77.NET.1}
  - {name: beta, host: 10.77.NET.2}
  - {name: gamma, host: 10.77.NET.3}
"""
UPDATES, EVERY, STEP_MS = 300, 5, 80
SETTINGS = ["data=synthetic", "samples=120", "batch=12", f"steps={UPDATES}", "epochs=100", "eval_every=0"]
SETTINGS += ["num_workers=0", f"checkpoint_every={EVERY}", f"slow=rank:0,at:start,ms:{STEP_MS}"]
LATEST_S = 12.0
"""After the first step, the master is lost within so long."""
ROUND_S = 280.0
KINDS = ("power", "link")
_STANDS_UP = threading.Lock()
"""Two labs at once would copy the users of this machine while the other makes one."""


@dataclass
class Round:
    number: int
    kind: str
    wrong: list[str] = field(default_factory=list)
    lost_at: int = 0
    """The update that the ranks had come to."""
    resumed_at: int = 0
    took_s: float = 0.0


class Watch:
    """Which jobs of a home have ranks alive, looked at all the time: they are seen whatever a host's network does."""

    def __init__(self, jobs: Path) -> None:
        self._jobs, self._over = jobs, threading.Event()
        self.together: set[frozenset[str]] = set()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.1):
            ours = {path.name for path in self._jobs.glob("*")} if self._jobs.is_dir() else set()
            if len(alive := frozenset(ranks_alive() & ours)) > 1:
                self.together.add(alive)


def ranks_alive() -> set[str]:
    """The jobs that have ranks on any host of this machine: they work in their job's folder."""
    found = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if job := re.search(r"/jobs/([^/]+)/src$", os.readlink(f"{entry.path}/cwd")):
                    found.add(job[1])
    return found


def play(person: Person, rack: Lab, number: int, seed: int) -> Round:
    draw = random.Random(f"{seed}/{number}")
    round_, began = Round(number, draw.choice(KINDS)), time.monotonic()
    sets = [word for setting in SETTINGS for word in ("--set", setting)]
    options = ["--retries", "1", "--retry-wait", "1s", "--grace", "0.5s"]
    known = jobs_of(person)
    with Watch(person.home / "jobs") as watch, open(person.folder / f"{number}.out", "w+") as out:
        run = person.starts("run", "--json", "--exp", "mnist_lenet", *sets, *options, stdout=out, stderr=out)
        until(lambda: "epoch 1" in Path(out.name).read_text() or run.poll() is not None, "its first steps")
        time.sleep(draw.uniform(0, LATEST_S))
        (first,) = jobs_of(person) - known
        plan = json.loads((person.home / "jobs" / first / "plan.json").read_text())
        master, other = plan["master"], plan["nodes"][1]["name"]
        (rack.power if round_.kind == "power" else rack.link)(master, {"power": "off", "link": "down"}[round_.kind])
        round_.lost_at = steps_of(rack, first, other)
        with contextlib.suppress(TimeoutError):
            until(lambda: run.poll() is not None, "its end")
        said = Path(out.name).read_text()
        if run.poll() is None:
            run.kill()
            round_.wrong.append("lost: it does not end")
    (rack.power if round_.kind == "power" else rack.link)(master, {"power": "on", "link": "up"}[round_.kind])
    round_.wrong += [f"second gang: {sorted(pair)}" for pair in watch.together]
    round_.wrong += wrong_of(round_, said, run.returncode)
    if len(jobs_of(person) - known) != 2:
        round_.wrong.append("no round: it had ended before its master was lost, or was not tried again")
    round_.took_s = time.monotonic() - began
    until(lambda: rack.ssh(master, "true").returncode == 0, "its host to come back")
    return round_


def wrong_of(round_: Round, said: str, code: int | None) -> Iterator[str]:
    if code != 0:
        yield f"lost: exit code {code}: ...{said[-700:]}"
    found = re.search(r"goes on after update (\d+)", said)
    round_.resumed_at = int(found[1]) if found else 0
    # The copy of the newest may have been on its way, and each rank was an update further than what it had recorded.
    if round_.resumed_at < round_.lost_at - 2 * EVERY - 2:
        yield f"lost steps: {round_.lost_at} were made, it went on after {round_.resumed_at}"


def jobs_of(person: Person) -> set[str]:
    return {path.parent.name for path in (person.home / "jobs").glob("*/job.json")}


def steps_of(rack: Lab, job: str, node: str) -> int:
    """As far as a rank of another host than the master has recorded."""
    path = f".orch/jobs/{job}/rank-1/metrics.jsonl"
    said = rack.host_exec(node, ["tail", "-n", "3", path], as_user=True).stdout
    return max((int(found) for found in re.findall(r'"step": ?(\d+)', said)), default=0)


def until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + ROUND_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited for {what}")
        time.sleep(0.1)


def play_on(net: int, numbers: list[int], seed: int, outcomes: list[Round]) -> None:
    """Some rounds, one after the other, on a rack of their own."""
    with contextlib.ExitStack() as standing:
        folder = standing.enter_context(tempfile.TemporaryDirectory(prefix="orch-again-"))
        with _STANDS_UP:
            rack = standing.enter_context(lab(INVENTORY.replace("NET", str(net)), trains=True))
        person = Person(rack, Path(folder, "home"), Path(folder))
        person.types("up", str(rack.inventory))
        for number in numbers:
            outcomes.append(one := play(person, rack, number, seed))
            verdict = "BROKEN " + "; ".join(one.wrong) if one.wrong else "ok"
            steps = f"lost at update {one.lost_at}, went on after {one.resumed_at}"
            print(f"{one.number:3} {one.kind:6} {steps}, {one.took_s:.0f} s: {verdict}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.retries", description=__doc__)
    for option, usual in (("--rounds", 20), ("--seed", 1), ("--racks", 2), ("--first", 0)):
        parser.add_argument(option, type=int, default=usual)
    asked = parser.parse_args()
    numbers, outcomes = range(asked.first, asked.first + asked.rounds), list[Round]()
    racks = [
        threading.Thread(target=play_on, args=(60 + one, list(numbers[one :: asked.racks]), asked.seed, outcomes))
        for one in range(asked.racks)
    ]
    for thread in racks:
        thread.start()
    for thread in racks:
        thread.join()
    lost = sum(any(line.startswith("lost") for line in one.wrong) for one in outcomes)
    gangs = sum(any(line.startswith("second") for line in one.wrong) for one in outcomes)
    print(json.dumps({"rounds": len(outcomes), "of": asked.rounds, "lost": lost, "second_gangs": gangs}))
    return 0 if len(outcomes) == asked.rounds and not lost and not gangs else 1


if __name__ == "__main__":
    sys.exit(main())
