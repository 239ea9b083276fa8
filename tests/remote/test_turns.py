"""The queue's order, by the hosts' own rule, with jobs that come, look and start in any order of single steps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.remote.gpu_queue import Ticket, ahead

HOSTS = "abcd"
GPUS = tuple(f"{host}{index}" for host in HOSTS for index in (0, 1))
MOST_STEPS = 20_000

job_needs = st.lists(
    st.tuples(st.sets(st.sampled_from(GPUS), min_size=1, max_size=5), st.integers(1, 40)), min_size=1, max_size=9
)


@dataclass
class Rack:
    """What the hosts know: their tickets, and which job has which GPU."""

    tickets: dict[str, list[Ticket]] = field(default_factory=lambda: {host: [] for host in HOSTS})
    held: dict[str, str] = field(default_factory=dict)

    def claim(self, job: str, gpus: list[str], host: str) -> bool:
        """One host's answer to a start: as `keeper.claim_gpus` gives it."""
        if ahead(job, gpus, self.tickets[host]) or any(gpu in self.held for gpu in gpus):
            return False
        for gpu in gpus:
            assert gpu not in self.held
            self.held[gpu] = job
        return True

    def release(self, job: str) -> None:
        self.held = {gpu: holder for gpu, holder in self.held.items() if holder != job}


class Waiting:
    """One job, one step at a time: each `yield` is a moment in which any other may act."""

    def __init__(self, rack: Rack, job: str, gpus: set[str], steps: int) -> None:
        self.rack, self.job, self.gpus, self.steps = rack, job, gpus, steps
        self.on = {host: sorted(gpu for gpu in gpus if gpu[0] == host) for host in {gpu[0] for gpu in gpus}}
        self.queued = self.started = self.ended = False
        self.looked_after: set[str] = set()
        """Jobs whose tickets all lay there when this one first looked."""

    def course(self, everybody: list[Waiting]):
        self.looked_after = {other.job for other in everybody if other.queued}
        numbers = []
        for host in self.on:
            numbers += [ticket.number for ticket in self.rack.tickets[host]]
            yield
        for host, gpus in self.on.items():
            self.rack.tickets[host].append(Ticket(self.job, 1 + max(numbers, default=0), gpus))
            yield
        self.queued = True
        while not self.started:
            yield
            self.started = yield from self._starts()
        for host in self.on:
            self.rack.tickets[host] = [ticket for ticket in self.rack.tickets[host] if ticket.job != self.job]
            yield
        for _ in range(self.steps):
            yield
        self.rack.release(self.job)
        self.ended = True

    def _starts(self):
        """On all its hosts or on none."""
        for host, gpus in self.on.items():
            if not self.rack.claim(self.job, gpus, host):
                self.rack.release(self.job)
                return False
            yield
        return True


@settings(deadline=None, max_examples=150)
@given(job_needs, st.integers(0, 1 << 32).map(random.Random))
def test_every_job_runs_alone_on_its_gpus_and_nobody_who_came_later_goes_before(needs, draw: random.Random):
    rack = Rack()
    jobs = [Waiting(rack, f"job-{number}", gpus, steps) for number, (gpus, steps) in enumerate(needs)]
    draw.shuffle(jobs)
    at_work = [(job, job.course(jobs)) for job in jobs]
    for _ in range(MOST_STEPS):
        if not at_work:
            break
        job, course = draw.choice(at_work)
        was_started = job.started
        if next(course, "over") == "over":
            at_work.remove((job, course))
        if job.started and not was_started:
            earlier = [other for other in jobs if other.job in job.looked_after and not other.started]
            assert [other.job for other in earlier if other.gpus & job.gpus] == []
    assert all(job.ended for job in jobs)
    assert not rack.held and not any(rack.tickets.values())


def test_a_job_that_needs_no_contested_gpu_passes_those_that_wait():
    large = Ticket("large", 1, ("a0", "a1"))
    assert ahead("small", ["a1"], [large, Ticket("small", 2, ("a1",))]) == [large]
    assert ahead("other", ["a2"], [large, Ticket("other", 2, ("a2",))]) == []
    assert ahead("large", ["a0", "a1"], [large, Ticket("small", 2, ("a1",))]) == []


def test_a_job_without_a_ticket_goes_behind_all_and_equal_numbers_go_by_id():
    two = [Ticket("b", 1, ("a0",)), Ticket("a", 1, ("a0",))]
    assert [ticket.job for ticket in ahead("new", ["a0"], two)] == ["a", "b"]
    assert [ticket.job for ticket in ahead("b", ["a0"], two)] == ["a"]
    assert ahead("a", ["a0"], two) == []
