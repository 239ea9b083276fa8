"""python -m tests.neighbours [--rounds N] [--seed S] [--first NUMBER] [--only NUMBER]

Plays N rounds, prints a line each, and ends with what was typed, watched and lost; exit code 1 where anything was lost.
Such a round prints its steps and the line that plays it again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from orchestrator.remote.workfolder import MARK

from .people import PEOPLE, Person, Schedule, Typed, schedule
from .script import SIZE
from .street import HOSTS, LOGINS, STREWN, Street
from .watch import Eyes, Job, Look, Step

SPEAKS_S = 60.0
SHOWN = 20


def main() -> int:
    asked = _parser().parse_args()
    numbers = range(asked.first, asked.first + asked.rounds) if asked.only is None else [asked.only]
    started = time.monotonic()
    tally: Counter[str] = Counter({"rounds": 0, "commands": 0, "losses": 0})
    with Street() as street:
        eyes = Eyes(street)
        _move_in(street)
        for number in numbers:
            began = time.monotonic()
            planned = schedule(asked.seed, number)
            wrong = Round(street, eyes, number, planned, tally).play()
            print(f"{number:4} {'LOST' if wrong else 'ok'} {time.monotonic() - began:.0f} s", flush=True)
            if wrong:
                _show(planned, wrong)
                print(f"    again: python -m tests.neighbours --seed {asked.seed} --only {number}", flush=True)
            tally["rounds"] += 1
            tally["losses"] += len(wrong)
        tally["files compared by hash"] = eyes.compared
    counts = ", ".join(f"{count} {what}" for what, count in tally.items())
    print(f"seed {asked.seed}: {counts}, {time.monotonic() - started:.0f} s")
    return 1 if tally["losses"] else 0


def _move_in(street: Street) -> None:
    with ThreadPoolExecutor() as pool:
        came = list(pool.map(lambda person: street.types(person, "up", str(street.inventory(person))), PEOPLE.values()))
    assert not any(done.returncode for done in came), [done.stderr for done in came]


def _show(planned: Schedule, wrong: list[str]) -> None:
    print(f"    strewn: {planned.strewn}; strays of: {', '.join(sorted(planned.strays)) or 'nobody'}")
    for step in planned.steps:
        print("    at once: " + "; ".join(f"{typed} after {typed.after_s} s" for typed in step))
    for line in wrong[:SHOWN]:
        print(f"    lost: {line}")
    print(f"    and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else "", flush=True)


@dataclass
class Round:
    """One schedule on the street. there: who has which jobs on the hosts, oldest first."""

    street: Street
    eyes: Eyes
    number: int
    planned: Schedule
    tally: Counter[str]
    jobs: dict[str, Job] = field(default_factory=dict)
    there: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in PEOPLE})

    def play(self) -> list[str]:
        self._strew()
        before = self.eyes.look()
        for number, together in enumerate(self.planned.steps):
            wrong = self._types(together)
            after = self.eyes.look()
            named = {what: {one.who for one in together if one.what == what} for what in ("down", "reap")}
            step = Step({one.who for one in together}, named["down"], named["reap"])
            wrong += self.eyes.losses(before, after, self.jobs, step)
            wrong += [line for one in together for line in self._not_home(one, before, after)]
            self._count(together, before, after)
            if wrong:
                self._clear()
                return [f"step {number}: {line}" for line in wrong]
            for one in together:
                self._remember(one)
            before = after
        return self._left(before)

    def _strew(self) -> None:
        """What is there before anybody types: people's own files, and processes that nobody watches."""
        for host in HOSTS:
            for login in LOGINS:
                shutil.rmtree(self.street.work(host, login), ignore_errors=True)
                if self.planned.strewn:
                    for name in (MARK, *STREWN):
                        self.street.write(host, login, f".orch/{name}", f"{name} of {login}\n")
        for name in sorted(self.planned.strays) if self.planned.strewn else ():
            job = f"stray-{name}-{self.number}"
            self.jobs[job] = Job(PEOPLE[name], "stray")
            self.street.leave_stray(HOSTS[0], PEOPLE[name], job)

    def _types(self, together: tuple[Typed, ...]) -> list[str]:
        """All of it at once. What commands that failed said."""
        words = [self._words(one) for one in together]
        with ThreadPoolExecutor(len(together)) as pool:
            said = list(pool.map(self._type, together, words))
        return [line for line in said if line]

    def _words(self, typed: Typed) -> list[str]:
        person = PEOPLE[typed.who]
        on = ["--cluster", person.cluster]
        script = str(self.street.folder / person.name / "script.py")
        return {
            "up": lambda: ["up", str(self.street.inventory(person))],
            "run": lambda: ["run", "--json", *on, "--", script],
            "stay": lambda: ["run", "--json", "--detach", *on, "--", script, "stay"],
            "collect": lambda: ["collect", "--job", self._picked(typed)],
            "pull": lambda: ["pull", self._picked(typed)],
            "reap": lambda: ["reap", "--yes", *on],
            "down": lambda: ["down", "--yes", "--discard", *on],
        }[typed.what]()

    def _picked(self, typed: Typed) -> str:
        return self.there[typed.who][-1 - typed.pick]

    def _type(self, typed: Typed, words: list[str]) -> str:
        time.sleep(typed.after_s)
        done = self.street.types(PEOPLE[typed.who], *words)
        if typed.what in ("run", "stay") and done.stdout.startswith("{"):
            self.jobs[job := json.loads(done.stdout)["id"]] = Job(PEOPLE[typed.who], typed.what)
            if not done.returncode and not self._speaks(PEOPLE[typed.who], job):
                return f"{typed}: not all ranks of {job} come to speak"
        return f"{typed} gave {done.returncode}: {done.stdout}{done.stderr}" if done.returncode else ""

    def _speaks(self, person: Person, job: str) -> bool:
        """Waits for every rank's first words: from then on there is something to lose."""
        logs = f"jobs/{job}/rank-*/stdout.log"
        works = [self.street.work(host, person.login) for host in HOSTS]
        deadline = time.monotonic() + SPEAKS_S
        while not all(any(log.stat().st_size for log in work.glob(logs)) for work in works):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _remember(self, typed: Typed) -> None:
        if typed.what == "down":
            self.there[typed.who] = []
            for job in [job for job, found in self.jobs.items() if found.whose.name == typed.who]:
                del self.jobs[job]
        known = self.there[typed.who]
        known += [
            job for job, found in self.jobs.items()
            if found.whose.name == typed.who and found.kind != "stray" and job not in known
        ]  # fmt: skip

    def _not_home(self, typed: Typed, before: Look, after: Look) -> Iterator[str]:
        """What lay on the hosts when somebody began to collect or to pull, and did not come as it is."""
        if typed.what not in ("collect", "pull"):
            return
        person, job = PEOPLE[typed.who], self._picked(typed)
        for host in HOSTS:
            for name, (_, seen) in before.of_jobs(host)[job].items():
                if typed.what == "pull" and name.endswith(".pt") and seen.size == SIZE:
                    if after.homes[person.home].get(f"runs/{job}/nodes/{host}/files/{name}") != seen:
                        yield f"{typed}: {host}: {job}/{name} did not come home"
                elif typed.what == "collect" and name.endswith("/stdout.log"):
                    here = after.homes[person.home].get(f"runs/{job}/nodes/{host}/{name}")
                    if here is None or here.size < seen.size:
                        yield f"{typed}: {host}: {job}/{name} did not come home"

    def _count(self, together: tuple[Typed, ...], before: Look, after: Look) -> None:
        self.tally["commands"] += len(together)
        self.tally["of them at once with another"] += len(together) if len(together) > 1 else 0
        self.tally["files watched"] += after.files
        for one in together:
            self.tally[one.what] += 1
            others = {job for job, found in self.jobs.items() if found.kind == "stay" and found.whose.name != one.who}
            if one.what == "down":
                self.tally["downs beside running jobs of others"] += any(before.ranks.get(job) for job in others)

    def _left(self, last: Look) -> list[str]:
        """What is there when everybody has cleared."""
        wrong = [f"in the end: {job} runs" for job in sorted(last.busy)]
        for host in HOSTS:
            for login in LOGINS:
                work = self.street.work(host, login)
                there = {str(path.relative_to(work)) for path in work.rglob("*") if path.is_file()}
                wanted = {MARK, *STREWN} if self.planned.strewn else set()
                if there != wanted or work.exists() != self.planned.strewn:
                    wrong.append(
                        f"in the end: {host}: {work} holds {sorted(there)}, and {sorted(wanted)} was left there"
                    )
        return wrong

    def _clear(self) -> None:
        """For the next round, where one has shown a loss."""
        for person in PEOPLE.values():
            self.street.types(person, "down", "--yes", "--discard", "--cluster", person.cluster)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.neighbours", description="Neighbours on the same hosts.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="begin with this round of the seed's")
    parser.add_argument("--only", type=int, help="this one round of the seed's")
    return parser


if __name__ == "__main__":
    sys.exit(main())
