"""How long made-up traces of jobs take in the queue's order, beside the best order that a search finds offline.

    python -m tests.bench.makespan [--jobs 30] [--seed 1] [--traces 10] [--orders 6000]

Four hosts with two GPUs each, time in minutes, no network. The rows:

- in the queue's order: by the hosts' own rule (`remote/gpu_queue.py`): a job passes those ahead of it only if it needs
  none of their GPUs
- first fit: a job that finds its GPUs free takes them; large jobs may starve. The difference is the price of fairness
- planned anew: no queue, but one who may let everybody wait as it likes. Like a queue it does not know which jobs will
  come; it knows how long each takes, and whenever one comes or ends it searches for the order in which those that wait
  are over first. What it lacks to the next row is the price of not knowing what will come
- best order found: by a search that knows from the beginning which jobs will come, when, and how long each takes, which
  no queue does. No job starts before it comes, and each as early as the order lets it: simulated annealing over
  exchanges of two jobs and moves of one, from the order in which they come. No order ends before the bound
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.remote.gpu_queue import Ticket, ahead

GPUS = tuple(f"{host}{index}" for host in "abcd" for index in (0, 1))
WARMEST, COLDEST = 8.0, 0.05
"""Minutes by which a worse order may be taken up, at first and at last."""


class Job(NamedTuple):
    name: str
    comes: int
    takes: int
    gpus: frozenset[str]


class Course(NamedTuple):
    """ends: when the last job does. waited: the mean, and the longest of a job that wants more than half the GPUs."""

    ends: int
    waited: float
    longest_of_large: int


def trace(count: int, draw: random.Random) -> list[Job]:
    """Most jobs want one host, some two, some all."""
    jobs, now = [], 0
    for number in range(count):
        now += draw.randrange(0, 12)
        hosts = draw.sample("abcd", draw.choices((1, 2, 4), (6, 3, 1))[0])
        wanted = frozenset(gpu for gpu in GPUS if gpu[0] in hosts)
        one = frozenset(draw.sample(sorted(wanted), 1))
        gpus = one if len(hosts) == 1 and draw.random() < 0.4 else wanted
        jobs.append(Job(f"job-{number:02d}", now, draw.randrange(5, 60), gpus))
    return jobs


@dataclass
class Queue:
    """The jobs of a trace as they come, one moment after the other."""

    in_turn: bool = True
    now: int = 0
    waiting: list[tuple[Job, int]] = field(default_factory=list)
    """With the numbers of their tickets."""
    running: list[tuple[int, Job]] = field(default_factory=list)
    """By their ends."""
    starts: dict[str, int] = field(default_factory=dict)

    def play(self, jobs: Sequence[Job]) -> dict[str, int]:
        """When each job starts."""
        coming, number = sorted(jobs, key=lambda job: job.comes), 0
        while coming or self.waiting or self.running:
            self.now = min([ends for ends, _ in self.running] + [job.comes for job in coming[:1]])
            while self.running and self.running[0][0] <= self.now:
                heapq.heappop(self.running)
            while coming and coming[0].comes <= self.now:
                number += 1
                self.waiting.append((coming.pop(0), number))
            while self._one_starts():
                pass
        return self.starts

    def _one_starts(self) -> bool:
        busy = {gpu for _, other in self.running for gpu in other.gpus}
        tickets = [Ticket(job.name, number, sorted(job.gpus)) for job, number in self.waiting]
        for job, number in self.waiting:
            if not busy & job.gpus and not (self.in_turn and ahead(job.name, job.gpus, tickets)):
                heapq.heappush(self.running, (self.now + job.takes, job))
                self.starts[job.name] = self.now
                self.waiting.remove((job, number))
                return True
        return False


def planned_anew(jobs: Sequence[Job], orders: int, draw: random.Random) -> dict[str, int]:
    """When each starts, where those that wait are put into the best order found whenever a job comes or ends."""
    starts, free = dict[str, int](), dict.fromkeys(GPUS, 0)
    moments = [job.comes for job in jobs]
    while moments:
        now = heapq.heappop(moments)
        waiting = [job for job in jobs if job.comes <= now and job.name not in starts]
        planned = searched(waiting, orders, draw, {gpu: max(now, until) for gpu, until in free.items()})
        for job in [job for job in waiting if planned[job.name] == now]:
            starts[job.name] = now
            free |= dict.fromkeys(job.gpus, now + job.takes)
            heapq.heappush(moments, now + job.takes)
    return starts


def ordered(jobs: Sequence[Job], since: Mapping[str, int]) -> dict[str, int]:
    """When each starts, as early as it can be after those before it in this order. since: when each GPU is free."""
    free, starts = dict(since), dict[str, int]()
    for job in jobs:
        starts[job.name] = max([job.comes, *(free[gpu] for gpu in job.gpus)])
        free |= dict.fromkeys(job.gpus, starts[job.name] + job.takes)
    return starts


def searched(jobs: Sequence[Job], orders: int, draw: random.Random, since: Mapping[str, int]) -> dict[str, int]:
    """The shortest of so many orders that lie near each other, from that in which they come on."""
    order = sorted(jobs, key=lambda job: job.comes)
    best = starts = ordered(order, since)
    for number in range(orders if len(jobs) > 1 else 0):
        warmth = COLDEST + (WARMEST - COLDEST) * (1 - number / orders)
        tried, one, other = list(order), draw.randrange(len(jobs)), draw.randrange(len(jobs))
        if draw.random() < 0.5:
            tried[one], tried[other] = tried[other], tried[one]
        else:
            tried.insert(other, tried.pop(one))
        found = ordered(tried, since)
        worse = cost_of(jobs, found) - cost_of(jobs, starts)
        if worse <= 0 or draw.random() < math.exp(-worse / warmth):
            order, starts = tried, found
        best = min(best, starts, key=lambda each: cost_of(jobs, each))
    return best


def cost_of(jobs: Sequence[Job], starts: Mapping[str, int]) -> float:
    """The end of the last one; of two equal ones the order in which jobs wait less."""
    return end_of(jobs, starts) + sum(starts.values()) / len(jobs) / 1000


def end_of(jobs: Sequence[Job], starts: Mapping[str, int]) -> int:
    return max(starts[job.name] + job.takes for job in jobs)


def course(jobs: Sequence[Job], starts: Mapping[str, int]) -> Course:
    waited = [starts[job.name] - job.comes for job in jobs]
    large = [starts[job.name] - job.comes for job in jobs if len(job.gpus) > len(GPUS) // 2]
    return Course(end_of(jobs, starts), sum(waited) / len(jobs), max(large, default=0))


def bound(jobs: Sequence[Job]) -> int:
    """No order is shorter: the work of one GPU, from when its first job comes; or a job that begins as it comes."""
    of_gpus = [
        min(job.comes for job in wanting) + sum(job.takes for job in wanting)
        for gpu in GPUS
        if (wanting := [job for job in jobs if gpu in job.gpus])
    ]
    return max(*of_gpus, *(job.comes + job.takes for job in jobs))


def courses_of(jobs: Sequence[Job], orders: int, seed: int) -> dict[str, Course]:
    played = {
        "in the queue's order": Queue().play(jobs),
        "first fit": Queue(in_turn=False).play(jobs),
        "planned anew": planned_anew(jobs, orders // 10, random.Random(seed)),
    }
    found = searched(jobs, orders, random.Random(seed), dict.fromkeys(GPUS, 0))
    best = min([found, *played.values()], key=lambda starts: end_of(jobs, starts))
    return {name: course(jobs, starts) for name, starts in {**played, "best order found": best}.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (("--jobs", 30), ("--seed", 1), ("--traces", 10), ("--orders", 6000)):
        parser.add_argument(option, type=int, default=default)
    asked = parser.parse_args()
    ratios = dict[str, list[float]]()
    for seed in range(asked.seed, asked.seed + asked.traces):
        jobs = trace(asked.jobs, random.Random(seed))
        courses = courses_of(jobs, asked.orders, seed)
        best = courses["best order found"].ends
        print(f"{asked.jobs} jobs, seed {seed}: no order ends before {bound(jobs)} min, the best found at {best} min")
        for name, each in courses.items():
            ratios.setdefault(name, []).append(each.ends / best)
            waits = f"waits {each.waited:.0f} min on average, a job on all hosts {each.longest_of_large} min at most"
            print(f"  {name:21} ends at {each.ends} min, {each.ends / best:.2f} of the best; {waits}")
    print(f"of the best order found, over {asked.traces} traces:")
    for name, found in ratios.items():
        within = f"{sum(ratio <= 1.1 for ratio in found)} of {asked.traces} traces within 1.10"
        print(f"  {name:21} {sum(found) / len(found):.2f} on average, {max(found):.2f} at most, {within}")


if __name__ == "__main__":
    main()
