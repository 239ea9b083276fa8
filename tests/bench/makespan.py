"""How long a made-up trace of jobs takes in the queue's order, beside the best order that a search finds offline.

    python -m tests.bench.makespan [--jobs 30] [--seed 1] [--orders 4000]

Four hosts with two GPUs each, time in minutes, no network. By the hosts' rule (`remote/turns.py`) a job starts when its
GPUs are free and no earlier job waits for one of them; "first fit" lets later jobs take GPUs that an earlier one waits
for, which may let large jobs starve. The search knows all jobs and how long each takes: it tries random orders, then
exchanges of two jobs in the best of these and of first fit's, and starts each job as early as the order lets it.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.remote.turns import Ticket, ahead

GPUS = tuple(f"{host}{index}" for host in "abcd" for index in (0, 1))


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


def played(jobs: Sequence[Job], *, in_turn: bool) -> dict[str, int]:
    """When each job starts: as they come, one moment after the other."""
    waiting, running, starts, now = [], list[tuple[int, Job]](), dict[str, int](), 0
    coming, number = sorted(jobs, key=lambda job: job.comes), 0
    while coming or waiting or running:
        now = min([ends for ends, _ in running] + [job.comes for job in coming[:1]])
        while running and running[0][0] <= now:
            heapq.heappop(running)
        while coming and coming[0].comes <= now:
            number += 1
            waiting.append((coming.pop(0), number))
        tickets = [Ticket(job.name, place, sorted(job.gpus)) for job, place in waiting]
        for job, place in list(waiting):
            busy = {gpu for _, other in running for gpu in other.gpus}
            if not busy & job.gpus and not (in_turn and ahead(job.name, job.gpus, tickets)):
                heapq.heappush(running, (now + job.takes, job))
                starts[job.name] = now
                waiting.remove((job, place))
                tickets = [ticket for ticket in tickets if ticket.job != job.name]
    return starts


def ordered(jobs: Sequence[Job]) -> Course:
    """Each as early as it can be after those before it in this order."""
    free, starts = dict.fromkeys(GPUS, 0), dict[str, int]()
    for job in jobs:
        starts[job.name] = max([job.comes, *(free[gpu] for gpu in job.gpus)])
        free |= dict.fromkeys(job.gpus, starts[job.name] + job.takes)
    return _course(jobs, starts)


def searched(jobs: Sequence[Job], first: Sequence[Job], orders: int, draw: random.Random) -> Course:
    """The shortest of half as many random orders and of `first`, made better by as many exchanges."""
    some = [first, *(draw.sample(jobs, len(jobs)) for _ in range(orders // 2))]
    best = min(some, key=lambda order: ordered(order).ends)
    for _ in range(orders // 2):
        tried = list(best)
        one, other = draw.sample(range(len(tried)), 2)
        tried[one], tried[other] = tried[other], tried[one]
        best = min(best, tried, key=lambda order: ordered(order).ends)
    return ordered(best)


def _course(jobs: Sequence[Job], starts: dict[str, int]) -> Course:
    waited = [starts[job.name] - job.comes for job in jobs]
    large = [starts[job.name] - job.comes for job in jobs if len(job.gpus) > len(GPUS) // 2]
    return Course(max(starts[job.name] + job.takes for job in jobs), sum(waited) / len(jobs), max(large, default=0))


def bound(jobs: Sequence[Job]) -> int:
    """No order is shorter: the work of one GPU, from when its first job comes."""
    return max(min(job.comes for job in jobs if gpu in job.gpus) + sum(job.takes for job in jobs if gpu in job.gpus)
               for gpu in GPUS if any(gpu in job.gpus for job in jobs))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for option, default in (("--jobs", 30), ("--seed", 1), ("--orders", 4000)):
        parser.add_argument(option, type=int, default=default)
    asked = parser.parse_args()
    jobs = trace(asked.jobs, random.Random(asked.seed))
    fitting = played(jobs, in_turn=False)
    first = sorted(jobs, key=lambda job: fitting[job.name])
    courses = {
        "in turn": _course(jobs, played(jobs, in_turn=True)),
        "first fit": _course(jobs, fitting),
        "best order found": searched(jobs, first, asked.orders, random.Random(asked.seed)),
    }
    print(f"{asked.jobs} jobs, seed {asked.seed}; no order ends before {bound(jobs)} min")
    for name, course in courses.items():
        words = f"ends at {course.ends} min, waits {course.waited:.0f} min on average"
        print(f"{name}: {words}, a job on all hosts {course.longest_of_large} min at most")


if __name__ == "__main__":
    main()
