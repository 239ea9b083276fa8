"""A sweep of twelve one-host jobs over four unequal paced hosts: its makespan beside that of the best order found.

    .venv/bin/python tests/bench/sweep.py [--scale 1.0] [--off]

The hosts keep the paces of four cards, which are assumed. Each job has another number of updates. Its time on the host
on which it ran is measured, from the moment it was given to that host to the moment its end was known; on the other
hosts it would be the median time of a start, and its samples over the host's pace. With these times a search from many
random orders (moves and exchanges, as long as they help) finds the best order, knowing all of them beforehand.

--off: the fastest host loses its power in the middle. The first best order then knows that beforehand, too, and gives
it only jobs that end in time. The second learns of it when it happens: what runs elsewhere by then runs on, and the
rest, with the job that is lost, is put into the best order. Needs root, as the lab does.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rack import Rack, rack, show_machine

PACES = {"r3090": 900, "v100": 833, "a2000": 333, "a16": 220}
SECONDS = (15, 20, 25, 30, 35, 40, 50, 60, 70, 80, 100, 120)
"""Of the jobs, on the V100."""
BATCH = 64
OFF_AFTER = 0.4
"""Of the time that the jobs would take together on all hosts."""
RESTARTS = 300
INVENTORY = """
cluster: sweep
defaults: {device: cpu, bandwidth: 2.5Gbps, env: {OMP_NUM_THREADS: "1"}}
nodes:
""" + "".join(
    f"  - {{name: {name}, host: 10.77.9.{number}, paced: {{samples_per_s: {pace}}}}}\n"
    for number, (name, pace) in enumerate(PACES.items(), start=1)
)


class Load(NamedTuple):
    """seconds: by host."""

    job: str
    seconds: Mapping[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description="See the module's docstring.")
    parser.add_argument("--scale", type=float, default=1.0, help="of the jobs' lengths")
    parser.add_argument("--off", action="store_true", help="the fastest host loses its power in the middle")
    asked = parser.parse_args()
    steps = [round(asked.scale * seconds * PACES["v100"] / BATCH) for seconds in SECONDS]
    with rack(INVENTORY) as lab:
        off_s = OFF_AFTER * sum(steps) * BATCH / sum(PACES.values()) if asked.off else None
        found, off_at = run(lab, steps, off_s)
    show_machine()
    report(found, off_at)


def run(lab: Rack, steps: Sequence[int], off_s: float | None) -> tuple[dict[str, Any], float | None]:
    """The sweep's document, and when the host went off. off_s: after the start of the first job."""
    settings = ("data=synthetic", f"batch={BATCH}", "epochs=1000", "samples=100000", "eval_every=0", "num_workers=0")
    words = [word for setting in settings for word in ("--set", setting)]
    grid = f"steps={','.join(map(str, steps))}"
    process = lab.person.starts("sweep", "--json", "--exp", "mnist_lenet", *words, "--grid", grid, stderr=None)
    off_at = None
    if off_s is not None:
        began = first_began(lab)
        time.sleep(max(0.0, began + off_s - time.time()))
        lab.lab.power("r3090", "off")
        off_at = time.time()
    out, _ = process.communicate()
    assert process.returncode == 0, out
    return json.loads(out), off_at


def first_began(lab: Rack) -> float:
    """When the sweep gave its first job to a host."""
    while True:
        for file in (lab.person.home / "sweeps").glob("*/sweep.json"):
            starts = [trial["began"] for trial in json.loads(file.read_text())["trials"] if trial["began"]]
            if starts:
                return min(starts)
        time.sleep(0.1)


def report(found: Mapping[str, Any], off_at: float | None) -> None:
    trials = found["trials"]
    began = min(trial["began"] for trial in trials)
    makespan = max(trial["began"] + trial["seconds"] for trial in trials) - began
    alone = {trial["job"]: int(trial["values"]["steps"]) * BATCH for trial in trials}
    starts = [trial["seconds"] - alone[trial["job"]] / PACES[trial["slot"]] for trial in trials]
    start = statistics.median(starts)
    loads = [
        Load(trial["job"], {host: trial["seconds"] if host == trial["slot"] else start + alone[trial["job"]] / pace
                            for host, pace in PACES.items()}) for trial in trials
    ]  # fmt: skip
    until = {"r3090": off_at - began} if off_at else {}
    best = best_found(loads, dict.fromkeys(PACES, 0.0), until)
    for host in PACES:
        mine = sorted((trial for trial in trials if trial["slot"] == host), key=lambda trial: trial["began"])
        shown = ", ".join(
            f"{trial['began'] - began:.0f}-{trial['began'] - began + trial['seconds']:.0f}" for trial in mine
        )
        print(f"{host:6} {len(mine)} jobs: {shown}")
    lost = sum(len(trial["lost"]) for trial in trials)
    print(f"starts {start:.1f} s in the median ({min(starts):.1f} to {max(starts):.1f}); {lost} jobs lost with a host")
    if off_at:
        print(f"r3090 lost its power after {off_at - began:.0f} s")
    print(f"makespan {makespan:.1f} s, best order found {best:.1f} s: ratio {makespan / best:.3f}")
    if off_at:
        ends = {trial["job"]: trial["began"] + trial["seconds"] - began for trial in trials}
        begun = [trial for trial in trials if trial["began"] < off_at]
        free = {host: off_at - began for host in PACES if host != "r3090"}
        free |= {
            trial["slot"]: max(free[trial["slot"]], ends[trial["job"]]) for trial in begun if trial["slot"] in free
        }
        rest = {trial["job"] for trial in trials} - {trial["job"] for trial in begun}
        best = best_found([load for load in loads if load.job in rest], free, {})
        print(f"best order found from the loss on {best:.1f} s: ratio {makespan / best:.3f}")


def best_found(loads: Sequence[Load], free: Mapping[str, float], until: Mapping[str, float]) -> float:
    """The earliest end. free: from when hosts are free. until: when they are gone."""
    draw = random.Random(1)
    return min(descend(loads, [draw.choice(list(free)) for _ in loads], free, until) for _ in range(RESTARTS))


def descend(loads: Sequence[Load], places: list[str], free: Mapping[str, float], until: Mapping[str, float]) -> float:
    def end(places: Sequence[str]) -> float:
        ends = dict(free)
        for load, host in zip(loads, places, strict=True):
            ends[host] += load.seconds[host]
        late = sum(max(0.0, ends[host] - until_s) for host, until_s in until.items())
        return max(value for host, value in ends.items() if host not in until or value) + 1e6 * late

    best, is_better = end(places), True
    while is_better:
        is_better = False
        for one in range(len(loads)):
            tries = [[*places[:one], host, *places[one + 1 :]] for host in free]
            for other in range(one):
                swapped = [*places]
                swapped[one], swapped[other] = places[other], places[one]
                tries.append(swapped)
            found = min(tries, key=end)
            if end(found) < best - 1e-9:
                best, places, is_better = end(found), found, True
    return best


if __name__ == "__main__":
    main()
